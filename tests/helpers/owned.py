"""The processes of servers that ranks own, as tests see them."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.support import Command


def words_of(pid: int) -> bytes:
    """Return the command line of a process, its words apart by zeros; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def title_of(pid: int) -> str:
    """Return the beginning of a process's command line; "" if it has ended."""
    return words_of(pid).replace(b"\0", b" ").decode(errors="replace")[:60]


def started_at(pid: int) -> str:
    """Return when a process has started, which no later one with its number has; "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def parent_of(pid: int) -> int:
    """Return the process that has started one which runs."""
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def guards(command: Command) -> list[int]:
    """Return what stands over the servers of a command."""
    return [pid for pid in command.pids() if b"server_guard" in words_of(pid)]
