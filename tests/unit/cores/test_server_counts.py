"""What servers count themselves, as vLLM 0.32 and SGLang write it, and what is said of it."""

from __future__ import annotations

import pytest

from mpillm.cores.openai_client.server_counts import cached_tokens_of, grown
from mpillm.report.doubts import doubts
from tests.helpers.endpoint_cores import Rows, requests, started
from tests.helpers.scripted_server import Reply, Request, ScriptedServer, choice, good, head, plain

VLLM = """# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="a b}}"}} {}
vllm:prefix_cache_hits_total{{engine="1",model_name="a b}}"}} 16.0
vllm:prefix_cache_hits_created{{engine="0",model_name="a b}}"}} 1.7e+09
vllm:external_prefix_cache_hits_total{{engine="0",model_name="a b}}"}} 64.0
"""


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (VLLM.format("32.0"), 48.0),
        ('sglang:cached_tokens_total{cache_source="device"} 7 1395066363000\n', 7.0),
        ("sglang:cached_tokens_total 1e3\n", 1000.0),
        ("vllm:prefix_cache_hits_total nonsense\nvllm:prefix_cache_hits_total\n", None),
        ("vllm:prefix_cache_hits_total NaN\n", None),
        ("", None),
    ],
)
def test_cached_tokens_of_a_page(text: str, tokens: float | None) -> None:
    assert cached_tokens_of(text) == tokens


def test_what_has_grown() -> None:
    assert grown([1, None, 5], [4, 7, None]) == 3
    assert grown([9], [2]) == 2, "it was started again"
    assert grown([None], [1]) is None


@pytest.mark.parametrize("caches", [True, False])
def test_a_server_that_caches_prompts(caches: bool) -> None:
    """What it had cached before the test does not count."""
    cached = [100.0]

    def metrics(request: Request) -> Reply:
        body = VLLM.format(cached[0]).encode()
        return Reply([head(Content_Length=len(body)) + body])

    def completions(request: Request) -> Reply:
        cached[0] += 48 * caches
        return good(request)

    with ScriptedServer(completions, {"/metrics": metrics}) as server, started(server) as core:
        core.statistics()  # waits for the reading of the start, which the requests would not
        core.enqueue(requests())
        Rows(core).until(4)
        statistics = core.statistics()
    assert statistics["cached_prompt_tokens"] == 4 * 48 * caches
    told = doubts({"per_instance": [statistics, statistics]}, of_servers=True)
    assert [line.partition(" came")[0] for line in told] == ["at least 192 prompt tokens"] * caches


def test_a_server_that_says_nothing_of_its_cache() -> None:
    with ScriptedServer() as server, started(server) as core:
        core.enqueue(requests())
        Rows(core).until(4)
        assert "cached_prompt_tokens" not in core.statistics()


def test_a_server_that_counts_other_tokens() -> None:
    """Not where tokens are made from text here."""
    client = {"other_answer_length": 3, "other_prompt_length": 1000}
    assert doubts({"per_instance": [client, client]}) == [
        "servers counted other numbers of tokens than their clients in the prompts of 2,000 requests and the"
        " answers of 6 requests"
    ]
    assert doubts({"per_instance": [client | {"retokenized": 5}]}) == []


@pytest.mark.parametrize("least", [0, 4, 5])
def test_a_server_that_ignores_min_tokens(least: int) -> None:
    def short(request: Request) -> Reply:
        n = min(4, request.json["max_tokens"])
        return plain({**choice([7] * n, "t" * n, "stop"), "usage": {"completion_tokens": n}})

    with ScriptedServer(short) as server, started(server) as core:
        core.enqueue(requests(max_output=8, min_output=least))
        Rows(core).until(4)
        statistics = core.statistics()
    told = doubts({"per_instance": [statistics]}, of_servers=True)
    assert [line.partition(" than")[0] for line in told] == ["4 answers had fewer tokens"] * (least == 5)
    assert statistics["short_answers"] == 4 * (least == 5)
