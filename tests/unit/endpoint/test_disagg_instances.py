"""Instances of context and generation servers, whose core and memory do one step at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpillm.comms.messages import (
    DONE,
    DROP,
    NO_INSTANCE,
    REQUEST,
    RESPONSE,
    WORK,
    Batch,
    RequestFlag,
    ResponseFlag,
)
from mpillm.comms.tags import Tag
from mpillm.cores.base import Credits
from mpillm.cores.capabilities import Cache
from mpillm.endpoint.disagg.instances import Arrival, ContextServer, GenerationServer
from mpillm.endpoint.disagg.kv_socket import KvStore, fetch
from tests.helpers.support import wait_until

ID, TOKEN = 7, 65
PROMPT = np.array([5, 6, 7], np.int32)
CACHE = np.arange(12, dtype=np.uint8)
FINAL, FIRST, CANCELLED = ResponseFlag.FINAL, ResponseFlag.FIRST, ResponseFlag.CANCELLED


class Memory:
    """Stands for `HostEnd`."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.moved: dict[int, Cache] = {}

    def take(self, request_id: int, slot: int, n_tokens: int) -> None:
        self.slots[request_id] = slot

    def give(self, request_id: int, slot: int, n_tokens: int, cache: Cache) -> None:
        assert request_id not in self.slots
        self.slots[request_id] = slot

    def poll(self) -> dict[int, Cache]:
        moved, self.moved = self.moved, {}
        for id_ in moved:
            del self.slots[id_]
        return moved


class Core:
    """A core that does what the test says, and notes what the role asks."""

    streams = True

    def __init__(self) -> None:
        self.memory = Memory()
        self.named: list[int] = []
        self.moved: list[int] = []
        self.rows: list[tuple[int, list[int], int]] = []
        self.released: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self.admitted: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.has_room = True

    def load(self) -> None: ...
    def start_test(self) -> None: ...
    def connect(self, mover: Any, peers: Any) -> None: ...
    def lose_peer(self, instance: int) -> None: ...
    def enqueue(self, requests: Batch) -> None: ...

    def credits(self) -> Credits:
        return Credits(8, 800)

    def has_work(self) -> bool:
        return bool(self.rows)

    def poll_responses(self) -> Batch:
        made, self.rows = batch(self.rows), []
        return made

    def started(self) -> list[int]:
        named, self.named = self.named, []
        return named

    def poll_kv(self) -> list[int]:
        moved, self.moved = self.moved, []
        return moved

    def send_kv(self, request_id: int, receiver: int, slot: int) -> None:
        self.sent.append((request_id, slot))

    def receive_kv(self, request: Batch, sender: int, slot: int) -> bool:
        return self.has_room

    def release_kv(self, request_id: int) -> None:
        self.released.append(request_id)

    def admit(self, request: Batch, first_token: int) -> None:
        self.admitted.append((int(request.rows["id"][0]), first_token))

    def cancel(self, ids: Iterable[int]) -> None:
        self.cancelled += ids

    def host_end(self) -> Memory:
        return self.memory

    def new_cache(self, n_bytes: int) -> Cache:
        return np.empty(n_bytes, np.uint8)


def batch(rows: list[tuple[int, list[int], int]]) -> Batch:
    made = np.array([(id_, len(tokens), flags) for id_, tokens, flags in rows], RESPONSE)
    return Batch(made, np.array([token for _, tokens, _ in rows for token in tokens], np.int32))


def new_route() -> Any:
    """Return a route to a leader that keeps the rows which it receives: id, tokens, flags."""
    route: Any = SimpleNamespace(handlers={}, rank=0, rows=[])

    def send(dest: int, tag: Tag, buffer: Any) -> None:
        if tag == DONE.tag:
            for one in DONE.read(buffer).split():
                row = one.rows[0]
                route.rows.append((int(row["id"]), one.tokens.tolist(), int(row["flags"])))

    route.send = send
    return route


def receive(role: Any, message: Any, value: Any) -> None:
    buffer = message.write(value)
    role._route.handlers[message.tag](SimpleNamespace(source=0, buffer=buffer))


def request(flag: RequestFlag) -> Batch:
    rows = np.zeros(1, REQUEST)
    rows["id"], rows["n_tokens"], rows["flags"] = ID, len(PROMPT), flag
    rows["generation"], rows["max_output"] = NO_INSTANCE, 4
    return Batch(rows, PROMPT)


def begin(role: Any) -> None:
    role.load()
    role.ready()
    role._route.rows.clear()


@pytest.fixture
def context() -> Iterator[Any]:
    core: Any = Core()
    with contextlib.closing(KvStore("127.0.0.1", 30.0)) as store:
        role: Any = ContextServer(core, new_route(), 0, 0, store)
        begin(role)
        receive(role, WORK, request(RequestFlag.CONTEXT_ONLY))
        yield role


def last_rows(role: Any) -> list[Any]:
    """Return the rows so far, without those that only confirm a cancellation."""
    return [row for row in role._route.rows if row[2] != ResponseFlag.CANCEL_DONE]


def test_a_context_is_kept_until_it_is_fetched(context: Any) -> None:
    core, store, first = context._core, context._store, (ID, [TOKEN], int(FIRST))
    core.named = [ID]
    context.poll()
    assert core.sent == [(ID, core.memory.slots[ID])], "while it is computed"
    core.rows = [(ID, [TOKEN], FIRST)]
    context.poll()
    assert last_rows(context) == [first] and not core.released
    core.moved = [ID]
    context.poll()
    assert core.released == [ID], "also while its cache has not arrived in memory"
    core.memory.moved = {ID: CACHE}
    context.poll()
    assert last_rows(context) == [first] and not context.done("drain")
    cache = fetch("127.0.0.1", store.port, store.key(ID), len(CACHE), time.monotonic() + 60.0)
    assert np.array_equal(cache, CACHE)
    wait_until(lambda: context.poll() or len(last_rows(context)) > 1, "the end of the request", 10)
    assert last_rows(context) == [first, (ID, [TOKEN], int(FINAL))] and context.done("drain")
    assert context._not_fetched == 0


def test_a_context_that_ends_with_its_first_token(context: Any) -> None:
    core = context._core
    core.named, core.rows = [ID], [(ID, [TOKEN], FIRST | FINAL)]
    context.poll()
    core.moved = [ID]
    context.poll()
    assert last_rows(context) == [] and core.released == [], "its cache is still on the way"
    core.memory.moved = {ID: CACHE}
    context.poll()
    assert core.released == [ID] and context.done("drain") and context._store.key(ID) is None
    assert last_rows(context) == [(ID, [TOKEN], int(FIRST | FINAL))]


@pytest.mark.parametrize("when", range(5))
def test_a_context_that_is_given_up(context: Any, when: int) -> None:
    """Its id is free when neither the engine nor the memory has it."""
    core = context._core
    steps: list[Callable[[], object]] = [
        lambda: setattr(core, "named", [ID]),
        lambda: setattr(core, "rows", [(ID, [TOKEN], FIRST)]),
        lambda: setattr(core, "moved", [ID]),
        lambda: setattr(core.memory, "moved", {ID: CACHE}),
    ]
    for step in steps[:when]:
        step()
        context.poll()
    receive(context, DROP, [ID])
    assert core.cancelled == [ID]
    if when == 0:
        core.rows = [(ID, [], CANCELLED | FINAL)]
    else:
        for step in steps[when:]:
            assert not any(flags & FINAL for *_, flags in last_rows(context))
            step()
            context.poll()
    context.poll()
    assert last_rows(context)[-1] == (ID, [], int(CANCELLED | FINAL)) and context.done("drain")
    assert context._store.key(ID) is None and core.released == ([ID] if when else [])


def test_a_context_that_nobody_fetches(context: Any) -> None:
    core = context._core
    context._store._timeout_s = 0.0
    core.named, core.rows, core.moved = [ID], [(ID, [TOKEN], FIRST)], [ID]
    wait_until(lambda: not context.poll(), "nothing to do", 10)
    assert not context.done("drain"), "its cache has not arrived in memory"
    core.memory.moved = {ID: CACHE}
    wait_until(lambda: not context.poll(), "nothing to do", 10)
    assert last_rows(context)[-1] == (ID, [TOKEN], int(FINAL)) and context.done("drain")
    assert context._not_fetched == 1


@pytest.fixture
def generation() -> Any:
    core: Any = Core()
    role: Any = GenerationServer(core, new_route(), 0, 0, {})
    begin(role)
    receive(role, WORK, request(RequestFlag.GENERATION_ONLY))
    return role


def test_an_arrival_waits_for_room(generation: Any) -> None:
    core = generation._core
    core.has_room = False
    generation.poll()
    generation._arrivals[ID] = Arrival(TOKEN, CACHE)
    generation.poll()
    assert last_rows(generation) == [] and not core.memory.slots and not generation.done("drain")
    core.has_room = True
    generation.poll()
    assert last_rows(generation) == [(ID, [TOKEN], int(FIRST))] and core.memory.slots
    core.moved = [ID]
    generation.poll()
    assert core.admitted == [(ID, TOKEN)] and not generation.done("drain")
    core.memory.moved = {ID: CACHE}
    generation.poll()
    assert generation.done("drain")


def test_an_id_that_is_used_again(generation: Any) -> None:
    """The cache of its last request has arrived, but the memory still sends it."""
    core = generation._core
    generation._arrivals[ID] = Arrival(TOKEN, CACHE)
    generation.poll()
    core.moved, core.rows = [ID], [(ID, [TOKEN, 66], FINAL)]
    generation.poll()
    generation._route.rows.clear()
    receive(generation, WORK, request(RequestFlag.GENERATION_ONLY))
    generation._arrivals[ID] = Arrival(TOKEN, CACHE)
    generation.poll()
    assert last_rows(generation) == []
    core.memory.moved = {ID: CACHE}
    for _ in range(2):
        generation.poll()
    assert last_rows(generation) == [(ID, [TOKEN], int(FIRST))] and core.memory.slots


@pytest.mark.parametrize("offered", [False, True])
def test_a_request_that_is_given_up(generation: Any, offered: bool) -> None:
    core = generation._core
    if offered:
        core.has_room = False
        generation._arrivals[ID] = Arrival(TOKEN, CACHE)
        generation.poll()
    receive(generation, DROP, [ID])
    if offered:
        assert core.cancelled == []
        core.has_room = True
        generation.poll()
        assert core.cancelled == [ID], "from now on the core has it"
        core.moved, core.memory.moved = [ID], {ID: CACHE}
        generation.poll()
        core.rows = [(ID, [], CANCELLED | FINAL)]
    generation.poll()
    assert last_rows(generation)[-1] == (ID, [], int(CANCELLED | FINAL)) and generation.done("drain")
