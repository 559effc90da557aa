"""``benchmarks precision``: one model in several types of weights, activations and KV cache, against float32.

The texts are prompts, and continuations that float32 sampled at temperature 1. So their tokens' mean negative
log-likelihood (nats per token) is least, on average, for float32 itself: what a type adds is its cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.agreement import agreeing, answer, step_of
from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.data.dataset import PromptLimits, load_dataset
from mpillm.data.tokenizer import load_tokenizer
from mpillm.engine.shape.engine_config import EngineConfig, SchedulerConfig
from mpillm.engine.shape.model_info import check_model
from mpillm.options.field import Field
from mpillm.options.fields.model import ModelFields
from mpillm.options.parsers import positive
from mpillm.options.values import Values

if TYPE_CHECKING:
    from mpillm.cores.torch_core import TorchCore

Tokens = list[list[int]]

_VARIANTS = (
    *("float32/none/bfloat16", "float32/none/fp8", "bfloat16", "bfloat16/none/fp8"),
    *("bfloat16/fp8", "bfloat16/fp8/fp8"),
)


class Options(Values):
    """Options of ``benchmarks precision``."""

    device = ModelFields.device.but(
        "where to compute", default="cpu", choices=("cpu", "cuda"), group="benchmark"
    )
    model_path = ModelFields.model_path.but("a Hugging Face folder, with its tokenizer", group="benchmark")
    dataset_path = Field(
        "dataset_path", "JSONL with prompts; without it, those that come with the program", group="benchmark"
    )
    variants = Field(
        "variants",
        "what to compare with float32, separated by commas:"
        " dtype, dtype/quantization or dtype/quantization/kv_cache_dtype",
        default=",".join(_VARIANTS),
        group="benchmark",
    )
    num_made = Field(
        "num_made",
        "texts made by float32: the data set's prompts, each with a continuation",
        positive,
        default=500,
        group="benchmark",
    )
    made_len = Field(
        "made_len", "sampled tokens of each continuation", positive, default=48, group="benchmark"
    )
    output_len = Field(
        "output_len", "greedy tokens after each prompt", positive, default=16, group="benchmark"
    )
    max_prompt_len = Field(
        "max_prompt_len",
        "skip longer prompts of the data set, tokens",
        positive,
        default=96,
        group="benchmark",
    )
    n_threads = Field("n_threads", "CPU threads", positive, default=2, group="benchmark")
    max_batch_size = ModelFields.max_batch_size.but(
        "requests of the engine at once", default=128, group="benchmark"
    )


_MOST_ROWS = 512  # rows of logits at once: float32, as long as the vocabulary


class _Outcome(NamedTuple):
    nats: NDArray[np.float32]  # of each token of the texts but the first
    likeliest: NDArray[np.int64]  # next token after each but the last
    answers: Tokens


DESCRIPTION = (
    "Measure the cost of types of weights and KV cache against float32:"
    " nats per token, likeliest tokens, greedy answers."
)
EPILOG = (
    "example:\n"
    "  python -m benchmarks precision --model_path build/models/smollm2-135m"
    " --variants bfloat16,bfloat16/none/fp8"
)


def main(config: Options) -> int:
    """Print the table; 0 unless something could not be run."""
    prompts = _prompts(config)
    core = _load(config, "float32")
    continued = [prompts[i % len(prompts)] for i in range(config.num_made)]
    seeds = np.arange(config.num_made)
    made = answer(core, continued, config.made_len, temperature=1.0, seed=seeds)
    texts = [*prompts, *(prompt + made[i] for i, prompt in enumerate(continued))]
    exact = _measure(core, texts, config.output_len)
    core.notify_stop()
    n_tokens = len(exact.nats)
    print(
        f"{config.model_path}: {len(prompts)} prompts of a data set and {len(made)} made of them"
        f" ({n_tokens} tokens), against float32"
    )
    print(
        f"  {'weights, KV cache':<28} {'nats/token':>10} {'more':>8} {'same likeliest':>14}"
        f" {'same answers':>14} {'tokens alike':>12}"
    )
    print(f"  {'float32, float32':<28} {exact.nats.mean():>10.4f}", flush=True)
    for variant in config.variants.split(","):
        started = time.perf_counter()
        core = _load(config, variant)
        outcome = _measure(core, texts, config.output_len)
        info = core.info
        weights = info.dtype if info.quantization == "none" else f"{info.dtype} ({info.quantization})"
        core.notify_stop()
        lengths = [agreeing(a, b) for a, b in zip(exact.answers, outcome.answers, strict=True)]
        same = sum(length == config.output_len for length in lengths)
        more = float((outcome.nats - exact.nats).mean())
        same_likeliest = float((outcome.likeliest == exact.likeliest).mean())
        print(
            f"  {f'{weights}, {info.kv_dtype}':<28} {outcome.nats.mean():>10.4f} {more:>+8.4f}"
            f" {same_likeliest:>14.2%} {same:>6} of {len(lengths):<4} {np.mean(lengths):>12.2f}"
            f"   {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    print(f"  tokens alike: mean number before the first difference, of {config.output_len}")
    return 0


def _load(config: Options, variant: str) -> TorchCore:
    from mpillm.cores.torch_core import TorchCore

    given = variant.split("/")
    dtype, quantization, kv_cache_dtype, *more = [*given, *("auto", "auto")[len(given) - 1 :]]
    if more:
        raise ConfigError(f"--variants {variant}: at most dtype/quantization/kv_cache_dtype")
    gpus = TorchCore.gpus() if config.device == "cuda" else ()
    if config.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: there is no NVIDIA GPU")
    longest = config.max_prompt_len + config.made_len + config.output_len
    scheduler = SchedulerConfig(
        max_batch_size=config.max_batch_size,
        max_num_tokens=max(_MOST_ROWS, config.max_prompt_len + config.made_len),
        enable_chunked_context=True,
    )
    engine = EngineConfig(
        scheduler,
        model_path=config.model_path,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_seq_len=longest,
        kv_cache_tokens=config.max_batch_size * (longest + 32),
        kv_cache_free_gpu_mem_fraction=0.9,
        end_ids=(),
        gpu=0 if gpus else None,
        gpu_bytes=gpus[0].free if gpus else None,
        n_threads=config.n_threads,
    )
    check_model(engine)
    core = TorchCore(CoreConfig("torch", engine))
    core.load()
    return core


def _prompts(config: Options) -> Tokens:
    if not config.model_path or not Path(config.model_path).is_dir():
        raise ConfigError(
            f"--model_path {config.model_path or 'DIR'}: a folder with weights and a tokenizer is needed"
        )
    info = check_model(EngineConfig(model_path=config.model_path))
    source = Path(config.dataset_path) if config.dataset_path else None
    dataset = load_dataset(source, load_tokenizer(info.folder), PromptLimits(info.vocab_size))
    prompts = [dataset.sample(i).tolist() for i in range(len(dataset))]
    prompts = [prompt for prompt in prompts if 2 <= len(prompt) <= config.max_prompt_len]
    if not prompts:
        raise ConfigError(f"{dataset.name} has no prompt of 2 to {config.max_prompt_len} tokens")
    return prompts


def _measure(core: TorchCore, texts: Tokens, n_output: int) -> _Outcome:
    import torch

    assert core.worker is not None
    nats, likeliest = [], []
    with torch.inference_mode():
        for some in _groups(texts):
            logits = core.worker.logits(step_of(core, some))
            ends = np.cumsum([len(text) for text in some])
            rows = np.delete(np.arange(ends[-1]), ends - 1)  # nothing follows a text's last token
            follow = torch.tensor([token for text in some for token in text[1:]], device=logits.device)
            seen = logits[torch.from_numpy(rows).to(logits.device)].float()
            nats.append(torch.nn.functional.cross_entropy(seen, follow, reduction="none").cpu().numpy())
            likeliest.append(seen.argmax(-1).cpu().numpy())
    answers = answer(core, texts, n_output)
    return _Outcome(np.concatenate(nats), np.concatenate(likeliest), [answers[i] for i in range(len(texts))])


def _groups(texts: Tokens) -> Iterator[Tokens]:
    """Yield groups of texts with at most `_MOST_ROWS` tokens, or of one text."""
    group: Tokens = []
    for text in texts:
        if group and sum(map(len, group)) + len(text) > _MOST_ROWS:
            yield group
            group = []
        group.append(text)
    yield group
