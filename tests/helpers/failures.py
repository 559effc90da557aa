"""Runs that fail: options, limits, and a check of exit code, message and result."""

from __future__ import annotations

import re

from tests.helpers.support import (
    Ended,
)

START_S = 45.0  # to start and to end: far more than it takes, because other tests may have the cores
GRACE_S = 1.5
GRACE: list[object] = ["--grace", GRACE_S]
# A test that lasts until something happens to it.
ENDLESS: list[object] = ["--scenarios", "Server", "--server_target_qps", 100, "--min_duration", 100, *GRACE]


def check_failure(
    ended: Ended, code: int, *causes: str, rank: int | None = None, phase: str = "", within: float = START_S
) -> None:
    """Check the exit code, the one message with the causes and the rank, and the time.

    result.json, if the run directory was made, must contain the same.
    """
    ended.must(code)
    message = ended.message
    for cause in causes:
        assert cause in message, f"no {cause!r} in the message\n{ended!r}"
    if rank is not None:
        assert re.search(rf"\brank {rank} \(\w+.*\), .*, pid \d+: ", message), (
            f"no rank {rank} in the message\n{ended!r}"
        )
    if phase:
        assert f"in phase '{phase}'" in message.splitlines()[0], repr(ended)
    assert ended.seconds < within, repr(ended)
    assert not re.search(r"^Traceback", ended.err, re.MULTILINE), repr(ended)
    if (ended.log_dir / "plan.json").exists():
        result = ended.result
        assert (result["status"], result["exit_code"]) == ("FAILED", code)
        recorded = "\n".join(failure["cause"] + failure["traceback"] for failure in result["failures"])
        assert all(cause in recorded for cause in causes)
        assert rank is None or rank in [failure["rank"] for failure in result["failures"]]
    else:
        assert not (ended.log_dir / "result.json").exists()
