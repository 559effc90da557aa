"""Counting what is compiled, with stand-ins for Triton: the real one is asked in tests/gpu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.run import compilations
from tests.helpers.engine_configs import engine_config


class Triton:
    """Stands for the part of Triton that calls back, as it was before 3.4 or as it is since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_old: bool, hook: Any = None) -> None:
        module: Any = ModuleType("triton")
        self._place: Any
        if is_old:
            self._place, self._name = (
                type("JITFunction", (), {"compiled_hook": hook, "cache_hook": None}),
                "compiled_hook",
            )
            module.runtime = SimpleNamespace(jit=SimpleNamespace(JITFunction=self._place))
        else:
            self._place, self._name = (
                SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=hook),
                "jit_post_compile_hook",
            )
            module.knobs = SimpleNamespace(runtime=self._place)
        monkeypatch.setitem(sys.modules, "triton", module)

    def compile(self, name: str) -> None:
        """Do what the first launch of a kernel does."""
        hook = getattr(self._place, self._name)
        function, _, key = name.partition(" ")
        info = SimpleNamespace(module="kernels", name=function, jit_function=None)
        hook(
            key=key,
            repr=f"{function}[num_warps=4](a: [)",
            fn=info,
            compile={},
            is_manual_warmup=False,
            already_compiled=False,
        )


@pytest.mark.parametrize("is_old", [True, False])
def test_each_kernel_is_noted_once_however_often_triton_is_watched(
    monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    others: list[str] = []
    triton = Triton(monkeypatch, is_old, None if is_old else lambda **event: others.append(event["key"]))
    started = compilations.count()
    for _ in range(3):
        compilations.watch_triton()
    triton.compile("_context [('*bf16', 'D')]{'num_warps': 8}")
    before = compilations.count()
    assert before == started + 1 and compilations.since(before) == []
    triton.compile("_decode [('*bf16', 'D')]{'num_warps': 4}" + 1000 * " ")
    compilations.note("a graph")
    first, second = compilations.since(before)
    assert first.startswith("_decode [('*bf16', 'D')]{'num_warps': 4}") and len(first) < 500
    assert second == "a graph"
    assert len(others) == (0 if is_old else 2)  # whoever was told before still is


def test_a_core_counts_from_the_start_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton(monkeypatch, is_old=False)
    compilations.watch_triton()
    # it leads no instance
    core = TorchCore(CoreConfig("torch", engine_config("tiny-llama", tp_size=2, tp_rank=1)))
    triton.compile("_embed 1")
    core.start_test()
    assert core.compiled_in_test() == []
    triton.compile("_embed 2")
    assert core.compiled_in_test() == ["_embed 2"]
