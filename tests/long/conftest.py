"""Long tests run when they are asked for: `just long` sets FINWHALE_LONG."""

import os

if not os.environ.get("FINWHALE_LONG"):
    collect_ignore_glob = ["test_*.py"]
