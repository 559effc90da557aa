"""`bench http` refuses what would fail after minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpillm.cli import main


def test_a_tokenizer_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert main(["bench", "http", "--peers", str(tmp_path), "--model_path", str(absent)]) == 2
    assert f"--model_path {absent}: no such folder" in capsys.readouterr().err
