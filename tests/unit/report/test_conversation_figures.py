"""Figures of tests of conversations: turns, interactivity, conversations that met limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from mpillm.report.conversation_figures import answered_figures, conversation_figures, conversation_goodput
from mpillm.report.request_log import RECORD


def rows_of(*requests: tuple[int, float, float, int]) -> NDArray[np.void]:
    """Return records, one a second: conversation, time to first token, latency (s) and output tokens."""
    rows = np.zeros(len(requests), RECORD)
    rows["issued"] = np.arange(len(requests))
    for name, values in zip(
        ("session", "ttft", "latency", "tokens"), zip(*requests, strict=True), strict=True
    ):
        rows[name] = values
    sessions = rows["session"].tolist()
    rows["turn"] = [sessions[:i].count(session) for i, session in enumerate(sessions)]
    rows["prompt"] = rows["cached"] = -1
    return rows


def test_failed_requests_have_no_latency_and_no_throughput() -> None:
    rows = rows_of(*[(1, math.nan, 0.001, 3)] * 100, *[(2, 0.1, 2.0, 11)] * 20)
    rows["error"][:100] = 1
    figures = answered_figures(rows, 10.0, True)
    assert (figures["samples_per_second"], figures["tokens_per_second"]) == (2, 22)
    assert figures["latency_ms"]["p50"] == 2000
    assert figures["ttft_ms"]["p90"] == pytest.approx(100) and figures["ttft_ms"]["p99"] is None
    assert answered_figures(rows, 10.0, False)["ttft_ms"] is None
    assert answered_figures(rows[:100], 10.0, True)["latency_ms"] is None


def test_first_and_later_turns() -> None:
    rows = rows_of((7, 0.1, 1, 5), (9, 0.3, 1, 5), (7, 0.5, 1, 5), (9, 9.0, 1, 5))
    rows["error"][3] = 1
    rows["prompt"], rows["cached"] = [10, 10, 20, 0], [0, 2, 15, -1]
    figures = conversation_figures(rows, (0.0, math.inf), True)
    first, later = figures["first_turns"], figures["later_turns"]
    assert (first["requests"], later["requests"]) == (2, 1)
    assert (first["ttft_ms"]["mean"], later["ttft_ms"]["mean"]) == pytest.approx((200, 500))
    assert (first["cached_share"], later["cached_share"]) == (0.1, 0.75)
    assert (first["prompt_tokens"], later["prompt_tokens"]) == (20, 20)
    assert conversation_figures(rows, (0.0, math.inf), False)["first_turns"]["ttft_ms"] is None


def test_the_window_leaves_out_requests_but_not_their_turns() -> None:
    rows = rows_of((7, 0.1, 1, 5), (7, 0.5, 1, 5))
    figures = conversation_figures(rows, (0.5, 9.0), True)
    assert (figures["first_turns"]["requests"], figures["later_turns"]["requests"]) == (0, 1)


def test_interactivity_of_mlperf_endpoints_and_of_inferencex() -> None:
    """The mean divides sums; the other takes the slow tail of single requests."""
    fast, slow = (1, 0.1, 1.0, 10), (1, 0.1, 4.0, 10)
    figures = conversation_figures(rows_of(*[fast] * 8, *[slow] * 2), (0.0, math.inf), True)
    assert figures["e2e_avg_interactivity"] == pytest.approx(100 / 16, abs=1e-4)
    assert figures["e2e_normalized_interactivity_p90"] == pytest.approx(10 / 4, abs=1e-4)
    few = conversation_figures(rows_of(fast, slow), (0.0, math.inf), True)
    assert few["e2e_normalized_interactivity_p90"] is None
    none = conversation_figures(rows_of((1, 0.1, 1.0, 0)), (0.0, math.inf), True)
    assert none["e2e_normalized_interactivity_p90"] is None and none["e2e_avg_interactivity"] == 0


def test_a_good_conversation_meets_the_limits_with_every_request() -> None:
    """Conversations 1 to 5: good, late once, failed and cut off, cut off, and good with one request."""
    requests = [(1, 0.1, 1, 5)] * 2 + [(2, 0.1, 1, 5), (2, 0.9, 1, 5), (3, 0.1, 1, 5)]
    rows = rows_of(*requests, (4, 0.1, 1, 5), (5, 0.1, 1, 5))
    rows["error"][4] = 1
    assert conversation_goodput(rows, {3, 4}, {"ttft": 500}, 10.0) == {
        "conversations": 4,
        "good_conversations": 2,
        "good_conversations_share": 0.5,
        "good_conversations_per_second": 0.2,
    }
    cut = conversation_goodput(rows[5:6], {3, 4}, {"ttft": 500}, 10.0)
    assert (cut["conversations"], cut["good_conversations_share"]) == (0, None)


def test_rates_are_those_of_the_window() -> None:
    rows = rows_of(*[(i, 0.1, 1.0, 5) for i in range(10)])  # a response ends at each second from 1 to 10
    figures = conversation_figures(rows, (3.0, 7.0), True)
    assert (figures["requests_per_second"], figures["tokens_per_second"]) == (1, 5)
    assert conversation_figures(rows, (5.0, math.inf), True)["requests_per_second"] == 1
    assert conversation_figures(rows, (20.0, math.inf), True)["requests_per_second"] is None


def test_each_conversation_counts_once() -> None:
    rows = rows_of((7, 0.1, 1.0, 11), (7, 0.3, 1.0, 11), (7, 0.2, 1.0, 1), (9, 1.0, 2.0, 11))
    rows["prompt"], rows["cached"] = [10, 20, 30, 40], [0, 10, 20, 0]
    figures = conversation_figures(rows, (0.0, math.inf), True)["per_conversation"]
    assert figures["conversations"] == 2
    assert figures["ttft_ms"]["mean"] == pytest.approx((200 + 1000) / 2)
    assert figures["tpot_ms"]["mean"] == pytest.approx(1e3 * ((0.09 + 0.07) / 2 + 0.1) / 2)
    assert figures["latency_ms"]["mean"] == pytest.approx((3000 + 2000) / 2)
    assert figures["cached_share_p50"] == 0.25
    empty = conversation_figures(rows[:0], (0.0, math.inf), True)["per_conversation"]
    assert empty["conversations"] == 0 and empty["ttft_ms"] is None and empty["cached_share_p50"] is None
