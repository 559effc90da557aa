"""Which descriptors have data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from launch.readable import readable
from tests.helpers.descriptors import only_large_descriptors


@pytest.mark.parametrize("descriptors", [contextlib.nullcontext, only_large_descriptors])
def test_descriptors_with_data_or_at_their_end(
    descriptors: Callable[[], AbstractContextManager[None]],
) -> None:
    with descriptors():
        silent, silent_end = os.pipe()
        ready, ready_end = os.pipe()
        ended, ended_end = os.pipe()
    assert (silent > 1023) == (descriptors is only_large_descriptors)
    assert readable([silent, ready], 0.0) == []
    os.write(ready_end, b"x")
    os.close(ended_end)
    assert readable([silent, ready, ended], 60.0) == [ready, ended]
    with os.fdopen(ended) as file:
        assert readable([file], 60.0) == [file]
    for fd in (silent, silent_end, ready, ready_end):
        os.close(fd)
