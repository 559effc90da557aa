"""Several runs: compared, alternating, over a grid, and in search of the best rate."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from mpillm.report.request_log import read_requests
from tests.helpers.support import Command, Starter, wait_until

DUMMY = ("-n", 2, "--core_type", "dummy", "--max_output_len", 1)


def test_a_sweep_goes_on_where_it_stopped_and_its_runs_compare(one: Starter, tmp_path: Path) -> None:
    """Of three points one has a result, one is half written, one was never begun."""
    words = ("sweep", *DUMMY, "--core_options", "ttft_ms:1", "ttft_ms:30", "--log_dir", tmp_path / "sweep")
    first = one.mpillm(*words, "--output", tmp_path / "sweep.json").must(0)
    assert first.out.count(": VALID") == 2 and "Pareto" in first.out
    assert len(re.findall(r": VALID  about \d+ (s|min) left\n", first.out)) == 1, "the last has none left"
    assert "sweep.html" in first.out.splitlines()[-1]
    runs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert len(runs) == 2 and all(len(read_requests(run)) == 160 for run in runs)
    assert len(json.loads((tmp_path / "sweep.json").read_text())["points"]) == 2

    compared = one.mpillm("compare", *runs, "--log_dir", tmp_path / "compared").must(0)
    assert (tmp_path / "compared" / "compare.html").exists()
    assert re.search(r"core_options.ttft_ms +1 +30", compared.out), compared.out
    assert re.search(r"tokens/s .*%", compared.out), compared.out

    result = runs[1] / "result.json"
    result.write_text(result.read_text()[:200])
    second = one.mpillm(*words).must(0)
    assert second.out.count(": was there") == 1 and second.out.count(": VALID") == 1
    assert (tmp_path / "sweep" / f"{runs[1].name}.incomplete").is_dir()


@pytest.mark.slow
def test_the_highest_rate_of_a_known_system(one: Starter, tmp_path: Path) -> None:
    """16 slots of 200 ms answer 80 requests a second.

    LoadGen's arrivals of 20 s are some percent denser than their rate, and a busy machine answers later.
    """
    words = (
        *("find-max-qps", *DUMMY, "--core_options", "ttft_ms:200", "--max_batch_size", 16),
        *("--min_duration", 20, "--probe_duration", 5, "--goodput", "time_to_first_token:3000"),
        *("--log_dir", tmp_path / "search", "--output", tmp_path / "found.json"),
    )
    ended = typed(one, *words).end(600).must(0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert 60 < found["rate"] < 90, ended.out
    assert found["too_high"] / found["rate"] < 1.011
    confirming = json.loads((Path(found["run"]) / "result.json").read_text())
    assert confirming["status"] == "VALID"
    assert confirming["loadgen"]["min_duration_ms"] == 20_000


def test_an_interrupted_search_prints_the_best_rate_and_goes_on(one: Starter, tmp_path: Path) -> None:
    """The tests that have ended are not repeated, and no other search goes on there."""
    words = (
        *("find-max-qps", *DUMMY, "--server_target_qps", 100, "--goodput", "ttft:2000"),
        *("--min_duration", 30, "--probe_duration", 1, "--log_dir", tmp_path / "search"),
    )
    command = typed(one, *words)
    wait_until(lambda: command.out.count(" VALID") >= 2, "two tests", 240)
    command.process.send_signal(signal.SIGINT)
    ended = command.end().must(130)
    best = r"best so far 200 per second, by a short test only: \S*short-200"
    assert re.search(best, ended.flowing), repr(ended)
    assert ended.out.splitlines()[-1] == "to go on: the same command with --log_dir search", repr(ended)

    again = typed(one, *words)
    wait_until(lambda: again.out.count(" VALID") >= 3, "a third test", 240)
    again.kill()
    assert re.findall(r"(\S+)/s .*from before", again.out)[:2] == ["100", "200"], again.out
    other = typed(one, *words, "--tolerance", 0.1, "--max_output_len", 2).end().must(2)
    assert "a search with other options began there" in other.err


def test_a_comparison_that_is_interrupted_names_its_run(one: Starter, tmp_path: Path) -> None:
    words = ("ab", "--seed 1", "--seed 2", *DUMMY, "--min_duration", 60, "--log_dir", tmp_path / "ab")
    command = typed(one, *words)
    wait_until(lambda: (tmp_path / "ab" / "warm-up" / "console.txt").exists(), "its first run", 120)
    command.process.send_signal(signal.SIGINT)
    ended = command.end().must(130)
    assert re.search(
        r"^mpillm: interrupted \(Ctrl-C\) during the run in \S*ab/warm-up$", ended.err, re.MULTILINE
    )


@pytest.mark.slow
def test_a_difference_is_found_and_a_failed_run_is_named(one: Starter, tmp_path: Path) -> None:
    words = (*DUMMY, "--max_batch_size", 80, "--pairs", 3, "--output", tmp_path / "ab.json")
    fast, slow = "--core_options ttft_ms:1000", "--core_options ttft_ms:3000"
    slower = typed(one, "ab", fast, slow, *words).end(300).must(0)
    assert "B differs: -" in slower.out and "paired t test of 3 log ratios" in slower.out
    assert json.loads((tmp_path / "ab.json").read_text())["verdict"]["real"]
    ended = typed(one, "ab", fast, "--core_options fault:raise,fault_rank:1", *words).end(300).must(1)
    assert "run B of pair 1 failed" in ended.message


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(one: Starter, tmp_path: Path) -> None:
    values = ("ttft_ms:1", "ttft_ms:2", "ttft_ms:3")
    words = ("sweep", *DUMMY, "--core_options", *values, "--log_dir", tmp_path / "s")
    command = typed(one, *words)
    wait_until(lambda: ": VALID" in command.out, "a result")
    command.kill()
    ended = typed(one, *words).end().must(0)
    assert ": was there" in ended.out and "3 of 3" in ended.out


def typed(one: Starter, *words: object) -> Command:
    """Start ``python -m mpillm WORDS``."""
    return one.command([one.python, "-m", "mpillm", *words])


def test_advice_is_calibrated_predicted_and_verified(one: Starter, tmp_path: Path) -> None:
    """Two instances have twice the slots of one that another computes the contexts for."""
    words = ("advise", "--total_gpus", 2, "--core_type", "dummy", "--core_options", "ttft_ms:60,tpot_ms:6")
    limits = ("--max_output_len", 4, "--max_batch_size", 4, "--min_query_count", 32)
    advice = tmp_path / "advice.json"
    ended = one.mpillm(
        *words, *limits, "--verify", 1, "--log_dir", tmp_path / "runs", "--output", advice
    ).must(0)
    assert "1. 2 x tp 1, max_batch_size 4: " in ended.out and "Pareto curve" in ended.out, ended.out
    found = json.loads(advice.read_text())
    assert len(found["predicted"]) == 2 * 3  # modes, batch sizes
    assert [one["options"].split("--mode=")[1].split()[0] for one in found["best"]] == [
        "aggregated",
        "disaggregated",
    ]
    (verified,) = found["verified"]
    assert (Path(verified["run"]) / "result.json").exists()
    run = re.search(r"mpirun -n 3 (run .*)", ended.out.replace("\\\n", ""))
    assert run is not None and "--mode=aggregated" in run[1] and run[1].count("max_batch_size") == 1


@pytest.mark.slow
def test_a_test_is_predicted_anew_right_before_it_is_verified(one: Starter, tmp_path: Path) -> None:
    """From a separate short run, with at least one request per slot and at most half of the test's."""
    words = ("advise", "--total_gpus", 1, "--model_path", "tiny-llama", "--max_output_len", 8)
    more = ("--max_batch_size", 1, "--min_query_count", 16, "--verify", 1)
    advice = tmp_path / "advice.json"
    ended = typed(one, *words, *more, "--log_dir", tmp_path / "runs", "--output", advice).end(600).must(0)
    (verified,) = json.loads(advice.read_text())["verified"]
    now = ended.out.index(f"predicted, now {verified['predicted_just_before']:,.4g}")
    assert now < ended.out.index(f"VALID, prediction {verified['error_just_before']:+.1%}")
    run = Path(verified["run"])

    def finished(folder: Path) -> int:
        return (folder / "result.json").stat().st_mtime_ns

    # Others may be later: where the machine was busy, the test was made again.
    earlier = [one for one in (tmp_path / "runs").glob("calibration-??") if finished(one) < finished(run)]
    assert 1 <= len(read_requests(max(earlier, key=finished))) <= 8 and len(read_requests(run)) == 16
    for name in ("", "_just_before", "_from_own_steps"):
        error = verified[f"predicted{name}"] / verified["tokens_per_second"] - 1
        assert verified[f"error{name}"] == pytest.approx(error)
