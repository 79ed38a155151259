"""``python -m fullhit`` is the same as the ``fullhit`` command."""

import sys

from fullhit.cli import main

sys.exit(main())
