"""What commands make of a run whose load another client makes."""

from __future__ import annotations

import pytest

from mpillm.cli import main


def test_find_max_qps_needs_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["find-max-qps", "-n", "2", "--core_type", "dummy", "--server_target_qps", "5"]
    assert main([*words, "--harness", "aiperf"]) == 2
    assert "find-max-qps goes by LoadGen's verdicts" in " ".join(capsys.readouterr().err.split())
