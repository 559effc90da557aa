"""The options' dtype names: their bytes, safetensors' names and PyTorch's types."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

N_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8", "fp8": "F8_E4M3"}
CHECKPOINT_DTYPES = {STORED[name]: name for name in ("float32", "bfloat16", "float16")}


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, "float8_e4m3fn" if name == "fp8" else name)
    return dtype
