"""`python -m finwhale`: the same as the command `finwhale`."""

import sys

from finwhale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
