"""The HTTP application, and the engine process behind it. Needs the "server" extra."""

from finwhale.extras import need

need("server")
