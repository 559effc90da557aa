"""Runs and servers from a Python program: the figures, the requests and the page of real runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import mpillm
from disagg.errors import ConfigError

DUMMY: dict[str, Any] = {"core_type": "dummy", "min_query_count": 50, "max_output_len": 8}


@pytest.mark.smoke
def test_two_runs_in_one_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their figures are those of result.json, their requests are all there, and another child lives on."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        first = mpillm.run(ranks=2, log_dir=tmp_path / "first", core_options={"ttft_ms": 5}, **DUMMY)
        printed = capfd.readouterr().out
        second = mpillm.run(ranks=3, log_dir=tmp_path / "second", echo=False, **DUMMY)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert "LoadGen" in printed and str(tmp_path / "first") in printed
    waits = re.compile(r"  second, \d+ s: ")  # of a busy machine
    assert all(map(waits.match, capfd.readouterr().out.splitlines()))
    for run, instances in ((first, 1), (second, 2)):
        result = json.loads((run.path / "result.json").read_text())
        assert run.result == result and run.status == result["status"] != "" and run.valid
        assert run.tokens_per_second == result["tokens_per_second"] > 0
        assert len(run.per_instance) == instances
        assert len(run.requests) == result["samples"] == len(run.frame())
        assert list(run.frame().columns) == [*(run.requests.dtype.names or ()), "tpot"]
        assert run.option("core_type") == "dummy"
        assert run._repr_html_().startswith("<iframe") and "&lt;" in run._repr_html_()
    assert mpillm.load(first.path).result == first.result and str(first.path) in repr(first)


def test_wrong_options_and_failed_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_batchsize: no such option .*max_batch_size"):
        mpillm.run(ranks=2, max_batchsize=3)
    with pytest.raises(ConfigError, match="max_output_len 0"):
        mpillm.run(ranks=2, log_dir=tmp_path / "wrong", echo=False, **(DUMMY | {"max_output_len": 0}))
    with pytest.raises(mpillm.RunFailed, match="rank 1") as failed:
        mpillm.run(
            ranks=2,
            log_dir=tmp_path / "failed",
            echo=False,
            core_options={"fault": "raise", "fault_phase": "load", "fault_rank": 1},
            **DUMMY,
        )
    assert failed.value.code == 3 and failed.value.path == tmp_path / "failed"
    assert mpillm.load(tmp_path / "failed").status == "FAILED"
    with pytest.raises(ConfigError, match="no such run directory"):
        mpillm.load(tmp_path / "nowhere")


def test_a_server_for_the_length_of_a_block(tmp_path: Path) -> None:
    with (
        mpillm.serve(
            ranks=2, log_dir=tmp_path / "served", echo=False, core_type="dummy", model_path="tiny-llama"
        ) as server,
        urllib.request.urlopen(f"{server.url}/models", timeout=300) as answer,
    ):
        assert answer.status == 200
    assert mpillm.load(server.path).status == "SERVED"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{server.url}/models", timeout=300)
