"""Completions and chats over real sockets, streamed or not; clients that disconnect cancel their requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import ServedModel
from tests.helpers.http_api import BOTH, HOUR_MS, ROUTES, Letters, api, body_for, run
from tests.helpers.served import whole


@BOTH
def test_a_completion(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(disaggregated, ServedModel(("dummy",), Letters(), PromptLimits(32000, 200))) as a:
            tokens = whole([1, 2, 3], 7)
            made = await a.answer(
                "/v1/completions", model="dummy", prompt=[1, 2, 3], max_tokens=7, return_token_ids=True
            )
            (choice,) = made["choices"]
            assert choice["token_ids"] == tokens and choice["prompt_token_ids"] == [1, 2, 3]
            assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
            assert (made["object"], made["model"], choice["finish_reason"]) == (
                "text_completion",
                "dummy",
                "length",
            )
            events = await a.events(
                "/v1/completions",
                prompt=[1, 2, 3],
                max_tokens=7,
                return_token_ids=True,
                stream_options={"include_usage": True},
            )
            *chunks, last = events
            assert last["choices"] == [] and last["usage"] == made["usage"]
            assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == tokens
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
                len(chunks) - 1
            ) + ["length"]
            assert {chunk["id"] for chunk in events} == {last["id"]} != {made["id"]}
            await a.idle()

    run(test)


@BOTH
def test_a_chat(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(
            disaggregated, ServedModel(("dummy",), ByteTokenizer(), PromptLimits(256, 400), max_output_len=9)
        ) as a:
            parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
            messages = [{"role": "system", "content": "short"}, {"role": "user", "content": parts}]
            made = await a.answer("/v1/chat/completions", messages=messages, return_token_ids=True)
            assert bytes(made["prompt_token_ids"]).decode() == "short\nhéllo"
            assert made["usage"]["completion_tokens"] == 9, "--max_output_len"
            assert made["choices"][0]["message"]["role"] == "assistant"
            first, *chunks = await a.events(
                "/v1/chat/completions", messages=messages, max_completion_tokens=4
            )
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert first["object"] == "chat.completion.chunk"
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            await a.idle()

    run(test)


@BOTH
def test_several_prompts_of_one_body(disaggregated: bool) -> None:
    async def test() -> None:
        async with api(disaggregated, ServedModel(("dummy",), Letters(), PromptLimits(32000, 200))) as a:
            prompts = [[5], [6, 7], [8, 9, 10]]
            made = await a.answer("/v1/completions", prompt=prompts, max_tokens=3, return_token_ids=True)
            assert [choice["token_ids"] for choice in made["choices"]] == [
                whole(prompt, 3) for prompt in prompts
            ]
            got: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for chunk in await a.events(
                "/v1/completions", prompt=prompts, max_tokens=3, return_token_ids=True
            ):
                for choice in chunk["choices"]:
                    got[choice["index"]] += choice["token_ids"]
            assert got == {i: whole(prompt, 3) for i, prompt in enumerate(prompts)}
            await a.idle()

    run(test)


@BOTH
def test_several_answers_to_each_prompt(disaggregated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a request with its own seed; a prompt's tokens count once."""

    async def test() -> None:
        async with api(disaggregated) as a:
            rows: list[Any] = []
            plain = a.world.open.open

            def note(row: Any, prompt: Any) -> Any:
                rows.append((row["seed"], prompt.tolist()))
                return plain(row, prompt)

            monkeypatch.setattr(a.world.open, "open", note)
            body: dict[str, Any] = {"max_tokens": 3, "n": 2, "seed": 2**32 - 1, "return_token_ids": True}
            made = await a.answer("/v1/completions", prompt=[[5, 6], [7]], **body)
            assert rows == [(2**32 - 1, [5, 6]), (0, [5, 6]), (2**32 - 1, [7]), (0, [7])]
            answers = [(choice["index"], choice["token_ids"]) for choice in made["choices"]]
            assert answers == [(i, whole(prompt, 3)) for i, (_, prompt) in enumerate(rows)]
            assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
            chat = {
                "messages": [{"role": "user", "content": "hi"}],
                "stream_options": {"include_usage": True},
            }
            *chunks, last = await a.events("/v1/chat/completions", **body, **chat)
            n_prompt = len(rows[-1][1])
            assert last["usage"] == {
                "prompt_tokens": n_prompt,
                "completion_tokens": 6,
                "total_tokens": n_prompt + 6,
            }
            ends = [one["index"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
            assert sorted(ends) == [0, 1]
            error = await a.error(400, "/v1/completions", {"prompt": [[1]] * 2000, "n": 2})
            assert error["param"] == "n" and "4000 answers; a request may have 2048" in error["message"]
            await a.idle()

    run(test)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_request_where_it_is_generated(disaggregated: bool, stream: bool) -> None:
    """The core would go on for an hour."""

    async def test() -> None:
        # Tokens from 26 on are a, b, c, …: "de" comes with the fifth.
        async with api(
            disaggregated, ServedModel(("dummy",), Letters(), PromptLimits(32000, 32000)), {"tpot_ms": 0.5}
        ) as a:
            body = {"prompt": [26], "max_tokens": 20_000, "stop": ["zz", "de"]}
            if stream:
                chunks = await a.events("/v1/completions", **body)
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                last = chunks[-1]["choices"][0]
            else:
                made = await a.answer("/v1/completions", **body)
                (last,), text = made["choices"], made["choices"][0]["text"]
                assert made["usage"]["completion_tokens"] == 5
            assert (text, last["finish_reason"], last["stop_reason"]) == ("abc", "stop", "de")
            late = await a.answer("/v1/completions", **body | {"min_tokens": 6})
            assert late["choices"][0]["text"] == "abcdefghijklmnopqrstuvwxyzabc", (
                "the one in the first six does not count"
            )
            token = await a.answer("/v1/completions", prompt=[26], max_tokens=20_000, stop_token_ids=[28])
            assert (token["choices"][0]["text"], token["choices"][0]["stop_reason"]) == ("ab", 28)
            await a.idle()

    run(test)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_request_while_others_of_the_body_go_on(
    disaggregated: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedModel(("dummy",), ByteTokenizer(), PromptLimits(vocab_size=256, max_seq_len=1 << 14))

    async def test() -> None:
        async with api(disaggregated, served) as a:
            answers: list[PendingResponse] = []
            open_request = a.world.open.open

            def recorded(*args: Any) -> PendingResponse:
                answers.append(open_request(*args))
                return answers[-1]

            monkeypatch.setattr(a.world.open, "open", recorded)
            body: dict[str, Any] = {"prompt": [[200], [0]], "max_tokens": 10_000, "stop": "~"}
            await (a.events if stream else a.answer)("/v1/completions", **body, ignore_eos=True)
            other, stopped = answers
            assert len(other.tokens) == 10_000 and not other.cancelled
            assert len(stopped.tokens) < 10_000 and stopped.cancelled
            await a.idle()

    run(test)


@BOTH
@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_disconnect_cancel_their_requests(disaggregated: bool, path: str, stream: bool) -> None:
    """Some of them wait at the leader, because the instances have no room; none would end by itself."""

    async def test() -> None:
        async with api(disaggregated, core={"ttft_ms": 0.5, "tpot_ms": HOUR_MS}) as a:

            async def ask(i: int) -> None:
                async with await a.post(
                    path, {**body_for(path, str(i)), "max_tokens": 9, "stream": stream}
                ) as response:
                    await response.read()

            tasks = [asyncio.ensure_future(ask(i)) for i in range(40)]
            await a.until(lambda: len(a.world.open) == 40 and a.world.open.running > 0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await a.idle()
            assert a.service.metrics.aborted == 40

    run(test)


@BOTH
def test_a_client_that_leaves_right_after_its_body(disaggregated: bool) -> None:
    """Its request, which would not end by itself, is cancelled, or never begins."""

    async def test() -> None:
        async with api(disaggregated, core={"ttft_ms": 0.5, "tpot_ms": HOUR_MS}) as a:
            body = json.dumps({"prompt": "hello", "max_tokens": 9}).encode()
            reader, writer = await asyncio.open_connection(*a.base.removeprefix("http://").split(":"))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body)
            )
            await reader.readuntil(b"\r\n\r\n")
            assert a.service.guard.active == 1  # it waits for the body
            writer.write(body)
            writer.close()
            await a.idle()

    run(test)


@BOTH
def test_clients_that_disconnect_in_the_middle_of_a_stream(
    disaggregated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A disconnect is no error of the server."""

    async def test() -> None:
        async with api(disaggregated, core={"tpot_ms": 1.0}, max_queue_size=2000) as a:
            gate = asyncio.Semaphore(50)

            async def ask(i: int) -> None:
                async with (
                    gate,
                    await a.post(
                        "/v1/completions", {"prompt": [i % 256], "max_tokens": 150, "stream": True}
                    ) as response,
                ):
                    assert response.status == 200
                    await response.content.readany()
                    response.close()

            await asyncio.gather(*(ask(i) for i in range(200)))
            await a.idle()
            assert (
                a.service.metrics.aborted + a.service.metrics.totals.samples == 200
                and a.service.metrics.aborted > 0
            )
        assert not caplog.records

    run(test)
