"""Where a real tritonserver is, if `make triton` has installed one."""

from __future__ import annotations

import pytest

from mpillm.triton.tritonserver import made_prefix

TRITONSERVER = made_prefix() / "bin" / "tritonserver"

MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not TRITONSERVER.is_file(), reason="there is no tritonserver: make triton"),
]
"""`pytestmark` of a file whose tests start it."""
