"""KV caches over real sockets, and what becomes of those that do not arrive."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mpillm.cores.capabilities import Cache
from mpillm.endpoint.disagg import kv_socket
from mpillm.endpoint.disagg.kv_socket import CacheLost, KvStore, fetch
from tests.helpers.support import wait_until

HOST = "127.0.0.1"
CACHE = np.arange(3 << 20, dtype=np.uint32).view(np.uint8)  # 12 MiB: more than any socket buffers
TIMEOUT_S = 60.0


@pytest.fixture
def store() -> Iterator[KvStore]:
    made = KvStore(HOST, TIMEOUT_S)
    yield made
    made.close()


def fetched(store: KvStore, id_: int, key: bytes | None = None) -> Cache:
    return fetch(HOST, store.port, key or store.key(id_) or b"", CACHE.nbytes, time.monotonic() + TIMEOUT_S)


def test_a_cache_is_fetched_once(store: KvStore) -> None:
    store.open(5)
    store.put(5, CACHE)
    key = store.key(5)
    assert np.array_equal(fetched(store, 5), CACHE)
    wait_until(lambda: store.key(5) is None, "the store to let it go")
    assert wait_until(store.take_fetched, "the word of it") == [5]
    assert store.take_fetched() == [] and store.overdue() == []
    with pytest.raises(CacheLost, match="it has dropped the KV cache"):
        fetched(store, 5, key)


def test_a_host_of_ipv6() -> None:
    with contextlib.closing(KvStore("::1", TIMEOUT_S)) as store:
        store.open(1)
        store.put(1, CACHE)
        found = fetch("::1", store.port, store.key(1) or b"", CACHE.nbytes, time.monotonic() + TIMEOUT_S)
    assert np.array_equal(found, CACHE)


def test_an_early_request_waits(store: KvStore) -> None:
    store.open(1)
    made: list[Cache] = []
    thread = threading.Thread(target=lambda: made.append(fetched(store, 1)))
    thread.start()
    store.put(1, CACHE)
    thread.join(TIMEOUT_S)
    assert np.array_equal(made[0], CACHE)


def test_a_cache_that_is_dropped_while_somebody_waits(store: KvStore) -> None:
    store.open(1)
    with socket.create_connection((HOST, store.port)) as connection:
        connection.sendall(store.key(1) or b"")
        store.drop(1)
        assert int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little", signed=True) == -1


def test_a_client_that_breaks_off_leaves_the_cache_to_another(store: KvStore) -> None:
    store.open(1)
    store.put(1, CACHE)
    with socket.create_connection((HOST, store.port)) as connection:
        connection.sendall(store.key(1) or b"")
        connection.recv(100)
    assert store.take_fetched() == []
    assert np.array_equal(fetched(store, 1), CACHE)


def test_nothing_of_a_dropped_request_touches_the_next_one_with_its_id(store: KvStore) -> None:
    store.open(5)
    store.put(5, CACHE)
    with socket.create_connection((HOST, store.port), TIMEOUT_S) as client:
        client.sendall(store.key(5) or b"")
        left = 12 + CACHE.nbytes
        while left:
            left -= len(client.recv(left))
        store.drop(5)  # its time is over, or the client has gone
        store.open(5)
        client.sendall(b"\x01")
        assert client.recv(1) == b"", "the store has read that the first cache is there"
    assert store.key(5) is not None and store.take_fetched() == []

    store.put(5, CACHE)
    fetched(store, 5)
    wait_until(lambda: store.key(5) is None, "the store to let it go")
    store.drop(5)  # before anybody has asked what is fetched
    assert store.take_fetched() == []


def test_a_cache_that_nobody_fetches() -> None:
    store = KvStore(HOST, 0.0)
    store.open(3)
    wait_until(lambda: store.overdue() == [3], "its time to be over")
    store.drop(3)
    assert store.overdue() == []
    store.close()


def test_a_cache_of_another_size(store: KvStore) -> None:
    store.open(1)
    store.put(1, CACHE[:100])
    with pytest.raises(CacheLost, match=f"has 100 bytes, not {CACHE.nbytes}"):
        fetched(store, 1)


def test_a_server_that_sends_a_byte_now_and_then() -> None:
    """Its bytes put nothing off: the cache has its time, and no more."""
    over = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(struct.pack("<qI", 1 << 20, 0))
            while not over.wait(0.0002):
                connection.sendall(b"x")

    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(CacheLost, match="did not come in time"):
                fetch(HOST, listening.getsockname()[1], bytes(16), 1 << 20, began + 0.3)
            assert time.monotonic() - began < 100
        finally:
            over.set()
            thread.join()


def test_a_server_that_is_gone(store: KvStore) -> None:
    store.open(1)
    key = store.key(1)
    store.close()
    with pytest.raises(CacheLost, match=r"can't be fetched: Connection refused"):
        fetched(store, 1, key)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "it closed the connection before"),
        (CACHE.nbytes.to_bytes(8, "little") + bytes(104), "it closed the connection before"),
        (CACHE.nbytes.to_bytes(8, "little") + bytes(4 + CACHE.nbytes), "another checksum"),
        (None, "did not come in time"),
    ],
)
def test_a_server_that_breaks_off_or_is_silent(sent: bytes | None, message: str) -> None:
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.recv(16, socket.MSG_WAITALL)
            connection.sendall(sent or b"")
            if sent is None:
                over.wait(TIMEOUT_S)

    with socket.create_server((HOST, 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        timeout_s = TIMEOUT_S if sent is not None else 0.2
        with pytest.raises(CacheLost, match=message):
            fetch(HOST, listening.getsockname()[1], bytes(16), CACHE.nbytes, time.monotonic() + timeout_s)
        over.set()
        thread.join(TIMEOUT_S)


def test_a_caller_that_cannot_be_accepted_does_not_end_the_store(store: KvStore) -> None:
    """For want of a file descriptor, which another connection may give back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack, socket.socket() as caller:
        resource.setrlimit(resource.RLIMIT_NOFILE, (caller.fileno() + 50, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(caller.fileno()))
        caller.connect((HOST, store.port))
        time.sleep(0.3)
    store.open(1)
    store.put(1, CACHE)
    assert np.array_equal(fetched(store, 1), CACHE)


def test_strangers_get_no_thread_and_few_files(store: KvStore) -> None:
    threads = threading.active_count()
    store.open(1)
    store.put(1, CACHE)
    with contextlib.ExitStack() as stack:
        for i in range(200):
            one = stack.enter_context(socket.create_connection((HOST, store.port), TIMEOUT_S))
            with contextlib.suppress(OSError):  # closed already
                one.sendall(bytes(16) if i % 2 else b"half")
        assert np.array_equal(fetched(store, 1), CACHE)
        assert threading.active_count() <= threads + 1


def test_a_key_gives_few_callers_a_thread(store: KvStore) -> None:
    """Whoever sees an answer of a context server has one."""
    store.open(1)
    key = store.key(1) or b""
    with contextlib.ExitStack() as stack:
        first = [
            stack.enter_context(socket.create_connection((HOST, store.port), TIMEOUT_S))
            for _ in range(kv_socket._CALLERS)
        ]
        for one in first:
            one.sendall(key)
        wait_until(lambda: store._stored[1].callers == len(first), "the first callers")
        with pytest.raises(CacheLost, match="has dropped"):
            fetched(store, 1, key)
        store.put(1, CACHE)
        assert first[0].recv(8, socket.MSG_WAITALL) == CACHE.nbytes.to_bytes(8, "little")
    wait_until(lambda: not store._stored[1].callers, "their end")
    assert np.array_equal(fetched(store, 1), CACHE)


def test_the_checksum_sees_each_byte_and_its_place() -> None:
    cache = np.random.default_rng(0).integers(0, 256, 300_003).astype(np.uint8)
    expected = kv_socket.checksum(cache)
    swapped = cache.copy()
    swapped[:65_536], swapped[65_536:131_072] = cache[65_536:131_072], cache[:65_536]
    assert kv_socket.checksum(swapped) != expected
    for at in (0, 7, 131_071, 299_999, 300_000, 300_002):
        other = cache.copy()
        other[at] ^= 1
        assert kv_socket.checksum(other) != expected
    assert kv_socket.checksum(cache[:0]) == kv_socket.checksum(np.zeros(0, np.uint8))
