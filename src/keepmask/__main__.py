"""`python -m keepmask`."""

import sys

from keepmask.cli import main

sys.exit(main())
