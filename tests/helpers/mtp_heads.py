"""Layers that guess, of random numbers, and what they guess by transformers' layer, with no cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.families import make_family

DEEPSEEK = "DeepseekV3ForCausalLM"


def mtp(n: int = 3) -> dict[str, Any]:
    """Return how to guess with a model's own layer."""
    return {"decoding_type": "MTP", "num_nextn_predict_layers": n}


def save_model(folder: Path, **more: Any) -> Any:
    """Save a tiny DeepSeek V3 that has one; return transformers' model. `more`: of config.json."""
    model = make_family(DEEPSEEK, folder)
    config = json.loads((folder / "config.json").read_text())
    n, h = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(5)

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=random)

    prefix, last = f"model.layers.{n}.", f"model.layers.{n - 1}."
    for name, tensor in list(tensors.items()):
        if name.startswith(last):  # the same shapes, and other numbers
            order = torch.randperm(tensor.numel(), generator=random)
            tensors[prefix + name.removeprefix(last)] = tensor.flatten()[order].view(tensor.shape).clone()
    tensors |= {
        f"{prefix}enorm.weight": norm(h),
        f"{prefix}hnorm.weight": norm(h),
        f"{prefix}eh_proj.weight": torch.randn(h, 2 * h, generator=random) / (2 * h) ** 0.5,
        f"{prefix}shared_head.norm.weight": norm(h),
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1} | more))
    return model


class NaiveMtp:
    """The layer that guesses of a folder that `save_model` has made."""

    def __init__(self, model: Any, folder: Path) -> None:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

        self._model = model
        self._config = model.config
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        tensors = load_file(folder / "model.safetensors")
        self._tensors = {
            name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)
        }
        # A layer with experts, as the last one's; its tensors by this transformers' own names.
        like = model.model.layers[-1].state_dict()
        self._layer = DeepseekV3DecoderLayer(model.config, model.config.num_hidden_layers - 1).eval()
        self._layer.load_state_dict(self._as_here(like))

    def _as_here(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's tensors as transformers has them in memory: all experts may be one tensor."""
        made = {}
        for name, tensor in like.items():
            if name in self._tensors:
                made[name] = self._tensors[name]
                continue
            parts = []
            for expert in range(self._config.n_routed_experts):
                names = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
                parts.append(torch.cat([self._tensors[f"mlp.experts.{expert}.{n}.weight"] for n in names]))
            made[name] = torch.stack(parts)
            assert made[name].shape == tensor.shape, name
        return made

    @torch.inference_mode()
    def guesses(self, tokens: list[int], n: int) -> list[int]:
        """Return what the layer guesses after `tokens`."""
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]  # normed
        following, found = tokens[1:], []
        for _ in range(n):
            out = self._run(following, hidden)
            found.append(int(F.linear(out[-1], self._tensors["shared_head.head.weight"]).argmax()))
            following, hidden = [*following, found[-1]], torch.cat([hidden, out[-1:]])
        return found

    def _run(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Return the layer's normed output for each row."""
        embedded = self._model.model.embed_tokens(torch.tensor(tokens))
        both = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", hidden)], dim=1)
        x = F.linear(both, self._tensors["eh_proj.weight"])[None]
        places = torch.arange(len(tokens))[None]
        turned = self._model.model.rotary_emb(x, position_ids=places)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        out = self._layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        return self._norm("shared_head.norm", (out[0] if isinstance(out, tuple) else out)[0])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self._config.rms_norm_eps)
