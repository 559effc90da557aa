"""Agentic benchmarks of MLPerf Endpoints: accuracy thresholds, and the configuration of MLCommons' client.

Sources: `examples/10_Agentic_Inference` of mlcommons/endpoints (the client's configurations, and the rules
for them), and the thresholds in MLCommons' endpoints-submission-cli 1.5.3.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from disagg.text_file import read_text
from disagg.yaml_text import value_of
from mpillm.submission.seed_sets import SAMPLES, SCHEDULER
from mpillm.workloads.workload import Endpoints

INLINE, SWE_BENCH = "agentic_inference_inline", "swe_bench_scorer"
"""The client's scorers: of the performance run itself, and of 200 software tasks by a separate service."""

SWE_BENCH_NAME = "swe_bench"
N_ACCURACY = 4
"""Accuracy runs, one in each region, whose mean must reach the threshold (rules, 4.3)."""

_LONG_S, _SHORT_S = 2400.0, 600.0
_ULTRA_LOW = 32
_DATASET = "agentic_inference_conversations"
_DATASET_LINK = "https://endpoints.mlcommons-storage.org/index.html#mlperf-agentic-inference"
_TRAJECTORIES, _TASKS = 613, 200  # of the official data sets


@dataclass(frozen=True)
class Agentic:
    """An agentic benchmark. Scores are percentages."""

    endpoints: Endpoints
    inline: float  # minimum of each point
    swe_bench: float  # minimum of the mean
    output_len: tuple[float, float]  # mean tokens of a turn


def _agentic(model: str, hf_model: str, inline: float, swe_bench: float, *output_len: float) -> Agentic:
    link = f"https://huggingface.co/{hf_model}"
    return Agentic(
        Endpoints(model, _DATASET, link, _DATASET_LINK), inline, swe_bench, (output_len[0], output_len[1])
    )


AGENTIC = {
    "kimi-k3": _agentic("kimi-k3", "moonshotai/Kimi-K3", 58.32, 93.5, 425, 520),
    "qwen3.6-35b-a3b": _agentic("qwen3_6-35b-a3b", "Qwen/Qwen3.6-35B-A3B", 55.86, 69, 344, 422),
    "deepseek-v4.1-flash": _agentic(
        "deepseek-v4_1-flash", "deepseek-ai/DeepSeek-V4.1-Flash", 52.36, 96.4, 793, 970
    ),
}


def min_agentic_duration_s(concurrency: int) -> float:
    """Return the minimum duration of an agentic point (§6.2)."""
    return _SHORT_S if concurrency <= _ULTRA_LOW else _LONG_S


@dataclass(frozen=True)
class AgenticConfig:
    """Configuration of MLCommons' client for one model, as published. mpillm sets a point's load in it."""

    path: Path
    content: Mapping[str, Any]

    @staticmethod
    def read(path: str) -> AgenticConfig:
        """Read a configuration. Raises ConfigError if it has no agentic load."""
        where = f"--client_config {path}"
        content = value_of(read_text(path, "--client_config "), where)
        try:
            config = AgenticConfig(Path(path), content)
            ok = (
                content["settings"]["load_pattern"]["type"] == "agentic_inference" and config.trajectories > 0
            )
            _ = content["model_params"]["name"], content["endpoint_config"].keys()
            _ = [str(one["type"]) for one in content["datasets"]], list(config.violations())
            # Whatever a point needs is read here, so that a damaged file is refused before the first point.
            config.of_point(
                url="",
                model=None,
                dataset=None,
                concurrency=1,
                repeats=1,
                seeds={SCHEDULER: 0, SAMPLES: 0},
                report=Path(),
                with_accuracy=True,
            )
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
            ok = False
        if not ok:
            raise ConfigError(
                f"{where}: expected a configuration of MLCommons' client with load pattern agentic_inference,"
                " such as examples/10_Agentic_Inference/qwen_agentic_benchmark.yaml of mlcommons/endpoints"
            )
        return config

    def _datasets(self, kind: str) -> Iterator[Mapping[str, Any]]:
        for one in self.content["datasets"]:
            if one.get("type", "performance") == kind:
                yield one

    @property
    def performance(self) -> Mapping[str, Any]:
        """The data set of conversations."""
        return next(self._datasets("performance"))

    @property
    def trajectories(self) -> int:
        """Conversations of a run, which may be repeated as a whole."""
        return int(self.performance["agentic_inference"].get("num_trajectories_to_issue") or _TRAJECTORIES)

    @property
    def has_swe_bench(self) -> bool:
        """Whether the client can ask a service for the accuracy on software tasks."""
        return any(_method(one) == SWE_BENCH for one in self._datasets("accuracy"))

    def violations(self) -> Iterator[str]:
        """Yield a line for each value that an official submission does not allow."""
        agentic = self.performance["agentic_inference"]
        for name, value in (
            ("enable_salt", True),
            ("inject_tool_delay", True),
            ("stop_issuing_on_first_user_complete", False),
        ):
            if agentic.get(name, False) is not value:
                yield f"agentic_inference.{name} is {agentic.get(name, False)}; must be {value}".lower()
        if self.trajectories % _TRAJECTORIES:
            yield f"num_trajectories_to_issue is {self.trajectories}; must be a multiple of {_TRAJECTORIES}"
        if _method(self.performance) != INLINE:
            yield f"accuracy_config.eval_method of the conversations is not {INLINE}"
        for one in self._datasets("accuracy"):
            tasks = ((one.get("accuracy_config") or {}).get("extras") or {}).get("num_instances")
            if _method(one) == SWE_BENCH and tasks != _TASKS:
                yield f"num_instances of {one.get('name')} is {tasks}; must be {_TASKS}"

    def of_point(
        self,
        *,
        url: str,
        model: str | None,
        dataset: str | None,
        concurrency: int,
        repeats: int,
        seeds: Mapping[str, int],
        report: Path,
        with_accuracy: bool,
    ) -> dict[str, Any]:
        """Return the client's configuration for a run.

        Args:
            model: Name at the server; None: the published one.
            dataset: Replaces the path of the conversations; None: the published one.
            repeats: Times that all conversations are issued.
            with_accuracy: Whether the configuration has the data sets of accuracy runs.
        """
        config: dict[str, Any] = copy.deepcopy(dict(self.content))
        if not with_accuracy:
            config["datasets"] = [one for one in config["datasets"] if one.get("type") != "accuracy"]
        conversations = next(
            one for one in config["datasets"] if one.get("type", "performance") == "performance"
        )
        conversations["agentic_inference"]["num_trajectories_to_issue"] = self.trajectories * repeats
        if path := dataset or conversations.get("path"):
            base = Path() if dataset else self.path.parent
            conversations["path"] = str((base / path).absolute())
        if model:
            config["model_params"]["name"] = model
        config["endpoint_config"]["endpoints"] = [url]
        settings = config["settings"]
        settings["load_pattern"]["target_concurrency"] = concurrency
        runtime = settings.setdefault("runtime", {})
        runtime["scheduler_random_seed"] = seeds[SCHEDULER]
        runtime["dataloader_random_seed"] = seeds[SAMPLES]
        config["report_dir"] = str(report)
        return config


def _method(dataset: Mapping[str, Any]) -> str:
    return str((dataset.get("accuracy_config") or {}).get("eval_method", ""))


def scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in the client's `accuracy_results.json` in percent: "" is the inline score.

    Raises LookupError, TypeError or ValueError for another form.
    """
    scores = {}
    for entry in results["accuracy_scores"]:
        name = "" if entry.get("dataset_type") == "performance" else str(entry["dataset_name"])
        if entry["score"] is None:
            continue
        if not 0 <= (score := float(entry["score"])) <= 1:  # or not a number
            raise ValueError(f"score {score:g}; must be from 0 to 1")
        scores[name] = 100 * score
    return scores


def shortfalls(
    benchmark: Agentic, scores: Mapping[int, Mapping[str, float]], output_len: Mapping[int, float | None]
) -> Iterator[str]:
    """Yield a line for each threshold that a curve does not reach. The keys are its concurrencies."""
    for c, of_point in scores.items():
        inline = of_point.get("")
        if inline is None:
            yield f"r{c}: no inline accuracy; each point needs one"
        elif inline < benchmark.inline:
            yield f"r{c}: inline accuracy {inline:.2f} %, must be at least {benchmark.inline:g} %"
    low, high = benchmark.output_len
    for c, mean in output_len.items():
        if mean is not None and not low <= mean <= high:
            yield f"r{c}: {mean:.0f} tokens in a response, must be {low:g} to {high:g}"
    results = [one[SWE_BENCH_NAME] for one in scores.values() if SWE_BENCH_NAME in one]
    if len(results) == N_ACCURACY and (mean := sum(results) / len(results)) < benchmark.swe_bench:
        limit = f"must be at least {benchmark.swe_bench:g} %"
        yield f"SWE-bench: the mean of {N_ACCURACY} is {mean:.2f} %, {limit}"


def swe_bench_line(benchmark: Agentic, scores: Sequence[Mapping[str, float]]) -> str | None:
    """Return the mean of the accuracy runs as a line; None: there is none."""
    results = [one[SWE_BENCH_NAME] for one in scores if SWE_BENCH_NAME in one]
    if not results:
        return None
    mean = sum(results) / len(results)
    return f"mean of {len(results)}: {mean:.2f} % (of {N_ACCURACY}: at least {benchmark.swe_bench:g} %)"
