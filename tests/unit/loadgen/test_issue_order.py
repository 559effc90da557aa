"""What LoadGen will issue, as LoadGen itself says it in a test of no time."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.errors import ConfigError
from mpillm.loadgen.forecast import arrivals
from mpillm.loadgen.issue_order import IssueOrder, issue_order
from mpillm.loadgen.settings import LoadGenConfig, LoadGenSettings, load_settings
from mpillm.options.options import parse_run

N_SAMPLES = 50


def settings(*words: str) -> LoadGenSettings:
    config = parse_run(["--core_type=dummy", *words])
    made = load_settings(LoadGenConfig.from_run(config), N_SAMPLES)
    # LoadGen reads its own only at a process's first call.
    made.test.qsl_rng_seed, made.test.sample_index_rng_seed, made.test.schedule_rng_seed = 1, 2, 3
    return made


def order(*words: str) -> IssueOrder:
    return issue_order(settings(*words), N_SAMPLES)


def test_an_offline_test_issues_all_at_once() -> None:
    issued = order("--min_query_count=120")
    assert len(issued.indices) == len(issued.at) == 120
    assert not issued.at.any() and issued.indices.min() >= 0 and issued.indices.max() < N_SAMPLES
    assert np.array_equal(issued.indices, order("--min_query_count=120").indices)
    assert np.array_equal(issued.indices[:60], order("--min_query_count=60").indices)


def test_a_server_test_issues_queries_at_its_rate() -> None:
    words = ("--scenarios=Server", "--server_target_qps=40", "--min_query_count=300")
    issued, test = order(*words), settings(*words).test
    assert np.array_equal(issued.at, arrivals(test, 0.0, 300)[:300])
    assert issued.at[-1] == pytest.approx(300 / 40, rel=0.2)
    assert not np.array_equal(issued.indices, order("--min_query_count=300").indices)


def test_what_depends_on_the_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match="only Offline and Server"):
        order("--scenarios=SingleStream")
