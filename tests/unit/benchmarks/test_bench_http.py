"""`benchmarks http` refuses what would fail after minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.command import main
from disagg.errors import ConfigError


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ConfigError, match=f"--model_path {absent}: no such folder"):
        main(["http", "--peers", str(tmp_path), "--model_path", str(absent)])
