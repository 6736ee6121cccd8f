"""Makes `python -m outrider.cli` the command `outrider`."""

from __future__ import annotations

import sys

from outrider.cli.main import main

sys.exit(main())
