"""LoadGen's test."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import boolean, duration, positive, rate

test_mode = Field("test_mode", "LoadGen's mode", default="PerformanceOnly", choices=("PerformanceOnly", "AccuracyOnly"), group="test")
user_conf = Field("user_conf", "a LoadGen user.conf, laid over mlperf.conf", group="test")
audit_conf = Field("audit_conf", "a LoadGen audit.config, for compliance runs", group="test")
min_duration = Field("min_duration", "seconds that the test lasts at least [default: 0, or user_conf's]", duration, group="test")
min_query_count = Field(
    "min_query_count", "queries (Offline: samples) at least [default: each sample once, or user_conf's]", positive, group="test"
)
server_target_qps = Field("server_target_qps", "Server: queries per second", rate, group="test")
offline_expected_qps = Field("offline_expected_qps", "Offline: sizes the one query, with min_duration", rate, group="test")
require_valid = Field("require_valid", "an INVALID result is an error (exit code 4)", boolean, default=False, group="test")
compliance_test = Field("compliance_test", "a compliance run: its audit.config is used", choices=("TEST06",), group="test")
