"""Requests of many threads in one engine: here a dummy core that answers by counting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import RESPONSE, Batch, RequestFlag, ResponseFlag
from mpillm.cores.base import CoreConfig, Credits, LLMCore
from mpillm.triton.models.engine_thread import EngineResponse, EngineThread
from mpillm.triton.models.requests import NO_END, PromptRequest

WAIT_S = 30.0


class Counting(LLMCore):
    """Answers 1, 2, 3, … with a token a step, to all open requests; a prompt with a 13 is an error."""

    def __init__(self) -> None:
        super().__init__(CoreConfig("counting"))
        self.open: dict[int, list[int]] = {}  # id -> tokens so far, at most, flags
        self.most = 0
        self.cancelled: list[int] = []
        self.broken = False

    def load(self) -> None: ...

    def run_health_check(self) -> None: ...

    def credits(self) -> Credits:
        return Credits(64, 1 << 20)

    def enqueue(self, requests: Batch) -> None:
        for part in requests.split():
            (row,) = part.rows
            n = 0 if 13 in part.tokens else int(row["max_output"])
            self.open[int(row["id"])] = [0, n, int(row["flags"])]
        self.most = max(self.most, len(self.open))

    def has_work(self) -> bool:
        return bool(self.open)

    def cancel(self, ids: Iterable[int]) -> None:
        self.cancelled += ids

    def poll_responses(self) -> Batch:
        if self.broken:
            raise RuntimeError("out of memory")
        rows: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        new_tokens: list[int]
        for id_, state in [*self.open.items()]:
            state[0] += 1
            n, most, flags = state
            if id_ in self.cancelled:
                self.cancelled.remove(id_)
                new_tokens, kind = [], ResponseFlag.FINAL | ResponseFlag.CANCELLED
            elif most == 0:
                new_tokens, kind = [], ResponseFlag.FINAL | ResponseFlag.ERROR
            elif n == most:
                new_tokens, kind = [*range(1, n + 1)], ResponseFlag.FINAL
            elif flags & RequestFlag.STREAM:
                new_tokens, kind = [n], ResponseFlag.PARTIAL
            else:
                continue
            rows.append((id_, len(new_tokens), int(kind)))
            tokens += new_tokens
            if kind & ResponseFlag.FINAL:
                del self.open[id_]
        return Batch(np.array(rows, RESPONSE), np.array(tokens, np.int32))


class Client:
    """Keeps the events that it receives."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[list[int], bool, str]] = queue.Queue()

    def __call__(self, answer: EngineResponse, tokens: Sequence[int], is_final: bool, error: str) -> None:
        self.events.put(([*tokens], is_final, error))

    def parts(self) -> list[list[Any]]:
        """Return what came until the end."""
        parts: list[list[Any]] = []
        while True:
            tokens, is_final, error = self.events.get(timeout=WAIT_S)
            parts.append([error] if error else tokens)
            if is_final:
                return parts


@pytest.fixture
def core() -> Counting:
    return Counting()


def ask(thread: EngineThread, **options: object) -> tuple[Client, EngineResponse]:
    client = Client()
    answer = EngineResponse(PromptRequest([5], **{"max_output": 4, **options}), client)  # type: ignore[arg-type]
    thread.submit([answer])
    return client, answer


def test_whole_answers_and_streams(core: Counting) -> None:
    thread = EngineThread(core)
    whole, streamed = ask(thread)[0], ask(thread, streaming=True)[0]
    assert whole.parts() == [[1, 2, 3, 4]]
    parts = streamed.parts()
    assert [token for part in parts for token in part] == [1, 2, 3, 4] and len(parts) > 1
    thread.stop()


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"end_id": 2}, [1, 2]),
        ({"end_id": NO_END}, [1, 2, 3, 4]),
        ({"stop_words": ((2, 3),)}, [1, 2, 3]),
        ({"stop_words": ((9, 2), (4,))}, [1, 2, 3, 4]),
        ({"end_id": 2, "min_output": 3}, [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_ends(options: dict[str, object], tokens: list[int], streaming: bool, core: Counting) -> None:
    thread = EngineThread(core)
    client, _ = ask(thread, streaming=streaming, **options)
    assert [token for part in client.parts() for token in part] == tokens
    thread.stop()
    assert not core.open or core.cancelled == [0], "a request that ends early is cancelled"


def test_many_are_under_way_at_once_and_ids_are_used_again(core: Counting) -> None:
    thread = EngineThread(core)
    for _ in range(3):
        clients = [Client() for _ in range(16)]
        thread.submit([EngineResponse(PromptRequest([5], 50), client) for client in clients])
        assert all(client.parts() == [[*range(1, 51)]] for client in clients)
    thread.stop()
    assert core.most == 16


def test_cancelled(core: Counting) -> None:
    thread = EngineThread(core)
    client, answer = ask(thread, max_output=1 << 30, streaming=True)
    client.events.get(timeout=WAIT_S)
    thread.cancel([answer])
    client.parts()
    other, _ = ask(thread)
    assert other.parts() == [[1, 2, 3, 4]]
    thread.stop()


def test_one_error_and_a_broken_engine(core: Counting) -> None:
    thread = EngineThread(core)
    client = Client()
    thread.submit([EngineResponse(PromptRequest([13], 4), client)])
    ((error,),) = client.parts()
    assert "the engine cannot compute the request" in str(error)
    core.broken = True
    ((error,),) = ask(thread)[0].parts()
    assert error == "the engine has failed: RuntimeError: out of memory"
    ((error,),) = ask(thread)[0].parts()
    assert "out of memory" in str(error), "later requests get the error as well"
    thread.stop()


def test_an_engine_that_waits_for_a_rank_for_ever(core: Counting) -> None:
    """Another thread reports the cause, which open and later requests get immediately."""
    began, lasts = threading.Event(), threading.Event()

    def wait() -> Batch:
        began.set()
        assert lasts.wait(WAIT_S)
        return Counting.poll_responses(core)

    core.poll_responses = wait  # type: ignore[method-assign]
    thread = EngineThread(core)
    client, _ = ask(thread)
    assert began.wait(WAIT_S)
    thread.fail("rank 1 has ended")
    assert client.parts() == ask(thread)[0].parts() == [["rank 1 has ended"]]
    lasts.set()
    thread.stop()
    assert client.events.empty(), "each request ends once"


def test_why_an_engine_failed(core: Counting) -> None:
    core.broken = True
    thread = EngineThread(core, why_failed=lambda: "rank 1 has ended")
    assert ask(thread)[0].parts() == [["rank 1 has ended"]]
