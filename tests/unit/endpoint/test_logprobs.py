"""Log probabilities, from rows of an instance to OpenAI's forms. What the engine computes is
tests/unit/engine/run/test_engine_logprobs.py's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import RESPONSE, Batch, ResponseFlag
from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint import logprobs
from mpillm.endpoint.frontend import Frontend
from mpillm.endpoint.protocol import ServedModel
from tests.helpers.http_api import BOTH, Api, Letters, api, run
from tests.helpers.served import World, whole

GIVES = ServedModel(("dummy",), Letters(), PromptLimits(32000, 200), gives_logprobs=True)
FIRST, FINAL, PARTIAL = ResponseFlag.FIRST, ResponseFlag.FINAL, ResponseFlag.PARTIAL


def bits(*numbers: float) -> list[int]:
    made: list[int] = np.array(numbers, np.float32).view(np.int32).tolist()
    return made


def made_of(place: int, token: int, k: int) -> list[int]:
    """Return the numbers for a place of an answer: the likeliest tokens are those after the chosen one."""
    others = range(token + 1, token + 1 + k)
    return [*bits(-0.5 - place), *others, *bits(*(-0.25 * (1 + i) - place for i in range(k)))]


def give_logprobs(world: World) -> None:
    """Put log probabilities before rows of answers, as the torch core does."""
    frontend = world.roles[0]
    assert isinstance(frontend, Frontend)
    mailbox = frontend._mailbox
    deliver: Callable[[Batch], None] = mailbox.deliver
    n_sent: dict[int, int] = {}  # by id, of those that generate

    def add(batch: Batch) -> None:
        parts: list[tuple[int, list[int], int]] = []
        for one in batch.split():
            id_, flags, tokens = int(one.rows["id"][0]), int(one.rows["flags"][0]), one.tokens.tolist()
            wants = world.open._answers[id_].wants_logprobs
            if wants and tokens and flags & (FIRST | FINAL | PARTIAL):
                at = 0 if flags & FIRST else n_sent.get(id_, 1)
                new = tokens if not flags & FINAL else tokens[at:]
                numbers = [made_of(at + i, token, wants - 1) for i, token in enumerate(new)]
                if new:
                    parts.append((id_, [at, *(n for row in numbers for n in row)], ResponseFlag.LOGPROBS))
                n_sent[id_] = max(n_sent.get(id_, 1), at + len(new))
                if flags & FINAL:
                    del n_sent[id_]
            parts.append((id_, tokens, flags))
        rows = np.array([(id_, len(numbers), flags) for id_, numbers, flags in parts], RESPONSE)
        deliver(Batch(rows, np.array([n for _, numbers, _ in parts for n in numbers], np.int32)))

    mailbox.deliver = add


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("k", [0, 2])
def test_of_a_completion(disaggregated: bool, stream: bool, k: int) -> None:
    tokens = whole([1, 2, 3], 6)

    async def test() -> None:
        async with api(disaggregated, GIVES) as a:
            give_logprobs(a.world)
            for _ in range(5):  # rows overtake one another now and then
                body = {"prompt": [1, 2, 3], "max_tokens": 6, "logprobs": k, "return_token_ids": True}
                parts = await choices(a, "/v1/completions", body, stream)
                assert [token for part in parts for token in part["token_ids"]] == tokens
                joined = {
                    name: [one for part in parts for one in part["logprobs"][name]]
                    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
                }
                letters = [chr(ord("a") + token % 26) for token in tokens]
                assert joined["tokens"] == letters
                assert joined["token_logprobs"] == [-0.5 - i for i in range(6)]
                assert joined["text_offset"] == [*range(6)]
                expected = {chr(ord("a") + (tokens[1] + 1 + i) % 26): -0.25 * (1 + i) - 1 for i in range(k)}
                assert joined["top_logprobs"][1] == {**expected, letters[1]: -1.5}
            await a.idle()

    run(test)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_of_a_chat(disaggregated: bool, stream: bool) -> None:
    async def test() -> None:
        async with api(disaggregated, GIVES) as a:
            give_logprobs(a.world)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True}
            parts = await choices(a, "/v1/chat/completions", {**body, "top_logprobs": 1}, stream)
            content = [one for part in parts for one in (part["logprobs"] or {"content": []})["content"]]
            assert [one["logprob"] for one in content] == [-0.5, -1.5, -2.5]
            for i, one in enumerate(content):
                assert one["bytes"] == [ord(one["token"])]
                (top,) = one["top_logprobs"]
                assert top["logprob"] == -0.25 - i and top["bytes"] == [ord(top["token"])]
            parts = await choices(a, "/v1/chat/completions", body, stream)
            content = [one for part in parts for one in (part["logprobs"] or {"content": []})["content"]]
            assert len(content) == 3 and all(one["top_logprobs"] == [] for one in content)
            await a.idle()

    run(test)


async def choices(a: Api, path: str, body: dict[str, Any], stream: bool) -> list[dict[str, Any]]:
    """Return the choices of a stream, except the one with the role, or the only one."""
    if not stream:
        return list((await a.answer(path, **body))["choices"])
    events = await a.events(path, **body)
    return [event["choices"][0] for event in events if "role" not in event["choices"][0].get("delta", ())]


def test_infinities_and_tokens_with_the_same_text() -> None:
    """Of tokens whose bytes are no text by themselves, all U+FFFD, only the likeliest is told."""
    entry = logprobs.read(200, [*bits(-math.inf), 201, 202, 65, *bits(-0.5, -1.0, -2.0)])
    assert entry == (200, -9999.0, [(201, -0.5), (202, -1.0), (65, -2.0)])
    made = logprobs.completion([entry._replace(token=66)], ByteTokenizer(), 7, as_ids=False)
    assert made["top_logprobs"] == [{"\ufffd": -0.5, "A": -2.0, "B": -9999.0}]
    assert made["text_offset"] == [7]
    made = logprobs.completion([entry], ByteTokenizer(), 7, as_ids=True)
    top = {"token_id:200": -9999.0, "token_id:201": -0.5, "token_id:202": -1.0, "token_id:65": -2.0}
    assert made["tokens"] == ["token_id:200"] and made["top_logprobs"] == [top]
    (content,) = logprobs.chat([entry], ByteTokenizer(), as_ids=True)["content"]
    assert content["token"] == "token_id:200" and content["top_logprobs"][2]["bytes"] == [65]


def test_what_is_refused() -> None:
    async def test() -> None:
        async with api(served=GIVES) as a:
            error = await a.error(400, "/v1/completions", {"prompt": "hi", "logprobs": 21})
            assert error["param"] == "logprobs" and "0 to 20" in error["message"]
            chat = {"messages": [{"role": "user", "content": "hi"}]}
            error = await a.error(400, "/v1/chat/completions", {**chat, "logprobs": 1})
            assert error["param"] == "logprobs" and "true or false" in error["message"]
            error = await a.error(400, "/v1/chat/completions", {**chat, "top_logprobs": 2})
            assert error["param"] == "top_logprobs" and "logprobs true" in error["message"]
            for path, body in ("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat):
                error = await a.error(400, path, {**body, "prompt_logprobs": 0})
                assert error["param"] == "prompt_logprobs"
        async with api() as a:
            error = await a.error(400, "/v1/completions", {"prompt": "hi", "logprobs": 1})
            assert "the core here gives no log probabilities" in error["message"]

    run(test)
