"""The compiled kernels for CPUs compute what the same operations in PyTorch do."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.kernels import ops
from mpillm.engine.kernels.cpu_kernels import CpuKernels, cpu_kernels
from mpillm.engine.model.attention import StepAttention
from mpillm.engine.model.step_parts import LayerKind
from mpillm.engine.schedule.step import Span

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
TYPES = [torch.float32, torch.bfloat16]


def close(mine: torch.Tensor, wanted: torch.Tensor) -> None:
    rounding = 2e-2 if mine.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(mine, wanted, rtol=rounding, atol=rounding)


def kernels_for(dtype: torch.dtype, head_dim: int = 16, group: int = 1) -> CpuKernels:
    kernels = cpu_kernels(dtype, head_dim, group)
    assert kernels is not None
    return kernels


@needs_cc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 48), (7, 50), (40, 576)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_norm(dtype: torch.dtype, shape: tuple[int, int], adds: bool) -> None:
    torch.manual_seed(1)
    x, delta, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[1:]))
    mine, wanted = x.clone(), x.clone()
    close(
        kernels_for(dtype).add_norm(mine, delta if adds else None, weight, 1e-5),
        ops.add_norm(wanted, delta if adds else None, weight, 1e-5),
    )
    assert mine.equal(wanted)


@needs_cc
@pytest.mark.parametrize("dtype", TYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate_up = (4 * torch.randn(9, 2 * 50)).to(dtype)
    gate_up[0, :6] = torch.tensor([-1e4, -88.5, -0.0, 88.5, 1e4, torch.nan]).to(dtype)
    mine = kernels_for(dtype).gated(gate_up.clone())
    close(mine.nan_to_num(7), ops.gated(gate_up).nan_to_num(7))
    assert mine[0, 5].isnan()


@needs_cc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 16), (9, 3, 64), (4, 1, 128), (8, 1, 32), (7, 1, 64), (6, 1, 16)],
)
@pytest.mark.parametrize(("window", "has_sinks"), [(0, False), (7, False), (0, True), (40, True)])
@pytest.mark.long
def test_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, has_sinks: bool
) -> None:
    """Single tokens, guesses, contexts from the start and behind cached tokens, a long one, shared blocks."""
    layers = [LayerKind(window, 0, 2 * torch.randn(heads) if has_sinks else None)]
    torch.manual_seed(1)
    size = 8
    kinds = [(0, 1), (7, 1), (8, 1), (700, 1), (5, 3), (0, 17), (0, 20), (12, 9), (0, 600)]  # cached, new
    spans = [Span(slot, n, new, is_few=(n, new) == (5, 3)) for slot, (n, new) in enumerate(kinds)]
    numbers: Iterator[int] = iter(torch.randperm(300).add(1).tolist())
    tables = {s.slot: [next(numbers) for _ in range(-(-(s.n_cached + s.n_new) // size))] for s in spans}
    tables[7][0] = tables[3][0]
    caches = [KVCache(1, 300, kv_heads, size, head_dim, dtype) for _ in range(2)]
    for pool in (caches[0].keys, caches[0].values):
        pool.normal_()
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    turns = torch.randn(1000, head_dim // 2)
    rotations = torch.polar(torch.ones_like(turns), turns)
    qkv = torch.randn(sum(s.n_new for s in spans), heads + 2 * kv_heads, head_dim).to(dtype)
    mine, wanted = (
        StepAttention(spans, tables, cache, heads, rotations, dtype, kernels, layers)(0, qkv.clone())
        for cache, kernels in zip(
            caches, (kernels_for(dtype, head_dim, heads // kv_heads), None), strict=True
        )
    )
    close(caches[0].keys, caches[1].keys)
    assert caches[0].values.equal(caches[1].values)
    close(mine, wanted)


def test_where_there_is_no_compiler_or_it_fails_pytorch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cpu_kernels.__wrapped__(torch.float32, 64, 3) is None
    with caplog.at_level(logging.WARNING):
        monkeypatch.setenv("CC", "false")
        assert cpu_kernels.__wrapped__(torch.float32, 64, 3) is None
    assert "is not compiled" in caplog.text
    assert cpu_kernels.__wrapped__(torch.float16, 64, 3) is None
    assert cpu_kernels.__wrapped__(torch.float32, 24, 3) is None


@needs_cc
def test_a_user_without_a_home_computes_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in containers that run under any number."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with caplog.at_level(logging.WARNING):
        assert cpu_kernels.__wrapped__(torch.float32, 16, 5) is None
    assert "home directory" in caplog.text


@needs_cc
def test_they_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert cpu_kernels.__wrapped__(torch.float32, 16, 5) is not None
    assert len(list((tmp_path / "mpillm").iterdir())) == 1


@needs_cc
def test_a_compiler_with_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The arguments are the compiler's, and other arguments give another library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for command in ("cc", "cc -fno-strict-aliasing"):
        monkeypatch.setenv("CC", command)
        assert cpu_kernels.__wrapped__(torch.float32, 16, 5) is not None
    assert len(list((tmp_path / "mpillm").iterdir())) == 2
    for command, cause in (("cc -no-such-argument", "-no-such-argument"), ("cc 'a", "no C compiler")):
        caplog.clear()
        monkeypatch.setenv("CC", command)
        assert cpu_kernels.__wrapped__(torch.float32, 16, 5) is None
        assert cause in caplog.text
