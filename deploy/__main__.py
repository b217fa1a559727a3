"""`python -m deploy` is `specwire`."""

import sys

from deploy.cli import main

sys.exit(main())
