"""What killed ranks leave in /dev/shm, here a folder of the test's own, and who removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch import segments
from launch.siblings import start_ticks
from tests.helpers.support import ROOT

RANK = """
import mmap, sys
from pathlib import Path
from launch import segments
segments._SHM = Path(sys.argv[1])
own = segments.apart()["OMPI_MCA_btl_sm_backing_directory"] if "apart" in sys.argv else ""
maps = []
for name in sys.argv[2:]:
    path = Path(own if name == "apart" else sys.argv[1], name.replace("apart", "sm_segment.h1.0.b1200001.0"))
    if not path.exists():
        path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 4096))
segments.note()
print("here", flush=True)
sys.stdin.readline()
"""
OPEN_MPI = ["sm_segment.h1.0.b1200001.0", "sm_segment.h1.0.b1200001.1"]
MPICH = "mpich_shm_cecc4b16_0"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(segments, "_SHM", tmp_path)
    return tmp_path


@pytest.fixture
def start(shm: Path) -> Iterator[Start]:
    """Yield what starts a process with such segments, which it makes unless they are there."""
    started: list[subprocess.Popen[str]] = []

    def rank(*names: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(shm), *names],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        return process

    yield rank
    for process in started:
        process.kill()
        process.communicate()


def left(shm: Path) -> list[str]:
    return sorted(path.name for path in shm.iterdir() if path.is_file())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_killed_ranks_segments_are_swept(shm: Path, start: Start) -> None:
    """A program of somebody else's left some, too; and one of the node's ranks lives on."""
    (shm / "mpich_shm_1234_0").touch()
    first, second = start(OPEN_MPI[0], MPICH), start(OPEN_MPI[1], MPICH)
    segments.sweep()
    assert left(shm) == sorted([*OPEN_MPI, MPICH, "mpich_shm_1234_0"]), "both are there"
    end(first)
    segments.sweep()
    assert left(shm) == sorted([OPEN_MPI[1], MPICH, "mpich_shm_1234_0"])
    end(second)
    segments.sweep()
    assert left(shm) == ["mpich_shm_1234_0"]
    assert segments.left_over() == {"mpich_shm_1234_0": 0}


def test_a_segment_of_the_same_name_is_another(shm: Path, start: Start) -> None:
    """Open MPI names them after the job, and jobs after process ids."""
    end(start(OPEN_MPI[0]))
    kept = shm / "kept"
    (shm / OPEN_MPI[0]).rename(kept)  # so that its number can't be given again
    (shm / OPEN_MPI[0]).write_bytes(bytes(4096))
    segments.sweep()
    assert left(shm) == ["kept", OPEN_MPI[0]]


def test_a_rank_that_ends_well_leaves_no_record(shm: Path, start: Start) -> None:
    start(MPICH).communicate("\n")
    assert [*segments._folder().iterdir()] == []
    segments.sweep()
    assert left(shm) == [MPICH], "MPI removes its segments itself"


def test_what_has_an_owner_is_not_left_over(shm: Path, start: Start) -> None:
    process = start(MPICH)
    (shm / "other").write_bytes(b"x")
    assert segments.left_over() == {}
    end(process)
    assert [*segments.left_over()] == [MPICH]
    os.truncate(shm / MPICH, 1 << 30)
    assert segments.left_over()[MPICH] < 1 << 20, "what nobody wrote to takes no memory"


@pytest.mark.parametrize("text", ["", "no record", "here\n1\nx mpich_shm_1_0", "here\n1\n5 ../kept"])
def test_damaged_records_remove_nothing(shm: Path, text: str) -> None:
    (shm / "mpich_shm_1_0").touch()
    segments._folder().mkdir(mode=0o700)
    (segments._folder() / "1").write_text(text)
    (segments._folder() / "no number").write_text(text)
    segments.sweep()
    assert left(shm) == ["mpich_shm_1_0"]


def test_a_folder_that_others_can_write_to_is_not_read(shm: Path, start: Start) -> None:
    end(start(MPICH))
    segments._folder().chmod(0o777)
    segments.sweep()
    assert left(shm) == [MPICH]


def test_runs_of_one_name_are_kept_apart(shm: Path, start: Start) -> None:
    """Open MPI would open the same file; a killed rank's folder goes, a living one's stays."""
    first, second = start("apart"), start("apart")
    own = segments._own_folder(first.pid, start_ticks(first.pid))
    other = segments._own_folder(second.pid, start_ticks(second.pid))
    assert [*own.iterdir()] == [own / OPEN_MPI[0]] and [*other.iterdir()] == [other / OPEN_MPI[0]]
    assert own.stat().st_mode & 0o777 == 0o700
    end(first)
    assert [*segments.left_over()] == [str((own / OPEN_MPI[0]).relative_to(shm))]
    segments.sweep()
    assert not own.exists() and other.exists()
    second.communicate("\n")
    assert other.exists(), "MPI had not removed its segment yet"
    segments.sweep()
    assert [*segments._folder().iterdir()] == []


def test_what_a_living_rank_has_in_the_folder_of_a_dead_one_stays(shm: Path, start: Start) -> None:
    """Ranks that another one has started have its folder."""
    first = start("apart")
    (segment,) = segments._own_folder(first.pid, start_ticks(first.pid)).iterdir()
    child = start(str(segment.relative_to(shm)))
    end(first)
    segments.sweep()
    assert segment.exists()
    end(child)
    segments.sweep()
    segments.sweep()
    assert [*segments._folder().iterdir()] == []


def test_a_rank_whose_segment_is_gone_leaves_no_folder(shm: Path) -> None:
    folder = Path(segments.apart()["OMPI_MCA_btl_sm_backing_directory"])
    assert folder.is_dir()
    segments.forget()
    assert [*segments._folder().iterdir()] == []


def test_without_a_place_of_its_own_a_rank_starts_as_ever(shm: Path) -> None:
    segments._folder().mkdir()
    segments._folder().chmod(0o777)
    assert segments.apart() == {}
