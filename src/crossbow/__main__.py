"""`python -m crossbow`, the same as `crossbow`."""

import sys

from crossbow.cli import main

sys.exit(main())
