"""Which rank gets which GPU, and what is wrong before anything is loaded."""

from __future__ import annotations

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.devices import Gpu, assign, local_gpus

BIG, SMALL = Gpu("GPU", 100, 90), Gpu("GPU", 100, 40)


def plan(workers: int, nodes: list[str] | None = None, **options: int) -> disagg.WorldPlan:
    size = workers + (1 if workers < 3 else 2)
    return disagg.plan(disagg.generate("aggregated", size, **options), size, nodes)


def test_no_gpu_is_the_cpu_and_none_is_asked_for() -> None:
    assert assign("auto", plan(3), [()] * 5) == {}
    assert assign("cpu", plan(3), [(BIG,)] * 5) == {}


def test_an_instance_has_what_its_fullest_gpu_has() -> None:
    assert assign("auto", plan(3), [(BIG, SMALL, BIG, SMALL)] * 5) == {0: 90, 1: 40, 2: 90}
    assert assign("cuda", plan(4, tensor_parallelism=2), [(BIG, BIG, BIG, SMALL)] * 6) == {0: 90, 1: 40}


def test_control_ranks_take_none() -> None:
    """Nodes a and b with two ranks each, the two control ranks on a."""
    assert assign("cuda", plan(2, ["a", "b", "b"]), [(), (BIG, SMALL), (BIG, SMALL)]) == {0: 90, 1: 40}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_workers_than_gpus(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"--device {device}: 2 worker ranks on node b, one GPU each, and PyTorch can use 1 there"):
        assign(device, plan(2, ["a", "b", "b"]), [(BIG, BIG), (BIG,), (BIG,)])


def test_cuda_without_gpus() -> None:
    with pytest.raises(ConfigError, match=r"1 worker rank on node .*, one GPU each, and PyTorch can use 0 there"):
        assign("cuda", plan(1), [()] * 2)


def test_looking_for_gpus_needs_none() -> None:
    assert all(gpu.free <= gpu.total for gpu in local_gpus())
