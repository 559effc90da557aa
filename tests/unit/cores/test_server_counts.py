"""What servers count themselves, as vLLM 0.32 and SGLang write it, and what is said of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest

from mpillm.comms.messages import RequestFlag
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.server_counts import ServerCounts, grown, of_iterations, read_one, reading_of
from mpillm.report.validity_checks import doubts, server_checks
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
    assert reading_of(text).cached_tokens == tokens


def test_what_has_grown() -> None:
    def cached(*tokens: float | None) -> list[ServerCounts]:
        return [ServerCounts(cached_tokens=one) for one in tokens]

    assert grown(cached(1, None, 5), cached(4, 7, None)) == {"cached_tokens": 3}
    assert grown(cached(9), cached(2)) == {"cached_tokens": 2}, "it was started again"
    assert grown(cached(None), cached(1)) == {}


def test_a_page_of_gauges() -> None:
    page = """vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:generation_tokens_total{engine="0"} 10
vllm:nixl_num_failed_transfers_total 3
vllm:nixl_xfer_time_seconds_count{engine="0"} 6
vllm:nixl_num_failed_notifications_total 2
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 34
vllm:nixl_num_notifications_after_expiry_total{engine="0"} 26
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 4
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 1
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 30
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 40
vllm:spec_decode_num_accepted_tokens_total 5
"""
    counts = ServerCounts(
        7, None, 0.5, generated_tokens=10, transfers=6, failed_transfers=3, accepted_guesses=5
    )
    counts = counts._replace(expired_leases=34, late_reads=26, computed_tokens=4, received_tokens=70)
    assert reading_of(page) == counts


# What SGLang 0.5.23 gave after requests without hits of its cache: of its counters those that have grown.
SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 14.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.08
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 16.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 10.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 12.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 4.0
sglang:num_requests_total{engine_type="unified",is_streaming="false",model_name="m"} 2.0
sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="m"} 1.0
"""


def test_a_count_that_sglang_does_not_give_is_0() -> None:
    """Otherwise the first cache hits of a test would be missed: no earlier page has this count."""
    fresh = reading_of("sglang:num_running_reqs{} 0.0\n")
    assert (fresh.cached_tokens, fresh.generated_tokens, fresh.accepted_guesses) == (0.0, 0.0, 0.0)
    counts = reading_of(SGLANG)
    assert counts[:6] == (2, 14, 0.08, 26, 16, 0) and (counts.preemptions, counts.failed_transfers) == (0, 0)
    assert counts.transfers is None, "only context servers have such a count"
    context = SGLANG.replace("unified", "prefill")
    assert reading_of(context).transfers == 0
    sent = 'sglang:kv_transfer_latency_ms_count{engine_type="prefill",tp_rank="0"} 3.0\n'
    failed = "sglang:num_bootstrap_failed_reqs_total{} 2\nsglang:num_transfer_failed_reqs_total{} 1\n"
    counted = reading_of(context + sent + failed)
    assert (counted.transfers, counted.failed_transfers) == (3, 3)
    hits = 'sglang:cached_tokens_total{cache_source="device"} 7\n'
    assert grown([fresh], [reading_of(SGLANG + hits)])["cached_tokens"] == 7


def test_guesses_of_sglang() -> None:
    """Of three requests with 16 tokens, 5 come from verifications, and 3 from prompts."""
    assert reading_of(SGLANG + "sglang:spec_verify_calls_total{} 5\n").accepted_guesses == 16 - 5 - 3
    assert reading_of(SGLANG + "sglang:spec_verify_calls_total{} 14\n").accepted_guesses == 0
    assert reading_of(SGLANG + "sglang:spec_verify_calls_total{} 14\n").verifications == 14


DRAFTS = """vllm:spec_decode_num_drafts_total{engine="0"} 100.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 130.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
"""


def test_acceptance_by_position_of_vllm() -> None:
    after = reading_of(DRAFTS)
    assert (after.verifications, after.drafted_tokens, after.accepted_guesses) == (100, 300, 130)
    assert after.accepted_at == (80, 54, 0)
    before = reading_of(DRAFTS.replace("100.0", "20.0").replace(" 80.0", " 8.0"))
    growth = grown([before], [after])
    assert growth["verifications"] == 80
    assert [growth[f"accepted_at_{i}"] for i in range(3)] == [72, 0, 0]
    assert grown([ServerCounts()], [after])["accepted_at_0"] == 80, "a count appears with the first request"
    for damage in ('position="x"', 'position="-1"', 'position="1000000"'):
        assert reading_of(DRAFTS.replace('position="2"', damage)).accepted_at == (80, 54)
    assert reading_of(DRAFTS.replace(" 80.0", " inf")).accepted_at == (0, 54, 0)


def test_guesses_and_lost_transfers_are_doubtful() -> None:
    client = generation("a", 3, {"accepted_guesses": 5.0, "failed_transfers": 2.0, "cached_tokens": 7.0})
    result = {"per_instance": [client, {}]}
    lines = doubts(result, others_serve=True, speculation_forbidden=True, reuse_allowed=True)
    assert [line.partition(",")[0] for line in lines] == [
        "servers accepted 5 draft tokens",
        "2 transfers of KV caches failed: generation servers may have computed prompts again (generation"
        " server a: 2)",
        "generation server a gives no count of KV cache transfers (/metrics)",
    ]
    assert len(doubts(result, others_serve=True)) == 3, "the prefix cache instead of the guesses"


@pytest.mark.parametrize(("role", "fails"), [("generation", False), ("", True)])
def test_failed_transfers_of_servers_that_cannot_recompute(role: str, fails: bool) -> None:
    """Their requests fail too. The servers behind a router may be of any kind."""
    client = generation("a", 9, {"failed_transfers": 3.0}, may_recompute=False)
    client["servers"][0]["role"] = role
    assert bool(server_checks({"per_instance": [client]})["no_failed_transfers"]) is fails


@pytest.mark.parametrize(("sent", "outcome"), [(None, None), (19.0, None), (20.0, ""), (40.0, "")])
def test_context_servers_count_the_transfers(sent: float | None, outcome: str | None) -> None:
    """SGLang's generation servers do not. Too low a count proves nothing: some transports have none."""
    client = generation("a", 20, {}, may_recompute=False)
    counted = {} if sent is None else {"transfers": sent}
    client["servers"].append({"url": "c", "role": "context", "model": "m", "owned": True, "counted": counted})
    assert server_checks({"per_instance": [client]})["contexts_arrived"] == outcome


def generation(url: str, n: int, counted: dict[str, float], may_recompute: bool = True) -> dict[str, Any]:
    """Return a client's result, whose server received `n` requests with KV caches."""
    zeros = dict.fromkeys(("other_prompt_length", "other_answer_length", "short_answers", "retokenized"), 0)
    server = {"url": url, "role": "generation", "model": "m", "owned": True, "may_recompute": may_recompute}
    server |= {"handed_over": n, "prompt_tokens": 9, "generated_tokens": None, "counted": counted}
    sums = {f"server_{name}": value for name, value in counted.items()}
    return {**zeros, **sums, "samples": n, "handed_over": n, "servers": [server]}


@pytest.mark.parametrize(("counted", "is_doubtful"), [(29.0, True), (30.0, False), (60.0, False)])
def test_contexts_that_were_not_handed_over(counted: float, is_doubtful: bool) -> None:
    """With tensor parallelism each rank of a server counts its part, which is no other server's."""
    clients = [generation("a", 30, {"transfers": counted}), generation("b", 10, {"transfers": 20.0})]
    found = server_checks({"per_instance": clients})["contexts_arrived"]
    assert found == (
        "generation server a counts 29 transfers of KV caches for 30 requests with one: it computed the other"
        " prompts again"
        if is_doubtful
        else ""
    )


def test_a_generation_server_without_counts() -> None:
    """It refuses the test only where it may have computed prompts again; not after it was started again."""
    clients = [generation("a", 20, {"transfers": 20.0, "cached_tokens": 0.0}), generation("b", 20, {})]
    clients[1]["server_silent"] = 1
    found = server_checks({"per_instance": clients})
    assert str(found["contexts_arrived"]).startswith(
        "generation server b gives no count of KV cache transfers"
    )
    assert found["no_cached_prompts"] is None, "what the other one counts does not hold for it"
    again = clients[1] | {"server": {"index": 1, "restarts": [{"at_s": 1.0, "why": "it ended"}]}}
    assert server_checks({"per_instance": [clients[0], again]})["contexts_arrived"] is None
    cannot = generation("b", 20, {}, may_recompute=False)
    assert server_checks({"per_instance": [clients[0], cannot]})["contexts_arrived"] is None
    clients[0]["server_cached_tokens"] = 7.0
    assert server_checks({"per_instance": clients})["no_cached_prompts"], "what one has said is enough"


def test_context_servers_count_too() -> None:
    client = {"server_cached_tokens": 0.0, "server_context_cached_tokens": 16.0}
    (line,) = doubts({"per_instance": [client]}, others_serve=True)
    assert line.startswith("16 prompt tokens came from a server's prefix cache")


@pytest.mark.parametrize("caches", [True, False])
def test_a_server_that_caches_prompts(caches: bool) -> None:
    """Cached tokens count from the start of the test, also if a reading is slow."""
    cached, first = [100.0], itertools.count()

    def metrics(request: Request) -> Reply:
        if next(first) == 0:
            time.sleep(0.3)
        body = VLLM.format(cached[0]).encode()
        return Reply([head(Content_Length=len(body)) + body])

    def completions(request: Request) -> Reply:
        cached[0] += 48 * caches
        return good(request)

    with ScriptedServer(completions, {"/metrics": metrics}) as server, started(server) as core:
        core.enqueue(requests())
        Rows(core).until(4)
        core.flush()
        statistics = core.statistics()
    assert statistics["server_cached_tokens"] == 4 * 48 * caches
    lines = doubts({"per_instance": [statistics, {}]}, others_serve=True)
    assert [line.partition(" came")[0] for line in lines] == ["192 prompt tokens"] * caches


def test_a_server_whose_counts_come_too_late() -> None:
    """The test does not wait for the counts; afterwards the check of the run is called."""
    calls = itertools.count()

    def meanwhile() -> None:
        if next(calls) == 2:
            raise LookupError("the server has ended")

    with (
        ScriptedServer(good, {"/metrics": lambda _: Reply([], "hang")}) as server,
        started(server) as core,
    ):
        core.check_run = meanwhile
        assert "server_cached_tokens" not in core.statistics() and next(calls) == 0
        core.flush()
        with pytest.raises(LookupError, match="the server has ended"):
            core.statistics()


def test_a_server_without_cache_counts() -> None:
    with ScriptedServer() as server, started(server) as core:
        core.enqueue(requests())
        Rows(core).until(4)
        core.flush()
        assert "server_cached_tokens" not in core.statistics() and core.statistics()["server_silent"] == 1


def test_a_server_that_counts_other_tokens() -> None:
    """Also if another server sends text."""
    client = {"other_answer_length": 3, "other_prompt_length": 1000}
    assert doubts({"per_instance": [client, client]}) == [
        "servers counted other numbers of tokens than their clients in the prompts of 2,000 requests and the"
        " answers of 6 requests"
    ]
    assert doubts({"per_instance": [client | {"retokenized": 5}, {"retokenized": 5}]}) == [
        "servers counted other numbers of tokens than their clients in the prompts of 1,000 requests and the"
        " answers of 3 requests"
    ]
    assert doubts({"per_instance": [{"retokenized": 5, "other_text_length": 5}]}) == []


@pytest.mark.parametrize(("least", "flags"), [(0, 0), (4, 0), (5, 0), (0, int(RequestFlag.IGNORE_END))])
def test_a_server_that_ignores_min_tokens_or_ignore_eos(least: int, flags: int) -> None:
    def short(request: Request) -> Reply:
        n = min(4, request.json["max_tokens"])
        return plain({**choice([7] * n, "t" * n, "stop"), "usage": {"completion_tokens": n}})

    with ScriptedServer(short) as server, started(server) as core:
        core.enqueue(requests(max_output=8, min_output=least, flags=flags))
        Rows(core).until(4)
        statistics = core.statistics()
    lines = doubts({"per_instance": [statistics]}, others_serve=True)
    is_short = least == 5 or flags > 0
    assert [line.partition(" than")[0] for line in lines] == ["4 answers had fewer tokens"] * is_short
    assert statistics["short_answers"] == 4 * is_short


def test_checks_of_servers() -> None:
    """A check that holds has an empty text; a check without counts has None."""
    zeros = dict.fromkeys(("other_prompt_length", "other_answer_length", "short_answers", "retokenized"), 0)
    client = {**zeros, "samples": 5, "server_cached_tokens": 0.0, "server_accepted_guesses": 3.0}
    assert server_checks({"per_instance": [client]}, speculation_forbidden=True) == {
        "no_cached_prompts": "",
        "no_failed_transfers": None,
        "no_expired_leases": None,
        "contexts_arrived": None,
        "server_totals": None,
        "answer_models": "",
        "token_counts": "",
        "answer_lengths": "",
        "no_guesses": "servers accepted 3 draft tokens, which the workload's rules forbid",
    }
    text = server_checks({"per_instance": [{**client, "retokenized": 5}]}, reuse_allowed=True)
    assert text["token_counts"] is None and "no_cached_prompts" not in text and "no_guesses" not in text
    without_samples = server_checks({"per_instance": [{**client, "samples": 0}]})
    assert without_samples["answer_lengths"] is None and without_samples["no_cached_prompts"] == ""
    assert server_checks({"per_instance": [{"samples": 5}]}) == {}


ITERATION = {
    "numActiveRequests": 5,
    "numQueuedRequests": 3,
    "kvCacheStats": {"maxNumBlocks": 1000, "usedNumBlocks": 600, "tokensPerBlock": 64, "reusedBlocks": 7},
    "specDecodingStats": {"numDraftTokens": 20, "numAcceptedTokens": 15, "numRequestsWithDraftTokens": 5},
}


MORE = {"cached_tokens": 0.0, "accepted_guesses": 15.0, "drafted_tokens": 20.0, "verifications": 5.0}


def test_iterations_of_tensorrt_llm() -> None:
    """Each answer has the iterations since the one before: counts are added up, the rest is the last's."""
    first = of_iterations(json.dumps([ITERATION, ITERATION]), ServerCounts())
    drafts: dict[str, Any] = {"accepted_guesses": 30.0, "drafted_tokens": 40.0, "verifications": 10.0}
    assert first == ServerCounts(5.0, 3.0, 0.6, cached_tokens=448.0, **drafts)
    none = of_iterations("[]", first)
    assert none == first._replace(running=0.0, waiting=0.0)
    second = of_iterations(json.dumps([ITERATION]), none)
    assert grown([first], [second]) == MORE


@pytest.mark.parametrize(
    "text", ["[", "[1, null]", '[{"kvCacheStats": 3, "numActiveRequests": "many"}]', "[" * 10**5]
)
def test_iterations_that_are_none(text: str) -> None:
    found = of_iterations(text, ServerCounts(cached_tokens=4.0))
    assert (found.kv_cache_usage, found.cached_tokens, found.accepted_guesses) == (None, 4.0, None)


def test_a_server_with_iterations_is_read_again() -> None:
    """As `trtllm-serve`: what it says is gone once it was read."""
    pages = [json.dumps([ITERATION]), "[]", json.dumps([ITERATION])]

    async def read() -> list[ServerCounts]:
        endpoint = RemoteServer("127.0.0.1:1")

        async def fetch(*_: object) -> tuple[int, dict[str, str], bytes]:
            return 200, {}, pages.pop(0).encode()

        endpoint.fetch = fetch  # type: ignore[method-assign, assignment]
        return [await read_one(endpoint) for _ in range(3)]

    first, _, last = asyncio.run(read())
    assert grown([first], [last]) == MORE
