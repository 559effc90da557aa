"""`Staging`: memory is used again, but not before its readers have ended."""

from __future__ import annotations

import numpy as np
import torch

from mpillm.engine.tensors.staging import Staging
from tests.helpers.loopback import Mark


def test_memory_waits_for_its_readers() -> None:
    staging, ends = Staging(torch.device("cpu")), [Mark(over=False), Mark(over=False)]
    some = [staging.to_device(np.arange(i, i + 5)) for i in (0, 10)]
    staging.read_until(ends[0])
    later = staging.to_device(np.arange(20, 25))
    staging.read_until(ends[1])
    assert [each.tolist() for each in (*some, later)] == [
        [i, i + 1, i + 2, i + 3, i + 4] for i in (0, 10, 20)
    ]
    ends[0].over = True
    again = [staging.to_device(np.full(3, i)) for i in (7, 8, 9)]
    addresses = [each.data_ptr() for each in again]
    assert addresses[:2] == [each.data_ptr() for each in some], "the memory of what has been read"
    assert later.tolist() == [20, 21, 22, 23, 24]
    assert addresses[2] not in (addresses[0], addresses[1], later.data_ptr())


def test_a_large_array_gets_memory_of_its_own() -> None:
    staging, end = Staging(torch.device("cpu")), Mark()
    small = staging.to_device(np.arange(3))
    staging.read_until(end)
    large = staging.to_device(np.arange(5000))
    assert large.data_ptr() != small.data_ptr() and large.tolist() == list(range(5000))
