"""Where a real tritonserver is, if `make triton` has installed one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

PREFIX = Path(os.environ.get("MPILLM_TRITON_PREFIX") or f"{sys.prefix}/triton")
TRITONSERVER = PREFIX / "bin" / "tritonserver"

MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not TRITONSERVER.is_file(), reason="there is no tritonserver: make triton"),
]
"""`pytestmark` of a file whose tests start it."""
