"""`python -m opsmith`, where a shell has no `opsmith` or has another one."""

import sys

from opsmith.cli import main

sys.exit(main())
