"""`--server=trtllm-serve` over two hosts, with fakes of its programs. With ``make test-hosts``.

The fake of `trtllm-llmapi-launch` has the properties that TensorRT-LLM's has: it splits its arguments at
blanks, prefers Slurm's rank, starts the server beside rank 0, and does not notice the server's end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.answers import wait_for_answers
from tests.helpers.clusters import OnHosts
from tests.helpers.owned import TEST, words_of
from tests.helpers.scripted_server import answer_of
from tests.helpers.support import DONE, INSTANCE_LOST, NOT_READY, Command, make_samples, wait_until
from tools.hosts import HEAD

pytestmark = pytest.mark.hosts

N_HOSTS = 2
WITHIN_S = 90.0
LAUNCH = """#!/bin/bash
if [ "${SLURM_PROCID:-$OMPI_COMM_WORLD_RANK}" = 0 ]; then
    task="$*"
    (unset ${!OMPI_*} ${!PMIX_*} ${!PRTE_*}; $task) &
fi
PYTHON -m tests.helpers.trtllm_world FOLDER/met
"""
SERVE = """#!PYTHON
import os, sys, time
from tests.helpers import small_server
at = {name: sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port")}
end = time.monotonic() + 60
while not os.path.exists("FOLDER/met") and time.monotonic() < end:
    time.sleep(0.1)
assert sys.argv[1] == "serve" and "two words" in sys.argv, sys.argv
sys.argv[1:] = [word for pair in at.items() for word in pair] + MORE
small_server.main()
"""


@pytest.fixture
def shells(on_hosts: OnHosts) -> Iterator[dict[str, str]]:
    """Let an mpirun on one host start processes on another; yield the variables of its ranks."""
    agent = on_hosts.starter.folder / "remote_shell"  # also of the run's mpirun
    agent.rename(from_head := agent.with_name("remote_shell_of_head"))
    agent.write_text(
        f'#!/bin/sh\n[ "$(hostname)" != {HEAD} ] || exec {from_head} "$@"\n'
        f'exec {on_hosts.starter.python} -m tests.helpers.remote_commands "$@"\n'
    )
    agent.chmod(0o755)
    with ExitStack() as stack:
        for host in on_hosts.hosts.names:
            line = on_hosts.hosts.on(host, [on_hosts.starter.python, "-m", "tests.helpers.remote_commands"])
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True))
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "OMPI_MCA_btl_tcp_if_include": "10.77.0.0/24",  # without docker0, which all hosts have
        }


def start(on_hosts: OnHosts, shells: dict[str, str], *more: object) -> tuple[Command, list[list[int]]]:
    """Start a run with a server of two ranks, one on each host; `more`: arguments of `small_server`."""
    folder = on_hosts.starter.folder
    for name, text in (("trtllm-llmapi-launch", LAUNCH), ("trtllm-serve", SERVE)):
        program = folder / name
        text = text.replace("PYTHON", str(on_hosts.starter.python)).replace("FOLDER", str(folder))
        program.write_text(text.replace("MORE", repr([str(one) for one in more])))
        program.chmod(0o755)
    (model := folder / "scripted").mkdir(exist_ok=True)
    samples = make_samples(folder / "samples.jsonl", range(1, 257))
    server = [
        "--server",
        "trtllm-serve",
        "--server_nodes",
        2,
        "--tensor_parallelism",
        2,
        "--model_path",
        model,
    ]
    test = [*TEST, "--dataset_path", samples.path, "--server_args=--served_model_name 'two words'"]
    exports = {
        **shells,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd())),
    }
    command = on_hosts.start("h1:2,h2:1", "run", *server, *test, "--max_batch_size", 4, exports=exports)
    return command, samples.prompts


def ranks_on(on_hosts: OnHosts, host: str) -> list[int]:
    """Return the processes of the server's MPI ranks on a host."""
    return [pid for pid in on_hosts.hosts.processes(host) if b"trtllm_world\0" in words_of(pid)]


def nothing_left(on_hosts: OnHosts) -> bool:
    names = (b"trtllm_world", b"trtllm-serve", b"trtllm-llmapi-launch", b"prterun")
    pids = [pid for host in on_hosts.hosts.names for pid in on_hosts.hosts.processes(host)]
    return not any(name in words_of(pid) for pid in pids for name in names)


def test_a_server_over_two_hosts(on_hosts: OnHosts, shells: dict[str, str]) -> None:
    command, prompts = start(on_hosts, shells)
    ended = command.end(WITHIN_S).must(DONE)
    outputs = {line["index"]: line["output_tokens"] for line in ended.outputs()}
    assert outputs == {i: answer_of(prompt, 6) for i, prompt in enumerate(prompts)}
    log = (ended.log_dir / "server_0.log").read_text()
    assert re.findall(r"rank (\d) \(pid \d+\) of the world h1,h2", log) in (["0", "1"], ["1", "0"])
    assert "mpirun -n 2 " in ended.out and "-H h1:1,h2:1" in ended.out
    assert "server 0 (trtllm-serve, part 2 of 2): rank 2 on h2" in ended.out
    wait_until(lambda: nothing_left(on_hosts), "the end of all processes", WITHIN_S)


def test_a_rank_on_the_other_host_that_is_killed_in_the_test(
    on_hosts: OnHosts, shells: dict[str, str]
) -> None:
    command, _ = start(on_hosts, shells, "--pause_s", 0.3)
    wait_for_answers(command, 4)
    (pid,) = ranks_on(on_hosts, "h2")
    os.kill(pid, signal.SIGKILL)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    assert "server 0 (trtllm-serve, part 1 of 2): " in ended.message, repr(ended)
    assert re.search(r"rank 1 of its 2 MPI ranks, on h2, ended with exit code 137", ended.message), repr(
        ended
    )
    wait_until(lambda: nothing_left(on_hosts), "the end of all processes", WITHIN_S)


def test_a_server_that_fails_while_it_loads(on_hosts: OnHosts, shells: dict[str, str]) -> None:
    """`trtllm-llmapi-launch` would wait for its ranks until --load_deadline."""
    command, _ = start(on_hosts, shells, "--no_such_option")
    ended = command.end(WITHIN_S).must(NOT_READY)
    assert "trtllm-serve ended with exit code 2, and then its MPI ranks" in ended.message, repr(ended)
    wait_until(lambda: nothing_left(on_hosts), "the end of all processes", WITHIN_S)


def test_nothing_stays_when_the_owner_is_killed(on_hosts: OnHosts, shells: dict[str, str]) -> None:
    command, _ = start(on_hosts, shells, "--pause_s", 0.3)
    wait_for_answers(command, 4)
    owner = next(pid for pid in on_hosts.hosts.processes("h1") if b"server_guard" in words_of(pid))
    os.kill(int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{owner}/status").read_text())[0]), signal.SIGKILL)
    command.end(WITHIN_S).must(INSTANCE_LOST)
    wait_until(lambda: nothing_left(on_hosts), "the end of all processes", WITHIN_S)
