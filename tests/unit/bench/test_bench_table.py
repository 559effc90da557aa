"""`bench table`: what it gives each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpillm.bench import bench_table
from mpillm.bench.whole_runs import EndedRun
from mpillm.cli import main


@pytest.mark.parametrize(
    ("extra", "expected"), [((), "500"), (("--extra", "enable_chunked_context:true"), "64")]
)
def test_a_step_holds_a_whole_prompt_only_where_it_must(
    extra: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def run_in(folder: Path, mpirun: Sequence[str], options: Sequence[str], **_: Any) -> EndedRun:
        given.update(zip(options[::2], options[1::2], strict=True))
        return EndedRun(folder, 1, {"status": "FAILED", "failures": []})

    monkeypatch.setattr(bench_table, "run_in", run_in)
    words = ["--models", "tiny-llama", "--pairs", "500/20", "--max_num_tokens", "64", *extra]
    assert main(["bench", "table", *words]) == 1
    assert given["--max_num_tokens"] == expected
