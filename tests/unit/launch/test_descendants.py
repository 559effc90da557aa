"""New processes below a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from launch.descendants import Descendants
from tests.helpers.support import wait_until

# Starts a process that starts one, from a thread; on a line of its input, it starts another one.
STARTS = """
import subprocess, sys, threading
nested = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]
threading.Thread(target=lambda: subprocess.run(nested), daemon=True).start()
sys.stdin.readline()
subprocess.Popen(["sleep", "600"])
sys.stdin.readline()
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_each_descendant_is_found_once() -> None:
    below: list[int] = []
    with subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE) as first:
        found = Descendants(first.pid)

        def look(n: int) -> bool:
            below.extend(found.new())
            return len(below) >= n

        try:
            wait_until(lambda: look(2), "both processes")
            assert [parent(pid) for pid in below] == [first.pid, below[0]]
            assert first.stdin is not None
            first.stdin.write(b"\n")
            first.stdin.flush()
            wait_until(lambda: look(3), "the third process")
            assert parent(below[2]) == first.pid
            os.kill(below[2], signal.SIGKILL)  # a zombie, because its parent does not wait for it
            assert [found.new() for _ in range(3)] == [[]] * 3
        finally:
            for pid in (*below, first.pid):
                os.kill(pid, signal.SIGKILL)


def test_processes_of_others_are_not_found() -> None:
    with subprocess.Popen(["sleep", "600"]) as one, subprocess.Popen(["sleep", "600"]) as other:
        found = Descendants(one.pid)
        assert [found.new() for _ in range(3)] == [[]] * 3
        with subprocess.Popen(["sleep", "600"]) as late:
            assert [found.new() for _ in range(3)] == [[]] * 3
            late.kill()
        one.kill()
        other.kill()
