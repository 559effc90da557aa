"""``python -m tools.slurm [--nodes N] [--install] [COMMAND …]``: run a real Slurm cluster on this machine.

Each node is a host of namespaces (`tools.hosts`) with a slurmd. `head` runs slurmctld and COMMAND (default: a
shell), which may use srun, salloc, sbatch and scancel. The cluster ends with COMMAND. It has a separate
folder and separate networks, so it does not interfere with another Slurm.

Exit code 77: Slurm cannot run here; the message has the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.hosts import HEAD, Hosts, NotHere, administrators_path, find_program, hosts

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libpmix-dev")
"""Debian's packages. srun loads PMIx by a file name that only libpmix-dev has."""

NOT_HERE = 77
_PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
_START_S = 60.0
_INSTALL_S = 300.0

# CPUs: may exceed the machine's, because ranks share them. KillWait: seconds between SIGTERM and SIGKILL for
# a job that is cancelled or has reached its time limit.
_CONF = """\
ClusterName=mpillm
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=defer_batch,sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=10
MinJobAge=600
OverTimeLimit=0
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        # Debian's srun has PMIx 4, Open MPI's wheel PMIx 5. Both support these modules.
        self.env = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PMIX_MCA_gds": "hash",
            "PMIX_MCA_psec": "native",
        }

    def on_head(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on the login host."""
        return self.hosts.on(
            HEAD, ["env", *(f"{name}={value}" for name, value in self.env.items()), *command]
        )

    def run(self, *command: str) -> str:
        """Run a short command of Slurm; return its output."""
        done = subprocess.run(self.on_head(command), capture_output=True, text=True, timeout=_START_S)
        return done.stdout.strip()


def install() -> None:
    """Install Debian's packages if programs are missing. Raises NotHere if that is not possible."""
    if not _missing():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotHere(f"Slurm is not installed ({', '.join(_missing())}), and only root can, with apt")
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for args in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        try:
            done = subprocess.run(
                ["apt-get", *args],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
            )
        except subprocess.TimeoutExpired:
            raise NotHere(f"apt-get {args[0]}: not done within {_INSTALL_S:g} s") from None
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise NotHere(f"apt-get {args[0]}: {' '.join(last) or f'exit code {done.returncode}'}")


def _missing() -> list[str]:
    return [name for name in _PROGRAMS if find_program(name) is None]


@contextmanager
def slurm(nodes: int = 2, cpus: int = 4) -> Iterator[Slurm]:
    """Start a cluster of `nodes` nodes. Raises NotHere if this machine or user cannot run one."""
    if missing := _missing():
        raise NotHere(f"Slurm is not installed ({', '.join(missing)}): make slurm installs it, as root")
    with (
        tempfile.TemporaryDirectory(prefix="mpillm-slurm-", ignore_cleanup_errors=True) as name,
        _Daemons(Path(name)) as daemons,
        hosts(nodes) as started,  # the daemons end with the hosts
    ):
        folder = Path(name)
        _write_files(folder, started, cpus)
        cluster = daemons.cluster = Slurm(started, folder)
        socket = folder / "munge.socket"
        daemons.start(
            HEAD,
            "munged",
            [
                *("munged", "--foreground", "--force", f"--socket={socket}"),
                *(f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")),
            ],
        )
        daemons.wait(socket.exists, "munged")
        daemons.start(HEAD, "slurmctld", ["slurmctld", "-D", "-i"])
        for host in started.names:
            daemons.start(host, f"slurmd.{host}", ["slurmd", "-D"])
        daemons.wait(lambda: cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D") == f"{nodes}", "Slurm")
        yield cluster


def _write_files(folder: Path, started: Hosts, cpus: int) -> None:
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    for host in started.names:
        (folder / f"spool.{host}").mkdir()
        (folder / f"tmp.{host}").mkdir()
    conf = _CONF.format(folder=folder, nodes=",".join(started.names), cpus=cpus)
    (folder / "slurm.conf").write_text(conf, encoding="ascii")
    # Control groups are unused. The other plugin, which a machine may select, requires systemd.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="ascii")


class _Daemons:
    """Daemons in the foreground of their hosts, each with a log."""

    cluster: Slurm

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Daemons:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.wait()

    def start(self, host: str, name: str, command: list[str]) -> None:
        env = os.environ | self.cluster.env | {"PATH": administrators_path()}
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                self.cluster.hosts.on(host, command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log.txt"

    def wait(self, ready: Callable[[], bool], service: str) -> None:
        end = time.monotonic() + _START_S
        while not ready():
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise NotHere(f"{name} ended with exit code {process.returncode}: {self._tail(name)}")
            if time.monotonic() > end:
                tails = "\n".join(f"{name}: {self._tail(name)}" for name in self._running)
                raise NotHere(f"{service} was not ready within {_START_S:g} s\n{tails}")
            time.sleep(0.1)

    def _tail(self, name: str) -> str:
        return "\n".join(self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-8:])


def main(argv: Sequence[str]) -> int:
    """Start the cluster, run the command on its login host, stop the cluster."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.slurm", description="A real Slurm on this machine."
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--install", action="store_true", help="install Debian's packages first")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="runs on the head [default: a shell]")
    options = parser.parse_args(argv)
    try:
        if options.install:
            install()
        with slurm(options.nodes) as cluster:
            command = options.command or [os.environ.get("SHELL", "sh")]
            print(f"Slurm runs: {', '.join(cluster.hosts.names)}; logs in {cluster.folder}", file=sys.stderr)
            return subprocess.run(cluster.on_head(command)).returncode
    except NotHere as error:
        print(f"make slurm: {error}", file=sys.stderr)
        return NOT_HERE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
