"""vLLM as ranks of the run: `--server=vllm` starts it, and every end of it is named."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_instance_loss import wait_for_answers
from tests.helpers.clusters import OnHosts, or_skip
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    Command,
    Starter,
    descendants,
    wait_until,
)
from tests.peers.conftest import TIMEOUT_S, Program, Says, peer_environment
from tests.peers.test_servers import offline, server
from tests.peers.test_servers import prompts as prompts
from tools.hosts import hosts

pytestmark = pytest.mark.peers

LENGTH, WITHIN_S = 32, 120.0
VLLM: tuple[object, ...] = ("--server", "vllm", "--server_args=--enforce-eager", "--max_seq_len", 1024)


@pytest.fixture(autouse=True)
def in_path(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vllm in PATH, and its settings for CPUs in the environment."""
    program("vllm")
    for name in ("PATH", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, peer_environment()[name])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def options(model: Path, data: Path) -> tuple[object, ...]:
    return ("--dataset_path", data, "--model_path", model, "--max_output_len", LENGTH, "--dtype", "float32")


@pytest.mark.parametrize("ranks", [2, 3])
def test_vllm(ranks: int, model: Path, prompts: Callable[[int], Path], one: Starter, say: Says) -> None:
    """One and two instances: every answer has the tokens of ours."""
    n = 160 if ranks == 2 else 40
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = ("--min_duration", 0, "--save_outputs", "--log_dir", one.folder / "theirs")
    command = one.start(ranks, *data, *VLLM, *words, core="trtllm_endpoint", log_dir=one.folder / "theirs")
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    say(f"{ranks - 1} x vLLM as ranks: Offline VALID; {equal} of {n} answers have our tokens")
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == n
    for instance in ended.result["per_instance"]:
        assert instance["frameworks"] == ["vLLM 0.32.0"] and instance["server_cached_tokens"] == 0
        assert instance["server_generated_tokens"] == instance["tokens"]
    assert "prefix cache" not in ended.out


def test_server_scenario(model: Path, prompts: Callable[[int], Path], one: Starter, say: Says) -> None:
    result = server(one, 64, *options(model, prompts(64)), *VLLM)
    say(f"vLLM as a rank: Server VALID, first token p50 {result['ttft_ms']['p50']:.0f} ms")


def test_tensor_parallel_over_three_hosts(
    model: Path, prompts: Callable[[int], Path], one: Starter, say: Says
) -> None:
    """Each host has a third of every layer; gloo carries their sums."""
    n = 40
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = ("run", *data, *VLLM, "--tensor_parallelism", 3, "--server_nodes", 3, "--min_duration", 0)
    names = ("PATH", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND")
    with or_skip(hosts(3)) as made:
        on = OnHosts(made, one)
        exports = {name: os.environ[name] for name in names}
        command = on.start("h1:2,h2:1,h3:1", *words, "--save_outputs", exports=exports)
        ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    say(
        f"vLLM, TP 3 over three hosts: Offline {ended.result['status']};"
        f" {equal} of {n} answers have our tokens"
    )
    assert (ended.result["status"], ended.result["errors"]) == ("VALID", 0) and equal == n


def test_a_server_that_is_started_again(
    model: Path, prompts: Callable[[int], Path], one: Starter, say: Says
) -> None:
    n = 160
    data = options(model, prompts(n))
    ours = offline(one, "ours", "torch", *data)
    words = (*VLLM, "--min_duration", 0, "--save_outputs", "--on_instance_loss", "restart")
    command = one.start(2, *data, *words, "--max_batch_size", 8, core="trtllm_endpoint")
    command.wait_phase("test", TIMEOUT_S)
    wait_for_answers(command, 8)
    os.kill(processes(command, b"VLLM::EngineCore")[0], signal.SIGKILL)
    ended = command.end(TIMEOUT_S).must(DONE)
    theirs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    equal = sum(theirs[index] == tokens for index, (tokens, _) in ours.items())
    (client,) = ended.result["per_instance"]
    (again,) = client["server"]["restarts"]
    say(
        f"vLLM's engine core killed in the test: {again['why']}, back after {again['back_after_s']} s,"
        f" {client['retries']} requests asked again; {equal} of {n} answers have our tokens"
    )
    assert ended.result["errors"] == 0 and equal == n and "(SIGKILL)" in again["why"]


def test_a_prefix_cache_that_nobody_asked_for(model: Path, one: Starter, tmp_path: Path, say: Says) -> None:
    """vLLM's default, which `--server=vllm` turns off, found by vLLM's own count."""
    ids = [100 + i % 50 for i in range(400)]  # its blocks on CPUs have 128 tokens
    (data := tmp_path / "same.jsonl").write_text(
        "".join(json.dumps({"input_tokens": [*ids, i]}) + "\n" for i in range(8))
    )
    words = (*options(model, data), "--min_duration", 0, "--max_batch_size", 2)
    cached = "--server_args=--enforce-eager --enable-prefix-caching"
    command = one.start(2, *words, *VLLM, cached, core="trtllm_endpoint")
    ended = command.end(TIMEOUT_S).must(DONE)
    (doubt,) = [doubt for doubt in ended.result["doubts"] if "prefix cache" in doubt]
    say(f"with vLLM's prefix cache: LoadGen {ended.result['loadgen_result']}; {doubt}")
    assert "prompt tokens came from a server's prefix cache, which MLPerf forbids" in doubt


def titled(word: bytes) -> list[int]:
    """Return the processes with a word in their title: vLLM's own title takes the place of our mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(word):
                found.append(int(path.parent.name))
    return found


def processes(command: Command, title: bytes, word: bytes = b"vllm") -> list[int]:
    """Wait for the processes with this title of the server with `word` in its command line, and return them.

    vLLM's titles take the place of our mark; what stands over a server keeps it.
    """

    def find() -> list[int]:
        ids = [pid for pid in guards(command) if _words_of(pid, word)]
        return [pid for guard in ids for pid in descendants(guard) if _words_of(pid, title)]

    return list(wait_until(find, f"vLLM's {title.decode()}", TIMEOUT_S))


def guards(command: Command) -> list[int]:
    """Return what stands over the servers."""
    return [pid for pid in command.pids() if _words_of(pid, b"server_guard")]


def _words_of(pid: int, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


SEED = int(os.environ.get("MPILLM_KILLS_SEED", "0"))
ROUNDS = int(os.environ.get("MPILLM_KILLS", "3"))


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_random_kills(
    seed: int, model: Path, prompts: Callable[[int], Path], one: Starter, say: Says
) -> None:
    """Any process of vLLM's is killed or stopped at some time: the run names it, and nothing stays."""
    choose = random.Random(seed)
    number = choose.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT, signal.SIGSEGV])
    phase = choose.choice(["load", "load", "warmup", "test", "test", "drain"])
    tp = choose.choice([1, 1, 1, 3])  # its model has 9 heads
    few = phase == "drain"
    words = [*options(model, prompts(4 if few else 160)), *VLLM, "--min_duration", 0 if few else 60]
    words += ["--tensor_parallelism", tp] if tp > 1 else []
    command = one.start(2, *words, core="trtllm_endpoint")
    before = {"load": "join", "warmup": "health", "test": "ready", "drain": "test"}[phase]

    def is_over(phase: str) -> bool:
        return re.search(rf"^  {phase} +[\d.]+ s", command.out, re.MULTILINE) is not None

    wait_until(lambda: is_over(before) or command.process.poll() is not None, phase, TIMEOUT_S)
    (guard,) = wait_until(lambda: guards(command), "the server's guard", WITHIN_S)
    time.sleep(choose.random() * {"load": 20, "test": 5}.get(phase, 0))
    below = wait_until(lambda: descendants(guard) or command.process.poll() is not None, "vLLM", WITHIN_S)
    assert command.process.poll() is None, repr(command.end())
    tree = {pid: _started(pid) for pid in (guard, *below)}
    victim = choose.choice([pid for pid in tree if pid != guard and _title(pid)])
    who, loaded = _title(victim), is_over("load")
    at = time.monotonic()
    os.kill(victim, number)
    wait_until(lambda: "failed in phase" in command.err or command.process.poll() is not None, "its end", 120)
    named_s = time.monotonic() - at
    ended = command.end(120, lingers=15)
    said = ended.message.splitlines()[1].strip() if ended.message else ended.result["status"]
    what = f"seed {seed}, {phase}, TP {tp}, {number.name}, {who}"
    say(f"{what}: exit code {ended.code}, after {named_s:.1f} s: {said}")
    assert not {pid for pid, started in tree.items() if _started(pid) == started}
    if ended.code == DONE:
        assert phase == "drain", "the run was over"
        return
    assert ended.code in ([INSTANCE_LOST] if loaded else [INSTANCE_LOST, NOT_READY]), repr(ended)
    how = "is stopped: kill -CONT" if number == signal.SIGSTOP else f"({number.name})"
    by_itself = "has ended, then the server"  # its parent was faster to ask how
    assert ended.result["failures"] and (how in said or by_itself in said), repr(ended)
    assert f"process {victim} (" in said or "(vllm): was ended by" in said, repr(ended)


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60]
    except OSError:
        return "gone"
