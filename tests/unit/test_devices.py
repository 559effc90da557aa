"""Which rank gets which GPU, and what is wrong before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import disagg
from disagg.errors import ConfigError
from mpillm.cores.torch_core import TorchCore
from mpillm.devices import Gpu, OwnGpu, _read, assign, of_instance, visible_handles


def gpu(name: str, free: int = 90) -> Gpu:
    return Gpu(f"GPU-{name}", "GPU", 100, free)


A, B, C, D = gpu("a"), gpu("b", 40), gpu("c"), gpu("d", 40)


def plan(workers: int, nodes: list[str] | None = None, tensor_parallelism: int = 1) -> disagg.WorldPlan:
    control = 1 if workers < 3 else 2
    size = workers + control
    made = disagg.generate("aggregated", size, control_ranks=control, tensor_parallelism=tensor_parallelism)
    return disagg.plan(made, size, nodes)


def test_no_gpu_is_the_cpu_and_none_is_requested() -> None:
    assert assign("auto", plan(3), [()] * 5) == {}
    assert assign("cpu", plan(3), [(A, B, C)] * 5) == {}
    ranks = plan(3).on_devices({2: 7}, {3: (4, 5)}).ranks
    assert [(rank.device, rank.server_devices) for rank in ranks[1:4]] == [
        (None, ()),
        (7, ()),
        (None, (4, 5)),
    ]


def test_an_instance_has_what_its_fullest_gpu_has() -> None:
    assert assign("auto", plan(3), [(A, B, C, D)] * 5) == {
        2: OwnGpu(0, 90),
        3: OwnGpu(1, 40),
        4: OwnGpu(2, 90),
    }
    own = assign("cuda", plan(4, tensor_parallelism=2), [(A, C, gpu("e"), D)] * 6)
    assert own == {2: OwnGpu(0, 90), 3: OwnGpu(1, 90), 4: OwnGpu(2, 40), 5: OwnGpu(3, 40)}


def test_control_ranks_take_none() -> None:
    """Nodes a and b have two ranks each, the two control ranks on a."""
    assert assign("cuda", plan(2, ["a", "b", "b"]), [(), (A, B), (A, B)]) == {
        1: OwnGpu(0, 90),
        2: OwnGpu(1, 40),
    }


def test_ranks_that_see_only_their_own_gpu() -> None:
    """Each rank counts its own GPU as the first, as under Slurm's --gpus-per-task, also on two nodes and if
    the control rank has one."""
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
    """Each rank has CUDA_VISIBLE_DEVICES with its own GPU first."""
    own = assign("cuda", plan(3), [(), (), (A, B, C), (B, C, A), (C, A, B)])
    assert [own[rank].device for rank in (2, 3, 4)] == [0, 0, 0]
    own = assign("cuda", plan(2), [(), (A, B), (A, B)])
    assert [own[rank].device for rank in (1, 2)] == [0, 1]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_workers_than_gpus(device: str) -> None:
    """They are also too many if each sees one GPU, the same for all."""
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


# In the forms that NVIDIA documents (no card with MIG was at hand): two slices of the first card, the second
# card whole.
MIG = {
    "GPU-5a1f": ("NVIDIA H100 80GB HBM3", 80),
    "GPU-77c0": ("NVIDIA H100 80GB HBM3", 80),
    "MIG-1c1e26d4-9f0f-5c2b-a3a7-9d1a7dfbf2a1": ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40),
    "MIG-0e8f8f0a-3d0c-53cb-8e5e-1d39fe7f0c55": ("NVIDIA H100 80GB HBM3 MIG 4g.40gb", 41),
    "MIG-GPU-5a1f/1/0": ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20),  # as drivers before 470 call it
}
GIB = 1 << 30


class Nvml:
    """Has NVML's functions that are called, for these devices. An index counts cards, not their slices."""

    def __init__(self) -> None:
        self._names = list(MIG)
        self._cards = [name for name in self._names if name.startswith("GPU-")]

    def _find(self, name: str | None, handle: Any) -> int:
        if name not in self._names:
            return 6  # NVML_ERROR_NOT_FOUND
        handle._obj.value = self._names.index(name) + 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._find(self._cards[index.value] if index.value < len(self._cards) else None, handle)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return self._find(uuid.decode(), handle)

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self._names[handle.value - 1].encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = MIG[self._names[handle.value - 1]][0].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = memory._obj.free = MIG[self._names[handle.value - 1]][1] * GIB
        return 0


@pytest.mark.parametrize(
    "visible, uuids",
    [
        (None, ["GPU-5a1f", "GPU-77c0"]),
        ("1", ["GPU-77c0"]),
        ("1, 0", ["GPU-77c0", "GPU-5a1f"]),
        ("GPU-77c0,5,0", ["GPU-77c0"]),  # as in CUDA: what names none ends the list
        ("", []),
        ("NoDevFiles", []),  # Slurm's, for a task without a GPU
        (",".join(list(MIG)[2:4]), list(MIG)[2:4]),
        ("MIG-GPU-5a1f/1/0", ["MIG-GPU-5a1f/1/0"]),
    ],
)
def test_the_devices_that_slurm_leaves_visible(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml: Any = Nvml()
    found = [_read(nvml, handle) for handle in visible_handles(nvml)]
    assert found == [Gpu(name, MIG[name][0], MIG[name][1] * GIB, MIG[name][1] * GIB) for name in uuids]


def test_slices_of_one_card_are_devices_like_others() -> None:
    """Two ranks have a slice each, as under Slurm's --gpus-per-task, or both see both."""
    one, other = (Gpu(name, *MIG[name], MIG[name][1]) for name in list(MIG)[2:4])
    assert assign("auto", plan(2), [(), (one,), (other,)]) == {1: OwnGpu(0, 40), 2: OwnGpu(0, 41)}
    assert assign("auto", plan(2), [(), (one, other), (one, other)]) == {1: OwnGpu(0, 40), 2: OwnGpu(1, 41)}


def test_the_gpus_of_one_of_several_instances() -> None:
    """Ranks 0 and 1 are an instance, 2 another, 3 and 4 a third, over two nodes."""
    nodes = ["a", "a", "a", "a", "b"]
    seen: Sequence[tuple[Gpu, ...]] = [(A, B, C, D)] * 4 + [(gpu("e"),)]

    def own(ranks: list[int], rank: int, seen: Sequence[tuple[Gpu, ...]] = seen) -> str:
        return "".join(one.uuid[-1] for one in of_instance("auto", ranks, rank, nodes, seen))

    assert [own([0, 1], 0), own([0, 1], 1), own([2], 2)] == ["ab", "ba", "c"]
    assert [own([3, 4], 3), own([3, 4], 4)] == ["d", "e"]
    assert own([0, 1], 1, [(A,), (B,), (C,), (D,), (gpu("e"),)]) == "b"  # the launcher has assigned them
    assert own([0, 1], 1, [()] * 5) == "" and of_instance("cpu", [0, 1], 1, nodes, seen) == []
    with pytest.raises(ConfigError, match=r"node a needs one GPU per worker rank \(4\)"):
        own([3, 4], 4, [(A, B, C)] * 4 + [(gpu("e"),)])
