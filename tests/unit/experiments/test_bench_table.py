"""`bench table`: what it gives each run, and what it prints of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpillm.devices import Gpu
from mpillm.experiments.bench.bench_table import Options, main, run_options
from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from mpillm.runtime.whole_runs import EndedRun


def options_of(words: str) -> Options:
    return collect(words.split(), Options, Parser(prog="mpillm bench table"))


@pytest.mark.parametrize(("extra", "expected"), [("", 500), ("--extra enable_chunked_context:true", 64)])
def test_a_step_holds_a_whole_prompt_only_where_it_must(extra: str, expected: int) -> None:
    config = options_of(f"--max_num_tokens 64 {extra}")
    assert run_options(config, "tiny-llama", (500, 20), ())["max_num_tokens"] == expected


@pytest.mark.parametrize(
    ("lengths", "words", "expected"),
    [
        ((2048, 2048), "--extra kv_cache_tokens:500000", 3 * 122),
        (
            (2048, 2048),
            "--extra kv_cache_tokens:500000,tensor_parallelism:2 --ranks 5 --rounds 2",
            488,
        ),
        ((128, 128), "--max_batch_size 100", 300),
        ((20000, 2000), "--num_samples 7", 7),
    ],
)
def test_as_many_samples_as_run_at_once_or_a_multiple(
    lengths: tuple[int, int], words: str, expected: int
) -> None:
    """Samples that are left over would run alone, at a small part of the rate."""
    gpus = [Gpu(f"{i}", "H200", 150_750_000_000, 150_200_000_000) for i in range(2)]
    config = options_of(f"--kv_cache_free_gpu_mem_fraction 0.95 {words}")
    assert run_options(config, "llama3.1-8b", lengths, gpus)["num_samples"] == expected


@pytest.mark.parametrize(
    "failed",
    [
        {"result": {"status": "FAILED", "failures": [{"cause": "rank 1: no memory\nmore"}]}},
        {"result": {}, "message": "rank 1: no memory\nmore"},
    ],
)
def test_a_run_without_figures_has_its_cause_in_the_table(
    failed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Open MPI's banner stands behind our message, and ends the output."""
    given: dict[str, str] = {}

    def run_in(folder: Path, mpirun: Sequence[str], options: Sequence[str], **_: Any) -> EndedRun:
        given.update(zip(options[::2], options[1::2], strict=True))
        return EndedRun(folder, 3, tail="  | rank 1: no memory\n  | -----\n  | \0", **failed)

    assert main(options_of("--pairs 128/128 --num_samples 4"), run_in) == 1
    assert (given["--num_samples"], given["--input_mean"]) == ("4", "128")
    _, header, *_, row = capsys.readouterr().out.splitlines()
    assert " output tokens/s published " in header
    assert row.endswith("128/128 failed: rank 1: no memory")


def test_prints_both_figures_and_what_the_gpus_drew_in_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    def gpu(joules: float, mhz: float) -> dict[str, Any]:
        """Of a rank whose GPU draws and clocks twice as much while it loads."""
        seconds = [-2, -1, 0, 1, 2, 3]
        return {
            "phases": [["load", -2.0, 0.0], ["test", 0.0, 2.5]],
            "samples": {
                "gpu": {
                    "seconds": seconds,
                    "energy_j": [joules * (2 * at if at < 0 else at) for at in seconds],
                    "sm_mhz": [2 * mhz if at < 0 else mhz for at in seconds],
                    "memory_bytes": [(128 if at == 1 else 120) * 2**30 for at in seconds],
                }
            },
        }

    harness = {"phases": [["test", 0.0, 2.5]], "samples": {}}
    result = {
        "status": "VALID", "tokens_per_second": 30_702.0, "samples": 40, "test_s": 2.5,
        "loadgen_result": "VALID",
        "per_instance": [{"metrics": {"running": {"peak": 7}}, "preemptions": 3}],
    }  # fmt: skip

    def run_in(folder: Path, *_: Any, **__: Any) -> EndedRun:
        folder.mkdir()
        ranks = {"0": harness, "1": gpu(600, 1000), "2": gpu(700, 1500)}
        (folder / "telemetry.json").write_text(json.dumps({"ranks": ranks}), encoding="utf-8")
        return EndedRun(folder, 0, result)

    assert main(options_of("--pairs 128/128"), run_in) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == [
        "llama3.1-8b",
        "128/128",
        "40",
        "7",
        "3",
        "2.5",
        "30,702",
        "27,911",
        "1.10",
        "3,791",
        "8.10",
        "128.0",
        "650",
        "1,250",
        "21.2",
        "165.0",
        "VALID",
    ]
    # Two GPUs with an instance between them read the weights once.
    assert main(options_of("--pairs 128/128 --ranks 3"), run_in) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[9] == "7,581"
    # Their figure for this one is of a card that may take more power than most.
    assert main(options_of("--models llama2-70b --pairs 222/292"), run_in) == 0
    line, note = capsys.readouterr().out.splitlines()[-2:]
    assert " 4,415 " in line and "an eighth of" in note
