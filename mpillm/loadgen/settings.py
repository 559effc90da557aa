"""LoadGen's test and log settings from ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlperf_loadgen as lg

from disagg.errors import ConfigError

_ANY_MODEL = "mpillm"  # a name that mlperf.conf has no section for: the rules that hold for every model apply, and no others


@dataclass(frozen=True)
class LoadGenConfig:
    """One test. None leaves LoadGen's value, or the one of `user_conf`."""

    scenario: str
    test_mode: str
    model: str = _ANY_MODEL  # as mlperf.conf names it
    user_conf: str | None = None
    min_duration_s: float | None = None
    min_query_count: int | None = None
    server_target_qps: float | None = None
    offline_expected_qps: float | None = None
    audit_conf: str | None = None


def test_settings(config: LoadGenConfig, n_samples: int) -> Any:
    """A `TestSettings`: mlperf.conf (inside LoadGen), then the user's file, then what was given on the command line.

    Once in a process: LoadGen reads its own values at the first call only.
    """
    settings = lg.TestSettings()
    settings.scenario = getattr(lg.TestScenario, config.scenario)
    settings.mode = getattr(lg.TestMode, config.test_mode)
    if config.user_conf is not None:
        if not Path(config.user_conf).is_file():
            raise ConfigError(f"--user_conf {config.user_conf}: no such file")
        if settings.FromConfig(config.user_conf, config.model, config.scenario):
            raise ConfigError(f"--user_conf {config.user_conf}: LoadGen can't read it (see its lines above)")
    else:
        settings.FromConfig("", config.model, config.scenario, 0)
    given = config.user_conf is not None
    if config.model == _ANY_MODEL:
        _without_a_workload(settings, config, n_samples, given)
    if config.min_duration_s is not None:
        settings.min_duration_ms = int(config.min_duration_s * 1000)
    if config.min_query_count is not None:
        settings.min_query_count = config.min_query_count
    if config.server_target_qps is not None:
        settings.server_target_qps = config.server_target_qps
    if config.offline_expected_qps is not None:
        settings.offline_expected_qps = config.offline_expected_qps
    return settings


def _without_a_workload(settings: Any, config: LoadGenConfig, n_samples: int, given: bool) -> None:
    """What a test means when no MLPerf workload says it: each sample once, as fast as it goes, token latencies but no limit on them."""
    if not given:
        settings.min_duration_ms = 0
        settings.min_query_count = n_samples
        settings.offline_expected_qps = 1
        settings.ttft_latency = settings.tpot_latency = settings.server_target_latency_ns = 10**15
    settings.use_token_latencies = config.scenario != "Offline"


def log_settings(directory: Path) -> Any:
    """`LogSettings` for LoadGen's files in `directory`."""
    output = lg.LogOutputSettings()
    output.outdir = str(directory)
    output.copy_summary_to_stdout = False
    settings = lg.LogSettings()
    settings.log_output = output
    settings.enable_trace = False
    return settings
