"""LoadGen's test and log settings from mpillm's options, all through one user.conf in the run directory."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg

from disagg.errors import ConfigError, about, nearest
from disagg.text_file import read_text
from mpillm.loadgen.forecast import Forecast, forecast
from mpillm.options.latency_limits import NO_LIMIT_MS
from mpillm.options.run_config import RunConfig
from mpillm.workloads import WORKLOADS
from mpillm.workloads.early_stopping import SERVER_PERCENTILE, SINGLE_STREAM_PERCENTILE, queries_needed
from mpillm.workloads.rounds import Round, round_named, round_of, why_not

ANY_MODEL = "mpillm"  # has no section in mlperf.conf, so only the rules for every model apply

_SCENARIOS = ("SingleStream", "MultiStream", "Server", "Offline", "*")
# Keys that `TestSettings::FromConfig` (loadgen/test_settings_internal.cc) reads from a user's file. It
# silently ignores all others.
_KEYS = (
    "mode", "use_token_latencies", "ttft_latency", "tpot_latency", "infer_token_latencies",
    "token_latency_scaling_factor", "target_latency_percentile", "samples_per_query", "target_latency",
    "target_qps", "coalesce_queries", "max_async_queries", "performance_issue_unique",
    "performance_issue_same", "performance_issue_same_index", "sample_concatenate_permutation",
    "min_duration", "max_duration", "min_query_count", "max_query_count", "print_timestamps",
    "performance_sample_count_override", "accuracy_sample_count_override",
)  # fmt: skip
# Keys that generators of user.conf write but LoadGen does not read, each with LoadGen's key.
_WITHOUT_EFFECT = {"performance_sample_count": "performance_sample_count_override"}
# All other keys need whole numbers: LoadGen reads 1.5 as 1, and 6e5 as 6.
_FRACTIONAL = ("target_qps", "target_latency", "target_latency_percentile")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,17}|0[xX][0-9a-fA-F]{1,15}")  # not 010, which LoadGen reads as 8
_DECIMAL = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?")
_LINE = re.compile(
    r"(?P<key>[^\s=]+)\s+=\s+(?P<value>[^\s=]+)"
)  # LoadGen does not accept a comment after the value
_TARGETS = {"Server": "server_target_qps", "Offline": "offline_expected_qps"}
_TEST07_SAMPLES = 990  # in the test's own data set
_MIN_QUERIES = {
    "Server": queries_needed(SERVER_PERCENTILE),
    "SingleStream": queries_needed(SINGLE_STREAM_PERCENTILE, late=1),
}


@dataclass(frozen=True)
class LoadGenConfig:
    """A test's values by the keys of user.conf; LoadGen's defaults apply to the others."""

    scenario: str
    test_mode: str
    model: str = ANY_MODEL  # name in mlperf.conf
    scaled: Mapping[str, float] = field(
        default_factory=dict
    )  # values of the workload that differ from LoadGen's
    user_conf: str | None = None  # a file; overrides `scaled`
    explicit: Mapping[str, float] = field(default_factory=dict)  # from the command line; overrides the file
    round: Round | None = None  # the round with the seeds to use; None: the installed LoadGen's seeds

    @staticmethod
    def from_run(config: RunConfig) -> LoadGenConfig:
        """Return the test for the options of a run.

        Raises ConfigError if the workload does not count in the round in --round.
        """
        workload = config.workload
        of_round = round_named(config.round) if config.round else None
        if of_round and workload and (why := why_not(workload, config.accuracy_target, of_round.name)):
            about = ["round", "benchmarks", "accuracy_target"]
            raise ConfigError(f"{config.named('round')}: {why}", about=about)
        scaled: dict[str, float] = {}
        explicit: dict[str, float] = {}
        if workload is not None and workload.scaled:
            scaled["performance_sample_count_override"] = workload.n_samples
            if WORKLOADS[workload.name].accuracy_samples is not None:
                scaled["accuracy_sample_count_override"] = workload.n_samples
        elif config.compliance_test == "TEST07":
            scaled["performance_sample_count_override"] = _TEST07_SAMPLES
        durations = ("min_duration", "max_duration")  # seconds; milliseconds in LoadGen
        options = {name: name for name in (*durations, "min_query_count", "max_query_count")}
        if config.scenario in _TARGETS:
            options["target_qps"] = _TARGETS[config.scenario]
        for key, name in options.items():
            if (value := getattr(config, name)) is not None:
                (explicit if config.is_user_set(name) else scaled)[key] = (
                    round(value * 1000) if key in durations else value
                )
        if config.goodput:
            # With token latencies, LoadGen has no limit on the whole answer.
            explicit |= {
                f"{name}_latency": int(config.goodput.get(name, NO_LIMIT_MS)) for name in ("ttft", "tpot")
            }
            explicit |= {"target_latency": NO_LIMIT_MS, "use_token_latencies": 1}
        model = workload.loadgen_model if workload else ANY_MODEL
        return LoadGenConfig(
            config.scenario, config.test_mode, model, scaled, config.user_conf, explicit, of_round
        )


@dataclass(frozen=True)
class LoadGenSettings:
    """The settings of a LoadGen test."""

    test: Any  # a `TestSettings`
    user_conf: str  # source text of `test`
    model: str
    forecast: Forecast
    notes: tuple[str, ...] = ()  # for the user: keys of the user's file without effect

    def to_json(self) -> dict[str, Any]:
        """Return the settings that affect the result, for result.json; a missing latency limit is None."""
        s = self.test
        is_server = s.scenario == lg.TestScenario.Server
        limits = {"ttft_latency_ms": s.ttft_latency / 1e6, "tpot_latency_ms": s.tpot_latency / 1e6}
        return {
            "model": self.model,
            **{
                name: limit if is_server and s.use_token_latencies and limit < NO_LIMIT_MS else None
                for name, limit in limits.items()
            },
            "target_qps": self._target_qps(),
            "min_duration_ms": s.min_duration_ms,
            "min_query_count": s.min_query_count,
            "performance_sample_count": s.performance_sample_count_override,
            "round": self.round.name if self.round else None,
            **self.forecast.to_json(),
        }

    @property
    def round(self) -> Round | None:
        """The known round with LoadGen's seeds, or None."""
        s = self.test
        return round_of((s.qsl_rng_seed, s.sample_index_rng_seed, s.schedule_rng_seed))

    def _target_qps(self) -> float | None:
        """Return the rate; None in SingleStream."""
        s = self.test
        return {
            lg.TestScenario.Server: s.server_target_qps,
            lg.TestScenario.Offline: s.offline_expected_qps,
        }.get(s.scenario)

    def describe(self) -> str:
        """Return the settings as one line of text."""
        values = self.to_json()
        limits = [
            f"{name.upper()} {ms:g} ms"
            for name in ("ttft", "tpot")
            if (ms := values[f"{name}_latency_ms"]) is not None
        ]
        rate = (
            f"{qps:g} samples/s {'asked' if limits else 'expected'}"
            if (qps := values["target_qps"]) is not None
            else ""
        )
        seconds = values["min_duration_ms"] / 1000
        minimum = f"{self.model}: at least {values['min_query_count']} samples and {seconds:g} s"
        return ", ".join(text for text in (minimum, rate, *limits) if text)


def load_settings(config: LoadGenConfig, n_samples: int) -> LoadGenSettings:
    """Return LoadGen's settings. The command line overrides the user's file, which overrides mlperf.conf.

    Call this once per process: LoadGen reads its own values only in the first call. Raises ConfigError for a
    wrong line in the user's file, a Server test without a rate, or a data set with too few samples.
    """
    text = "# This run's settings, which override LoadGen's mlperf.conf.\n"
    if config.scaled:
        text += "# the workload's\n" + _lines("*.*", config.scaled)
    if config.user_conf is not None:
        text += f"# --user_conf {config.user_conf}\n{_user_lines(Path(config.user_conf))}"
    # The full key overrides every key with a wildcard.
    section = f"{config.model}.{config.scenario}"
    if config.model == ANY_MODEL:
        text += "# no workload\n" + _lines(section, _without_a_workload(text, config, n_samples))
    if config.explicit:
        text += "# options\n" + _lines(section, config.explicit)
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, config.scenario)
    settings.mode = getattr(lg.TestMode, config.test_mode)
    with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if settings.FromConfig(file.name, config.model, config.scenario):
            raise ConfigError(f"LoadGen can't read this user.conf:\n{text}", about=["user_conf"])
    if config.round is not None:  # a user.conf cannot set seeds
        settings.qsl_rng_seed, settings.sample_index_rng_seed, settings.schedule_rng_seed = config.round.seeds
    needed = settings.performance_sample_count_override
    if config.test_mode == "AccuracyOnly":
        needed = settings.accuracy_sample_count_override or needed
    if needed > n_samples:
        raise ConfigError(
            f"the data set has {n_samples} samples, but a test of {config.model} needs {needed}"
            " (performance_sample_count_override; lower it with --user_conf"
            " if the result need not count for the benchmark)",
            about=["user_conf"],
        )
    if config.scenario == "Server" and not (
        _is_set(text, config, "target_qps") and settings.server_target_qps > 0
    ):
        settings.server_target_qps = 1.0
        raise ConfigError(
            "--scenarios Server needs --server_target_qps: how many queries per second to send."
            f" At LoadGen's own rate: {forecast(settings, n_samples).line}",
            about=["scenarios", "server_target_qps"],
        )
    notes = _unused_keys(config.user_conf)
    return LoadGenSettings(settings, text, config.model, forecast(settings, n_samples), notes)


def _unused_keys(user_conf: str | None) -> tuple[str, ...]:
    """Return a line for each key of a user's file that LoadGen does not read."""
    if user_conf is None:
        return ()
    lines = read_text(user_conf, "--user_conf ").splitlines()
    keys = {line.partition("=")[0].strip().rpartition(".")[2] for line in lines if "=" in line}
    return tuple(
        f"--user_conf {user_conf}: {key} has no effect; LoadGen reads {other}"
        for key, other in _WITHOUT_EFFECT.items()
        if key in keys
    )


def _is_set(text: str, config: LoadGenConfig, key: str) -> bool:
    """Return whether a user.conf sets `key` for this test's model and scenario, or for *."""
    keys = {line.partition("=")[0].strip() for line in text.splitlines()}
    return any(
        f"{model}.{scenario}.{key}" in keys
        for model in (config.model, "*")
        for scenario in (config.scenario, "*")
    )


def _lines(section: str, values: Mapping[str, float]) -> str:
    return "".join(f"{section}.{key} = {value}\n" for key, value in values.items())


def _without_a_workload(text: str, config: LoadGenConfig, n_samples: int) -> dict[str, float]:
    """Return the defaults of a test without an MLPerf workload, for keys that `text` does not set.

    The test issues each sample once, or as many samples as early stopping needs. Token latencies are measured
    without limits. LoadGen's own defaults are for the benchmarks.
    """
    values: dict[str, float] = {
        "min_duration": 0,
        "min_query_count": max(n_samples, _MIN_QUERIES.get(config.scenario) or 0),
    }
    if config.scenario == "Server":
        values |= dict.fromkeys(("ttft_latency", "tpot_latency", "target_latency"), NO_LIMIT_MS)
    unset = {key: value for key, value in values.items() if not _is_set(text, config, key)}
    return unset | {"use_token_latencies": int(config.scenario != "Offline")}


@about("user_conf")
def _user_lines(file: Path) -> str:
    """Read and check a user's user.conf, because LoadGen ignores unknown keys."""
    text = read_text(str(file), "--user_conf ")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--user_conf {file}:{number}"
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ConfigError(f"{where}: {line.strip()!r} is not 'model.scenario.key = number'")
        _, _, after_model = match["key"].partition(".")
        scenario, _, key = match["key"].rpartition(".")
        scenario = scenario.rpartition(".")[2]
        if not after_model or scenario not in _SCENARIOS:
            raise ConfigError(
                f"{where}: {scenario or match['key']} is not a scenario{nearest(scenario, _SCENARIOS)}:"
                f" {', '.join(_SCENARIOS)}"
            )
        if key not in _KEYS and key not in _WITHOUT_EFFECT:
            raise ConfigError(f"{where}: LoadGen takes no {key} from a user.conf{nearest(key, _KEYS)}")
        is_integer = key not in _FRACTIONAL or (key, scenario) == ("target_latency", "Server")
        if not _INTEGER.fullmatch(match["value"]) and (is_integer or not _DECIMAL.fullmatch(match["value"])):
            number_of = "a whole number" if is_integer else "a number"
            raise ConfigError(
                f"{where}: {match['value']} is not {number_of} of at least 0, which {key} takes"
            )
    return text if text.endswith("\n") or not text else text + "\n"


def log_settings(directory: Path) -> Any:
    """Return `LogSettings` for LoadGen's files in `directory`."""
    output = lg.LogOutputSettings()
    output.outdir = str(directory)
    output.copy_summary_to_stdout = False
    settings = lg.LogSettings()
    settings.log_output = output
    settings.enable_trace = False
    return settings
