"""LoadGen's test."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import boolean, length_of_a_test, positive, rate
from mpillm.workloads.rounds import ROUNDS


class LoadgenFields(Options):
    """LoadGen's test."""

    test_mode = Field(
        "test_mode",
        "LoadGen's mode",
        default="PerformanceOnly",
        choices=("PerformanceOnly", "AccuracyOnly"),
        group="test",
    )
    round = Field(
        "round",
        "the MLPerf round whose seeds LoadGen takes, and in which the workload must count"
        " [default: the seeds of the installed LoadGen]",
        choices=tuple(r.name for r in ROUNDS),
        group="test",
    )
    user_conf = Field("user_conf", "a LoadGen user.conf; it overrides mlperf.conf", group="test")
    audit_conf = Field("audit_conf", "a LoadGen audit.config, for compliance runs", group="test")
    min_duration = Field(
        "min_duration",
        "shortest time for the test: 600s, 10min or 600000ms; a bare number is seconds"
        " [default: 0, or user_conf's]",
        length_of_a_test,
        group="test",
    )
    min_query_count = Field(
        "min_query_count",
        "minimum number of queries (Offline: samples)"
        " [default: enough for each sample once and for early stopping; or user_conf's]",
        positive,
        group="test",
    )
    server_target_qps = Field("server_target_qps", "queries per second; Server needs it", rate, group="test")
    offline_expected_qps = Field(
        "offline_expected_qps",
        "Offline: expected samples per second; the query has this times min_duration samples",
        rate,
        group="test",
    )
    require_valid = Field(
        "require_valid",
        "treat an INVALID result as an error (exit code 4)",
        boolean,
        default=False,
        group="test",
    )
    compliance_test = Field(
        "compliance_test",
        "make a compliance run, with this test's audit.config",
        choices=("TEST06", "TEST07", "TEST09"),
        group="test",
    )
