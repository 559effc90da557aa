"""The times between tokens in `/metrics`."""

from __future__ import annotations

import re

import pytest

from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.prometheus import BucketHistogram, TokenGaps
from tests.helpers.http_api import api, run


def answer_of(n_tokens: int, first_at: float, last_at: float) -> PendingResponse:
    answer = PendingResponse(0, 1)
    answer.tokens, answer.first_at, answer.last_at = [0] * n_tokens, first_at, last_at
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_every_gap_of_several_answers_counts(stream: bool) -> None:
    async def test() -> None:
        async with api() as a:
            body = {"prompt": [[0], [1], [2], [3]], "max_tokens": 50, "ignore_eos": True}
            await (a.events if stream else a.answer)("/v1/completions", **body)
            async with a.session.get(a.base + "/metrics") as response:
                text = await response.text()
            counts = re.findall(r"inter_token_latency_seconds_count\S* (\d+)", text)
            assert counts == ["196"], "4 answers of 49 gaps"

    run(test)


def test_an_answer_that_is_read_after_its_end() -> None:
    histogram = BucketHistogram("", (0.5, 1.5))
    gaps = TokenGaps(histogram, answer_of(5, 1.0, 5.0))
    gaps.add(2)  # in slices
    gaps.add(3)
    assert [*histogram.lines("x", "l")][:3] == [
        'x_bucket{l,le="0.5"} 0',
        'x_bucket{l,le="1.5"} 4',
        'x_bucket{l,le="+Inf"} 4',
    ]


def test_an_answer_that_is_read_while_it_grows() -> None:
    histogram = BucketHistogram("", (0.5, 1.5))
    answer = answer_of(1, 1.0, 1.0)
    gaps = TokenGaps(histogram, answer)
    gaps.add(1)
    assert [*histogram.lines("x", "l")][-2:] == ["x_sum{l} 0.0", "x_count{l} 0"]
    answer.tokens, answer.last_at = [0] * 3, 2.0
    gaps.add(2)
    answer.tokens, answer.last_at = [0] * 4, 4.0
    gaps.add(1)
    assert [*histogram.lines("x", "l")] == [
        'x_bucket{l,le="0.5"} 2',
        'x_bucket{l,le="1.5"} 2',
        'x_bucket{l,le="+Inf"} 3',
        "x_sum{l} 3.0",
        "x_count{l} 3",
    ]
