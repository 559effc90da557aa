"""EAGLE-3 heads of random numbers, and what they guess, computed as on paper: slowly, with no cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from mpillm.cores.torch_core import TorchCore
from mpillm.engine.schedule.sequence import Sequence
from mpillm.engine.speculation.eagle import EagleDrafter
from tests.helpers.oracle import Oracle, Tokens
from tests.helpers.torch_cores import Answers, make_batch

READ = [1, 3, 5]  # the layers of tiny-llama whose input a head reads


def eagle(folder: Path, max_draft_len: int = 3) -> dict[str, Any]:
    """Return how to guess with the head of `folder`."""
    return {"decoding_type": "Eagle", "max_draft_len": max_draft_len, "speculative_model": str(folder)}


def save_head(
    model: Path, path: Path, draft_vocab_size: int = 300, prefix: str = "midlayer", **more: Any
) -> None:
    """Save a head for the model of a folder. `more`: of its config.json."""
    config = json.loads((model / "config.json").read_text())
    h, d, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads, vocab_size = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": READ},
        **more,
    }
    shapes = {
        "fc": (h, len(READ) * h),
        f"{prefix}.self_attn.q_proj": (heads * d, 2 * h),
        f"{prefix}.self_attn.k_proj": (kv_heads * d, 2 * h),
        f"{prefix}.self_attn.v_proj": (kv_heads * d, 2 * h),
        f"{prefix}.self_attn.o_proj": (h, heads * d),
        f"{prefix}.mlp.gate_proj": (inner, h),
        f"{prefix}.mlp.up_proj": (inner, h),
        f"{prefix}.mlp.down_proj": (h, inner),
        "lm_head": (draft_vocab_size, h),
    }
    random = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=random) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    norms = (
        "norm",
        *(f"{prefix}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    )
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(h, generator=random) for name in norms}
    if draft_vocab_size != vocab_size:
        kept = torch.randperm(vocab_size, generator=random)[:draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), kept)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")


class NaiveHead:
    """A head with `midlayer` in its names, for the model of an `Oracle`."""

    def __init__(self, oracle: Oracle, path: Path) -> None:
        self._model = oracle.model
        self._config = json.loads((path / "config.json").read_text())
        self._tensors = load_file(path / "model.safetensors")

    @torch.inference_mode()
    def guesses(self, tokens: list[int], n: int) -> list[int]:
        """Return what the head guesses after `tokens`."""
        states = self._model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        read = self._config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        hidden = self._by("fc", torch.cat([states[i][0] for i in read], dim=1))
        following, found = tokens[1:], []
        for _ in range(n):
            out, logits = self._layer(following, hidden)
            best = int(logits.argmax())
            found.append(best + int(self._tensors["d2t"][best]) if "d2t" in self._tensors else best)
            following, hidden = [*following, found[-1]], torch.cat([hidden, out[None]])
        return found

    def _layer(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the logits for the last row."""
        embedded = self._norm(
            "midlayer.input_layernorm", self._model.model.embed_tokens(torch.tensor(tokens))
        )
        normed = self._norm("midlayer.hidden_norm", hidden)
        residual = normed if self._config.get("norm_before_residual") else hidden
        both = torch.cat([embedded, normed], dim=1)
        x = residual + self._attention(both)
        normed = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (self._by(f"midlayer.mlp.{name}_proj", normed) for name in ("gate", "up"))
        x = x + self._by("midlayer.mlp.down_proj", F.silu(gate) * up)
        return x[-1], self._by("lm_head", self._norm("norm", x))[-1]

    def _attention(self, x: Tensor) -> Tensor:
        d = self._config["head_dim"]
        q, k, v = (
            self._by(f"midlayer.self_attn.{name}_proj", x).view(len(x), -1, d).transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = (turn[0] for turn in self._model.model.rotary_emb(x, torch.arange(len(x))[None]))

        def rotated(y: Tensor) -> Tensor:
            turned: Tensor = y * cos + torch.cat([-y[..., d // 2 :], y[..., : d // 2]], dim=-1) * sin
            return turned

        k, v = (y.repeat_interleave(len(q) // len(k), dim=0) for y in (rotated(k), v))
        attended = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return self._by("midlayer.self_attn.o_proj", attended.transpose(0, 1).reshape(len(x), -1))

    def _by(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], self._config["rms_norm_eps"])


class Seen:
    """What a core's drafter has guessed after which tokens; with `right`, in place of some, what is right."""

    def __init__(self, core: TorchCore, right: dict[tuple[int, ...], list[int]] | None = None) -> None:
        assert core.engine.speculation is not None
        assert isinstance(core.engine.speculation._drafter, EagleDrafter)
        drafter: Any = core.engine.speculation._drafter
        self.drafts: list[tuple[list[int], list[int]]] = []
        draft = drafter.draft

        def noting(wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
            found: list[list[int]] = draft(wanted)
            for i, ((sequence, most), guesses) in enumerate(zip(wanted, found, strict=True)):
                assert len(guesses) in (0, most)
                self.drafts.append((sequence.prompt + sequence.output, list(guesses)))
                if right is not None:
                    answer = right[tuple(sequence.prompt)][len(sequence.output) :]
                    n = i % (most + 1)  # so many are right
                    found[i] = [*answer[:n], *((token or 2) - 1 for token in answer[n:most])]
            return found

        drafter.draft = noting


def answer_with_guesses(
    core: TorchCore, prompts: Tokens, plain: Tokens, *, replaced: bool, n_output: int
) -> Seen:
    """Have a core that guesses with a head answer, `plain` if it is right; return what it guessed.

    With `replaced` some guesses are right, which a head of random numbers has none of by itself.
    """
    right = {tuple(prompt): tokens for prompt, tokens in zip(prompts, plain, strict=True)}
    seen = Seen(core, right if replaced else None)
    core.enqueue(make_batch(prompts, max_output=n_output))
    found = Answers()
    while not core.engine.is_idle():
        found.poll(core)
    assert found.tokens() == plain
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
    counts = core.statistics()
    assert counts["drafted_tokens"] > 100
    if replaced:
        assert 0.2 < counts["accepted_tokens"] / counts["drafted_tokens"] < 0.7
    return seen


def check_guesses(seen: Seen, guesses: Callable[[list[int], int], list[int]]) -> None:
    """Check some of what was guessed against what `guesses` says of it, computed naively."""
    drafts = [(tokens, found) for tokens, found in seen.drafts if found][:: 1 + len(seen.drafts) // 60]
    assert len(drafts) > 20
    equal = [found == guesses(tokens, len(found)) for tokens, found in drafts]
    assert sum(equal) >= len(equal) - 1  # a near tie
