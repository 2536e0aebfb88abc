"""``python -m zero_bubble``: the same as the ``zero-bubble`` command."""

import sys

from zero_bubble.cli import main

sys.exit(main())
