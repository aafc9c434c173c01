"""`python -m sharpmax.cli`: the command line where no `sharpmax` was installed."""

from __future__ import annotations

import sys

from sharpmax.cli import main

sys.exit(main())
