"""Each workload and scenario, scaled down, as a person types it: LoadGen ends the test by its own rules for
that workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mpillm import workloads
from mpillm.data.preprocessed.loader import PreprocessedLoader
from tests.helpers.support import DONE, Ended, Starter, make_samples

# TTFT and TPOT limits of Server in ms, as MLPerf's rules have them.
LIMITS = {
    "llama2-70b": (2000, 200),
    "llama2-70b-interactive": (450, 40),
    "mixtral-8x7b": (2000, 200),
    "llama3.1-405b": (6000, 175),
    "llama3.1-405b-interactive": (4500, 80),
    "llama3.1-8b": (2000, 100),
    "llama3.1-8b-interactive": (500, 30),
    "deepseek-r1": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 15),
}
CASES = [
    (name, scenario, mode)
    for name in LIMITS
    for scenario in workloads.get(name).scenarios
    for mode in ("aggregated", "disaggregated")
]
FAST = (("mixtral-8x7b", "Offline", "disaggregated"), ("llama2-70b", "Server", "aggregated"))
# of 459 at 10 per second, fewer than which can't be VALID
FEW = ("--min_query_count", 60, "--server_target_qps", 20)
# Why a test is INVALID when the machine is slow or the test short.
REASONS = {"latency limits", "early stopping", "minimum duration", "minimum query count"}


def run(one: Starter, name: str, scenario: str, mode: str, *more: object) -> Ended:
    ranks = 3 if mode == "aggregated" else 4
    ended = one.start(
        ranks,
        *("--benchmarks", name, "--scenarios", scenario, "--mode", mode, "--model_scale", "tiny"),
        *more,
        core="torch",
    )
    return ended.end(240)


@pytest.mark.parametrize(
    ("name", "scenario", "mode"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id="-".join(case))
        for case in CASES
    ],
)
def test_tiny(one: Starter, name: str, scenario: str, mode: str) -> None:
    ended = run(one, name, scenario, mode, *(FEW if scenario == "Server" else ())).must(DONE)
    result, tiny = ended.result, workloads.get(name, "tiny")
    print(
        name,
        scenario,
        mode,
        result["loadgen_result"],
        result["loadgen_unsatisfied"],
        result["samples_per_second"],
        f"{ended.seconds:.0f} s",
    )
    assert (
        result["workload"] == f"{name} (tiny)"
        and result["errors"] == 0
        and result["samples"] >= tiny.n_samples
    )
    assert result["loadgen_result"] == ("INVALID" if result["loadgen_unsatisfied"] else "VALID")
    assert set(result["loadgen_unsatisfied"]) <= REASONS
    if scenario == "Offline":
        assert result["loadgen_result"] == "VALID"
    assert result["mode"] == mode

    # What LoadGen says of itself: the workload's official name and limits, and what is reduced.
    detail = ended.loadgen()
    ttft, tpot = LIMITS[name]
    assert detail["requested_use_token_latencies"] is True
    if scenario == "Server":
        assert (result["loadgen"]["ttft_latency_ms"], result["loadgen"]["tpot_latency_ms"]) == (ttft, tpot)
        assert (detail["requested_server_ttft_latency"], detail["requested_server_tpot_latency"]) == (
            ttft * 10**6,
            tpot * 10**6,
        )
        assert f"TTFT {ttft} ms, TPOT {tpot} ms" in ended.out
    assert detail["qsl_reported_performance_count"] == tiny.n_samples
    assert detail["effective_min_duration_ms"] == 0
    assert (ended.log_dir / "user.conf").read_text().count("performance_sample_count_override") == 1

    # What is scaled is said, and where every value came from.
    assert f"scaled down: {tiny.scaled}" in ended.out
    config = ended.json("config.json")
    for option in (
        "model_path",
        "max_output_len",
        "max_seq_len",
        "end_ids",
        "min_query_count",
        "dataset_path",
    ):
        assert config[option]["source"] in (f"workload {name} (tiny)", "command line")
    made = ended.log_dir / "dataset"
    assert config["dataset_path"]["value"] == str(made)
    assert len(PreprocessedLoader(made, tiny.columns).load().lengths) == tiny.n_samples


def test_a_data_frame_is_converted_by_the_first_run(one: Starter) -> None:
    """Answers are those to the frame's prompts, from the frame and from its arrays."""
    samples = make_samples(one.folder / "samples.jsonl", [400] * 1500)
    frame = one.folder / "set.pkl"
    pd.DataFrame({"tok_input": samples.prompts}).to_pickle(frame)
    for name, notes in (("first", 1), ("second", 0)):
        ended = one.run(
            3,
            "--dataset_path",
            frame,
            "--test_mode",
            "AccuracyOnly",
            "--max_output_len",
            2,
            log_dir=one.folder / name,
        ).must(DONE)
        assert ended.out.count(f"data set converted for later runs: {frame}.arrays\n") == notes
        assert sorted(ended.accuracy_log()) == [(i, samples.answer(i, 2)) for i in range(1500)]


@pytest.mark.slow
def test_arrays_and_accuracy(one: Starter) -> None:
    """With NVIDIA's arrays, and a stop word of every other sample, each sample is answered once."""
    tiny = workloads.get("mixtral-8x7b", "tiny")
    folder = one.folder / "moe"
    folder.mkdir()
    arrays(folder, tiny.n_samples, tiny.max_input_len, tiny.stop_words[0])
    ended = run(
        one,
        "mixtral-8x7b",
        "Offline",
        "aggregated",
        "--dataset_path",
        folder,
        "--test_mode",
        "AccuracyOnly",
        "--max_output_len",
        4,
    ).must(DONE)
    assert sorted(index for index, _ in ended.accuracy_log()) == list(range(tiny.n_samples))
    assert all(2 <= len(answer) <= 4 for _, answer in ended.accuracy_log())


def arrays(folder: Path, n: int, width: int, word: tuple[int, ...]) -> None:
    files: dict[str, Any] = {
        "input_ids_padded": np.ones((n, width)),
        "input_lens": np.arange(n) % width + 1,
        "stop_ids_padded": np.array([word if i % 2 else (257,) * len(word) for i in range(n)]),
    }
    for name, values in files.items():
        np.save(folder / f"{name}.npy", values.astype(np.int32))
