"""What a run leaves and prints: its directory, the console, the progress."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answers import check_each_index_once, check_outputs
from tests.helpers.support import DONE, ROOT, Samples, Starter, make_samples, wait_until

PHASES = ["join", "load", "health", "warmup", "ready", "test", "drain", "stop"]
FILES = {
    "disagg.yaml",
    "plan.json",
    "config.json",
    "ranks.json",
    "result.json",
    "requests.bin",
    "mlperf_log_summary.txt",
    "mlperf_log_detail.txt",
    "mlperf_log_accuracy.json",
}


def test_the_run_directory(one: Starter, samples: Samples, tmp_path: Path) -> None:
    log_dir = tmp_path / "deep" / "run"
    options = [
        "--mode",
        "disaggregated",
        "--num_gen_servers",
        2,
        "--dataset_path",
        samples.path,
        "--max_output_len",
        6,
        "--save_outputs",
    ]
    ended = one.run(4, *options, "--core_options", "tpot_ms:0.1", log_dir=log_dir)
    ended.must(DONE)
    names = {str(path.relative_to(log_dir)) for path in log_dir.rglob("*") if path.is_file()}
    assert names >= FILES | {"machines.json"} | {"outputs.jsonl"} | {
        f"ranks/rank_{rank:04d}.log" for rank in range(4)
    }
    assert not [name for name in names if name.endswith(".part")]

    result = ended.result
    types: dict[str, Any] = {
        "status": str,
        "loadgen_result": str,
        "scenario": str,
        "mode": str,
        "core_type": str,
        "world_size": int,
        "samples": int,
        "errors": int,
        "retried": int,
        "samples_per_second": float,
        "tokens_per_second": float,
        "ttft_ms": dict,
        "tpot_ms": dict,
        "phases_s": dict,
        "per_instance": list,
        "compiled_in_test": int,
        "compiled": list,
    }
    for key, expected in types.items():
        assert type(result[key]) is expected, key
    assert (result["scenario"], result["core_type"], result["world_size"]) == ("Offline", "dummy", 4)
    for key in ("ttft_ms", "tpot_ms"):
        assert {name: type(value) for name, value in result[key].items()} == dict.fromkeys(
            ("p50", "p90", "p99", "mean"), float
        )
        assert 0 < result[key]["p50"] <= result[key]["p90"] <= result[key]["p99"]
    assert list(result["phases_s"]) == PHASES
    assert all(type(seconds) is float and 0 <= seconds < 900 for seconds in result["phases_s"].values())
    assert [instance["instance"] for instance in result["per_instance"]] == [0, 1, 2]
    for instance in result["per_instance"]:
        assert type(instance["samples"]) is int
        assert type(instance["tokens"]) is int
        assert 0 <= instance["busy_fraction"] <= 1
    assert result["per_instance"][0]["samples"] == len(samples.prompts)
    assert sum(instance["samples"] for instance in result["per_instance"][1:]) == len(samples.prompts)

    assert set(ended.outputs()[0]) == {"index", "input_tokens", "output_tokens", "text"}
    assert all(type(line["text"]) is str for line in ended.outputs())

    config = ended.json("config.json")
    assert config["max_output_len"] == {"value": 6, "source": "command line"}
    assert config["mode"] == {"value": "disaggregated", "source": "command line"}
    assert config["temperature"] == {"value": 0.0, "source": "default"}
    assert config["core_options"]["value"] == {"tpot_ms": 0.1}

    ranks = ended.json("ranks.json")
    assert [entry["rank"] for entry in ranks] == [0, 1, 2, 3]
    assert len({entry["pid"] for entry in ranks}) == 4

    # The plan is the one that `mpillm plan` shows beforehand (it knows no host, and whether there are GPUs),
    # and the YAML gives the same.
    planned = json.loads(one.mpillm("plan", "--world_size", 4, *options[:4], "--format", "json").out)
    again = json.loads(
        one.mpillm(
            "plan", "--world_size", 4, "--disagg_config", log_dir / "disagg.yaml", "--format", "json"
        ).out
    )
    plan = ended.json("plan.json")
    for rank in plan["ranks"]:
        rank["node"] = "localhost"
    assert planned.pop("notes") == [] and again.pop("notes")  # what of a YAML has no effect
    assert {rank["device"] for rank in plan["ranks"]} == {None}, "the dummy core takes none"
    for rank in (*planned["ranks"], *again["ranks"]):
        rank["device"] = None
    assert plan == planned == again


@pytest.mark.smoke
def test_the_console(one: Starter) -> None:
    """It shows the plan's table, a line for each phase, and the summary; stderr has nothing but the
    launcher's line."""
    ended = one.run(3, "--mode", "disaggregated", "--max_output_len", 4)
    ended.must(DONE)
    lines = ended.out.splitlines()
    assert any(line.split()[:4] == ["rank", "node", "device", "roles"] for line in lines)
    phases = [
        line.split()[0]
        for line in lines
        if len(line.split()) > 2 and line.split()[2] == "s" and line.split()[0] in PHASES
    ]
    assert phases == PHASES
    for word in (
        "LoadGen",
        "samples per second",
        "tokens per second",
        "time to first token",
        "generation 1",
        "result.json",
    ):
        assert word in ended.out
    assert len(ended.err.replace("\\\n", "").splitlines()) == 1
    assert "mpirun" in ended.err


def test_the_progress_bar_on_a_terminal(both: Starter) -> None:
    """The bar is drawn while the test goes on, not when it is over."""
    options = ["--scenarios=Server", "--server_target_qps=150", "--min_duration=3", "--max_output_len=4"]
    command = both.start(3, *options, terminal=True)
    command.wait_phase("test")
    wait_until(lambda: "samples  " in command.out or "drain" in command.out, "the bar")
    assert "drain" not in command.out, command.out
    assert "\x1b[J" in command.end().must(DONE).out


@pytest.mark.parametrize("ranks", [1, 3])
def test_progress_is_drawn_before_a_sample_is_answered(both: Starter, samples: Samples, ranks: int) -> None:
    """Answers are long: for seconds no sample is answered, but the instances generate, on rank 0 or
    others."""
    options = [
        "--mode",
        "aggregated" if ranks == 1 else "disaggregated",
        "--dataset_path",
        samples.path,
        "--max_output_len",
        41,
    ]
    command = both.start(
        ranks, *options, "--max_batch_size", 512, "--core_options", "ttft_ms:1,tpot_ms:100", terminal=True
    )
    command.wait_phase("test")
    number = r"([\d.]+k?)"
    pattern = (
        rf" 0/256 samples  0\.0/s  \d+ s\n    out {number} tok/s \(now {number}\)  in {number}"
        rf" \({number}\)  run 256  wait 0\x1b"
    )
    wait_until(
        lambda: re.search(pattern, command.out) or "  drain" in command.out,
        "the progress of what is computed",
    )
    assert re.search(pattern, command.out), command.out
    ended = command.end().must(DONE)
    result = ended.result
    metrics = [instance["metrics"] for instance in result["per_instance"]]
    assert sum(m["generated_tokens"] for m in metrics) == result["tokens"] == 41 * 256
    assert sum(m["prompt_tokens"] for m in metrics) == sum(map(len, samples.prompts))
    last = metrics[-1]
    assert last["running"]["peak"] == 256 and last["running"]["last"] == last["waiting"]["last"] == 0
    assert 0 < last["generated_tokens_per_second"]["mean"] <= last["generated_tokens_per_second"]["peak"]
    assert last["kv_cache_usage"] is None
    rows = [json.loads(line) for line in (ended.log_dir / "timeline.jsonl").read_text().splitlines()]
    assert {row["instance"] for row in rows} == set(range(len(metrics)))
    generated = [row["generated_tokens"] for row in rows if row["instance"] == len(metrics) - 1]
    assert len(generated) > 2 and generated == sorted(set(generated))


def test_a_core_that_does_not_say_what_it_computes(one: Starter) -> None:
    environment = {"PYTHONPATH": str(ROOT)}
    ended = one.run(3, "--max_output_len", 4, core="tests.helpers.plugin_cores:Echo", env=environment).must(
        DONE
    )
    assert [instance["metrics"] for instance in ended.result["per_instance"]] == [None, None]
    assert not (ended.log_dir / "timeline.jsonl").exists()


def test_what_was_compiled_in_the_test_is_counted_on_all_ranks(one: Starter) -> None:
    """Both ranks of each of two instances count, though only one leads."""
    environment = {"PYTHONPATH": str(ROOT)}
    options = ["--max_output_len", 4, "--tensor_parallelism", 2]
    ended = one.run(6, *options, core="tests.helpers.plugin_cores:Compiling", env=environment).must(DONE)
    result = ended.result
    assert result["compiled_in_test"] == 8
    assert result["compiled"][2:4] == ["rank 3: kernel 0 of instance 0", "rank 3: kernel 1 of instance 0"]
    assert "compiled in the test   8 kernels or graphs" in ended.out
    assert (
        "compiled in the test: kernel 1 of instance 1" in (ended.log_dir / "ranks/rank_0005.log").read_text()
    )
    assert all("compiled" not in instance for instance in result["per_instance"])


def test_a_second_run_into_the_same_directory(one: Starter, samples: Samples, tmp_path: Path) -> None:
    """It replaces the first one's result and answers."""
    options = ["--dataset_path", samples.path, "--save_outputs"]
    first = one.run(3, *options, "--max_output_len", 2, "--test_mode", "AccuracyOnly")
    check_outputs(first, samples, 2)
    second = one.run(3, *options, "--max_output_len", 4, "--test_mode", "AccuracyOnly")
    check_outputs(second, samples, 4)
    check_each_index_once(second, samples, 4)
    small = make_samples(tmp_path / "small.jsonl", [5, 6])
    third = one.run(3, "--dataset_path", small.path, "--max_output_len", 4)
    third.must(DONE)
    assert third.result["samples"] == 2
    assert not (third.log_dir / "outputs.jsonl").exists()


def test_a_run_directory_has_the_rights_of_the_umask(one: Starter, tmp_path: Path) -> None:
    """Also the files of ranks that mpirun has started."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\numask 027\nexec {one.python} "$@"\n')
    python.chmod(0o755)
    one.python = str(python)
    log_dir = tmp_path / "run"
    line = [
        one.python,
        "-m",
        "mpillm",
        "mpirun",
        "-n",
        2,
        "run",
        "--core_type",
        "dummy",
        "--log_dir",
        log_dir,
    ]
    one.command([*line, "--min_query_count", 8, "--save_outputs"], log_dir).end().must(DONE)
    found = [log_dir, *log_dir.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} == {0o750}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o640}
    assert len(found) > len(FILES)
