"""Logits of every family equal those of transformers but for the error of float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpillm.engine.shape.families.known import FAMILIES
from tests.helpers.extras_checks import AS_ON_A_GPU, check_family_logits

pytest.importorskip("transformers")

OPTIONS: list[dict[str, Any]] = [{}, {"max_num_tokens": 16}]


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    check_family_logits(name, tmp_path, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long
def test_as_on_a_gpu(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Layers with a window may have a KV cache of their own there."""
    check_family_logits(
        name, tmp_path, **AS_ON_A_GPU, **options, gpu_bytes=8 << 30, kv_cache_tokens=2048, max_batch_size=3
    )
