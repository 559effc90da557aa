"""LoadGen's test."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.latency_limits import WORDS, whole_limits_ms
from mpillm.configurator.parsers import boolean, length_of_a_test, positive, rate
from mpillm.fields.effects import REPORTED, RUN, TEST, used_by
from mpillm.workloads.rounds import ROUNDS


class LoadgenFields(Options):
    """LoadGen's test."""

    test_mode = Field(
        "test_mode",
        "LoadGen's mode",
        default="PerformanceOnly",
        choices=("PerformanceOnly", "AccuracyOnly"),
        effect=TEST,
        group="test",
    )
    round = Field(
        "round",
        "the MLPerf round whose seeds LoadGen takes, and in which the workload must count"
        " [default: the seeds of the installed LoadGen]",
        choices=tuple(r.name for r in ROUNDS),
        effect=TEST,
        group="test",
    )
    user_conf = Field("user_conf", "a LoadGen user.conf; it overrides mlperf.conf", effect=TEST, group="test")
    audit_conf = Field("audit_conf", "a LoadGen audit.config, for compliance runs", effect=TEST, group="test")
    min_duration = Field(
        "min_duration",
        "shortest time for the test: 600s, 10min or 600000ms; a bare number is seconds"
        " [default: 0, or user_conf's]",
        length_of_a_test,
        effect=TEST,
        group="test",
    )
    min_query_count = Field(
        "min_query_count",
        "minimum number of queries (Offline: samples)"
        " [default: enough for each sample once and for early stopping; or user_conf's]",
        positive,
        effect=TEST,
        group="test",
    )
    max_query_count = Field(
        "max_query_count",
        "maximum number of queries; Offline has one of all samples [default: none, or user_conf's]",
        positive,
        effect=used_by(commands=[RUN], scenarios=["Server", "SingleStream"]),
        group="test",
    )
    max_duration = Field(
        "max_duration",
        "longest time for the test, from its start to its last query; as min_duration"
        " [default: none, or user_conf's]",
        length_of_a_test,
        effect=used_by(commands=[RUN], scenarios=["Server", "SingleStream"]),
        group="test",
    )
    server_target_qps = Field(
        "server_target_qps",
        "queries per second; Server needs it",
        rate,
        effect=used_by(commands=[RUN], scenarios=["Server"]),
        group="test",
    )
    offline_expected_qps = Field(
        "offline_expected_qps",
        "Offline: expected samples per second; the query has this times min_duration samples",
        rate,
        effect=used_by(commands=[RUN], scenarios=["Offline"]),
        group="test",
    )
    goodput = Field(
        "goodput",
        "Server: latency limits in place of the workload's, milliseconds at the 99th percentile: ttft:500"
        " tpot:50 e2el:9000, or AIPerf's names time_to_first_token, inter_token_latency, request_latency;"
        " a latency that is not named has no limit",
        whole_limits_ms,
        effect=used_by(commands=[RUN], scenarios=["Server"]),
        group="test",
        argparse_opts=WORDS,
    )
    require_valid = Field(
        "require_valid",
        "treat an INVALID result as an error (exit code 4)",
        boolean,
        default=False,
        effect=REPORTED,
        group="test",
    )
    compliance_test = Field(
        "compliance_test",
        "make a compliance run, with this test's audit.config",
        choices=("TEST06", "TEST07", "TEST09"),
        effect=TEST,
        group="test",
    )
