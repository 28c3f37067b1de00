"""`python -m tierckpt`."""

import sys

from tierckpt.cli.main import main

sys.exit(main())
