"""Servers that ranks start and own: their answers, and their ends in every phase; nothing of them stays."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from mpillm.roles.server import MAX_RESTARTS
from tests.helpers.answers import wait_for_answers
from tests.helpers.make_checkpoint import make_tokenizer
from tests.helpers.owned import OUTPUT, TEST, guards, processes, server
from tests.helpers.scripted_server import answer_of
from tests.helpers.serve_command import answer, post, serve, tokens_of
from tests.helpers.support import (
    DONE,
    INSTANCE_LOST,
    NOT_READY,
    SLOW_WITH_MPICH,
    USAGE,
    Command,
    Starter,
    make_samples,
    wait_until,
)

N = 64
SLOW = ("--pause_s", 0.3)


def start(one: Starter, ranks: int, *options: object, **more: Any) -> tuple[Command, list[list[int]]]:
    samples = make_samples(one.folder / "samples.jsonl", range(1, N + 1))
    words = [*TEST, "--dataset_path", samples.path, "--max_batch_size", 4, *options]
    return one.start(ranks, *words, core="trtllm_endpoint", **more), samples.prompts


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "clients"), [(3, 1), (5, 2)])
def test_two_servers(one: Starter, ranks: int, clients: int) -> None:
    command, prompts = start(one, ranks, *server("--says", "hello"), "--clients_per_server", clients)
    ended = command.end(120).must(DONE)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, OUTPUT) for i, prompt in enumerate(prompts)}
    plan = ended.json("plan.json")["ranks"]
    owners = [rank["rank"] for rank in plan if "server" in rank["roles"]]
    assert owners == [1, 1 + clients] and [rank["server"] for rank in plan[1:]] == sorted([0, 1] * clients)
    logs = [(ended.log_dir / f"server_{index}.log").read_text() for index in (0, 1)]
    assert all("hello" in log and "--port" in log for log in logs)
    ports = {word for log in logs for word in log.split() if word.isdigit()}
    assert len(ports) == 2 and "server 1 (command): rank" in ended.out
    assert ended.json("environment.json")["servers"] == "", "this one does not say what it is"
    samples = [instance["samples"] for instance in ended.result["per_instance"]]
    assert sum(samples) == N and min(samples) > 0


def test_a_server_that_is_an_mpirun(both: Starter) -> None:
    """What one rank tells its own MPI of networks, which it does not need, is not for the server's ranks."""
    words = [both.python, "-m", "mpillm", "mpirun", "-n", 2, "serve", "--core_type", "dummy"]
    command = f"command:{shlex.join(map(str, words))} --port {{port}} --log_dir {both.folder / 'serve'}"
    ended = both.run(1, "--server", command, "--min_query_count", 8, core="trtllm_endpoint", timeout=120)
    assert ended.must(DONE).result["errors"] == 0


@pytest.mark.parametrize("clients", [1, 2])
def test_a_server_that_waits_for_its_clients_at_its_end(one: Starter, clients: int) -> None:
    """As tritonserver does: the run ends without its being killed."""
    command, _ = start(one, 1 + clients, *server("--waits"), "--clients_per_server", clients)
    ended = command.end(60).must(DONE)
    assert "its clients are gone" in (ended.log_dir / "server_0.log").read_text()


@SLOW_WITH_MPICH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
@pytest.mark.parametrize("whose", ["server", "worker"])
def test_a_process_that_is_killed_or_stopped_in_the_test(both: Starter, whose: str, number: int) -> None:
    command, _ = start(both, 3, *server("--worker", *SLOW))
    wait_for_answers(command, 4)
    victims = processes(command, b"small_server" if whose == "server" else b"time.sleep(600)")
    assert len(victims) == 2
    os.kill(victims[0], number)
    ended = command.end(60).must(INSTANCE_LOST)
    name = signal.Signals(number).name
    how = f"is stopped: kill -CONT {victims[0]}" if number == signal.SIGSTOP else f"({name})"
    assert how in ended.message and "(command)" in ended.message, repr(ended)
    assert ended.message.startswith("mpillm: failed in phase 'test'\n  rank ")
    (failure,) = ended.result["failures"]
    assert failure["rank"] in (1, 2) and (ended.log_dir / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("phase", "before", "holds"),
    [
        ("health", "load", ("--pause_s", 10)),
        ("warmup", "health", ("--pause_s", 10, "--at_once", 1)),
        ("drain", "test", ("--metrics_s", 10)),
    ],
)
def test_a_process_that_is_killed_or_stopped_before_or_after_the_test(
    one: Starter, phase: str, before: str, holds: tuple[object, ...], number: int
) -> None:
    command, _ = start(one, 2, *server("--worker", *holds))
    is_over = re.compile(rf"^  {before} +[\d.]+ s", re.MULTILINE)
    wait_until(lambda: is_over.search(command.out) or command.process.poll() is not None, phase)
    (victim,) = processes(command, b"time.sleep(600)")
    os.kill(victim, number)
    ended = command.end(60).must(INSTANCE_LOST)
    how = f"is stopped: kill -CONT {victim}" if number == signal.SIGSTOP else "(SIGKILL)"
    first, *_ = ended.message.splitlines()[1:]
    assert f"(command): process {victim} (" in first and how in first, repr(ended)
    assert ended.result["status"] == "FAILED" and ended.result["phase"] == phase


def test_a_server_that_gives_up_when_its_worker_is_killed(one: Starter) -> None:
    """As vLLM: its clients hear HTTP 500 first, and it ends with exit code 0. The worker is named."""
    command, _ = start(one, 3, *server("--worker", "--gives_up", "--pause_s", 0.1))
    wait_for_answers(command, 4)
    victim = processes(command, b"time.sleep(600)")[0]
    os.kill(victim, signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    first, *_ = ended.message.splitlines()[1:]
    assert f"(command): process {victim} (" in first and "HTTP 500" not in ended.message, repr(ended)


def test_a_server_that_is_killed_while_it_streams_to_two_ranks(one: Starter) -> None:
    """Whoever of the two hears first that its stream has ended: what is said is how the server has."""
    more = ("--scenarios", "Server", "--server_target_qps", 20, "--clients_per_server", 2)
    command, _ = start(one, 3, *server("--token_s", 0.5), *more)
    wait_for_answers(command, 2)
    os.kill(processes(command)[0], signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    first, *_ = ended.message.splitlines()[1:]
    assert "rank 1 (" in first and "was ended by signal 9 (SIGKILL)" in first, repr(ended)


@pytest.mark.parametrize(
    ("options", "within", "message"),
    [
        (("--says", "torch.OutOfMemoryError: CUDA out of memory", "--nonsense"), 60, "too little memory"),
        (("--nonsense",), 60, "ended with exit code 2"),
        (("--ready_after_s", 600), 2, "was not ready within"),
    ],
)
def test_a_server_that_does_not_become_ready(
    one: Starter, options: tuple[object, ...], within: float, message: str
) -> None:
    command, _ = start(one, 3, *server(*options), "--load_deadline", within)
    ended = command.end(60).must(NOT_READY)
    assert message in ended.message and "the end of" in ended.message, repr(ended)


def test_a_server_that_takes_too_much_memory(one: Starter) -> None:
    command, _ = start(one, 2, *server("--worker", "--ready_after_s", 600), "--server_memory_limit", 0.25)
    ended = command.end(60).must(NOT_READY)
    assert "GiB of memory, more than --server_memory_limit; most of it process" in ended.message


def test_a_program_that_is_not_there(one: Starter) -> None:
    command, _ = start(one, 2, "--server", "command:no-such-server {port}")
    assert "there is no no-such-server" in command.end(60).must(USAGE).message


def test_a_server_that_ends_in_the_test_with_code_0(one: Starter) -> None:
    command, _ = start(one, 2, *server("--exits_after_s", 3, *SLOW))
    ended = command.end(60).must(INSTANCE_LOST)
    assert "server 0 (command): ended with exit code 0" in ended.message and "| enough" in ended.message


def test_a_port_that_another_process_takes_first(one: Starter) -> None:
    """The server gets another one, and its clients hear which."""
    command, _ = start(one, 2, *server("--fails_once", one.folder / "once"))
    ended = command.end(60).must(DONE)
    log = (ended.log_dir / "server_0.log").read_text()
    ports = [line.split("--port ")[1].split()[0] for line in log.splitlines() if line.startswith("$")]
    assert len(set(ports)) == 2 and "again" in log


def test_a_compiler_that_a_server_starts_may_end(one: Starter) -> None:
    """vLLM's first request starts one, large enough to be a part that it can't do without."""
    command, _ = start(one, 2, *server("--compiles"))
    assert command.end(60).must(DONE).result["errors"] == 0


def test_what_stands_over_a_server_is_stopped(one: Starter) -> None:
    command, _ = start(one, 2, *server("--worker", *SLOW))
    wait_for_answers(command, 4)
    (guard,) = guards(command)
    os.kill(guard, signal.SIGSTOP)
    ended = command.end(60, lingers=10).must(INSTANCE_LOST)
    message = f"process {guard} (its guard) is stopped: kill -CONT {guard}"
    assert message in ended.message, repr(ended)


@pytest.mark.parametrize("victim", ["owner", "mpirun", "guard"])
def test_nothing_stays_when_its_owner_is_killed(both: Starter, victim: str) -> None:
    command, _ = start(both, 3, *server("--worker", *SLOW))
    wait_for_answers(command, 4)
    if victim == "mpirun":
        os.kill(command.process.pid, signal.SIGKILL)
        command.end(60, tidy=False, lingers=20)
        return
    pid = command.wait_rank(1) if victim == "owner" else _guard(command)
    os.kill(pid, signal.SIGKILL)
    ended = command.end(60, lingers=10).must(INSTANCE_LOST)
    assert "rank 1" in ended.message, repr(ended)
    if victim == "guard":
        assert f"its guard (pid {pid}) has ended" in ended.message


def _guard(command: Command) -> int:
    return min(
        guards(command),
        key=lambda pid: not {b"OMPI_COMM_WORLD_RANK=1", b"PMI_RANK=1"} & _parent_environment(pid),
    )


def _parent_environment(pid: int) -> set[bytes]:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return {*Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")}


def test_a_lost_server_that_the_run_can_do_without(one: Starter) -> None:
    command, prompts = start(one, 3, *server(*SLOW), "--on_instance_loss", "continue", "--grace", 1.5)
    wait_for_answers(command, 4)
    os.kill(processes(command)[0], signal.SIGKILL)
    ended = command.end(120).must(DONE)
    answered = sorted(ended.accuracy_log())
    assert answered == [(i, answer_of(prompt, OUTPUT)) for i, prompt in enumerate(prompts)]
    (lost,) = ended.result["lost"]
    assert "was ended by signal 9 (SIGKILL)" in lost["cause"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_lost_server_that_is_started_again(one: Starter, ranks: int) -> None:
    command, prompts = start(one, ranks, *server("--worker", *SLOW), "--on_instance_loss", "restart")
    wait_for_answers(command, 4)
    os.kill(processes(command)[0], signal.SIGKILL)
    ended = command.end(120).must(DONE)
    answered = sorted(ended.accuracy_log())
    assert answered == [(i, answer_of(prompt, OUTPUT)) for i, prompt in enumerate(prompts)]
    result = ended.result
    assert result["lost"] == [] and sum(client["retries"] for client in result["per_instance"]) > 0
    (one_restart,) = [
        again for client in result["per_instance"] for again in client["server"].get("restarts", ())
    ]
    assert "was ended by signal 9 (SIGKILL)" in one_restart["why"] and one_restart["back_after_s"] > 0
    assert result["latency_ms"]["p99"] > 1000 * one_restart["back_after_s"], "what waited for it says so"
    lost, back = (line for line in ended.out.splitlines() if line.startswith(("  lost ", "  back ")))
    assert f": {one_restart['why']}; it is started again" in lost and "pid" in lost
    assert f": ready after {one_restart['back_after_s']:.1f} s; " in back
    (doubt,) = [doubt for doubt in result["doubts"] if doubt.startswith("server ")]
    index = doubt.split()[1]
    assert f"requests were sent again: server {index}: {one_restart['why']}" in ended.flowing
    assert "was lost" in doubt and "available again" in doubt
    log = (ended.log_dir / f"server_{index}.log").read_text()
    assert log.count("$ ") == 2


def test_a_server_that_is_lost_again_and_again(one: Starter) -> None:
    command, _ = start(one, 2, *server(*SLOW), "--on_instance_loss", "restart")
    wait_for_answers(command, 4)
    killed: list[int] = []
    for _ in range(1 + MAX_RESTARTS):
        (victim,) = wait_until(lambda: [pid for pid in processes(command) if pid not in killed], "a server")
        killed.append(victim)
        os.kill(victim, signal.SIGKILL)
    ended = command.end(60).must(INSTANCE_LOST)
    assert "server 0 (command): was ended by signal 9 (SIGKILL)" in ended.message
    assert (ended.log_dir / "server_0.log").read_text().count("$ ") == 1 + MAX_RESTARTS


def test_a_lost_server_behind_serve(one: Starter) -> None:
    """Its open streams go on where they were, at the other server, and later requests go there."""
    make_tokenizer(one.folder)
    pace = (*server("--token_s", 0.02), "--model_path", one.folder)
    command, host, port = serve(one, 3, *pace, "--core_type", "trtllm_endpoint", "--grace", 1.5)
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "return_token_ids": True, "stream": True}
    open_ = [post(host, port, "/v1/completions", **body).getresponse() for _ in range(4)]
    begun = [response.read(400) for response in open_]
    assert all(b"token_ids" in start for start in begun), "long before the end"
    os.kill(processes(command)[0], signal.SIGKILL)
    streamed = [tokens_of(start + response.read()) for start, response in zip(begun, open_, strict=True)]
    assert streamed == [answer_of([5, 6, 7], 200)] * 4
    later = answer(host, port, "/v1/completions", prompt=[9], max_tokens=3, return_token_ids=True)
    assert later["choices"][0]["token_ids"] == answer_of([9], 3)
    command.process.send_signal(signal.SIGTERM)
    ended = command.end(60).must(DONE)
    (lost,) = ended.result["lost"]
    assert "was ended by signal 9 (SIGKILL)" in lost["cause"] and ended.result["errors"] == 0


def test_two_runs_at_once(one: Starter) -> None:
    runs = [start(one, 3, *server(), log_dir=one.folder / f"run{index}") for index in range(2)]
    logs = [log for command, _ in runs for log in command.end(120).must(DONE).log_dir.glob("server_*.log")]
    ports = [re.findall(r"--port (\d+)", log.read_text()) for log in logs]
    assert len({port for (port,) in ports}) == 4, "each server has got its first one"


def test_ctrl_c_in_load(both: Starter) -> None:
    command, _ = start(both, 3, *server("--ready_after_s", 600, "--worker"))
    wait_until(lambda: len(processes(command)) == 2, "two servers")
    command.signal_group(signal.SIGINT)
    assert "interrupted" in command.end(60, lingers=10).must(130).message
