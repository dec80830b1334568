"""``python -m oracle``."""

import sys

from .cli import main

sys.exit(main())
