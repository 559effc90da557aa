"""The limit of open files, for the connections that are expected."""

from __future__ import annotations

import resource

import pytest

from launch.open_files import allow_connections
from launch.rank_registry import RankRegistry
from tests.helpers.descriptors import soft_limit


def test_the_limit_is_raised_for_the_connections_of_all_ranks() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip(f"the hard limit of open files is {hard}")
    with soft_limit(500):
        assert allow_connections(100) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 500, "it suffices"
        RankRegistry(600)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 600 + 256


def test_a_hard_limit_that_does_not_suffice_is_named() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no hard limit of open files")
    with soft_limit(min(500, hard)):
        assert (
            allow_connections(hard) == f"this process may open {hard} files: ulimit -n {hard + 256}, or more"
        )
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
