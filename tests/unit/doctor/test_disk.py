"""The check of the run directory's disk."""

from __future__ import annotations

import threading
from pathlib import Path

from mpillm.doctor.disk import DiskFacts, disk_line
from mpillm.doctor.findings import Status


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    end = threading.Event()

    def hang(folder: Path) -> DiskFacts:
        end.wait(60)
        return DiskFacts(str(folder), "", 1 << 40, 1e9)

    line = disk_line(tmp_path, hang, 0.05)
    end.set()
    assert line.status is Status.FAILURE and "a network file system that hangs" in line.text
    assert disk_line(tmp_path).status is not Status.FAILURE
