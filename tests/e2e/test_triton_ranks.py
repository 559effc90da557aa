"""An engine of two ranks behind a real tritonserver: a server for each rank, or one that starts the other.

Only with `make test-triton`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mpillm.engine.weights.sources import save_preset
from tests.e2e.test_triton import generate, serving
from tests.e2e.test_triton_engine import N_OUTPUT, PROMPTS
from tests.helpers.oracle import Oracle
from tests.helpers.real_triton import MARKS, TRITONSERVER
from tests.helpers.support import Starter, free_ports
from tests.helpers.triton_requests import Asker, Refusal

pytestmark = MARKS
RANKS = 2


def repository(starter: Starter, *options: object) -> list[list[int]]:
    """Write one whose engine has two ranks; the answers to `PROMPTS`."""
    folder = starter.folder / "model"
    save_preset("tiny-llama", folder)
    generate(
        starter, f"--model_path={folder}", f"--tensor_parallelism={RANKS}", "--triton_text_models", *options
    )
    oracle = Oracle(folder)
    return [oracle.tokens(prompt, N_OUTPUT) for prompt in PROMPTS]


def check(asker: Asker, plain: list[list[int]]) -> None:
    """Ask all at once, then one as a stream."""
    answers = asker.ask(PROMPTS, N_OUTPUT)
    found = {int(one["batch_index"].item()): one["output_ids"][0, 0].tolist() for one in answers}
    assert found == dict(enumerate(plain))
    parts = asker.ask([PROMPTS[0]], N_OUTPUT, streaming=True)
    assert [int(part["output_ids"].item()) for part in parts] == plain[0]
    with pytest.raises(Refusal, match="return_context_logits"):  # so far on one rank only
        asker.ask([[5]], 4, return_context_logits=True)


def test_a_server_for_each_rank(one: Starter) -> None:
    plain = repository(one)
    with serving(one) as ((port,), _):
        check(Asker(port, "tensorrt_llm"), plain)
    log = (one.folder / "servers/tritonserver_0.log").read_text()
    assert log.count("Started GRPCInferenceService") == 1, "rank 1 does not serve"


def test_one_server_that_starts_the_other_rank(one: Starter) -> None:
    plain = repository(one)
    with serving(one, 1, "--triton_orchestrator") as ((port,), _):
        check(Asker(port, "tensorrt_llm"), plain)
        assert worker(one), "it has ended when `serving` has"


def test_a_worker_that_dies_is_named(one: Starter) -> None:
    """Open requests and later ones get an error."""
    plain = repository(one)
    with serving(one, 1, "--triton_orchestrator") as ((port,), _):
        asker = Asker(port, "tensorrt_llm")
        pid = worker(one)
        what = rf"rank 1 \(process {pid} on \S+\) of the engine has ended"
        with pytest.raises(Refusal, match=what):
            for n, _ in enumerate(asker.responses(asker.request([[5, 6]], 200, streaming=True, end_id=-1))):
                if n == 2:
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises(Refusal, match=what):
            asker.ask([PROMPTS[0]], len(plain[0]))


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
    module = b"mpillm.triton_models.spawned_rank"
    (pid,) = (
        pid
        for pid in starter.commands[-1].pids()
        if module in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
    return pid
