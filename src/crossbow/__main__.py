"""`python -m crossbow`, the same as `crossbow`."""

import sys

from crossbow.cli import main

if __name__ == "__main__":  # ranks import this module again
    sys.exit(main())
