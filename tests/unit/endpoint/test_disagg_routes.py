"""The routes of a context and of a generation server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.data.dataset import PromptLimits
from mpillm.data.tokenizer import ByteTokenizer
from mpillm.endpoint.api_error import ApiError
from mpillm.endpoint.disagg.instances import Arrival
from mpillm.endpoint.disagg.kv_socket import KvStore
from mpillm.endpoint.disagg.opaque_state import KvState, Seal, request_digest
from mpillm.endpoint.disagg.routes import DisaggRoutes, KvFormat
from mpillm.endpoint.open_requests import PendingResponse
from mpillm.endpoint.protocol import ServedModel


def test_a_handler_that_ends_late_leaves_the_next_request_with_its_id_alone() -> None:
    """An id is free with a request's last row; the request's handler runs a turn of the loop later."""
    arrivals: dict[int, Arrival] = {}
    routes = DisaggRoutes(
        "generation", "it", KvFormat("any", 1), "localhost", None, arrivals, 1.0, Seal(None)
    )
    first, second = (Arrival(token, np.zeros(1, np.uint8)) for token in (1, 2))
    routes.opened(PendingResponse(0, 1), first)
    del arrivals[0]  # its instance takes it, and answers
    routes.opened(PendingResponse(0, 1), second)
    routes.ended(PendingResponse(0, 1), first)
    assert arrivals == {0: second}
    routes.ended(PendingResponse(0, 1), second)
    assert not arrivals


SERVED = ServedModel(("m",), ByteTokenizer(), PromptLimits(vocab_size=256, max_seq_len=200))
PROMPT, FIRST = np.array([5, 6, 7], np.int32), 9
STATE = KvState("context server 0", "127.0.0.1", 1, "00" * 16, "any", request_digest(PROMPT, FIRST))


def generation_server(seal: Seal) -> DisaggRoutes:
    return DisaggRoutes("generation", "it", KvFormat("any", 1), "localhost", None, {}, 5.0, seal)


def fetched(routes: DisaggRoutes, state: object, prompt: Any = PROMPT, first: int = FIRST) -> Arrival:
    params = {"encoded_opaque_state": state, "first_gen_tokens": [first]}
    request: Any = SimpleNamespace(disaggregated=params)
    return asyncio.run(routes.fetch(request, prompt, SERVED))


def test_a_forged_state_sends_nothing_anywhere() -> None:
    """Neither to the address that it names, nor does the answer tell whether somebody listens there."""
    theirs, ours = Seal("theirs"), Seal("ours")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        state = dataclasses.replace(STATE, port=listening.getsockname()[1])
        plain = base64.b64encode(json.dumps(dataclasses.asdict(state)).encode()).decode()
        signature = ours.write(STATE).partition(".")[2]
        made: list[object] = [
            *(
                theirs.write(state),
                Seal(None).write(state),
                plain,
                f"{plain}.{signature}",
                ours.write(state)[:-1],
            ),
            *("", ".", None, 7, [], "x" * 100_000, "é", "[" * 3000),
        ]
        for forged in made:
            with pytest.raises(ApiError, match="MPILLM_KV_SECRET") as error:
                fetched(generation_server(ours), forged)
            assert error.value.status == 400
        with pytest.raises(TimeoutError):
            listening.accept()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"port": port} for port in (0, -1, 65_536, 1 << 70, "80", 1.5, True, None)),
        *({"key": key} for key in ("", "00", "00" * 17, "00" * 1000, "zz" * 16, 5)),
        *({"host": host} for host in (None, 5, ["a"], "10.0.0.1", "localhost.example.com", "0.0.0.0")),
        {"more": 1},
        {"server": None},
    ],
)
def test_a_state_without_a_secret_is_checked(wrong: dict[str, Any]) -> None:
    """And names this machine."""
    text = base64.b64encode(json.dumps(dataclasses.asdict(STATE) | wrong).encode()).decode()
    with pytest.raises(ApiError) as error:
        Seal(None).read(f"{text}.")
    assert error.value.status == 400


def test_a_state_that_is_nested_deep() -> None:
    text = base64.b64encode(b"[" * 2500).decode()
    with pytest.raises(ApiError) as error:
        Seal(None).read(f"{text}.")
    assert error.value.status == 400


def test_a_cache_is_bound_to_its_request() -> None:
    seal = Seal("ours")
    with contextlib.closing(KvStore("127.0.0.1", 60.0)) as store:
        cache = np.arange(len(PROMPT), dtype=np.uint8)
        store.open(1)
        store.put(1, cache)
        state = seal.write(dataclasses.replace(STATE, port=store.port, key=(store.key(1) or b"").hex()))
        routes = generation_server(seal)
        for prompt, first in (([5, 6, 8], FIRST), ([5, 6], FIRST), (PROMPT, 8)):
            with pytest.raises(ApiError, match="another prompt or first token"):
                fetched(routes, state, np.array(prompt, np.int32), first)
        arrival = fetched(routes, state)
        assert arrival.first_token == FIRST and np.array_equal(arrival.cache, cache)


def test_the_error_does_not_reveal_other_listeners(caplog: pytest.LogCaptureFixture) -> None:
    messages = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5.0)
        for port in (listening.getsockname()[1], 1):
            routes = DisaggRoutes(
                "generation", "it", KvFormat("any", 1), "localhost", None, {}, 0.2, Seal(None)
            )
            with pytest.raises(ApiError) as error:
                fetched(routes, Seal(None).write(dataclasses.replace(STATE, port=port)))
            messages.append((error.value.status, str(error.value)))
        listening.accept()[0].close()
    assert (
        messages[0]
        == messages[1]
        == (502, "context server 0: its KV cache cannot be fetched; our log has the cause")
    )
    assert "did not come" in caplog.text and "Connection refused" in caplog.text


def test_a_silent_server_leaves_threads_to_others() -> None:
    """Also after the requests for its caches are cancelled."""
    cache = np.arange(len(PROMPT), dtype=np.uint8)
    seal = Seal("ours")
    routes = DisaggRoutes("generation", "it", KvFormat("any", 1), "localhost", None, {}, 10.0, seal)

    async def fetch(port: int, key: str = STATE.key) -> Arrival:
        state = seal.write(dataclasses.replace(STATE, port=port, key=key))
        request: Any = SimpleNamespace(
            disaggregated={"encoded_opaque_state": state, "first_gen_tokens": [FIRST]}
        )
        return await routes.fetch(request, PROMPT, SERVED)

    async def test(silent: int, store: KvStore) -> None:
        for _ in range(2):
            waiting = [asyncio.ensure_future(fetch(silent)) for _ in range(80)]
            await asyncio.sleep(0.2)
            store.open(1)
            store.put(1, cache)
            arrival = await asyncio.wait_for(fetch(store.port, (store.key(1) or b"").hex()), 5.0)
            assert np.array_equal(arrival.cache, cache)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            store.drop(1)

    with (
        socket.create_server(("127.0.0.1", 0), backlog=256) as listening,
        contextlib.closing(KvStore("127.0.0.1", 60.0)) as store,
    ):
        asyncio.run(test(listening.getsockname()[1], store))


def test_a_request_that_waits_for_a_thread_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """A context server that says nothing has all threads of its share."""
    seal = Seal("ours")
    routes = DisaggRoutes("generation", "it", KvFormat("any", 1), "localhost", None, {}, 0.1, seal)
    params = {"encoded_opaque_state": seal.write(STATE), "first_gen_tokens": [FIRST]}
    request: Any = SimpleNamespace(disaggregated=params)

    async def test() -> None:
        routes._shares[STATE.host, STATE.port] = asyncio.Semaphore(0)
        await asyncio.wait_for(routes.fetch(request, PROMPT, SERVED), 20.0)

    with pytest.raises(ApiError, match="its KV cache cannot be fetched"):
        asyncio.run(test())
    assert "did not come in time" in caplog.text and routes.failed_transfers == 1


def test_requests_wait_for_room_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while others wait does not take the room that becomes free."""
    store = KvStore("127.0.0.1", 5.0)
    routes = DisaggRoutes("context", "it", KvFormat("any", 1), "localhost", store, {}, 5.0, Seal(None))
    served: list[int] = []
    answers = [PendingResponse(i, 1) for i in range(9)]

    async def ask(i: int) -> None:
        await routes.wait_for_capacity()
        routes.began(answers[i])
        served.append(i)

    async def all_of_them() -> None:
        tasks = []
        for i in range(8):
            tasks.append(asyncio.create_task(ask(i)))
            await asyncio.sleep(0)
        for i in range(8):
            while len(served) <= i:
                await asyncio.sleep(0.001)
            assert len(served) == i + 1  # there is room for one
            if i == 3:
                tasks.append(asyncio.create_task(ask(8)))
            answers[served[-1]].released = True
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    try:
        asyncio.run(all_of_them())
    finally:
        store.close()
    assert served == list(range(9))


def test_a_request_that_waits_too_long_for_capacity_gets_429() -> None:
    store = KvStore("127.0.0.1", 5.0)
    routes = DisaggRoutes("context", "it", KvFormat("any", 1), "localhost", store, {}, 0.05, Seal(None))
    routes.began(PendingResponse(0, 1))

    async def two() -> list[Any]:
        waits = routes.wait_for_capacity(), routes.wait_for_capacity()
        return list(await asyncio.gather(*waits, return_exceptions=True))

    try:
        found = asyncio.run(two())
    finally:
        store.close()
    assert [one.status for one in found] == [429, 429]
