"""--profile: when a client starts and stops its server's profiler, and what fails."""

from __future__ import annotations

import asyncio

import pytest

from mpillm.cores.base import LLMCore
from mpillm.cores.openai_client.endpoint import RemoteServer
from mpillm.cores.openai_client.profiling import START, STOP, ServerProfilers
from mpillm.report.validity_checks import doubts
from tests.helpers.endpoint_cores import Rows, core_of, requests
from tests.helpers.scripted_server import Reply, ScriptedServer, head, plain

EMPTY = Reply([head(Content_Length=0)])
BOTH = {START: lambda _: EMPTY, STOP: lambda _: EMPTY}


def ran(core: LLMCore) -> list[str]:
    """Run a small test; return the doubts about it."""
    core.load()
    core.run_health_check()
    core.start_test()
    core.enqueue(requests())
    Rows(core).until(4)
    core.flush()
    return doubts({"per_instance": [core.statistics()]}, others_serve=True)


def test_the_window_is_the_test() -> None:
    with ScriptedServer(others=dict(BOTH)) as server:
        with core_of(server.address, profiler_stop_s=5.0) as core:
            (doubt,) = ran(core)
        paths = [request.path for request in server.requests]
    assert "ran under a profiler (--profile): the figures are slower" in doubt and server.address in doubt
    assert paths.count(START) == paths.count(STOP) == 1
    in_test = paths[paths.index(START) : paths.index(STOP)]
    assert in_test.count("/v1/completions") == 4
    assert "/v1/models" not in in_test, "the health check was before"


def test_without_the_option_nothing_is_profiled() -> None:
    with ScriptedServer(others=dict(BOTH)) as server, core_of(server.address) as core:
        assert ran(core) == []
        assert not {START, STOP} & {request.path for request in server.requests}


def test_a_server_without_a_profiler_is_tested_all_the_same() -> None:
    with ScriptedServer() as server, core_of(server.address, profiler_stop_s=5.0) as core:
        (doubt,) = ran(core)
        assert STOP not in [request.path for request in server.requests]
    assert doubt.startswith(f"--profile: http://{server.address}/start_profile: ") and "404" in doubt
    assert "vLLM has this route only with --profiler-config" in doubt


def test_a_profiler_that_does_not_stop() -> None:
    broken = {**BOTH, STOP: lambda _: plain({"error": {"message": "disk full"}}, "500 Internal Server Error")}
    with ScriptedServer(others=broken) as server, core_of(server.address, profiler_stop_s=5.0) as core:
        profiled, problem = ran(core)
    assert "ran under a profiler" in profiled
    assert "/stop_profile: " in problem and "disk full" in problem


@pytest.mark.parametrize("path", [START, STOP])
def test_waits_are_bounded(path: str) -> None:
    async def profile(address: str) -> ServerProfilers:
        profilers = ServerProfilers([RemoteServer(address)])
        await profilers.start(0.3 if path == START else 30.0)
        await profilers.stop(0.3)
        return profilers

    with ScriptedServer(others={**BOTH, path: lambda _: Reply([], "hang")}) as server:
        values = asyncio.run(profile(server.address)).values()
    (problem,) = values["profile_problems"]
    assert "no answer" in problem and len(values["profiled"]) == (path == STOP)


def test_a_failed_run_stops_the_profiler_of_a_server_that_goes_on() -> None:
    with ScriptedServer(others=dict(BOTH)) as server:
        with core_of(server.address, profiler_stop_s=5.0) as core:
            core.load()
            core.run_health_check()
            core.start_test()
        assert [request.path for request in server.requests].count(STOP) == 1
