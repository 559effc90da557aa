"""Tiny models whose layers have int4 weights, as AWQ, GPTQ and compressed-tensors store them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq2": {"quant_method": "gptq", "bits": 4, "desc_act": False, "checkpoint_format": "gptq_v2"},
}
FORMS = (*CONFIGS, "packed", "packed symmetric")
_ORDER = {"awq": (0, 2, 4, 6, 1, 3, 5, 7)}


def pack_int4(model: Any, folder: Path, form: str, group: int) -> None:
    """Give a dense model other projections, of four bits, and write its folder anew with them."""
    import torch
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(7)
    tensors, parameters = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        n_out, n_in = tensors.pop(name).shape
        size = n_in if group == -1 else group
        numbers = torch.randint(16, (n_in, n_out), generator=random)
        zeros = torch.randint(0 if form == "awq" else 1, 16, (n_in // size, n_out), generator=random)
        if form == "packed symmetric":
            zeros = torch.full_like(zeros, 8)
        scales = (torch.rand(n_in // size, n_out, generator=random) * 0.04 + 0.01).half()
        wide = (numbers - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)
        parameters[name].data.copy_(wide.t())
        prefix = name.removesuffix("weight")
        if form.startswith("packed"):
            tensors |= {
                f"{name}_packed": _packed(numbers.t()),
                f"{name}_scale": scales.t().contiguous(),
                f"{name}_shape": torch.tensor([n_out, n_in]),
            }
            if form == "packed":
                tensors[f"{name}_zero_point"] = _packed(zeros).t().contiguous()
            continue
        along = numbers if form == "awq" else numbers.t()  # what eight of are packed
        packed = _packed(along, _ORDER.get(form, range(8)))
        tensors[f"{prefix}qweight"] = packed if form == "awq" else packed.t().contiguous()
        tensors[f"{prefix}qzeros"] = _packed(zeros - int(form == "gptq"), _ORDER.get(form, range(8)))
        tensors[f"{prefix}scales"] = scales
        if form != "awq":
            tensors[f"{prefix}g_idx"] = torch.arange(n_in, dtype=torch.int32) // size
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config(form, group)
    (folder / "config.json").write_text(json.dumps(config))


def quantization_config(form: str, group: int, **weights: Any) -> dict[str, Any]:
    """Return the entry of `config.json`; `weights`: other values of `pack-quantized`."""
    if form in CONFIGS:
        return CONFIGS[form] | {"group_size": group}
    by_row = {"strategy": "channel", "group_size": None}
    values = by_row if group == -1 else {"strategy": "group", "group_size": group}
    own = {"num_bits": 4, "type": "int", "symmetric": form == "packed symmetric", "actorder": None}
    scheme = {"targets": ["Linear"], "input_activations": None, "weights": own | values | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


def _packed(numbers: Any, order: Sequence[int] = range(8)) -> Any:
    """Pack eight columns into an int32, the one that `order` names first into its lowest bits."""
    import torch

    eight = numbers.long().view(len(numbers), -1, 8)[:, :, list(order)]
    whole = (eight << 4 * torch.arange(8)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)
