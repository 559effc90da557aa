"""For all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from launch.launcher import find_launcher
from tests.helpers.lone_mpi import leaving_nothing

# They keep all cores busy: several at a time would take as long, and the others wait most of their time.
BUSY = {
    f"test_{name}"
    for name in (
        "answer_ends",
        "core_handoff",
        "engine_gpu",
        "engine_tokens",
        "families",
        "handoff_layouts",
        "model_shapes",
        "oracle",
        "parallel",
        "pipeline",
        "quantized",
        "scheduling",
        "workload_runs",
    )
}

# What their tests share takes long, and would be computed in each process that has one of these tests.
TOGETHER = {
    f"test_{name}"
    for name in (
        "advice",
        "beams",
        "forecast",
        "kv_cache_dtype",
        "patterns",
        "troubleshooting_page",
        "wording",
    )
}

# Under nohup, what tests start would inherit that SIGHUP is ignored, and rightly go on when one comes.
# Handlers are not inherited.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A make that a test starts must not take over the variables and the job server of `make test`.
os.environ.pop("MAKEFLAGS", None)

# As `mpillm.triton.grpc_fork` sets it. Some tests import gRPC first.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Modules under test import MPI, which starts it.
if find_launcher() is None:
    with leaving_nothing() as _variables, mock.patch.dict(os.environ, _variables):
        from mpi4py import MPI  # noqa: F401

# What the engine compiles for CPUs, tests and what they start leave here, not in the user's cache.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, one process has all of the busy ones, and one each of the other files.

    That process begins with them: they take so long that the others would wait for it at the end. Tests that
    start whole commands are long, but for a few, and so are those of benchmarks that are not installed.
    """
    for item in items:
        parts = item.path.relative_to(Path(__file__).parent).parts  # whatever folder the clone is in
        if ("e2e" in parts and not item.get_closest_marker("smoke")) or "benchmarks" in parts:
            item.add_marker(pytest.mark.long)
        if item.path.stem in BUSY:
            item.add_marker(pytest.mark.xdist_group("busy"))
        elif item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.path.stem not in BUSY)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_handlecrashitem() -> None:
    """Leave a file for `.ci/run`: a test has ended its process, so others have not run."""
    crashed = Path(__file__).parents[1] / ".pytest_cache" / "crashed"
    crashed.parent.mkdir(exist_ok=True)
    crashed.touch()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the check that tests of `make test` are short."""
    text = "seconds of CPU that a test without the marker `long` may use, with the children that it waits for"
    parser.addoption("--cpu_limit", type=float, help=text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record the CPU time of a test (`--junitxml` shows it), and check it.

    Fixtures do not count: other tests share a module's fixtures and the first import of a library.
    """
    before = _cpu_s()
    yield
    used = _cpu_s() - before
    item.user_properties.append(("cpu_s", f"{used:.3f}"))
    limit = item.config.getoption("cpu_limit")
    is_short = not any(item.get_closest_marker(marker) for marker in ("long", "smoke"))
    if limit is not None and used > limit and is_short:
        pytest.fail(f"it used {used:.1f} s of CPU; the limit is {limit:g} s; mark it with pytest.mark.long")


def _cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])
