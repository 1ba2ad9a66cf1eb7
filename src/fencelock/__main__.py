"""`python -m fencelock` is the same as `fencelock`."""

import sys

from fencelock.cli import main

if __name__ == "__main__":
    sys.exit(main())
