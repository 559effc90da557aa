"""What killed processes leave in /dev/shm is removed, and nothing else."""

from __future__ import annotations

import os
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from benchmarks.left_in_shm import LeftInShm
from launch.children import Children
from launch.shared_files import SHM
from tests.helpers.support import wait_until

MAKES = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
own = SharedMemory(create=True, size=4096)
other = SharedMemory(sys.argv[1])
open(sys.argv[2], "w").write(own.name)
time.sleep(600)
"""


def test_a_segment_of_a_process_that_is_killed(tmp_path: Path) -> None:
    """That of its start is gone; one that was there before, and that it has mapped, stays."""
    before = SharedMemory(create=True, size=4096)
    note = tmp_path / "name"
    try:
        with LeftInShm() as left, Children(stop_grace_s=0) as children:
            # As vLLM's processes, in a session of their own, without Python's tracker of segments in the way.
            child = children.start("it", [sys.executable, "-c", MAKES, before.name, str(note)], os.environ)
            name = wait_until(lambda: note.exists() and note.read_text(), "its segment", 30)
            left.note([child.process.pid])
            os.killpg(child.process.pid, 9)
            assert (SHM / str(name)).exists()
        assert not (SHM / str(name)).exists() and (SHM / before.name).exists()
    finally:
        before.close()
        before.unlink()
