"""`python -m deploy` is `specwire`."""

import sys

from deploy.cli.main import main

sys.exit(main())
