"""``python -m mpillm``"""

import sys

from mpillm.cli import main

sys.exit(main())
