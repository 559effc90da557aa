"""When answers of triton_grpc go to rank 0. What a server answers is tried in tests/e2e."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tritonclient.grpc")

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from mpillm.comms.messages import Refusal, ResponseFlag
from mpillm.cores.base import CoreConfig
from mpillm.nvidia.configs import TritonHarnessConfig
from mpillm.triton.core import core as module
from mpillm.triton.core.triton_ready import Model, find_models, until_ready


class Stopped(Exception):
    pass


@pytest.mark.parametrize("ask", [until_ready, partial(find_models, name=None)])
def test_who_owns_a_server_looks_after_it_while_that_does_not_answer(ask: Callable[..., object]) -> None:
    """One that was stopped right when it was asked for its models was named 10 s later (seed 207)."""
    looks = itertools.count(1)

    def look() -> None:
        if next(looks) == 3:
            raise Stopped

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes its connections
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with grpc.insecure_channel(url) as channel, pytest.raises(Stopped):
            more = {"deadline_s": 600.0} if ask is until_ready else {"timeout_s": 600.0}
            ask(url, channel, on_wait=look, **more)
    assert time.monotonic() - began < 300


AT_ONCE = 64
MANY = AT_ONCE // module._GATHER_PART


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_answers_wait_for_others_where_nobody_measures_them(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline they go when they are a part of what may be open, or have waited; else at once."""
    config = TritonHarnessConfig(scenarios=(scenario,), runtime_flags={"max_batch_size": AT_ONCE})
    now, rung = 1000.0, 0
    core = module.TritonGrpcCore(CoreConfig("triton_grpc", settings=config))
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def ring() -> None:
        nonlocal rung
        rung += 1

    def taken() -> int:
        responses = core.poll_responses() if core.has_work() else None
        return 0 if responses is None else len(responses)

    core.wake = ring
    try:
        assert not core.has_work()
        counts = []
        for n, pause_s in ((1, 0.0), (MANY - 1, 0.0), (1, 0.0), (1, 0.0), (0, module._GATHER_S)):
            for id_ in range(n):
                core._add(id_, 0, [5])
            now += pause_s
            counts.append(taken())
        assert counts == ([1, 0, MANY, 0, 1] if scenario == "Offline" else [1, MANY - 1, 1, 1, 0])
        assert rung == 4
        assert core.quiet_s() > 1e9
    finally:
        core.notify_stop()


class Server:
    """Is ready, with one model, and says nothing on a stream until its client ends it."""

    def __getattr__(self, name: str) -> None:
        """Have the names of all other calls, which registering it asks for."""

    def ServerReady(self, request: object, context: object) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def RepositoryIndex(self, request: object, context: object) -> Any:
        made = service_pb2.RepositoryIndexResponse()
        made.models.add(name="llm")
        return made

    def ModelConfig(self, request: object, context: object) -> Any:
        made = service_pb2.ModelConfigResponse()
        made.config.model_transaction_policy.decoupled = True
        for name in ("input_ids", "request_output_len"):
            made.config.input.add(name=name)
        return made

    def ModelStreamInfer(self, requests: Iterator[object], context: object) -> Iterator[Any]:
        with contextlib.suppress(grpc.RpcError):
            for _ in requests:
                pass
        yield from ()


@pytest.fixture
def two_servers() -> Iterator[tuple[str, str]]:
    server = grpc.server(ThreadPoolExecutor(32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Server(), server)
    one, two = (server.add_insecure_port("localhost:0") for _ in range(2))
    server.start()
    yield f"localhost:{one}", f"localhost:{two}"
    server.stop(None).wait(300)


@pytest.mark.parametrize(("per_frontend", "per_server", "n"), [(1, 1, 1), (4, 1, 4), (1, 3, 3), (2, 8, 8)])
def test_both_names_of_the_number_of_clients(
    per_frontend: int, per_server: int, n: int, two_servers: tuple[str, str]
) -> None:
    """Each server gets so many."""
    config = TritonHarnessConfig(
        clients_per_frontend=per_frontend, clients_per_server=per_server, server_urls=two_servers
    )
    core = module.TritonGrpcCore(CoreConfig("triton_grpc", settings=config))
    try:
        core.load()
        assert Counter(one.url for one in core._clients.open) == dict.fromkeys(two_servers, n)
    finally:
        core.notify_stop()


def part(number: int, *tokens: int, is_last: bool = False) -> Any:
    """Return a response as a decoupled model sends it."""
    made = service_pb2.ModelInferResponse(id=str(number))
    made.parameters["triton_final_response"].bool_param = is_last
    made.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, len(tokens)])
    made.raw_output_contents.append(np.array(tokens, np.int32).tobytes())
    return made


@pytest.mark.parametrize("live", [False, True])
def test_later_tokens_are_reported_for_live_requests_only(live: bool) -> None:
    """Behind `serve` nothing waits for other answers, whatever the scenario."""
    config = TritonHarnessConfig(runtime_flags={"max_batch_size": AT_ONCE})
    core = module.TritonGrpcCore(CoreConfig("triton_grpc", serves=True, settings=config))
    stream: Any = SimpleNamespace(open={1})
    core._pending[1] = module._PendingRequest(7, Model("llm", decoupled=True), stream, live, 4)
    responses = []
    try:
        for response in (part(1), part(1, 5, 6), part(1, 8), part(1, is_last=True)):
            core._receive(stream, response, "")
            if core.has_work() and (batch := core.poll_responses()) is not None:
                responses.append((int(batch.rows["flags"][0]), batch.tokens.tolist()))
    finally:
        core.notify_stop()
    first, end = (int(ResponseFlag.FIRST), [5]), (int(ResponseFlag.FINAL), [5, 6, 8])
    assert responses == ([first, (int(ResponseFlag.PARTIAL), [6, 8]), end] if live else [first, end])


def test_a_server_that_sends_too_many_tokens_is_stopped() -> None:
    """Its answer would take unlimited memory; the core cancels the request."""
    config = TritonHarnessConfig()
    core = module.TritonGrpcCore(CoreConfig("triton_grpc", settings=config))
    sent: list[int] = []
    stream: Any = SimpleNamespace(open={1}, url="h:1", send=lambda number, *_: sent.append(number))
    core._pending[1] = module._PendingRequest(7, Model("llm", decoupled=True), stream, False, 4)
    try:
        for _ in range(3):
            core._receive(stream, part(1, 5, 6), "")
        batch = core.poll_responses()
    finally:
        core.notify_stop()
    assert batch is not None and sent == [1] and not core._pending
    assert batch.rows["flags"][-1] & ResponseFlag.ERROR and len(batch.tokens) == 1


@pytest.mark.parametrize("serves", [False, True])
def test_an_endpoint_reports_why_the_server_refuses(serves: bool) -> None:
    config = TritonHarnessConfig(runtime_flags={"max_batch_size": AT_ONCE})
    core = module.TritonGrpcCore(CoreConfig("triton_grpc", serves=serves, settings=config))
    stream: Any = SimpleNamespace(open={1, 2}, url="h:1")
    try:
        for number, error in ((1, "UNAVAILABLE: Exceeds maximum queue size"), (2, "too\nlong")):
            core._pending[number] = module._PendingRequest(
                number, Model("llm", decoupled=True), stream, True, 4
            )
            core._receive(stream, part(number), error)
        batch = core.poll_responses()
        assert batch is not None
    finally:
        core.notify_stop()
    responses = [(int(row["flags"]), one.tokens.tolist()) for one in batch.split() for row in one.rows]
    end: tuple[int, list[int]] = (int(ResponseFlag.FINAL | ResponseFlag.ERROR), [])
    assert [one for one in responses if one[0] != ResponseFlag.REFUSED] == [end, end]
    refused = [Refusal.of(numbers) for flags, numbers in responses if flags == ResponseFlag.REFUSED]
    both = [Refusal(503, "UNAVAILABLE: Exceeds maximum queue size"), Refusal(500, r"too\nlong")]
    assert refused == (both if serves else [])
