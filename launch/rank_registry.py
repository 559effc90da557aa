"""Rank registry: ranks of several hosts keep a liveness connection to `mpillm mpirun`.

MPI_Init waits for every rank, and does not name a missing rank. Rank 0 sees only the processes of its own
host. So ranks connect to the launcher (`launch.liveness_server`). The launcher names a rank that is lost
before all ranks have joined. Later, it names the rank that exited first, if mpirun leaves rank 0 no time.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Mapping

from disagg import rank_list
from launch.exits import RankExit
from launch.interfaces import interfaces, own_addresses
from launch.launcher import find_launcher
from launch.liveness_server import KEY, LivenessServer, connect
from launch.mpi_ports import FIREWALL, Port, listen_as_mpi
from launch.open_files import allow_connections, files_for

REGISTRY_ADDRESS = "MPILLM_RANK_REGISTRY"
"""Address of the launcher: host names and addresses, best first, the port, and a key, between slashes."""

_MAX_INTERFACES = 512  # bytes for names and addresses of interfaces
# The key, then the fields of `_Registration`.
_GREETING = struct.Struct(f"!{KEY}IIH64s{_MAX_INTERFACES}s")
_JOINED, _DEREGISTERS = b"+", b"."
_HERE = re.compile(r"\x1b_mpillm-here:([0-9]{1,9}) (\S+)\x1b")  # a terminal ignores this text
_USUAL_CONNECT_S = 0.5
_CONNECT_TIMEOUT_S = 5.0  # a reachable launcher answers much sooner
_MAX_NAMED = 8  # ranks
_CAUSE_WINDOW_S = 3.0  # an earlier exit did not cause rank 0's exit
_TOGETHER_S = 0.005  # several ranks are killed within this time; Open MPI aborts other ranks later
_REPORT_S = 5.0
"""Time for rank 0 to report the reason of a rank that has exited: see `let_rank_0_report`."""


_Registration = tuple[int, int, int, bytes, bytes]  # rank, process id, port, host, interfaces


class RankRegistry:
    """The launcher's side of the registry."""

    def __init__(self, size: int) -> None:
        """Open a port for `size` ranks. Raises OSError if that fails."""
        self._size = size
        # Another thread reads these objects, so they are replaced, never changed.
        self._hosts: dict[int, str] = {}  # hosts of the registered ranks
        self._ports: dict[int, Port] = {}
        self._cut_off: dict[int, str] = {}  # hosts of ranks that have started, but cannot reach the launcher
        self._joined: frozenset[int] = frozenset()
        self._deregistered: frozenset[int] = frozenset()
        self._exited: tuple[RankExit, ...] = ()
        self._n_connections = 2 * size  # from each rank, and to ports of ranks
        allow_connections(self._n_connections)
        self._server = server = LivenessServer(
            "mpillm-registry", _GREETING, self._on_exit, self._on_connect, self._on_byte
        )
        own = own_addresses()
        self._where = f"{own[0] if own else 'any address'} port {server.port}"
        self.address = f"{','.join(own)}/{server.port}/{server.key.hex()}"

    def _on_connect(self, fields: _Registration, address: str) -> None:
        rank, _, port, host, own = fields
        name, addresses = (text.rstrip(b"\0").decode(errors="replace") for text in (host, own))
        self._ports = self._ports | {rank: Port(rank, name, address, port, addresses)}
        self._hosts = self._hosts | {rank: name}

    def _on_byte(self, fields: _Registration, byte: bytes) -> bool:
        self._joined |= {fields[0]}
        if byte != _JOINED:
            self._deregistered |= {fields[0]}
        return byte == _JOINED

    def _on_exit(self, fields: _Registration) -> None:
        rank, pid, *_ = fields
        self._exited += (RankExit(rank, self._hosts[rank], pid, at=time.monotonic()),)

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the registered ranks, in the ranks' order."""
        return dict(sorted(self._hosts.items()))

    def lost(self) -> list[RankExit]:
        """Return `first_exits`, once rank 0 has had time to report these ranks, or if rank 0 has exited.

        After all ranks have joined, rank 0 reports lost ranks itself.
        """
        late = time.monotonic() - _REPORT_S
        return self.first_exits() if any(one.at < late or one.rank == 0 for one in self._early()) else []

    def first_exits(self) -> list[RankExit]:
        """Return the ranks that exited first, before all had joined. Their exits may have caused others."""
        return _simultaneous(self._early())

    def exits_before_rank_0(self) -> list[RankExit]:
        """Return the ranks that exited first in the 3 s before rank 0; none if rank 0 is among the first."""
        exited = {one.rank: one for one in self._exited}
        if 0 not in exited:
            return []
        first = _simultaneous([one for one in exited.values() if one.at > exited[0].at - _CAUSE_WINDOW_S])
        return [] if exited[0] in first else first

    def silent_hosts(self) -> list[str]:
        """Return the hosts from which no exit and no deregistration of a rank was reported."""
        ended = {self._hosts[rank] for rank in {*self._deregistered, *(one.rank for one in self._exited)}}
        return [host for host in dict.fromkeys(self.hosts().values()) if host not in ended]

    def _early(self) -> list[RankExit]:
        """Return the exits of ranks that had not joined."""
        return [one for one in self._exited if one.rank not in self._joined]

    def note_cut_off(self, line: str) -> bool:
        """Record a rank that cannot connect, if `line` is its printed message; return whether it is one."""
        match = _HERE.search(line)
        if match:
            self._cut_off = self._cut_off | {int(match[1]): match[2]}
        return match is not None

    def absent(self) -> str:
        """Once some ranks have registered, name the ranks that have not, and whether these have started.

        "" if all have registered.
        """
        registered = self._hosts.keys()
        missing = sorted(set(range(self._size)) - registered) if registered or self._cut_off else []
        cut_off = [rank for rank in missing if rank in self._cut_off]
        unseen = [rank for rank in missing if rank not in self._cut_off]
        problems = []
        if unseen:
            more = f" and {len(unseen) - _MAX_NAMED} more" if len(unseen) > _MAX_NAMED else ""
            names = ", ".join(f"rank {rank}" for rank in unseen[:_MAX_NAMED]) + more
            problems.append(f"{names} {self._unseen()}")
        if cut_off:
            ranks = rank_list(cut_off, {**self._hosts, **self._cut_off})
            has = "has" if len(cut_off) == 1 else "have"
            problems.append(
                f"{ranks} {has} started, but can't reach `mpillm mpirun` at {self._where}: {FIREWALL}"
            )
        return "; ".join(problems)

    def _unseen(self) -> str:
        """Return why ranks have not registered, as far as it is known."""
        if not self._server.lacks_files:
            return "has not started, or was lost before that"
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        needed = files_for(self._n_connections)
        return f"cannot register: `mpillm mpirun` may open only {limit} files: ulimit -n {needed}, or more"

    def waits(self) -> bool:
        """Return whether all ranks have registered, and some have not joined yet."""
        return len(self._hosts) == self._size > len(self._joined)

    def ports(self) -> list[Port]:
        """Return the ports of all ranks while MPI starts; empty until all have registered."""
        ports = self._ports
        return [ports[rank] for rank in sorted(ports)] if len(ports) == self._size else []


def _simultaneous(exits: list[RankExit]) -> list[RankExit]:
    """Return the exits at the time of the first one."""
    until = min((one.at for one in exits), default=0.0) + _TOGETHER_S
    return [one for one in exits if one.at <= until]


class _RegistryClient:
    """A rank's side of the registry."""

    def __init__(self, hosts: list[str], port: int, greeting: bytes, listener: socket.socket | None) -> None:
        self._lock = threading.Lock()
        self._listener = listener  # open until all ranks have joined
        self._unsent = b""  # byte to send once there is a connection
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._connect, args=(hosts, port, greeting), daemon=True)
        self._thread.start()

    def wait(self, seconds: float = _CONNECT_TIMEOUT_S) -> bool:
        """Wait until the connection is established or has failed; return whether it is established."""
        self._thread.join(seconds)
        return self._connection is not None

    def _connect(self, hosts: list[str], port: int, greeting: bytes) -> None:
        connection = connect(hosts, port, greeting)
        with self._lock:
            self._connection = connection
            self._send(self._unsent)

    def send(self, byte: bytes) -> None:
        """Send `_JOINED` or, as the last byte, `_DEREGISTERS`."""
        with self._lock:
            self._send(byte)

    def _send(self, byte: bytes) -> None:
        if self._connection is None:
            self._unsent = byte
        elif byte:
            with contextlib.suppress(OSError):
                self._connection.sendall(byte)
            if byte == _DEREGISTERS:
                self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close_port(self) -> None:
        """Close the port."""
        with self._lock:
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def close_in_child(self) -> None:
        """Close all sockets without a message. A forked child process, which is not the rank, calls this."""
        if self._listener is not None:
            self._listener.close()
        self._disconnect()


_client: _RegistryClient | None = None


def register(env: Mapping[str, str] = os.environ) -> None:
    """Register this rank's process with the launcher, if the launcher has a registry."""
    global _client
    launcher = find_launcher(env)
    if REGISTRY_ADDRESS not in env or launcher is None or launcher.rank is None or _client is not None:
        return
    hosts, port, key = env[REGISTRY_ADDRESS].split("/")
    host = socket.gethostname()
    listener = listen_as_mpi(env)
    own_port = listener.getsockname()[1] if listener is not None else 0
    own = ",".join("=".join(one) for one in interfaces())
    fields = (launcher.rank, os.getpid(), own_port, host.encode()[:64], own.encode()[:_MAX_INTERFACES])
    greeting = _GREETING.pack(bytes.fromhex(key), *fields)
    _client = _RegistryClient(hosts.split(","), int(port), greeting, listener)
    # Connecting usually takes a millisecond. After that, the launcher can name this rank if it is lost.
    if not _client.wait(_USUAL_CONNECT_S):
        # Printed now, because later no thread of this process can print: MPI_Init holds the GIL.
        with contextlib.suppress(OSError):
            os.write(2, f"\x1b_mpillm-here:{launcher.rank} {host}\x1b\\\n".encode())
    os.register_at_fork(after_in_child=_client.close_in_child)


def wait_registered() -> None:
    """Wait until the launcher has registered this rank, which is about to exit with an error."""
    if _client is not None:
        _client.wait()


def report_joined() -> None:
    """Report to the launcher that rank 0 has registered this rank's process."""
    if _client is not None:
        _client.close_port()
        _client.send(_JOINED)


def deregister(keep_port: bool = False) -> None:
    """Report to the launcher that this rank exits as planned, or that its exit does not matter.

    `keep_port`: leave the port open until the process exits, so that the launcher can still test it.
    """
    if _client is not None:
        if not keep_port:
            _client.close_port()
        _client.send(_DEREGISTERS)
