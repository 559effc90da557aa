"""Servers that keep prompts, found by their first tokens."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mpillm.report.repeats import repeated_prompts
from mpillm.report.request_log import RECORD
from mpillm.report.validity_checks import doubts, server_checks


def records(n: int, n_prompts: int, of_repeats: float, seed: int) -> NDArray[np.void]:
    """Return a test whose prompts have lengths and come in any order, under a load that grows."""
    chance = np.random.default_rng(seed)
    rows = np.zeros(n, RECORD)
    rows["index"] = chance.integers(0, n_prompts, n)
    rows["issued"] = np.arange(n) / 50
    lengths = chance.lognormal(0, 0.7, n_prompts)[rows["index"]]
    rows["ttft"] = lengths * (1 + np.arange(n) / n) * chance.lognormal(0, 0.4, n)
    again = np.ones(n, bool)
    again[np.unique(rows["index"], return_index=True)[1]] = False
    rows["ttft"][again] *= of_repeats
    return rows[chance.permutation(n)]  # they are written as their answers end


@pytest.mark.parametrize("seed", range(20))
def test_servers_that_keep_prompts_and_others(seed: int) -> None:
    """None of 20 servers that compute each prompt is doubted."""
    client = {"short_answers": 0, "samples": 1000}
    for of_repeats in (1.0, 0.3):
        result = {
            "per_instance": [client],
            "repeated_prompts": repeated_prompts(records(1000, 800, of_repeats, seed)),
        }
        notes = doubts(result, others_serve=True)
        if of_repeats == 1:
            assert notes == [] and server_checks(result)["no_cached_prompts"] == ""
        else:
            (note,) = notes
            assert note.startswith("first tokens of prompts that were sent before took 0.")
            assert doubts(result, others_serve=True, reuse_allowed=True) == []


def test_the_count_of_the_server_takes_precedence() -> None:
    kept = repeated_prompts(records(1000, 800, 0.3, 0))
    client = {"short_answers": 0, "samples": 1000, "server_cached_tokens": 0.0}
    assert doubts({"per_instance": [client], "repeated_prompts": kept}, others_serve=True) == []


@pytest.mark.parametrize(("n", "n_prompts"), [(0, 1), (60, 30), (500, 100_000), (500, 1)])
def test_too_few_of_either(n: int, n_prompts: int) -> None:
    found = repeated_prompts(records(n, n_prompts, 0.3, 0))
    assert found is None
    client = {"short_answers": 0, "samples": n}
    assert server_checks({"per_instance": [client], "repeated_prompts": found})["no_cached_prompts"] is None
