"""`python -m trainer` is the `trainer` program."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
