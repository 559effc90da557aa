"""A server over two hosts: each has a part of it, which a rank there owns. With ``make test-hosts``."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.answers import wait_for_answers
from tests.helpers.clusters import OnHosts
from tests.helpers.clusters import kill_named as kill_daemon
from tests.helpers.owned import TEST, words_of
from tests.helpers.scripted_server import answer_of
from tests.helpers.support import DONE, INSTANCE_LOST, NOT_READY, Command, make_samples, wait_until
from tools.hosts import Hosts

pytestmark = pytest.mark.hosts

N_HOSTS = 2
WITHIN_S = 90.0  # hosts that share two cores start slowly
PART = "--host {host} --part {node} {nodes} {first_host} {first_port}"


def start(on_hosts: OnHosts, *options: object) -> tuple[Command, list[list[int]]]:
    samples = make_samples(on_hosts.starter.folder / "samples.jsonl", range(1, 257))
    words = shlex.join([sys.executable, "-m", "tests.helpers.small_server", *map(str, options)])
    server = ["--server", f"command:{words} --port {{port}} {PART}", "--server_nodes", 2]
    test = [*TEST, "--dataset_path", samples.path, "--max_batch_size", 4]
    return on_hosts.start("h1:2,h2:1", "run", *server, *test), samples.prompts


def part_on(made: Hosts, host: str) -> int:
    """Return the process of the server's part on a host."""

    def find() -> list[int]:
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in made.processes(host)}
        return [
            pid
            for pid, line in words.items()
            if b"small_server\0" in line and b"server_guard" not in line and b"--server\0" not in line
        ]

    (pid,) = wait_until(find, f"the part on {host}", WITHIN_S)
    return int(pid)


def test_a_server_over_two_hosts(on_hosts: OnHosts) -> None:
    command, prompts = start(on_hosts)
    ended = command.end(WITHIN_S).must(DONE)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, 6) for i, prompt in enumerate(prompts)}
    plan = ended.json("plan.json")["ranks"]
    assert [(rank["rank"], rank["node"]) for rank in plan if "server" in rank["roles"]] == [
        (1, "h1"),
        (2, "h2"),
    ]
    assert "server 0 (command, part 2 of 2): rank 2 on h2" in ended.out
    assert "part 1 has met the first" in (ended.log_dir / "server_0_1.log").read_text()
    assert [one["samples"] > 0 for one in ended.result["per_instance"]] == [True, True], "both are clients"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("host", "rank", "part"), [("h1", 1, 1), ("h2", 2, 2)])
def test_a_part_that_is_killed_or_stopped_in_the_test(
    on_hosts: OnHosts, host: str, rank: int, part: int, number: signal.Signals
) -> None:
    command, _ = start(on_hosts, "--pause_s", 0.3)
    wait_for_answers(command, 4)
    victim = part_on(on_hosts.hosts, host)
    os.kill(victim, number)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    first = ended.message.splitlines()[1]
    how = "is stopped" if number == signal.SIGSTOP else "was ended by signal 9 (SIGKILL)"
    assert f"rank {rank} (" in first and f", {host}, pid " in first, repr(ended)
    assert f"server 0 (command, part {part} of 2): " in first and how in first, repr(ended)


def test_a_part_that_is_killed_in_load(on_hosts: OnHosts) -> None:
    command, _ = start(on_hosts, "--ready_after_s", 600)
    os.kill(part_on(on_hosts.hosts, "h2"), signal.SIGKILL)
    ended = command.end(WITHIN_S).must(NOT_READY)
    assert "h2, pid " in ended.message and "part 2 of 2): was ended by signal 9" in ended.message, repr(ended)


def test_nothing_of_a_server_stays_on_a_host_that_loses_its_daemon(on_hosts: OnHosts) -> None:
    """Its owner ends with the daemon, and it with its owner."""
    command, _ = start(on_hosts, "--worker", "--pause_s", 0.3)
    wait_for_answers(command, 4)
    part_on(on_hosts.hosts, "h2")
    kill_daemon(on_hosts.hosts, "h2", "prted", "hydra_pmi_proxy")
    ended = command.end(WITHIN_S, lingers=60.0)
    assert ended.code != DONE and "h2" in ended.err, repr(ended)

    def left() -> list[int]:
        words = (b"small_server\0", b"time.sleep(600)", b"server_guard")
        return [pid for pid in on_hosts.hosts.processes("h2") if any(word in words_of(pid) for word in words)]

    wait_until(lambda: not left(), f"processes {left()} to end", WITHIN_S)


def test_a_client_on_another_host_than_its_server(on_hosts: OnHosts) -> None:
    samples = make_samples(on_hosts.starter.folder / "samples.jsonl", range(1, 65))
    words = [sys.executable, "-m", "tests.helpers.small_server", "--host", "{host}", "--port", "{port}"]
    line = " ".join(words)
    test = [*TEST, "--dataset_path", samples.path, "--max_batch_size", 4, "--clients_per_server", 2]
    ended = on_hosts.start("h1:2,h2:1", "run", "--server", f"command:{line}", *test).end(WITHIN_S).must(DONE)
    plan = ended.json("plan.json")["ranks"]
    assert [(rank["node"], rank["server"]) for rank in plan[1:]] == [("h1", 0), ("h2", 0)]
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, 6) for i, prompt in enumerate(samples.prompts)}
    assert min(client["samples"] for client in ended.result["per_instance"]) > 0
