"""``python -m mpillm``"""

import gc
import sys

gc.disable()  # importing makes many objects and no garbage
from mpillm.cli import main  # noqa: E402

sys.exit(main())
