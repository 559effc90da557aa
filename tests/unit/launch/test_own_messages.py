"""The cause that a program's output names, whatever MPI's libraries print around it."""

from __future__ import annotations

import pytest

from launch.own_messages import cause_in, why_ended

_BANNER = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
  Proc: [[1,1],0]
  Errorcode: 2
--------------------------------------------------------------------------
\x00
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", ""),
        ("Traceback (most recent call last):\n", ""),
        (f"mpillm: --pairs 0: must be 1 or more\n{_BANNER}", "--pairs 0: must be 1 or more"),
        (f"{_BANNER}mpillm: failed in phase 'load'\n  rank 1: no memory\n{_BANNER}", "rank 1: no memory"),
        ("mpillm: failed in phase 'load'\n  one\n    two\nmpillm: rank 1: three\n", "one\n  two"),
        ("mpillm: no model\nmpillm: note: --x has no effect\n", "no model"),
        ("mpillm: failed in phase 'load'", ""),
    ],
)
def test_the_cause_is_in_our_own_message(output: str, cause: str) -> None:
    assert cause_in(output) == cause
    assert why_ended(3, output) == (f"exit code 3: {cause.splitlines()[0]}" if cause else "exit code 3")
