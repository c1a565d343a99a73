"""`python -m fpexp`: the same as the console script, for launchers such as torchrun."""

import sys

from fpexp.cli import main

sys.exit(main())
