"""Several hosts on this machine, made of namespaces.

Each host has its own addresses, name, process ids, boot id, /dev/shm and TMPDIR, and shares this machine's
files. It has Docker's bridge, with the same address on every host. /sys is this machine's, with the bridge
added.

Nothing outlives the process that starts the hosts. A host is a process (`setpriv`, `unshare`) that dies with
its parent. The kernel then ends the processes of its pid namespace, and removes its network. No file, link or
mount is created outside of the hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HEAD = "head"
"""The login host, which has the network's bridge."""

# Open MPI's daemons name their folders in TMPDIR by process ids, which are similar on all hosts.
_TMPDIR = "/dev/shm/tmp"
_NETWORK = "10.77.0."
_START_S = 60.0
_PROGRAMS = ("bridge", "ip", "mount", "nsenter", "setpriv", "unshare")

_INIT = f"""\
set -e
hostname "$0"
mount -t tmpfs none /dev/shm
printf %s "$1" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
mkdir -p /dev/shm/net/docker0/bridge /dev/shm/net/docker0/brif
mount -t overlay -o lowerdir=/dev/shm/net:/sys/class/net none /sys/class/net
cat /proc/sys/kernel/random/uuid > /dev/shm/boot_id
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id
mount -t tmpfs none /dev/shm
mkdir {_TMPDIR}
ip link set lo up
echo ready
while :; do sleep 1000; done
"""


class NotHere(Exception):
    """This machine or user cannot run such hosts; the message has the reason."""


class Hosts:
    """`head`, and inside it `h1`, `h2`, …, which its processes can enter and which end with it."""

    def __init__(self, pids: dict[str, int]) -> None:
        """`pids`: of the first process of each host."""
        self._pids = pids

    @property
    def names(self) -> list[str]:
        """Names of all hosts except `head`."""
        return [name for name in self._pids if name != HEAD]

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, in the current directory."""
        return [*_enter(self._pids[host]), "env", f"TMPDIR={_TMPDIR}", *command]

    def run(self, host: str, *command: str) -> str:
        """Run a short command on a host; return its output. Raises NotHere if it fails."""
        return _run(self.on(host, command))

    def processes(self, host: str) -> list[int]:
        """Return the process ids, in this namespace, of a host's processes except its first."""
        namespace = Path(f"/proc/{self._pids[host]}/ns/pid").readlink()
        pids = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal() and int(path.name) != self._pids[host]:
                with contextlib.suppress(OSError):
                    if (path / "ns/pid").readlink() == namespace:
                        pids.append(int(path.name))
        return pids

    def cut_power(self, host: str) -> None:
        """Kill a host with all its processes. Its network goes down first, so no peer is notified."""
        self.plug(host, in_=False)
        os.kill(self._pids[host], signal.SIGKILL)

    def plug(self, host: str, *, in_: bool) -> None:
        """Unplug or plug in a host's network cable. TCP resends the data that was lost."""
        self.run(HEAD, "ip", "link", "set", f"to-{host}", "up" if in_ else "down")
        if in_:  # a search for an address that began before would end soon, and all connections to it fail
            for name in self._pids:
                device = "br0" if name == HEAD else "eth0"
                self.run(name, "ip", "neigh", "flush", "dev", device)

    def keep_apart(self, *hosts: str) -> None:
        """Drop all traffic between these hosts, like a firewall."""
        bridge = find_program("bridge") or "bridge"
        for host in hosts:
            self.run(HEAD, bridge, "link", "set", "dev", f"to-{host}", "isolated", "on")

    @contextmanager
    def slow_link(self, host: str, rate: str) -> Iterator[None]:
        """Limit a host's incoming traffic to `rate` (``20mbit``). Raises NotHere if the kernel cannot."""
        on = ("dev", f"to-{host}", "root")
        self.run(HEAD, "tc", "qdisc", "add", *on, "tbf", "rate", rate, "burst", "32kb", "latency", "400ms")
        try:
            yield
        finally:
            self.run(HEAD, "tc", "qdisc", "del", *on)

    def write_remote_shell(self, path: Path) -> Path:
        """Write a program that runs commands like `ssh HOST COMMAND`, from `head`."""
        cases = "".join(f"  {name}) pid={_pid_in_head(self._pids[name])} ;;\n" for name in self.names)
        path.write_text(
            "#!/bin/sh\n"
            'while [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case "$1" in\n{cases}'
            '  *) echo "no host $1" >&2; exit 255 ;;\nesac\n'
            f'shift\nexec {" ".join(_enter("$pid"))} env TMPDIR={_TMPDIR} sh -c "$*"\n',
            encoding="ascii",
        )
        path.chmod(0o755)
        return path


def _enter(pid: int | str) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--uts", "--mount", "--ipc", "--pid", "--wd=."]


def _pid_in_head(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
    return int(numbers[-2])


def administrators_path() -> str:
    """Return the PATH, with the folders of administrators' programs: not every shell of root has them."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def find_program(name: str) -> str | None:
    """Return the path of a program; None if there is none."""
    return shutil.which(name, path=administrators_path())


def address(name: str) -> str:
    """Return the address of a host."""
    return f"{_NETWORK}{254 if name == HEAD else int(name.removeprefix('h'))}"


@contextmanager
def hosts(n: int) -> Iterator[Hosts]:
    """Start `n` hosts and `head`. Raises NotHere if that is not possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NotHere("hosts of namespaces need Linux and root")
    if missing := [name for name in _PROGRAMS if find_program(name) is None]:
        raise NotHere(f"hosts of namespaces need {', '.join(missing)} (Debian: iproute2, util-linux)")
    names = [HEAD, *(f"h{i}" for i in range(1, n + 1))]
    addresses = {"localhost": "127.0.0.1"} | {name: address(name) for name in names}
    table = "".join(f"{number} {name}\n" for name, number in addresses.items())
    started: list[subprocess.Popen[str]] = []
    pids: dict[str, int] = {}
    try:
        for name in names:
            inside = _enter(pids[HEAD]) if pids else ["setpriv", "--pdeathsig", "KILL"]
            started.append(_start(inside, name, table))
            pids[name] = _wait_for(name, started[-1])
        _connect(pids)
        yield Hosts(pids)
    finally:
        if pids:
            os.kill(pids[HEAD], signal.SIGKILL)
        elif started:
            started[0].kill()
        for process in started:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _start(inside: Sequence[str], name: str, table: str) -> subprocess.Popen[str]:
    apart = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        [*inside, "unshare", *apart, "sh", "-c", _INIT, name, table],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait_for(name: str, process: subprocess.Popen[str]) -> int:
    """Wait until the host is ready; return the process id, in this namespace, of its first process."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != "ready":
        raise NotHere(f"host {name} does not start: {line or 'unshare failed'}")
    pid = process.pid
    while _name_of(pid) != "sh":  # nsenter and unshare each start the next
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])
    return pid


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def _connect(pids: dict[str, int]) -> None:
    in_head = ["nsenter", f"--target={pids[HEAD]}", "--net", "ip"]
    _run([*in_head, "link", "add", "br0", "type", "bridge"])
    _run([*in_head, "addr", "add", f"{address(HEAD)}/24", "dev", "br0"])
    _run([*in_head, "link", "set", "br0", "up"])
    for name, pid in pids.items():
        if name == HEAD:
            continue
        _run(
            [*in_head, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
        )
        _run([*in_head, "link", "set", f"to-{name}", "master", "br0", "up"])
        in_host = ["nsenter", f"--target={pid}", "--net", "ip"]
        _run([*in_host, "addr", "add", f"{address(name)}/24", "dev", "eth0"])
        _run([*in_host, "link", "set", "eth0", "up"])
        _add_docker_bridge(in_host)


def _add_docker_bridge(ip: Sequence[str]) -> None:
    """Add the bridge that Docker creates on every host, also without containers."""
    _run([*ip, "link", "add", "docker0", "type", "bridge"])
    _run([*ip, "addr", "add", "172.17.0.1/16", "dev", "docker0"])
    _run([*ip, "link", "set", "docker0", "up"])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S)
    if done.returncode != 0:
        raise NotHere(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
