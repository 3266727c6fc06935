"""`python -m treadle` is the `treadle` command."""

import sys

from treadle.cli.main import main

sys.exit(main())
