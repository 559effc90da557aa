"""A curve of agentic points, with a stand-in for MLCommons' client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.errors import ConfigError
from mpillm.cli import main
from mpillm.errors import ExitCode
from mpillm.experiments.bench.bench_endpoint import null_server
from mpillm.submission.agentic_rules import AGENTIC, AgenticConfig, scores_of, shortfalls

# As MLCommons' qwen_agentic_benchmark.yaml, with few conversations.
CONFIG: dict[str, Any] = {
    "name": "agentic",
    "type": "online",
    "model_params": {"name": "published", "temperature": 1.0, "max_new_tokens": 8192},
    "datasets": [
        {
            "name": "agentic_coding",
            "type": "performance",
            "path": "./conversations.jsonl",
            "accuracy_config": {"eval_method": "agentic_inference_inline"},
            "agentic_inference": {
                "enable_salt": True,
                "inject_tool_delay": True,
                "num_trajectories_to_issue": 613,
                "stop_issuing_on_first_user_complete": False,
            },
        },
        {
            "name": "swe_bench",
            "type": "accuracy",
            "accuracy_config": {"eval_method": "swe_bench_scorer", "extras": {"num_instances": 200}},
        },
    ],
    "settings": {
        "runtime": {"min_duration_ms": 0},
        "load_pattern": {"type": "agentic_inference", "target_concurrency": 8},
    },
    "endpoint_config": {"endpoints": ["http://localhost:30000"], "api_type": "openai"},
    "report_dir": "logs",
}

# It leaves what the command reads, and a line for each of its runs.
CLIENT = """#!{python}
import json, pathlib, sys
import yaml
config = yaml.safe_load(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
mode, report = sys.argv[sys.argv.index("--mode") + 1], pathlib.Path(config["report_dir"])
state = json.loads(pathlib.Path("{state}").read_text())
state["runs"].append(dict(mode=mode, config=config))
pathlib.Path("{state}").write_text(json.dumps(state))
entries = []
if mode == "perf":
    n = config["datasets"][0]["agentic_inference"]["num_trajectories_to_issue"]
    (report / "performance").mkdir(parents=True)
    (report / "config.yaml").write_text(yaml.safe_dump(config))
    summary = dict(n_samples_issued=3 * n, n_samples_completed=3 * n - state["failed"])
    summary |= dict(n_samples_failed=state["failed"], duration_ns=n * 10**6, tps=50.0)
    summary |= dict(output_sequence_lengths=dict(total=400 * 3 * n), latency=dict(total=3 * n * 10**10))
    summary |= dict(tpot=dict(percentiles={{"90.0": 2e7}}), ttft={{}})
    summary |= dict(output_sequence_lengths_full_run=dict(output_sequence_lengths=dict(avg=state["osl"])))
    (report / "performance" / "result_summary.json").write_text(json.dumps(summary))
    entries = [dict(dataset_name="performance", dataset_type="performance", score=state["inline"])]
else:
    entries = [dict(dataset_name="swe_bench", dataset_type="accuracy", score=state["swe_bench"])]
(report / "accuracy").mkdir(parents=True, exist_ok=True)
(report / "accuracy" / "accuracy_results.json").write_text(json.dumps(dict(accuracy_scores=entries)))
"""


class Setting:
    """A folder with the stand-in's program and configuration, and a server that is ready."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.state = folder / "state.json"
        self.set(runs=[], failed=0, inline=0.57, swe_bench=0.70, osl=400)
        program = folder / "bin" / "inference-endpoint"
        program.parent.mkdir()
        program.write_text(CLIENT.format(python=sys.executable, state=self.state))
        program.chmod(0o755)
        self.configure(CONFIG)
        self.curve = folder / "made" / "Us" / "1" / "results" / "Box" / "qwen3_6-35b-a3b"

    def set(self, **values: Any) -> None:
        state = json.loads(self.state.read_text()) if self.state.exists() else {}
        self.state.write_text(json.dumps(state | values))

    def configure(self, content: Any) -> None:
        (self.folder / "client.yaml").write_text(yaml.safe_dump(content))

    def runs(self) -> list[dict[str, Any]]:
        """The client's runs since the last call."""
        runs: list[dict[str, Any]] = json.loads(self.state.read_text())["runs"]
        self.set(runs=[])
        return runs

    def command(self, *more: str) -> list[str]:
        words = ["agentic-submission", "--url", self.url, "--benchmarks", "qwen3.6-35b-a3b"]
        words += ["--client_config", str(self.folder / "client.yaml"), "--max_supported_concurrency", "48"]
        words += ["--submitter", "Us", "--system_name", "Box", "--output", str(self.folder / "made")]
        return [*words, "--concurrency", "1,3,4,10,48", "--min_duration", "0.5", *more]

    def point(self, c: int) -> dict[str, Any]:
        point: dict[str, Any] = yaml.safe_load((self.curve / f"r{c}" / "point.yaml").read_text())
        return point

    def scores(self, c: int) -> dict[str, float]:
        return scores_of(json.loads((self.curve / f"r{c}" / "accuracy_results.json").read_text()))


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    with null_server() as url:
        setting = Setting(tmp_path, url)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        yield setting


@pytest.mark.long
def test_a_curve_of_agentic_points(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(setting.command()) == 0
    out = capsys.readouterr().out
    assert "not official" not in out and "SWE-bench   mean of 4: 70.00 % (of 4: at least 69 %)" in out
    assert "concurrency 4  1,839 turns in 0.6 s  50 tokens/s  40 tokens/s end to end  inline 57.00 %" in out
    runs = setting.runs()
    # The accuracy run of each region follows its point: 1, 3 (low), 10 (medium), 48 (high).
    modes = [(run["config"]["settings"]["load_pattern"]["target_concurrency"], run["mode"]) for run in runs]
    assert modes == [
        *((1, "perf"), (1, "acc"), (3, "perf"), (3, "acc"), (4, "perf")),
        *((10, "perf"), (10, "acc"), (48, "perf"), (48, "acc")),
    ]
    for run in runs:
        config = run["config"]
        runtime = config["settings"]["runtime"]
        assert runtime["dataloader_random_seed"] == 586478644936801402
        assert runtime["scheduler_random_seed"] == 10487924139932647040 and runtime["min_duration_ms"] == 0
        assert config["endpoint_config"]["endpoints"] == [setting.url]
        assert config["model_params"] == CONFIG["model_params"], "as published"
        names = [one["name"] for one in config["datasets"]]
        assert names == (["agentic_coding"] if run["mode"] == "perf" else ["agentic_coding", "swe_bench"])
        assert config["datasets"][0]["path"] == str(setting.folder / "conversations.jsonl")
    for c in (1, 3, 4, 10, 48):
        point = setting.point(c)
        assert point["runtime_settings"]["load_pattern"] == "agentic_inference"
        assert point["offline"] == "none" and "steady_state" not in point
        assert point["warmup"]["requests_issued"] == 0 and point["model_name"] == "qwen3_6-35b-a3b"
        expected = {"": 57.0} | ({} if c == 4 else {"swe_bench": 70.0})
        assert setting.scores(c) == pytest.approx(expected), "inline at each point"
        assert (setting.curve / f"r{c}" / "config.yaml").exists()
    assert main(setting.command()) == 0
    assert capsys.readouterr().out.count("measured earlier") == 5 and setting.runs() == []


@pytest.mark.long
def test_only_what_is_missing_is_measured(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(setting.command()) == 0
    setting.runs()
    scores = setting.curve / "r3" / "accuracy_results.json"
    inline = [
        one for one in json.loads(scores.read_text())["accuracy_scores"] if "perf" in one["dataset_name"]
    ]
    scores.write_text(json.dumps({"accuracy_scores": inline}))
    (setting.curve / "r4" / "result_summary.json").unlink()
    capsys.readouterr()
    assert main(setting.command()) == 0
    assert [run["mode"] for run in setting.runs()] == ["acc", "perf"], "of r3, and of r4"
    assert capsys.readouterr().out.count("measured earlier") == 3
    assert setting.scores(3) == pytest.approx({"": 57.0, "swe_bench": 70.0})
    changed = json.loads(json.dumps(CONFIG))
    changed["model_params"]["temperature"] = 0.5
    setting.configure(changed)
    assert main(setting.command()) == 2
    assert "was measured with --client_config" in capsys.readouterr().err
    setting.configure(CONFIG)
    assert main(setting.command("--min_duration", "0.6")) == 2
    assert "with --min_duration 0.5, this is 0.6" in capsys.readouterr().err


@pytest.mark.long
def test_a_point_that_is_too_short_is_repeated(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of conversations stays a multiple of the data set."""
    assert main(setting.command("--min_duration", "2", "--model", "served", "--dataset_path", "x.jsonl")) == 0
    assert "0.6 s are too short: again, 5 times all conversations" in capsys.readouterr().out
    first, second, accuracy, *_ = setting.runs()
    numbers = [
        run["config"]["datasets"][0]["agentic_inference"]["num_trajectories_to_issue"]
        for run in (first, second, accuracy)
    ]
    assert numbers == [613, 5 * 613, 613]
    assert second["config"]["model_params"]["name"] == "served"
    assert second["config"]["datasets"][0]["path"] == str(Path("x.jsonl").absolute())


@pytest.mark.long
def test_thresholds_that_are_not_reached(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    setting.set(inline=0.5, swe_bench=0.6, osl=500)
    assert main(setting.command()) == ExitCode.TEST_FAILED
    error = capsys.readouterr().err
    assert error.count("inline accuracy 50.00 %, must be at least 55.86 %") == 5
    assert error.count("500 tokens in a response, must be 344 to 422") == 5
    assert "SWE-bench: the mean of 4 is 60.00 %, must be at least 69 %" in error


def test_failed_requests_leave_no_point(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    setting.set(failed=3)
    assert main(setting.command()) == 1
    assert "concurrency 1: 3 requests failed" in capsys.readouterr().err
    assert not [*setting.curve.rglob("result_summary.json")]


def test_the_mean_counts_and_not_each_result() -> None:
    benchmark = AGENTIC["qwen3.6-35b-a3b"]
    results = {
        c: {"": 60.0, "swe_bench": score} for c, score in ((1, 80.0), (4, 70.0), (10, 65.0), (48, 61.0))
    }
    assert [*shortfalls(benchmark, results, {})] == [], "69 %, two of them less"
    results[48]["swe_bench"] = 60.0
    assert [*shortfalls(benchmark, results, {})] == [
        "SWE-bench: the mean of 4 is 68.75 %, must be at least 69 %"
    ]
    del results[48]
    assert [*shortfalls(benchmark, results, {1: 343.0, 4: None, 10: 422.0})] == [
        "r1: 343 tokens in a response, must be 344 to 422"
    ]
    assert [*shortfalls(benchmark, {8: {"swe_bench": 90.0}}, {})] == [
        "r8: no inline accuracy; each point needs one"
    ]


def test_values_that_are_not_official_are_named(tmp_path: Path) -> None:
    content = json.loads(json.dumps(CONFIG))
    conversations, tasks = content["datasets"]
    path = tmp_path / "client.yaml"

    def violations() -> list[str]:
        path.write_text(yaml.safe_dump(content))
        return [*AgenticConfig.read(str(path)).violations()]

    assert violations() == []
    conversations["agentic_inference"] = {"stop_issuing_on_first_user_complete": True, "enable_salt": False}
    conversations["agentic_inference"]["num_trajectories_to_issue"] = 8
    conversations["accuracy_config"] = None
    tasks["accuracy_config"]["extras"] = None
    assert violations() == [
        "agentic_inference.enable_salt is false; must be true",
        "agentic_inference.inject_tool_delay is false; must be true",
        "agentic_inference.stop_issuing_on_first_user_complete is true; must be false",
        "num_trajectories_to_issue is 8; must be a multiple of 613",
        "accuracy_config.eval_method of the conversations is not agentic_inference_inline",
        "num_instances of swe_bench is None; must be 200",
    ]
    content["datasets"] = [conversations]
    path.write_text(yaml.safe_dump(content))
    assert not AgenticConfig.read(str(path)).has_swe_bench


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("datasets"),
        lambda content: content.update(datasets=[]),
        lambda content: content["settings"]["load_pattern"].update(type="concurrency"),
        lambda content: content["datasets"][0].pop("agentic_inference"),
        lambda content: content["datasets"][0]["agentic_inference"].update(num_trajectories_to_issue="x"),
        lambda content: content.pop("endpoint_config"),
        lambda content: content.update(model_params=3),
    ],
)
def test_another_configuration_is_refused(change: Any, tmp_path: Path) -> None:
    content = json.loads(json.dumps(CONFIG))
    change(content)
    path = tmp_path / "client.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="expected a configuration of MLCommons' client"):
        AgenticConfig.read(str(path))


def test_without_swe_bench_the_submitter_adds_it(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    setting.configure(CONFIG | {"datasets": CONFIG["datasets"][:1]})
    assert main(setting.command()) == 0
    out = capsys.readouterr().out
    assert "yours       SWE-bench: --client_config has no data set for it" in out
    assert {run["mode"] for run in setting.runs()} == {"perf"}


@pytest.mark.parametrize("score", [1.8e306, -0.1, float("nan")])
def test_a_score_is_a_part_of_one(score: float) -> None:
    """A larger one could become infinite in percent."""
    entry = {"dataset_name": "d", "dataset_type": "performance", "score": score}
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        scores_of({"accuracy_scores": [entry]})
