"""`python -m asrkit.cli`, as `torchrun -m asrkit.cli` starts it."""

import sys

from asrkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
