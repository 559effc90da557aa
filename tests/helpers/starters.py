"""Fixtures of tests that start real commands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.support import Starter


@pytest.fixture(autouse=True)
def own_tmpdir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield a `TMPDIR` for each test, with a short path, as sockets need.

    A plain mpirun of Open MPI that is killed leaves its session folder there, and a later one that gets the
    same process id does not start beside it.
    """
    # pytest's own folder, which outlives this one: it is made where TMPDIR says
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="mpillm-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def starter_of(name: str, folder: Path) -> Iterator[Starter]:
    starter = Starter(name, folder)
    yield starter
    for command in starter.commands:
        command.kill()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Starter]:
    """Yield a starter of commands with Open MPI, for what does not depend on the MPI."""
    yield from starter_of("openmpi", tmp_path)
