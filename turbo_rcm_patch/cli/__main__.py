"""``python -m turbo_rcm_patch.cli``: the command where no script is installed."""

import sys

from . import main

sys.exit(main())
