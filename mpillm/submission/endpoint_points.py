"""The files of a submission to MLPerf Endpoints: measurements and disclosures of each point."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from disagg.errors import ConfigError
from disagg.text_file import read_text
from disagg.yaml_text import value_of
from mpillm.experiments.loadtest.load_test import Record
from mpillm.files import as_written, read_object, write_json, write_text
from mpillm.report.numbers import rate_text
from mpillm.submission.client_form import CONFIG, SUMMARY
from mpillm.submission.endpoint_rules import OFFLINE_MARGIN, Regions, min_duration_s
from mpillm.submission.power import MEASURED
from mpillm.submission.scores import Scores
from mpillm.submission.seed_sets import SeedSet
from mpillm.submission.steady_state import MIN_PASSES
from mpillm.version import __version__
from mpillm.workloads.workload import Endpoints

POINT, SYSTEM, POWER, WARMUP = "point.yaml", "system_desc.json", "system_power.json", "warmup.json"
NOTES = "measured.yaml"
"""Options of a point's measurement, if its `config.yaml` comes from MLCommons' client."""
SALT = "salt"
"""Key of the salts in the options of a measurement, and in the runtime settings of point.yaml."""
C_MIN = "c_min_override"
"""Field of system_desc.json, and option."""
STEADY_STATE = "steady_state"
"""Key of the steady state in the options of a measurement, in a summary and in point.yaml."""
_PERCENTILES = (1, 5, 10, 25, 50, 75, 80, 90, 95, 97, 99, 99.9)
_NS = 1e9
_SYSTEM_FIELDS = (  # fields that the submitter must add to the system description (8.2)
    *("system_availability_status", "system_size", "system_node_ensemble_count"),
    *("system_node_ensemble_total", "shortened_system_name", "node_types"),
)
_POINT_KEY = re.compile(r"r\d+")  # key of the disclosures for one point


def result_summary(records: Sequence[Record], duration_s: float, started: float) -> dict[str, Any]:
    """Return `result_summary.json`. Times are nanoseconds; `started`: seconds since 1970."""
    good = [record for record in records if not record.error]
    tokens = sum(record.output_len for record in good)
    tpot = [record.tpot * _NS for record in good if record.output_len > 1]
    summary: dict[str, Any] = {
        "version": f"mpillm {__version__}",
        "git_sha": None,
        "test_started_at": round(started * _NS),
        "n_samples_issued": len(records),
        "n_samples_completed": len(good),
        "n_samples_failed": len(records) - len(good),
        "duration_ns": round(duration_s * _NS),
        "qps": len(good) / duration_s,
        "system_tps": tokens / duration_s,
        "ttft": _statistics([record.ttft * _NS for record in good]),
        "tpot": _statistics(tpot),
        "latency": _statistics([record.latency * _NS for record in good]),
        "output_sequence_lengths": _statistics([record.output_len for record in good]),
    }
    if p90 := summary["tpot"]["percentiles"].get("90"):
        summary["tps_per_user"] = _NS / p90
    return summary


def request_logs(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a log entry for each request, in seconds; `sent` counts from the first request."""
    first = min((record.start for record in records), default=0.0)
    names = ("ttft", "latency", "output_len", "error")
    return [
        {"sent": record.start - first, **{name: getattr(record, name) for name in names}}
        for record in records
    ]


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"total": 0, "percentiles": {}}
    array = np.asarray(values, np.float64)
    return {
        "total": float(array.sum()),
        "min": float(array.min()),
        "max": float(array.max()),
        "median": float(np.median(array)),
        "avg": float(array.mean()),
        "std_dev": float(array.std()),
        "percentiles": {f"{p:g}": float(np.percentile(array, p)) for p in _PERCENTILES},
    }


def accuracy_results(dataset: str, n_samples: int, scores: Scores) -> dict[str, Any]:
    """Return `accuracy_results.json` for one pass over a data set."""
    entry = {"dataset_name": dataset, "num_samples": n_samples, "n_repeats": 1, "score": scores.values}
    return {dataset: entry}


@dataclass(frozen=True)
class Curve:
    """Points of a system, with their common values."""

    output: Path  # the folder of submissions
    points: Sequence[int]  # concurrencies, without that of a separate Offline run
    submitter: str
    submission_id: str
    system: str
    division: str
    benchmark: Endpoints
    c_max: int
    regions: Regions
    seed_set: SeedSet
    target_cohort: str
    min_samples: int  # of a point: the samples of the data set
    system_description: Mapping[str, Any]  # from the submitter
    disclosure: Mapping[str, Any]  # from the submitter, for point.yaml
    offline_run: bool = False  # a separate run (5.7); otherwise the last point also represents Offline
    c_min: int | None = None  # the stated end of the region of lowest concurrency
    agentic: bool = False  # points of conversations

    @property
    def runs(self) -> list[int]:
        """The concurrencies of all runs. That of a separate Offline run is the size of the data set."""
        return [*self.points, self.min_samples] if self.offline_run else [*self.points]

    def is_offline(self, concurrency: int) -> bool:
        """Return whether this is the separate Offline run."""
        return self.offline_run and concurrency == self.min_samples

    def title(self, concurrency: int) -> str:
        """Return the name of a run."""
        return "Offline" if self.is_offline(concurrency) else f"concurrency {concurrency}"

    @property
    def root(self) -> Path:
        """The folder of the submission."""
        return self.output / self.submitter / self.submission_id

    def folder(self, concurrency: int) -> Path:
        """Return the folder of a point."""
        return self.root / "results" / self.system / self.benchmark.model / f"r{concurrency}"

    def write_point(self, concurrency: int) -> None:
        """Write a point's `point.yaml` from its measurement and the present disclosures."""
        folder = self.folder(concurrency)
        config = read_measurement(folder)
        with as_written(folder / SUMMARY):
            block = None
            if not self.is_offline(concurrency) and not self.agentic:
                summary = read_object(folder / SUMMARY)
                block = config.get(STEADY_STATE) or self.steady_state(summary, concurrency)
        fields = self.point(concurrency, config["min_duration"], config["warmup"])
        fields["runtime_settings"] |= {SALT: config[SALT]} if SALT in config else {}
        fields |= {MEASURED: config[MEASURED]} if MEASURED in config else {}
        shared = {name: value for name, value in self.disclosure.items() if not _POINT_KEY.fullmatch(name)}
        fields |= {"steady_state": block} if block else {}
        if not isinstance(own := self.disclosure.get(f"r{concurrency}", {}), dict):
            raise ConfigError(f"--disclosure: r{concurrency}: expected an object, the fields of that point")
        write_yaml(folder / POINT, fields | shared | own)

    def steady_state(self, summary: Mapping[str, Any], concurrency: int) -> dict[str, Any] | None:
        """Return the steady-state block (rules, 4.4) of a point without times of its requests.

        None: the summary does not decide it.
        """
        passes = summary["n_samples_issued"] // self.min_samples
        block = {"window": {"super_pass_size": self.min_samples}, "state": {}}
        if passes < MIN_PASSES:  # too few for any window
            status = "insufficient_passes" if passes else "partial_dataset"
            return {"status": status, "verdict": "not found", **block}
        if (summary["duration_ns"] or 0) / _NS < min_duration_s(concurrency):
            return {"status": "insufficient_duration", **block}
        return None

    def point(self, concurrency: int, min_duration_s: float, warmup: Mapping[str, Any]) -> dict[str, Any]:
        """Return `point.yaml` without the submitter's disclosures."""
        is_offline = self.is_offline(concurrency)
        is_elected = concurrency == self.c_max and not self.offline_run and not self.agentic
        pattern = "agentic_inference" if self.agentic else "concurrency"
        return {
            "concurrency": concurrency,
            "region": "submitters_choice" if is_offline else self.regions.region(concurrency),
            "offline": "dedicated" if is_offline else "elected" if is_elected else "none",
            "dataset": self.benchmark.dataset,
            "dataset_name": self.benchmark.dataset,
            "dataset_type": "Performance",
            "dataset_link": self.benchmark.dataset_link,
            "division": self.division,
            "max_supported_concurrency": self.c_max,
            "model_name": self.benchmark.model,
            "link_to_model": self.benchmark.link_to_model,
            "seed_set": self.seed_set.name,
            "target_cohort": self.target_cohort,
            "shared_src": "src/endpoint",
            "shared_docs": "docs",
            "runtime_settings": {
                "load_pattern": "max_throughput" if is_offline else pattern,
                "min_duration_ms": round(1000 * min_duration_s),
                "min_sample_count": self.min_samples,
                "stream_all_chunks": True,
                "runtime": dict(self.seed_set.seeds),
            },
            "warmup": dict(warmup),
        }

    def missing_disclosures(self, has_power: bool) -> list[str]:
        """Return a line for each value that the submitter must still provide."""
        lines = []
        lacks = [c for c in self.points if "steady_state" not in read_yaml(self.folder(c) / POINT)]
        if lacks and not self.agentic:
            lines.append(
                f"point.yaml: steady_state of {', '.join(f'r{c}' for c in lacks)}, from MLCommons'"
                " steady_state_diagnostics.py on the client's events.jsonl (--disclosure, under"
                f" r{lacks[0]})"
            )
        if lacking := [name for name in _SYSTEM_FIELDS if name not in self.system_description]:
            lines.append(f"system_desc.json: {', '.join(lacking)} (--system_description)")
        if "model_precision" not in self.disclosure:
            lines.append("point.yaml: model_precision (--disclosure)")
        if self.division == "Standardized" and not has_power:
            lines.append("system_power.json: the system's power (--system_power)")
        return lines

    def finish(self) -> None:
        """Write the files of each run that depend on the whole curve or on the submitter's description."""
        rates = self.rates()
        highest = max(rates.values())
        for c, rate in rates.items():
            self.write_point(c)
            description = dict(self.system_description) | {
                "system_name": self.system,
                "division": self.division,
                "max_supported_concurrency": self.c_max,
                **({} if self.c_min is None else {C_MIN: self.c_min}),
                "tps_utilization": rate / highest if highest else 0.0,
            }
            write_json(self.folder(c) / SYSTEM, description)

    def rates(self) -> dict[int, float]:
        """Return the tokens per second of each run."""
        rates = {}
        for c in self.runs:
            file = self.folder(c) / SUMMARY
            with as_written(file):
                rates[c] = system_tps(read_object(file))
        return rates

    def offline_violation(self) -> str | None:
        """Return a line if the Offline run is slower than the curve's last point (5.7.2)."""
        rates = self.rates()
        if not self.offline_run or rates[self.min_samples] >= OFFLINE_MARGIN * rates[self.c_max]:
            return None
        return (
            f"Offline: {rate_text(rates[self.min_samples])} tokens/s, less than {100 * OFFLINE_MARGIN:g} % of"
            f" concurrency {self.c_max} ({rate_text(rates[self.c_max])}): the checker flags it; remove"
            f" r{self.min_samples}, and measure it again or use --offline elected"
        )


def system_tps(summary: Mapping[str, Any]) -> float:
    """Return the tokens per second in a summary of mpillm or MLCommons' client. Raises ValueError."""
    rate = float(summary.get("system_tps") or summary.get("tps") or 0.0)
    if not 0 <= rate < math.inf:
        raise ValueError(f"{rate} tokens/s")
    return rate


def read_measurement(folder: Path) -> dict[str, Any]:
    """Return the options and the warm-up of a point's measurement. Raises ConfigError."""
    notes = folder / NOTES
    return read_yaml(notes if notes.exists() else folder / CONFIG)


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping as YAML, in its order."""
    plain = json.loads(json.dumps(value, default=str))  # YAML does not write tuples and paths
    write_text(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a file of `write_yaml`. Raises ConfigError for another content."""
    mapping = value_of(read_text(str(path)), str(path))
    if not isinstance(mapping, dict) or not isinstance(mapping.get("warmup"), dict):
        raise ConfigError(f"{path}: no options of a measurement in it; remove its folder")
    return mapping


def write_shared(root: Path, source: Path | None, docs: Path | None, readme: str) -> None:
    """Write `src/endpoint` and `docs` from the submitter's folders, with `readme` if they have no README."""
    for folder, place in ((source, root / "src" / "endpoint"), (docs, root / "docs")):
        place.mkdir(parents=True, exist_ok=True)
        if folder is not None:
            shutil.copytree(folder, place, dirs_exist_ok=True)
        if not (place / "README.md").exists():
            write_text(place / "README.md", readme)
