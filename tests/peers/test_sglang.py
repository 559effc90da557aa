"""SGLang on CPUs as ranks of the run, where MPILLM_SGLANG names an environment that has it.

`benchmarks/notes/2026-11-27-sglang-on-cpus.md` says how one is made: no wheel of it is for CPUs. A context
and a generation server also need Mooncake: `benchmarks/notes/2026-12-01-sglang-pair-on-cpus.md`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.peer_programs import TIMEOUT_S, Show, offline, processes
from tests.helpers.support import DONE, INSTANCE_LOST, Starter

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("sglang_in_path")]

N, LENGTH = 24, 16
# Its own attention wants kernels that only Intel's processors run; its cache would take half of the memory.
ON_CPUS = (
    "--server_args=--device cpu --attention-backend torch_native --sampling-backend pytorch"
    " --max-total-tokens 20000"
)
START: tuple[object, ...] = ("--server", "sglang", "--health_deadline", 900)
SGLANG = (*START, ON_CPUS)
# KV caches over TCP; by default, a generation server copies those of paused requests to pinned memory.
PAIR = (
    *("--mode", "disaggregated", *START, "--max_batch_size", 4),
    f"{ON_CPUS} --disaggregation-transfer-backend mooncake_tcp"
    " --disaggregation-decode-retraction-backup cpu_tensor",
)


def options(model: Path, data: Path) -> tuple[object, ...]:
    return ("--dataset_path", data, "--model_path", model, "--max_output_len", LENGTH, "--dtype", "float32")


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip without Mooncake. Set a variable of SGLang, without which a context server needs CUDA events."""
    if not [*Path(os.environ["MPILLM_SGLANG"]).glob("lib/python*/site-packages/mooncake")]:
        pytest.skip("SGLang's environment has no Mooncake")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the threads of two servers would wait for each other


def test_sglang(model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    data = options(model, prompts(N))
    ours = offline(one, "ours", "torch", *data)
    words = ("--min_duration", 0, "--save_outputs", "--log_dir", one.folder / "theirs")
    command = one.start(2, *data, *SGLANG, *words, core="trtllm_endpoint", log_dir=one.folder / "theirs")
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    (client,) = ended.result["per_instance"]
    show(f"{client['frameworks'][0]} as a rank: Offline VALID; {equal} of {N} answers have our tokens")
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == N
    assert client["server_cached_tokens"] == 0 and "prefix cache" not in ended.out
    assert client["server_generated_tokens"] == client["tokens"]
    assert client["frameworks"][0].startswith("SGLang 0.")


def test_its_scheduler_is_killed(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    data = options(model, prompts(N))
    command = one.start(2, *data, *SGLANG, "--min_duration", 0, "--max_batch_size", 2, core="trtllm_endpoint")
    command.wait_phase("test", TIMEOUT_S)
    (scheduler,) = processes(command, b"sglang::scheduler", b"sglang")
    os.kill(scheduler, signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    (message,) = [line.strip() for line in ended.err.splitlines() if "server 0 (sglang): process" in line]
    show(f"SGLang's scheduler killed in the test: {message}")
    assert "(sglang::scheduler) was ended by signal 9 (SIGKILL)" in message


@pytest.mark.usefixtures("mooncake")
def test_a_pair(model: Path, prompts: Callable[[int], Path], one: Starter, show: Show) -> None:
    data = options(model, prompts(N))
    ours = offline(one, "ours", "torch", *data)
    words = ("--min_duration", 0, "--save_outputs", "--log_dir", one.folder / "theirs")
    command = one.start(3, *data, *PAIR, *words, core="trtllm_endpoint", log_dir=one.folder / "theirs")
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    (client,) = ended.result["per_instance"]
    transfers = client["server_context_transfers"]
    show(
        f"a pair of SGLang: Offline VALID; {equal} of {N} answers have our tokens; {transfers:.0f} transfers"
    )
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == N
    assert client["handed_over"] == transfers == N and client["server_failed_transfers"] == 0
    checks = ended.result["server_checks"]
    for name in ("contexts_arrived", "no_failed_transfers", "no_cached_prompts", "server_totals"):
        assert checks[name] == "", name
    assert client["frameworks"][0].startswith("SGLang 0.")


@pytest.mark.usefixtures("mooncake")
def test_a_context_server_s_scheduler_is_killed(
    model: Path, prompts: Callable[[int], Path], one: Starter, show: Show
) -> None:
    command = one.start(3, *options(model, prompts(N)), *PAIR, "--min_duration", 0, core="trtllm_endpoint")
    command.wait_phase("test", TIMEOUT_S)
    (scheduler,) = processes(command, b"sglang::scheduler", b"prefill")
    os.kill(scheduler, signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    lines = [line.strip() for line in ended.err.splitlines()]
    (message,) = [line for line in lines if "server 0 (sglang, context): process" in line]
    show(f"the scheduler of SGLang's context server killed in the test: {message}")
    assert "(sglang::scheduler) was ended by signal 9 (SIGKILL)" in message
