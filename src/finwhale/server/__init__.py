"""The HTTP application, and the engine process behind it. Needs the "server" extra."""
