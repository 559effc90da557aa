"""What a rank's log begins with."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpillm.telemetry.rank_log import how_it_ended, last_read, log_name, open_rank_log

CODE = """
import sys
from pathlib import Path
from mpillm.telemetry.rank_log import open_rank_log
print(open_rank_log(Path(sys.argv[1]), 0).read_text())
"""


@pytest.mark.parametrize("key", [["--api_key", "sesame"], ["--api-key=sesame"]])
def test_the_command_line_without_a_key(tmp_path: Path, key: list[str]) -> None:
    words = [sys.executable, "-c", CODE, str(tmp_path), "--port", "0", *key, "--host", "here"]
    output = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True).stdout
    assert output.rstrip().endswith("--port 0 --host here") and "sesame" not in output


READS = """
import os, signal, sys
from pathlib import Path
from mpillm.telemetry.read_log import ReadLog
from mpillm.telemetry.rank_log import open_rank_log
open_rank_log(Path(sys.argv[1]), 1)
reads = ReadLog()
for i in range(200):
    reads.note(Path(f"/models/{i}.safetensors"))
    reads.note(Path(f"/models/{i}.safetensors"))
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGKILL"])
def test_the_file_that_a_rank_read_last(tmp_path: Path, name: str) -> None:
    """However many files it has read in a moment, and only where the signal may come from the file."""
    ended = subprocess.run([sys.executable, "-c", READS, str(tmp_path), name], timeout=300, check=False)
    assert ended.returncode < 0
    log = tmp_path / log_name(1)
    file = "the file that it read last: /models/199.safetensors"
    assert last_read(log) == file and log.read_text().count(" reads ") == 200
    assert (file in how_it_ended(log).splitlines()) is (name == "SIGBUS")
    assert last_read(tmp_path / "nowhere") == ""


@pytest.mark.parametrize("planted", ["a link", "a pipe", "a folder of another user"])
def test_a_log_is_not_led_elsewhere(tmp_path: Path, planted: str) -> None:
    """On a host that does not share rank 0's folder, one of this name may be another user's."""
    log = tmp_path / "run" / log_name(1)
    log.parent.mkdir(parents=True)
    if planted == "a link":
        log.symlink_to(tmp_path / "other")
    elif planted == "a pipe":
        os.mkfifo(log)
    elif os.geteuid() == 0:
        os.chown(tmp_path / "run", 1002, 1002)
    else:
        pytest.skip("only root can make another user's folder")
    with pytest.raises(OSError) as failed:
        open_rank_log(tmp_path / "run", 1)
    assert failed.value.errno in (errno.ELOOP, errno.ENXIO, errno.EPERM) and failed.value.filename
    assert not (tmp_path / "other").exists()
