"""`python -m tools.train_eagle_head MODEL HEAD`: train a small EAGLE-3 draft head, for measurements.

The model answers pieces of texts from Python's packages. The head learns to predict the tokens of the
answers: the next draft token from hidden states of the model, and two further draft tokens from its own
output (Li et al., EAGLE-3, 2025: training-time test). It is for two CPU cores and a small model, not for
serving.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.data.tokenizer import Tokenizer, load_tokenizer
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig

_STEPS = 3  # successive draft tokens in training
_N_EVALUATION = 40  # prompts that are not used for training: held_out.jsonl in the head's folder
_LATER = 0.8  # weight of a draft token's loss, relative to the previous draft token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a model's folder")
    parser.add_argument("head", type=Path, help="the folder to write")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--prompt_len", type=int, default=80, help="tokens, the chat template's included")
    parser.add_argument("--output_len", type=int, default=128)
    parser.add_argument("--draft_vocab_size", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.model)
    pieces = list(itertools.islice(_pieces(tokenizer, options.prompt_len), options.samples + _N_EVALUATION))
    options.head.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": text}) for text, _ in pieces[options.samples :]]
    (options.head / "held_out.jsonl").write_text("\n".join(lines) + "\n")
    prompts = [tokens for _, tokens in pieces[: options.samples]]
    texts = _answered(options.model, prompts, options)
    counts = Counter(texts.flatten().tolist())
    draft_tokens = torch.tensor(sorted(token for token, _ in counts.most_common(options.draft_vocab_size)))
    _log(f"{texts.numel()} tokens, of which the draft vocabulary has {len(draft_tokens)}")
    head = _train(options, texts, draft_tokens)
    _save(options, head, draft_tokens)


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _pieces(tokenizer: Tokenizer, length: int) -> Iterator[tuple[str, list[int]]]:
    """Yield random pieces of texts that are prompts of `length` tokens."""
    folder = Path(sysconfig.get_path("purelib"))
    files = sorted(file for kind in ("*.md", "*.rst", "*.txt", "*/METADATA") for file in folder.rglob(kind))
    random = np.random.default_rng(1)
    n_around = len(tokenizer.encode("word")) - len(tokenizer.encode_plain("word"))  # of the chat template
    while True:
        text = files[random.integers(len(files))].read_text(errors="replace")
        start = random.integers(max(1, len(text) - 2000))
        own = tokenizer.encode_plain(text[start : start + 12 * length].strip())[: length - n_around]
        piece = tokenizer.decode(own)
        if len(tokens := tokenizer.encode(piece)) == length:
            yield piece, tokens


def _answered(model: Path, prompts: list[list[int]], options: argparse.Namespace) -> Tensor:
    """Return each prompt with the model's greedy answer: [samples, tokens]."""
    engine = EngineConfig(
        SchedulerConfig(max_num_tokens=2048, enable_chunked_context=True),
        model_path=str(model),
        max_seq_len=options.prompt_len + options.output_len,
        end_ids=(),
        n_threads=options.threads,
    )
    core = TorchCore(CoreConfig("torch", engine))
    core.load()
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"], rows["n_tokens"], rows["max_output"] = (
        np.arange(len(prompts)),
        options.prompt_len,
        options.output_len,
    )
    rows["top_p"], rows["generation"] = 1, NO_INSTANCE
    core.enqueue(Batch(rows, np.array(prompts, np.int32).reshape(-1)))
    texts = torch.zeros(len(prompts), options.prompt_len + options.output_len, dtype=torch.int64)
    texts[:, : options.prompt_len] = torch.tensor(prompts)
    n_done = 0
    while n_done < len(prompts):
        if (responses := core.poll_responses()) is None:
            continue
        offsets = responses.offsets()
        for i, row in enumerate(responses.rows):
            if row["flags"] & ResponseFlag.FINAL:
                answer = responses.tokens[offsets[i] : offsets[i + 1]].astype(np.int64)
                texts[int(row["id"]), options.prompt_len :] = torch.from_numpy(answer)
                n_done += 1
                if n_done % 250 == 0:
                    _log(f"{n_done} answers")
    return texts


class _Head(nn.Module):
    """The draft head, with Hugging Face's parameter names."""

    def __init__(self, config: dict[str, int], n_features: int, n_drafted: int) -> None:
        super().__init__()
        h, d, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._d, self._eps = d, config["rms_norm_eps"]
        shapes = {
            "fc": (h, n_features * h),
            "midlayer.self_attn.q_proj": (heads * d, 2 * h),
            "midlayer.self_attn.k_proj": (kv_heads * d, 2 * h),
            "midlayer.self_attn.v_proj": (kv_heads * d, 2 * h),
            "midlayer.self_attn.o_proj": (h, heads * d),
            "midlayer.mlp.gate_proj": (inner, h),
            "midlayer.mlp.up_proj": (inner, h),
            "midlayer.mlp.down_proj": (h, inner),
            "lm_head": (n_drafted, h),
        }
        self.named = {name: nn.Parameter(torch.randn(s) / s[1] ** 0.5) for name, s in shapes.items()}
        norms = "input_layernorm", "hidden_norm", "post_attention_layernorm"
        for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
            self.named[name] = nn.Parameter(torch.ones(h))
        for name, parameter in self.named.items():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(
        self, embedded: Tensor, hidden: Tensor, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the logits. `embedded`, `hidden`: [texts, rows, width]."""
        normed = self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", hidden)
        x = hidden + self._attention(torch.cat(normed, dim=-1), *turns)
        inner = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (self.by(f"midlayer.mlp.{name}_proj", inner) for name in ("gate", "up"))
        x = x + self.by("midlayer.mlp.down_proj", F.silu(gate) * up)
        return x, self.by("lm_head", self._norm("norm", x))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, d = *x.shape[:2], self._d
        q, k, v = (
            self.by(f"midlayer.self_attn.{name}_proj", x).view(n, length, -1, d).transpose(1, 2)
            for name in "qkv"
        )
        q, k = (y * cos + torch.cat([-y[..., d // 2 :], y[..., : d // 2]], dim=-1) * sin for y in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.by("midlayer.self_attn.o_proj", attended.transpose(1, 2).reshape(n, length, -1))

    def by(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.named[name])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.named[name], self._eps)


def _train(options: argparse.Namespace, texts: Tensor, draft_tokens: Tensor) -> _Head:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.eval()
    config = json.loads((options.model / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    n = config["num_hidden_layers"]
    read = 2, n // 2, n - 3
    head = _Head(config, len(read), len(draft_tokens))
    number = torch.full((config["vocab_size"],), -1)
    number[draft_tokens] = torch.arange(len(draft_tokens))
    with torch.no_grad():
        head.named["lm_head"].copy_(model.get_output_embeddings().weight[draft_tokens])
    batches = torch.split(texts, 8)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=options.epochs * len(batches))
    for epoch in range(options.epochs):
        right, total = np.zeros(_STEPS), np.zeros(_STEPS)
        for i in torch.randperm(len(batches)).tolist():
            tokens = batches[i]
            with torch.inference_mode():
                states = model(tokens, output_hidden_states=True, logits_to_keep=1).hidden_states
                features = torch.cat([states[layer] for layer in read], dim=-1)
                embedded = model.get_input_embeddings()(tokens)
                turns = model.model.rotary_emb(features, torch.arange(tokens.shape[1])[None])
            features, embedded, *turns = (x.clone() for x in (features, embedded, *turns))
            # Row r contains token r + 1 and the hidden state of token r, and predicts token r + 2. In the
            # next step, the hidden state is the head's output of the previous row.
            hidden = head.by("fc", features)[:, :-1]
            loss = torch.zeros(())
            for step in range(_STEPS):
                rows = slice(step, tokens.shape[1] - 2)
                cos, sin = (turn[:, None, : tokens.shape[1] - 2 - step] for turn in turns)
                hidden, logits = head(
                    embedded[:, 1 + step : tokens.shape[1] - 1],
                    hidden[:, : tokens.shape[1] - 2 - step],
                    (cos, sin),
                )
                targets = number[tokens[:, 2:][:, rows]]
                answers = targets[:, options.prompt_len :]
                total[step] += answers.numel()
                right[step] += int((logits.argmax(-1)[:, options.prompt_len :] == answers).sum())
                of_step = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
                loss = loss + _LATER**step * of_step
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        _log(f"epoch {epoch + 1}: accuracy of 1st, 2nd, 3rd draft token: {(right / total).round(3).tolist()}")
    return head


def _save(options: argparse.Namespace, head: _Head, draft_tokens: Tensor) -> None:
    config = json.loads((options.model / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(draft_tokens),
        "tie_word_embeddings": False,
    }
    tensors = {f"{name}.weight": parameter.detach().contiguous() for name, parameter in head.named.items()}
    tensors["d2t"] = draft_tokens - torch.arange(len(draft_tokens))
    tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), draft_tokens)
    (options.head / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, options.head / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
