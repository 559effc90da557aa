"""Which rank gets which GPU, and what is wrong before anything is loaded."""

from __future__ import annotations

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.cores.torch_core import TorchCore
from mpillm.devices import Gpu, OwnGpu, assign


def gpu(name: str, free: int = 90) -> Gpu:
    return Gpu(f"GPU-{name}", "GPU", 100, free)


A, B, C, D = gpu("a"), gpu("b", 40), gpu("c"), gpu("d", 40)


def plan(workers: int, nodes: list[str] | None = None, tensor_parallelism: int = 1) -> disagg.WorldPlan:
    size = workers + (1 if workers < 3 else 2)
    return disagg.plan(
        disagg.generate("aggregated", size, tensor_parallelism=tensor_parallelism), size, nodes
    )


def test_no_gpu_is_the_cpu_and_none_is_asked_for() -> None:
    assert assign("auto", plan(3), [()] * 5) == {}
    assert assign("cpu", plan(3), [(A, B, C)] * 5) == {}


def test_an_instance_has_what_its_fullest_gpu_has() -> None:
    assert assign("auto", plan(3), [(A, B, C, D)] * 5) == {
        2: OwnGpu(0, 90),
        3: OwnGpu(1, 40),
        4: OwnGpu(2, 90),
    }
    own = assign("cuda", plan(4, tensor_parallelism=2), [(A, C, gpu("e"), D)] * 6)
    assert own == {2: OwnGpu(0, 90), 3: OwnGpu(1, 90), 4: OwnGpu(2, 40), 5: OwnGpu(3, 40)}


def test_control_ranks_take_none() -> None:
    """Nodes a and b with two ranks each, the two control ranks on a."""
    assert assign("cuda", plan(2, ["a", "b", "b"]), [(), (A, B), (A, B)]) == {
        1: OwnGpu(0, 90),
        2: OwnGpu(1, 40),
    }


def test_ranks_that_see_only_their_own_gpu() -> None:
    """As under Slurm's --gpus-per-task: each counts its own as the first.

    Also on two nodes, and if the control rank has one.
    """
    assert assign("auto", plan(2), [(), (A,), (B,)]) == {1: OwnGpu(0, 90), 2: OwnGpu(0, 40)}
    assert assign("auto", plan(2), [(A,), (B,), (C,)]) == {1: OwnGpu(0, 40), 2: OwnGpu(0, 90)}
    assert assign("auto", plan(2, tensor_parallelism=2), [(), (A,), (B,)]) == {
        1: OwnGpu(0, 40),
        2: OwnGpu(0, 40),
    }
    assert assign("auto", plan(2, ["a", "a", "b"]), [(C,), (A,), (B,)]) == {
        1: OwnGpu(0, 90),
        2: OwnGpu(0, 40),
    }


def test_ranks_that_see_all_in_another_order() -> None:
    """As where each rank has CUDA_VISIBLE_DEVICES with its own first."""
    own = assign("cuda", plan(3), [(), (), (A, B, C), (B, C, A), (C, A, B)])
    assert [own[rank].device for rank in (2, 3, 4)] == [0, 0, 0]
    own = assign("cuda", plan(2), [(), (A, B), (A, B)])
    assert [own[rank].device for rank in (1, 2)] == [0, 1]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_workers_than_gpus(device: str) -> None:
    """Also if each sees one, and it is the same."""
    for nodes, seen in ((["a", "b", "b"], [(A, B), (A,), (A,)]), (["a", "b", "b"], [(), (A,), (A,)])):
        with pytest.raises(
            ConfigError,
            match=rf"--device {device}: node b needs one GPU per worker rank \(2\), but the core can use"
            r" 1 there",
        ):
            assign(device, plan(2, nodes), seen)


def test_a_worker_that_sees_none_among_others_that_do() -> None:
    with pytest.raises(
        ConfigError,
        match=r"--device auto: node b needs one GPU per worker rank \(1\), but the core can use 0 there",
    ):
        assign("auto", plan(2, ["a", "a", "b"]), [(A, B), (A, B), ()])


def test_cuda_without_gpus() -> None:
    with pytest.raises(
        ConfigError, match=r"node .* needs one GPU per worker rank \(1\), but the core can use 0 there"
    ):
        assign("cuda", plan(1), [()] * 2)


def test_looking_for_gpus_needs_none() -> None:
    assert all(gpu.free <= gpu.total and gpu.uuid for gpu in TorchCore.gpus())
