"""Fixtures of the tests that start real mpiruns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.clusters import OnHosts, or_skip
from tests.helpers.instance_loss import N_SAMPLES
from tests.helpers.starters import one as one
from tests.helpers.starters import own_tmpdir as own_tmpdir
from tests.helpers.starters import starter_of
from tests.helpers.support import PYTHONS, Samples, Starter, make_samples
from tools.hosts import Hosts, hosts


@pytest.fixture
def mpich() -> str:
    """Return a Python whose mpi4py uses MPICH."""
    if not PYTHONS["mpich"]:
        pytest.skip("MPILLM_MPICH_PYTHON is not set: no environment with MPICH")
    return PYTHONS["mpich"]


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> str:
    """Return each MPI in turn."""
    name = str(request.param)
    if name == "mpich":
        request.getfixturevalue("mpich")
    return name


@pytest.fixture
def both(mpi: str, tmp_path: Path) -> Iterator[Starter]:
    """Yield a starter of commands, with each MPI in turn."""
    yield from starter_of(mpi, tmp_path)


@pytest.fixture(scope="module")
def module_hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Yield hosts for the tests of a module: as many as its N_HOSTS says."""
    with or_skip(hosts(request.module.N_HOSTS)) as made:
        yield made


@pytest.fixture
def on_hosts(module_hosts: Hosts, one: Starter) -> OnHosts:
    """Return what starts runs on the module's hosts, with Open MPI."""
    return OnHosts(module_hosts, one)


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return 256 prompts of many lengths: 1 token, and 30,000, which is more than any MPI sends eagerly."""
    lengths = [1, 2, 3, 30_000, *(1 + 7 * i % 193 for i in range(252))]
    return make_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", lengths)


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return 64 prompts, some of which MPI does not send eagerly as KV caches."""
    lengths = [1 + 37 * i % 293 for i in range(N_SAMPLES)]
    return make_samples(tmp_path_factory.mktemp("data") / "few.jsonl", lengths)
