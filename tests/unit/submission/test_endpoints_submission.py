"""A curve for MLPerf Endpoints, of a server whose answers cost nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpillm import workloads
from mpillm.cli import main
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.experiments.loadtest.load_test import Record
from mpillm.options.command_line import Parser
from mpillm.options.values import collect
from mpillm.submission import fixed_concurrency
from mpillm.submission.commands import endpoints_submission
from mpillm.submission.endpoint_points import result_summary
from mpillm.submission.steady_state import SteadyState, SuperPass
from tests.helpers.mlcommons_client import install_client

WORDS = ("--benchmarks", "llama3.1-8b", "--model_scale", "tiny", "--submitter", "Us", "--system_name", "Box")


@pytest.mark.long
def test_a_curve_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "system.json").write_text('{"system_size": "1 node", "division": "RDI"}')
    (tmp_path / "disclosure.json").write_text('{"model_precision": "fp8", "region": "submitters_choice"}')
    words = (*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48")
    files = ["--system_description", str(tmp_path / "system.json")]
    files += ["--disclosure", str(tmp_path / "disclosure.json"), "--concurrency", "1,4,10,48"]
    with null_server() as url:
        command = ["endpoints-submission", "--url", url, *words, *files, "--min_duration", "0.01"]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "4 points: a submission needs 7" in out
        assert "yours       system_power.json" in out and "model_precision" not in out
        assert "yours       system_desc.json: system_availability_status, system_node_ensemble_count" in out
        assert "system_size," not in out
        root = tmp_path / "made" / "Us" / "1"
        curve = root / "results" / "Box" / "llama3_1-8b"
        assert (root / "src" / "endpoint" / "README.md").exists() and (root / "docs").is_dir()
        assert {path.name for path in curve.iterdir()} == {"r1", "r4", "r10", "r48"}
        rates = []
        for folder in curve.iterdir():
            point = yaml.safe_load((folder / "point.yaml").read_text())
            assert f"r{point['concurrency']}" == folder.name
            assert point["offline"] == ("elected" if folder.name == "r48" else "none")
            salt = point["runtime_settings"]["salt"]
            seed = f"9315206023656308754/{folder.name}/1"
            assert salt == {"bits": 64, "after_tokens": 0, "seed": seed}, "another one at each point"
            assert point["model_precision"] == "fp8" and point["region"] == "submitters_choice"
            summary = json.loads((folder / "result_summary.json").read_text())
            assert summary["n_samples_completed"] == summary["n_samples_issued"] >= 26
            assert summary["n_samples_issued"] % 26 == 0, "whole passes (rules, 6.4)"
            block = point["steady_state"]
            assert block["status"] in ("insufficient_passes", "insufficient_duration"), "0.01 s are too short"
            assert block["window"]["super_pass_size"] % 26 == 0 and "steady_state" not in out
            assert block.items() <= summary["steady_state"].items() and "no steady state (insuff" in out
            assert len(json.loads((folder / "warmup.json").read_text())) == point["concurrency"]
            accuracy = json.loads((folder / "accuracy_results.json").read_text())
            assert accuracy["cnn_dailymail"]["num_samples"] == 26
            system = json.loads((folder / "system_desc.json").read_text())
            assert system["system_size"] == "1 node" and system["division"] == "Standardized"
            rates.append((summary["system_tps"], system["tps_utilization"]))
        assert max(rates)[1] == 1.0 and all(rate / max(rates)[0] == pytest.approx(u) for rate, u in rates)
        before = (curve / "r4" / "result_summary.json").read_bytes()
        scored = (curve / "r10" / "accuracy_results.json").stat()
        (curve / "r10" / "result_summary.json").unlink()
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.count("measured earlier") == 3 and re.search(r"concurrency 10  \d+ requests", out)
        assert (curve / "r4" / "result_summary.json").read_bytes() == before
        after = (curve / "r10" / "accuracy_results.json").stat()
        assert after.st_mtime_ns > scored.st_mtime_ns, "the accuracy belongs to the new measurement"
        (curve / "r4" / "accuracy_results.json").unlink()
        failed = curve / "r48" / "result_summary.json"
        failed.write_text(json.dumps({**json.loads(failed.read_text()), "n_samples_failed": 1}))
        assert main(command) == 0
        out = capsys.readouterr().out
        assert out.count("measured earlier") == 2
        assert "concurrency 4  without its accuracy run, which must follow directly; measured again" in out
        order = [
            line.split()[:2] for line in out.splitlines() if " requests in " in line or "accuracy:" in line
        ]
        assert [words[0] for words in order] == ["concurrency", "accuracy:"] * 2
        assert (curve / "r4" / "result_summary.json").read_bytes() != before
        again = yaml.safe_load((curve / "r4" / "point.yaml").read_text())["runtime_settings"]["salt"]
        assert again["seed"] == "9315206023656308754/r4/2", "a server may have the prompts of the first"
        assert (curve / "r4" / "accuracy_results.json").exists()
        assert json.loads(failed.read_text())["n_samples_failed"] == 0
        found = {"status": "windowable", "verdict": "STEADY STATE", "window": {}, "state": {}}
        disclosure = {"model_precision": "int8", "r48": {"steady_state": found}}
        (tmp_path / "disclosure.json").write_text(json.dumps(disclosure))
        assert main([*command, "--division", "RDI", "--target_cohort", "2027-01-C1"]) == 0
        assert capsys.readouterr().out.count("measured earlier") == 4
        for folder in curve.iterdir():
            point = yaml.safe_load((folder / "point.yaml").read_text())
            assert (point["model_precision"], point["division"]) == ("int8", "RDI"), "the latest values"
            assert (point.get("steady_state") == found) == (folder.name == "r48") and "r48" not in point
            assert point["target_cohort"] == "2027-01-C1" and point["region"] != "submitters_choice"
            assert point["warmup"]["requests_completed"] == point["concurrency"]
            assert point["runtime_settings"]["min_duration_ms"] == 10


def test_a_point_belongs_to_the_options_it_was_measured_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    with null_server() as url:
        command = ["endpoints-submission", *words, "--concurrency", "1,48", "--url", url]
        assert main([*command, "--min_duration", "0.01"]) == 0
        assert "tiny        26 of the benchmark's 13,368 samples: " in capsys.readouterr().out
        folder = tmp_path / "made/Us/1/results/Box/llama3_1-8b"
        files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for more, message in (
            (["--min_duration", "0.02"], "r1 was measured with --min_duration 0.01, this is 0.02"),
            ([], "r1 was measured with --min_duration 0.01, this is 600.0"),
            (["--min_duration", "0.01", "--model_scale", "full"], "with --model_scale tiny, this is full"),
            (["--min_duration", "0.01", "--dataset_path", "x"], "without --dataset_path, this is x"),
            (["--min_duration", "0.01", "--url", "h:1"], f"with --url {url}, this is h:1"),
            (["--min_duration", "0.01", "--concurrency", "2,48"], "r1 is not a point of this curve"),
        ):
            assert main([*command, *more]) == 2
            error = capsys.readouterr().err
            assert message in error and "another --submission_id" in error, error
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
        noted = yaml.safe_load((folder / "r1" / "config.yaml").read_text())
        assert noted["served_model"]
        unsalted = {name: value for name, value in noted.items() if name != "salt"}
        (folder / "r1" / "config.yaml").write_text(yaml.safe_dump(unsalted))
        assert main([*command, "--min_duration", "0.01"]) == 2
        assert "r1 was measured without salts (rules, 2.9.5)" in capsys.readouterr().err
        (folder / "r1" / "config.yaml").write_text(yaml.safe_dump(noted | {"served_model": "another"}))
        (folder / "r48" / "result_summary.json").unlink()
        assert main([*command, "--min_duration", "0.01"]) == 2
        assert "r1 was measured with the server's model another, now it has " in capsys.readouterr().err


def test_a_point_ends_with_its_steady_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search itself has its own tests. Here, five passes have a steady state in four of them."""

    def search(passes: Sequence[SuperPass], size: int, min_s: float) -> SteadyState:
        if len(passes) < 5:
            return SteadyState("insufficient_passes", "not found", size)
        return SteadyState("windowable", "STEADY STATE", size, 1, passes[1:5], {"tpot_p50": "Plateau"})

    for module in (endpoints_submission, fixed_concurrency):
        monkeypatch.setattr(module, "find_steady_state", search)
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--concurrency", "1,48", "--min_duration", "0.001"]
    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url]
        assert main([*command, "--max_duration", "0.0001"]) == 2
        assert "less than the steady state of concurrency 1, 0.001 s" in capsys.readouterr().err
        assert main([*command, "--max_duration", "60"]) == 0
        out = capsys.readouterr().out
        assert out.count("steady state: passes 2 to 5, ") == 2 and "no steady state" not in out
        for c in (1, 48):
            folder = tmp_path / f"made/Us/1/results/Box/llama3_1-8b/r{c}"
            block = yaml.safe_load((folder / "point.yaml").read_text())["steady_state"]
            summary = json.loads((folder / "result_summary.json").read_text())
            assert summary["n_samples_issued"] % 26 == 0 and summary["n_samples_issued"] >= 5 * 26
            assert block["status"] == "windowable" and block["window"]["n_samples"] == 4 * 26
            assert 0 < block["window"]["duration_s"] < summary["duration_ns"] / 1e9
            assert summary["steady_state"]["system_tps"] > 0
        assert main([*command, "--max_duration", "90"]) == 0
        assert capsys.readouterr().out.count("measured earlier") == 2, "a longer time changes nothing"


def test_each_region_has_one_accuracy_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Points that are added later do not move the accuracy runs (rules, 4.3: exactly one in a region)."""
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--min_duration", "0.01"]
    curve = tmp_path / "made/Us/1/results/Box/llama3_1-8b"

    def scored() -> set[str]:
        return {file.parent.name for file in curve.glob("r*/accuracy_results.json")}

    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url]
        assert main([*command, "--concurrency", "1,4,10,48"]) == 0
        assert scored() == {"r1", "r4", "r10", "r48"}
        assert main([*command, "--concurrency", "1,2,4,8,10,24,48"]) == 0
        assert scored() == {"r1", "r4", "r10", "r48"}
        assert capsys.readouterr().out.count("accuracy: ") == 4
        copied = (curve / "r4" / "accuracy_results.json").read_bytes()
        (curve / "r2" / "accuracy_results.json").write_bytes(copied)
        assert main([*command, "--concurrency", "1,2,4,8,10,24,48"]) == 2
        assert "r2 and r4 have accuracy results in low_concurrency" in capsys.readouterr().err


def test_a_separate_offline_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its concurrency is the size of the data set; all of it is sent together (rules, 5.7)."""
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--concurrency", "1,4,10,48", "--offline", "dedicated", "--min_duration", "0.01"]
    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url]
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "the size of the data set, 26, which must be more than --max_supported_concurrency 48" in error
        get = workloads.get
        with_60 = lambda *names: replace(get(*names), n_samples=60)  # noqa: E731
        monkeypatch.setattr(workloads, "get", with_60)
        assert main(command) == 0
        out = capsys.readouterr().out
        assert re.search(r" {10}Offline  \d+ requests in [0-9.]+ s  [0-9.,]+ tokens/s\n", out), out
        curve = tmp_path / "made/Us/1/results/Box/llama3_1-8b"
        points = {
            folder.name: yaml.safe_load((folder / "point.yaml").read_text()) for folder in curve.iterdir()
        }
        assert {name: point["offline"] for name, point in points.items()} == {
            **dict.fromkeys(("r1", "r4", "r10", "r48"), "none"),
            "r60": "dedicated",
        }
        offline = points["r60"]
        assert offline["runtime_settings"]["load_pattern"] == "max_throughput"
        assert (offline["concurrency"], offline["region"]) == (60, "submitters_choice")
        assert "steady_state" not in offline and offline["warmup"]["concurrency"] == 48
        summary = json.loads((curve / "r60" / "result_summary.json").read_text())
        assert summary["n_samples_issued"] % 60 == 0
        assert len([*curve.glob("r*/accuracy_results.json")]) == 5, "one in each region, and Offline's"
        utilization = [
            json.loads(file.read_text())["tps_utilization"] for file in curve.glob("r*/system_desc.json")
        ]
        assert max(utilization) == 1.0 and len(utilization) == 5
        assert main(command) == 0
        assert "Offline  measured earlier" in capsys.readouterr().out
        slow = curve / "r60" / "result_summary.json"
        slow.write_text(json.dumps(summary | {"system_tps": 1.0}))
        assert main(command) == 0
        assert "flagged     Offline: 1 tokens/s, less than 98 % of concurrency 48" in capsys.readouterr().out
        assert main([*command, "--offline", "elected"]) == 2
        assert "r60 is not a point of this curve (--concurrency, --offline)" in capsys.readouterr().err


def test_the_lowest_region_may_end_at_a_higher_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`c_min_override` of endpoints-submission-cli 1.5.3: an option, or a field of the system description."""
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--concurrency", "1,8,10,18,48", "--min_duration", "0.01"]
    described = tmp_path / "system.json"
    described.write_text('{"c_min_override": 8}')
    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url]
        for more, message in (
            (["--c_min_override", "9"], "_override 9: must be a point of the curve up to 32: 1, 8, 10, 18"),
            (["--c_min_override", "48"], "--c_min_override 48: must be a point of the curve up to 32"),
            (
                ["--c_min_override", "10", "--system_description", str(described)],
                "--c_min_override 10: --system_description has 8; remove one of the two",
            ),
        ):
            assert main([*command, *more]) == 2
            assert message in capsys.readouterr().err
        assert main([*command, "--c_min_override", "8"]) == 0
        assert "no point in" not in capsys.readouterr().out
        curve = tmp_path / "made/Us/1/results/Box/llama3_1-8b"
        regions = {}
        for folder in curve.iterdir():
            point = yaml.safe_load((folder / "point.yaml").read_text())
            regions[folder.name] = point["region"]
            assert json.loads((folder / "system_desc.json").read_text())["c_min_override"] == 8
        # 8 + 40 ** (1/3) = 11.4, 8 + 40 ** (2/3) = 19.7
        low = {"r1": "low_latency", "r8": "low_latency", "r10": "low_concurrency"}
        assert regions == low | {"r18": "med_concurrency", "r48": "high_concurrency"}
        scored = {file.parent.name for file in curve.glob("r*/accuracy_results.json")}
        assert scored == {"r1", "r10", "r18", "r48"}
        assert main([*command, "--system_description", str(described)]) == 0
        assert capsys.readouterr().out.count("measured earlier") == 5
        described.write_text('{"c_min_override": 8.0}')
        assert main([*command, "--system_description", str(described)]) == 2
        assert "c_min_override: 8.0; expected a whole number" in capsys.readouterr().err


def test_points_without_a_steady_state_may_take_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    with null_server() as url:
        command = ["endpoints-submission", *words, "--concurrency", "1,48", "--url", url]
        command += ["--min_duration", "0.001"]
        assert main([*command, "--max_duration", "0.01"]) == 0
        assert "the figures of all" in capsys.readouterr().out
        assert main([*command, "--max_duration", "0.02"]) == 0
        assert capsys.readouterr().out.count("measured again with a longer time") == 2
        assert main([*command, "--max_duration", "0.01"]) == 0
        assert capsys.readouterr().out.count("measured earlier") == 2


def test_each_option_belongs_to_a_point_or_is_written_anew() -> None:
    """An option in neither list would have no effect on points that exist."""
    of_points = {*endpoints_submission._MEASURED, "min_duration", "max_duration", "concurrency"}
    of_points |= {"seed_sets", "seed_set", "offline"}
    folders = {"output", "submitter", "submission_id", "system_name"}
    written_anew = {"division", "system_description", "system_power", "disclosure", "src", "docs"}
    written_anew |= {"target_cohort", "max_supported_concurrency", "c_min_override"}
    waits = {"ready_deadline", "stall_timeout"}
    every = {field.name for field in endpoints_submission._Options.declared()}
    assert every == of_points | folders | written_anew | waits


@pytest.mark.parametrize(
    ("latency", "expected"), [(0.3, "  5 per user"), (0.1, "  time per output token 0"), (None, "")]
)
def test_answers_that_come_in_one_piece_are_reported(latency: float | None, expected: str) -> None:
    """First and last token arrive together: no time per token, which MLCommons' checker rejects."""
    records = [] if latency is None else [Record(8, ttft=0.1, latency=latency, output_len=2)] * 10
    line = endpoints_submission.per_user(result_summary(records, 1.0, 0.0))
    assert line.startswith(expected) and bool(line) == bool(expected)


@pytest.mark.parametrize("key", ["90", "90.0"])
def test_percentiles_of_every_version_of_the_client_are_read(key: str) -> None:
    summary = {"n_samples_completed": 10, "tpot": {"percentiles": {key: 2e8}}}
    assert endpoints_submission.per_user(summary) == "  5 per user"


@pytest.mark.parametrize(("name", "temperature"), [("llama3.1-8b", 0.0), ("gpt-oss-120b", 1.0)])
def test_answers_are_sampled_as_the_workload_requires(name: str, temperature: float) -> None:
    words = [*WORDS, "--benchmarks", name, "--max_supported_concurrency", "48"]
    options = collect(words, endpoints_submission._Options, Parser(prog="mpillm endpoints-submission"))
    curve, workload = endpoints_submission._curve(options)
    assert endpoints_submission._sampling(curve, workload).temperature == temperature


def test_wrong_curves_are_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["endpoints-submission", "--url", "127.0.0.1:1", *WORDS, "--output", str(tmp_path)]
    for words, message in (
        ([], "needs --max_supported_concurrency"),
        (["--max_supported_concurrency", "32"], "must be more than 32"),
        (
            ["--max_supported_concurrency", "64", "--concurrency", "40,64"],
            "the lowest is 40; must be 1 to 32",
        ),
        (
            ["--max_supported_concurrency", "64", "--concurrency", ",".join(map(str, range(32, 65)))],
            "33 points; 32 are the most",
        ),
        (["--max_supported_concurrency", "64", "--concurrency", "1,63"], "the highest is 63; must be 64"),
        (
            ["--max_supported_concurrency", "64", "--system_description", "none.json"],
            "none.json: no such file",
        ),
    ):
        assert main([*base, *words]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([*base, "--max_supported_concurrency", "64", "--ready_deadline", "0.1"]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_points_that_mlcommons_client_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its summary and configuration go into the submission as they are; it sends enough for the duration."""
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--concurrency", "1,48", *install_client(tmp_path, monkeypatch)]
    with null_server() as url:
        command = ["endpoints-submission", *words, "--url", url, "--min_duration", "0.2"]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "8 tokens/s  500 per user" in out
        curve = tmp_path / "made/Us/1/results/Box/llama3_1-8b"
        for c in (1, 48):
            folder = curve / f"r{c}"
            config = yaml.safe_load((folder / "config.yaml").read_text())
            assert config["resolved"] and config["settings"]["load_pattern"]["target_concurrency"] == c
            runtime = config["settings"]["runtime"]
            assert runtime["dataloader_random_seed"] == 586478644936801402
            assert runtime["scheduler_random_seed"] == 10487924139932647040
            summary = json.loads((folder / "result_summary.json").read_text())
            assert summary["n_samples_issued"] >= 200, "of a millisecond each"
            point = yaml.safe_load((folder / "point.yaml").read_text())
            assert point["warmup"]["requests_completed"] == c
            assert point["warmup"]["data_source"].startswith("random tokens")
            assert json.loads((folder / "system_desc.json").read_text())["tps_utilization"] == 1.0
        assert main(command) == 0 and capsys.readouterr().out.count("measured earlier") == 2
        assert main([word for word in command if word not in ("--harness", "inference-endpoint")]) == 2
        assert "was measured with --harness inference-endpoint, this is without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "message"),
    [({"failed": 2}, "2 requests failed"), ({"fails": "Config error: no"}, "ended with exit code 1")],
)
def test_a_client_that_fails_has_no_point(
    how: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*WORDS, "--output", str(tmp_path / "made"), "--max_supported_concurrency", "48"]
    words += ["--concurrency", "1,48", *install_client(tmp_path, monkeypatch, **how)]
    with null_server() as url:
        assert main(["endpoints-submission", *words, "--url", url, "--min_duration", "0.01"]) == 1
    error = capsys.readouterr().err
    assert message in error and "concurrency 1: harness (inference-endpoint)" in error
    results = tmp_path / "made" / "Us" / "1" / "results"
    assert not [*results.rglob("result_summary.json")]
