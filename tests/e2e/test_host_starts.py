"""A rank of another host that is lost before MPI has started is named (make test-hosts, as root)."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.clusters import ROOT_MAY, OnHosts, or_skip, python_on
from tests.helpers.support import DONE, INSTANCE_LOST, NOT_READY, ROOT, Command, Starter, wait_until
from tools.hosts import Hosts, hosts

pytestmark = pytest.mark.hosts

N_HOSTS = 2
WITHIN_S = 90.0  # hosts that share two cores start slowly
VICTIM = 3  # the last of h2's
WHERE = "h1:2,h2:2"
RUN = ["run", "--core_type", "dummy", "--min_query_count", 20, "--join_deadline", 20]

# Python reads it before anything else; rank 0 never gets past MPI_Init before the fault.
SITE = """
import os, signal, socket, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
if rank == "{victim}" and "mpillm" in sys.orig_argv:
    {fault}
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
AT_IMPORT = """
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "mpillm.comms.start":
                {what}
    sys.meta_path.insert(0, Broken())
"""
FAULTS = {
    "a kill before Python's first line": KILL,
    "a kill": AT_IMPORT.format(what=KILL),
    "a broken import": AT_IMPORT.format(what="raise ImportError('broken there')"),
}


@pytest.fixture
def on_hosts(module_hosts: Hosts, both: Starter) -> OnHosts:
    return OnHosts(module_hosts, both)


def start(on: OnHosts, fault: str, plain: bool) -> Command:
    folder = on.starter.folder
    (folder / "sitecustomize.py").write_text(SITE.format(victim=VICTIM, fault=fault))
    return on.start(WHERE, *RUN, plain=plain, exports={"PYTHONPATH": f"{folder}:{ROOT}"})


@pytest.mark.parametrize("plain", [False, True], ids=["mpillm mpirun", "mpirun"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_ends(on_hosts: OnHosts, fault: str, plain: bool) -> None:
    ended = start(on_hosts, FAULTS[fault], plain).end(WITHIN_S)
    assert ended.code != DONE, ended
    if plain and on_hosts.starter.mpi == "mpich":  # Hydra names the host only
        assert re.search(r"RUNNING AT h2|@h2\]", ended.out + ended.err), ended
        return
    if plain:  # mpirun's own words and its own exit code
        assert re.search(rf"\brank {VICTIM}\b|@1,{VICTIM}\]", ended.err), ended
        return
    assert re.search(rf"\brank {VICTIM}\b", ended.err), ended
    assert len(re.findall("MPI can't start|MPI_Init did not end", ended.err)) == 1, ended
    if fault == "a kill before Python's first line":  # nobody hears of it before the deadline
        ended.must(NOT_READY)
    else:
        assert f"rank {VICTIM} on h2 (pid " in ended.must(INSTANCE_LOST).message


def test_a_rank_ends_in_mpi_init(on_hosts: OnHosts) -> None:
    """Another one is stopped, so that none gets past it."""
    command = start(on_hosts, "signal.raise_signal(signal.SIGSTOP)", plain=False)
    wait_until(lambda: len(python_on(on_hosts.hosts, "h2", "run")) == 2, "the ranks of h2", WITHIN_S)

    def rank_2() -> list[int]:
        return [
            pid
            for pid in python_on(on_hosts.hosts, "h2", "run")
            if re.search(rb"\b(OMPI_COMM_WORLD|PMI)_RANK=2\0", Path(f"/proc/{pid}/environ").read_bytes())
            and "mpi4py" in Path(f"/proc/{pid}/maps").read_text()
        ]

    os.kill(wait_until(rank_2, "rank 2 to load MPI", WITHIN_S)[0], signal.SIGKILL)
    ended = command.end(WITHIN_S).must(INSTANCE_LOST)
    assert "rank 2 on h2 (pid " in ended.message


def test_a_rank_never_starts(on_hosts: OnHosts) -> None:
    """It is stopped before its first line."""
    ended = start(on_hosts, "signal.raise_signal(signal.SIGSTOP)", plain=False).end(WITHIN_S)
    assert f"rank {VICTIM} has not started" in ended.must(NOT_READY).message


def test_a_host_without_python(on_hosts: OnHosts) -> None:
    real = str(Path(sys.executable).resolve())
    on_hosts.hosts.run("h2", "mount", "--bind", "/dev/null", real)
    try:
        ended = on_hosts.start(WHERE, *RUN).end(WITHIN_S, lingers=WITHIN_S)
    finally:
        on_hosts.hosts.run("h2", "umount", real)
    assert ended.code != DONE and "h2" in ended.err, ended


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_firewall_between_hosts(one: Starter, command: str) -> None:
    """All ranks have started: who can't be reached is named, and at which ports MPI listens.

    MPICH's UCX ends such a rank itself, and says which address it did not reach.
    """
    with or_skip(hosts(N_HOSTS)) as made:
        made.keep_apart("h1", "h2")
        words = RUN if command == "run" else ["doctor", "--deadline", 30]
        log_dir = one.folder / "run"
        ended = OnHosts(made, one).start(WHERE, *words, log_dir=log_dir).end(WITHIN_S).must(NOT_READY)
    assert re.search(
        r"all ranks have started, but host h2 \(ranks 2-3\) can't be reached from h1 \(10.77.0.2 port \d+: .*"
        r"is there a firewall .* listens at \d+-\d+",
        ended.message,
    ), ended


@pytest.mark.parametrize(
    "setting, cause",
    [
        ("OMPI_MCA_btl=self,sm", "leaves out tcp, which connects hosts"),
        ("OMPI_MCA_btl_tcp_if_include=lo", "names no interface that leads to other hosts; there are: eth0"),
        ("OMPI_MCA_btl_tcp_if_exclude=lo", "172.17.0.1 (docker0) is an address of h1 and of h2"),
    ],
)
def test_settings_that_keep_hosts_apart(one: Starter, setting: str, cause: str) -> None:
    """All hosts have Docker's bridge. Without these settings mpillm excludes it, as all other tests show."""
    name, _, value = setting.partition("=")
    with or_skip(hosts(N_HOSTS)) as made:
        words = [*RUN[:-1], 10]  # --join_deadline
        ended = OnHosts(made, one).start(WHERE, *words, exports={name: value}).end(WITHIN_S)
    message = ended.must(NOT_READY).message
    assert cause in message and "firewall" not in message, ended


def test_a_firewall_under_plain_mpirun(one: Starter) -> None:
    """Nobody knows whether the ranks of other hosts have started: which they are is said, and MPI's ports."""
    with or_skip(hosts(N_HOSTS)) as made:
        made.keep_apart("h1", "h2")
        ended = OnHosts(made, one).start(WHERE, *RUN, plain=True).end(WITHIN_S, lingers=WITHIN_S)
    assert ended.code != DONE
    assert re.search(
        r"ranks 2-3, on other hosts, have not started, or can't be reached: is there a firewall .* listens at"
        r" \d+-\d+ .*`python -m mpillm mpirun` reports details",
        ended.message,
    ), ended


def test_two_runs_whose_mpirun_has_one_process_id(one: Starter) -> None:
    """Open MPI names its shared memory after it: the second would write into what the first one reads."""
    words = [Path(one.python).parent / "mpirun", "-n", 2, "--bind-to", "none", one.python, "-m", "mpillm"]
    words += ["run", "--core_type", "dummy", "--scenarios", "Server", "--server_target_qps", 50]
    words += ["--min_query_count", 400, "--min_duration", 8]

    def start(name: str) -> Command:
        (one.folder / name).mkdir()
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # the shell is 1, mpirun 2
        line = [*apart, "sh", "-c", '"$@"; exit $?', "sh", *words, "--log_dir", one.folder / name / "run"]
        return one.command(list(map(str, line)), env={**ROOT_MAY, "TMPDIR": str(one.folder / name)})

    first = start("first")
    wait_until(lambda: "\n  ready " in first.out or first.process.poll() is not None, "its test", WITHIN_S)
    both = [start("second"), first]
    for command in both:
        ended = command.end(WITHIN_S).must(DONE)
        assert re.search(r"drain .* (\d+) of \1 samples answered", ended.out), ended
