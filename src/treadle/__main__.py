"""`python -m treadle` runs the `treadle` command."""

import sys

from treadle.cli.main import main

sys.exit(main())
