"""Limits of the system against what the ranks of a node need, and the explanation of a failed run."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpillm.doctor import limits
from mpillm.doctor.disk import Beacon, disk_facts, run_directory, shared_lines
from mpillm.doctor.findings import Line, Status, Verdict, World, by_verdict, judge, report_lines, size, worst
from mpillm.doctor.installed import PackageFacts, c_compiler, package_facts, packages, same_packages
from mpillm.doctor.limits import UNLIMITED, LimitFacts, limit_facts
from mpillm.doctor.local_checks import explain

PLENTY = LimitFacts(
    open_files=(1 << 20, 1 << 20),
    files_open=30,
    processes=UNLIMITED,
    user_threads=0,
    tasks=None,
    locked=UNLIMITED,
    rdma=True,
    left={},
    shm=(1 << 34, 1 << 34),
    memory=1 << 36,
    oom_kills=0,
    cores=64,
    quota=None,
)
LEFT, LEFT_NAMES = (
    {"mpich_shm_1_0": 2 << 20, "sm_segment.h1.0.b1.0": 16 << 20},
    "mpich_shm_1_0, sm_segment.h1.0.b1.0",
)
FOUR = World(dict.fromkeys(range(4), "n1"))


def lines(world: World = FOUR, **changes: Any) -> dict[str, Line]:
    """Return the lines of ranks with these limits, by check."""
    facts = {rank: PLENTY._replace(**changes) for rank in world.nodes}
    return {line.check: line for line in judge(limits.CHECKS, facts, world)}


def test_with_plenty_nothing_is_wrong() -> None:
    assert {line.status for line in lines().values()} == {Status.OK}


@pytest.mark.parametrize(
    ("check", "changes", "status", "expected"),
    [
        ("open files", {"open_files": (64, 4096)}, Status.WARNING, "ulimit -n 72 before"),
        ("open files", {"open_files": (64, 64)}, Status.WARNING, "hard limit is too low"),
        ("open files", {"open_files": (32, 4096)}, Status.FAILURE, "ulimit -n 72"),
        ("processes", {"tasks": 100}, Status.WARNING, "pids.max"),
        ("processes", {"processes": 1000, "user_threads": 900}, Status.WARNING, "ulimit -u"),
        ("locked memory", {"locked": 1 << 16}, Status.WARNING, "memlock"),
        ("locked memory", {"locked": 1 << 16, "rdma": False}, Status.OK, ""),
        ("left memory", {"left": LEFT}, Status.WARNING, "delete them"),
        ("shared memory", {"shm": (1 << 26, 1 << 26)}, Status.WARNING, "size=128M"),
        ("shared memory", {"shm": (1 << 26, 1 << 20)}, Status.FAILURE, "--shm-size=128m"),
        ("shared memory", {"shm": None}, Status.FAILURE, "tmpfs"),
        ("memory", {"memory": 1 << 31}, Status.WARNING, "fewer ranks"),
        ("memory", {"memory": 1 << 28}, Status.FAILURE, "fewer ranks"),
        ("cores", {"cores": 2}, Status.WARNING, "fewer ranks"),
        ("cores", {"quota": 1.5}, Status.WARNING, "fewer ranks"),
    ],
)
def test_each_limit(check: str, changes: dict[str, Any], status: Status, expected: str) -> None:
    line = lines(**changes)[check]
    assert (line.status, expected in line.advice) == (status, True), line


def test_what_a_node_has_is_judged_once_per_node() -> None:
    world = World({0: "n1", 1: "n1", 2: "n2"})
    facts = {0: PLENTY, 1: PLENTY._replace(shm=(0, 0)), 2: PLENTY._replace(cores=0)}
    found = [line for line in judge(limits.CHECKS, facts, world) if line.status is not Status.OK]
    assert [(line.check, line.ranks) for line in found] == [("cores", (2,))]


def test_this_machine_has_limits() -> None:
    facts = limit_facts()
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < facts.files_open < 10_000 and facts.memory > 0 and facts.cores > 0


def test_equal_verdicts_share_a_line() -> None:
    ok, bad = Verdict(Status.OK, "fine"), Verdict(Status.FAILURE, "bad", "mend it")
    assert by_verdict("it", {0: ok, 1: ok}) == [Line("it", Status.OK, "fine")]
    found = by_verdict("it", {0: ok, 1: bad, 2: bad, 3: ok})
    assert [line.ranks for line in found] == [(0, 3), (1, 2)]
    assert worst(found) is Status.FAILURE and worst([]) is Status.OK
    text = "\n".join(report_lines(found))
    assert "ranks 1-2: bad" in text and "-> mend it" in text and "1 failure, 1 ok" in text


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1500, "1.5 kB"), (64 << 20, "67 MB"), (1e12, "1.0 TB")])
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text


def test_the_disk_of_the_run_directory(tmp_path: Path) -> None:
    facts = disk_facts(tmp_path / "not" / "yet")
    assert (facts.folder, facts.problem) == (str(tmp_path), "") and facts.rate > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for wrong in (disk_facts(tmp_path / "file" / "run"), disk_facts(Path("/proc/none"))):
        assert run_directory(wrong).status is Status.FAILURE, wrong
    assert run_directory(None).status is Status.FAILURE
    assert run_directory(facts._replace(free=1)).status is Status.FAILURE
    assert run_directory(facts._replace(free=1 << 40, rate=1e6)).status is Status.WARNING


def test_packages() -> None:
    needs = [
        "numpy>=1.26",
        "none-such>=1",
        "psutil>=999",
        'torch>=999 ; extra == "torch"',
        "x ; extra == 'lint'",
    ]
    facts = package_facts(lambda _: needs)
    assert facts.required is not None and facts.required["none-such"] == "is not installed"
    assert list(facts.required) == ["none-such", "psutil"] and facts.extras == {"torch": ("torch",)}
    (line,) = packages({0: facts}, World({0: "a"}))
    assert line.status is Status.FAILURE and line.advice == "pip install none-such psutil"


def test_packages_that_differ() -> None:
    one = PackageFacts({}, {}, {"numpy": "2.0", "psutil": "7"})
    facts, world = (
        {0: one, 1: one._replace(versions={"numpy": "2.1", "psutil": "7"})},
        World({0: "a", 1: "b"}),
    )
    (line,) = same_packages(facts, world)
    assert (line.status, line.text) == (Status.WARNING, "numpy 2.0 of rank 0 on a or 2.1 of rank 1 on b")
    assert same_packages(facts, World({0: "a", 1: "a"})) == []


def test_a_missing_c_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({0: "a", 1: "b"})
    there = PackageFacts({}, {}, {}, "/usr/bin/cc")
    monkeypatch.setenv("CC", "no-such-compiler")
    lines = c_compiler({0: there, 1: package_facts()}, world)
    assert [(line.status, line.ranks) for line in lines] == [(Status.OK, (0,)), (Status.WARNING, (1,))]
    assert "CC" in lines[1].advice


@pytest.mark.parametrize(
    ("cause", "changes", "expected"),
    [
        ("OSError: [Errno 24] Too many open files", {"open_files": (20, 20)}, "open files: at most 20"),
        (
            "the process has ended; last seen in phase 'load'",
            {"shm": (1, 1)},
            "shared memory: /dev/shm has 1 B",
        ),
        ("RuntimeError: can't start new thread", {"tasks": 1}, "processes: 1 more may start"),
        ("MemoryError: ", {"memory": 5}, "memory: 5 B free"),
        ("MemoryError: ", {}, ""),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB.", {}, "GPU memory: weights"),
        ("--max_seq_len 3: too short", {"shm": (1, 1)}, ""),
    ],
)
def test_a_failed_run_is_explained(cause: str, changes: dict[str, Any], expected: str) -> None:
    found = explain(cause, lambda: PLENTY._replace(**changes))
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_a_port_that_is_taken_names_who_has_it(free_listener: Callable[[], socket.socket]) -> None:
    with free_listener() as taken:
        port = taken.getsockname()[1]
        found = explain(f"OSError: 0.0.0.0:{port}: Address already in use")
    assert f"{port} is taken by python" in found


@pytest.fixture
def free_listener() -> Callable[[], socket.socket]:
    return lambda: socket.create_server(("127.0.0.1", 0))


def test_the_stack_of_a_killed_rank_does_not_blame_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was killed while it imported PyTorch: the files of its stack are named after CUDA."""
    where = 'File "torch/cuda/__init__.py", line 22, in <module>\n    from ._gpu_trace import ncclGPU'
    cause = f"the process has ended; last seen in phase 'load', stuck for 1.2 s in:\n  {where}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert explain("CUDA: no GPU is visible", lambda: PLENTY) != ""
    assert explain(cause, lambda: PLENTY) == ""


def test_memory_left_by_killed_programs_is_named() -> None:
    text = lines(left=LEFT)["left memory"].text
    assert text == "19 MB in /dev/shm that no process here has: mpich_shm_1_0, sm_segment.h1.0.b1.0"


def test_a_shared_folder(tmp_path: Path) -> None:
    """Only a folder that hangs is a fault: the others need none of rank 0's files."""
    world = World({0: "a", 1: "b", 2: "c", 3: "d"})
    beacon = Beacon.light(tmp_path / "not" / "yet")
    assert beacon is not None and beacon.path.parent == tmp_path and beacon.path.exists()
    beacon.put_out()
    assert not [*tmp_path.iterdir()] and Beacon.light(Path("/proc/none")) is None
    lines = shared_lines(tmp_path, {1: True, 2: False, 3: None}, world)
    assert [(line.status, line.ranks) for line in lines] == [(Status.FAILURE, (3,)), (Status.OK, (2,))]
    (line,) = shared_lines(tmp_path, {1: True, 2: True}, world)
    assert line.status is Status.OK and line.figures["seen_on"] == ["b", "c"] and not line.ranks
