"""`python -m asrkit`."""

import sys

from asrkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
