"""An engine of two ranks behind a real tritonserver: a server for each rank, or one that starts the other.

Only with `make test-triton`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers.ports import free_port, free_ports
from tests.helpers.real_triton import (
    MARKS,
    N_OUTPUT,
    PROMPTS,
    TRITONSERVER,
    repository,
    serving,
    start,
    until_ready,
)
from tests.helpers.support import INSTANCE_LOST, Command, Starter, wait_until
from tests.helpers.triton_requests import Asker, Refusal

pytestmark = MARKS


def check(asker: Asker, plain: list[list[int]]) -> None:
    """Ask all at once, then one as a stream."""
    answers = asker.ask(PROMPTS, N_OUTPUT)
    found = {int(one["batch_index"].item()): one["output_ids"][0, 0].tolist() for one in answers}
    assert found == dict(enumerate(plain))
    parts = asker.ask([PROMPTS[0]], N_OUTPUT, streaming=True)
    assert [int(part["output_ids"].item()) for part in parts] == plain[0]


def test_a_server_for_each_rank(both: Starter) -> None:
    plain = repository(both)
    with serving(both) as ((port,), _):
        check(Asker(port, "tensorrt_llm"), plain)
    log = (both.folder / "servers/tritonserver_0.log").read_text()
    assert log.count("Started GRPCInferenceService") == 1, "rank 1 does not serve"


def test_one_server_that_starts_the_other_rank(both: Starter) -> None:
    plain = repository(both)
    with serving(both, 1, "--triton_orchestrator") as ((port,), _):
        check(Asker(port, "tensorrt_llm"), plain)
        assert worker(both), "it has ended when `serving` has"


def test_one_server_with_two_engines_of_two_ranks(one: Starter) -> None:
    """Without an option: each of its models starts its own ranks."""
    plain = repository(one, "--triton_num_servers=1", "--triton_num_models_per_server=2", text_models=False)
    models = sorted(path.parent.name for path in (one.folder / "repo_0").glob("*/config.pbtxt"))
    assert len(models) == 2
    with serving(one) as ((port,), _):
        for model in models:
            check(Asker(port, model), plain)


def test_a_worker_that_dies_is_named(one: Starter) -> None:
    """Open requests and later ones get an error. (MPICH ends the server as well.)"""
    plain = repository(one)
    with serving(one, 1, "--triton_orchestrator") as ((port,), _):
        asker = Asker(port, "tensorrt_llm")
        pid = worker(one)
        what = rf"rank 1 on \S+ \(pid {pid}\) of the engine has ended"
        with pytest.raises(Refusal, match=what):
            for n, _ in enumerate(asker.responses(asker.request([[5, 6]], 200, streaming=True, end_id=-1))):
                if n == 2:
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises(Refusal, match=what):
            asker.ask([PROMPTS[0]], len(plain[0]))


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (0, (), "noticed that process rank 0 "),
        (1, (), "noticed that process rank 1 "),
        (
            None,
            ("--triton_orchestrator",),
            "tritonserver 0 was ended by signal 9 (SIGKILL) after it was ready",
        ),
    ],
    ids=["leader", "follower", "orchestrator"],
)
def test_a_server_that_dies(rank: int | None, options: tuple[str, ...], message: str, one: Starter) -> None:
    """The open request ends, no process stays, and run-llm-server names the process that died."""
    import grpc

    repository(one)
    port = free_port()
    servers = until_ready(start(one, [port], *options))
    pid = server_of(servers, rank)
    asker = Asker(port, "tensorrt_llm")
    request = asker.request([[5, 6]], 400, streaming=True, end_id=-1)
    with pytest.raises((Refusal, grpc.RpcError)):
        for n, _ in enumerate(asker.responses(request)):
            if n == 2:
                os.kill(pid, signal.SIGKILL)
    ended = servers.end(60).must(INSTANCE_LOST)
    assert message in ended.message, ended
    wait_until(lambda: not servers.pids(), "no process that stays", 30)


def server_of(servers: Command, rank: int | None) -> int:
    """Return the process of a rank's tritonserver; None: of the only one."""
    wanted = b"" if rank is None else f"OMPI_COMM_WORLD_RANK={rank}\0".encode()
    (pid,) = (
        pid
        for pid in servers.pids()
        if Path(f"/proc/{pid}/comm").read_text().strip() == "tritonserver"
        and wanted in Path(f"/proc/{pid}/environ").read_bytes()
    )
    return pid


def test_ranks_that_nobody_started(one: Starter) -> None:
    repository(one)
    ports = [
        f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]
    ended = one.command(
        [TRITONSERVER, "--model-repository=repo_0", "--disable-auto-complete-config", *ports]
    ).end(60)
    ended.must(1)
    assert "the engine has 2 ranks, and MPI's world 1: start a tritonserver for each rank" in ended.err


def worker(starter: Starter) -> int:
    """Return the process that MPI_Comm_spawn has started."""
    module = b"mpillm.triton.models.spawned_rank"
    (pid,) = (
        pid
        for pid in starter.commands[-1].pids()
        if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
    return pid
