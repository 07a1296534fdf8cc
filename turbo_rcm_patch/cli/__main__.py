"""``python -m turbo_rcm_patch.cli`` runs the command if its script is not installed."""

import sys

from . import main

sys.exit(main())
