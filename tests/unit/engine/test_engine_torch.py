"""The engine against transformers, token by token, and the torch core's contract."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.comms.messages import NO_INSTANCE, REQUEST, Batch, RequestFlag, ResponseFlag
from mpillm.comms.mover import Peer
from mpillm.cores.base import CoreConfig, Metrics
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.cache.kv_cache import KVCache
from mpillm.engine.model.attention import StepAttention
from mpillm.engine.model.model_config import load_model_config, preset_json
from mpillm.engine.model.transformer import _rotations
from mpillm.engine.sampler import SamplingParams, sample
from mpillm.engine.step import Span
from mpillm.engine.weights.sources import DummyWeights, save_preset
from tests.helpers.loopback import Wire

N_OUTPUT = 24
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    save_preset("tiny-llama", path)
    return path


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    rng = np.random.default_rng(7)
    lengths = [1, 2, 3, 31, 32, 33, *rng.integers(4, 90, 14).tolist()]
    return [rng.integers(0, 512, n).tolist() for n in lengths]


def oracle(folder: Path, prompts: Tokens, max_output: int, **options: Any) -> Tokens:
    """Return what transformers answers, one prompt at a time, the end token included."""
    transformers = pytest.importorskip("transformers")
    # small products: a second thread costs more than it gives, above all on a busy machine
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # an end token is one only if `options` say so, as with `make_core`
    model.generation_config.eos_token_id = None
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_output,
                pad_token_id=0,
                **options,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Tokens) -> Tokens:
    return oracle(folder, prompts, N_OUTPUT)


def make_core(model: Path | str, connect: Any = None, **options: Any) -> TorchCore:
    defaults: dict[str, Any] = {
        "tokens_per_block": 8,
        "n_threads": 1,
        "end_ids": (),
        "max_seq_len": 256,
        "enable_chunked_context": True,
    }
    core = TorchCore(CoreConfig("torch", model_path=str(model), **(defaults | options)))
    if connect is not None:
        core.connect(*connect)
    core.load()
    return core


def make_batch(prompts: Tokens, **fields: Any) -> Batch:
    rows = np.zeros(len(prompts), REQUEST)
    rows["id"] = np.arange(len(prompts))
    rows["n_tokens"] = [len(p) for p in prompts]
    rows["max_output"] = N_OUTPUT
    rows["top_p"] = 1
    rows["generation"] = NO_INSTANCE
    for name, value in fields.items():
        rows[name] = value
    return Batch(rows, np.array([t for p in prompts for t in p], np.int32))


class Answers:
    """Collects response rows and checks the contract: one FIRST and one FINAL for each id, in that order, or
    both at once."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.final: dict[int, list[int]] = {}
        self.partial: dict[int, list[int]] = {}  # what streamed, behind the first token
        self.errors: list[int] = []
        self.cancelled: list[int] = []

    def poll(self, core: TorchCore) -> None:
        batch = core.poll_responses()
        if batch is None:
            return
        assert len(batch)
        offsets = batch.offsets()
        assert offsets[-1] == len(batch.tokens)
        for i, row in enumerate(batch.rows):
            id_, flags, tokens = (
                int(row["id"]),
                int(row["flags"]),
                batch.tokens[offsets[i] : offsets[i + 1]].tolist(),
            )
            assert id_ not in self.final
            if flags & ResponseFlag.ERROR:
                assert flags & ResponseFlag.FINAL and not tokens
                self.errors.append(id_)
                continue
            if flags & ResponseFlag.CANCELLED:
                assert flags & ResponseFlag.FINAL and not tokens
                self.cancelled.append(id_)
                continue
            if flags & ResponseFlag.PARTIAL:
                assert tokens and flags == ResponseFlag.PARTIAL
                self.partial.setdefault(id_, []).extend(tokens)
            if flags & ResponseFlag.FIRST:
                assert id_ not in self.first
                self.first[id_] = tokens[0]
                assert len(tokens) == 1 or flags & ResponseFlag.FINAL
            if flags & ResponseFlag.FINAL:
                assert id_ not in self.first or tokens[0] == self.first[id_]
                assert tokens[1 : 1 + len(self.partial.get(id_, ()))] == self.partial.get(id_, [])
                self.final[id_] = tokens

    def run(self, core: TorchCore) -> Answers:
        while core.has_work():
            self.poll(core)
        return self

    def tokens(self) -> Tokens:
        return [self.final[id_] for id_ in sorted(self.final)]


def answer(core: TorchCore, batch: Batch) -> Tokens:
    core.enqueue(batch)
    answers = Answers().run(core)
    assert not answers.errors
    assert set(answers.first) == set(answers.final)
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
    return answers.tokens()


# --- greedy tokens ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 1},
        {"max_batch_size": 5, "max_num_tokens": 7},
        {"max_num_tokens": 33},
        {"max_num_tokens": 96, "enable_chunked_context": False},
        {"tokens_per_block": 1, "kv_cache_tokens": 300, "max_num_tokens": 40},
        {"tokens_per_block": 64},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(
    folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]
) -> None:
    assert answer(make_core(folder, **options), make_batch(prompts)) == expected


@pytest.mark.parametrize("max_num_tokens", [16, 2048])
def test_a_preempted_request_gives_the_same_tokens(
    folder: Path, prompts: Tokens, expected: Tokens, max_num_tokens: int
) -> None:
    core = make_core(folder, kv_cache_tokens=160, max_seq_len=None, max_num_tokens=max_num_tokens)
    assert answer(core, make_batch(prompts)) == expected
    assert core.statistics()["preemptions"] > 3


@pytest.mark.parametrize(("max_num_tokens", "kv_cache_tokens"), [(2048, None), (16, None), (16, 160)])
def test_metrics(folder: Path, prompts: Tokens, max_num_tokens: int, kv_cache_tokens: int | None) -> None:
    """Computed in chunks, then token by token.

    What a preemption throws away is computed again, and counts again.
    """
    core = make_core(
        folder,
        max_num_tokens=max_num_tokens,
        kv_cache_tokens=kv_cache_tokens,
        max_seq_len=None if kv_cache_tokens else 256,
    )
    answer(core, make_batch(prompts[:3]))  # a warm-up
    core.start_test()
    assert core.metrics() == Metrics(0, 0, 0, 0, 0.0)
    core.enqueue(make_batch(prompts))
    answers, seen = Answers(), [core.metrics()]
    assert seen[0] == Metrics(0, 0, 0, len(prompts), 0.0)
    while core.has_work():
        answers.poll(core)
        seen.append(core.metrics())
        (prompt, generated, running, waiting, usage), before = seen[-1], seen[-2]
        assert (
            0 <= prompt - before.prompt_tokens <= max_num_tokens
            and 0 <= generated - before.generated_tokens <= len(prompts)
        )
        assert running + waiting + len(answers.final) == len(prompts)
        assert usage is not None and (usage > 0) == (running > 0)
    n_prompt, n_output = sum(map(len, prompts)), N_OUTPUT * len(prompts)
    assert seen[-1][1:] == (n_output, 0, 0, 0.0)
    preempted = core.statistics()["preemptions"] > 0
    assert (seen[-1].prompt_tokens > n_prompt) if preempted else (seen[-1].prompt_tokens == n_prompt)
    assert preempted == (kv_cache_tokens is not None)
    assert any(0 < metrics.prompt_tokens < n_prompt for metrics in seen) == (max_num_tokens == 16)


@pytest.fixture(scope="module")
def alike(folder: Path) -> tuple[Tokens, Tokens]:
    """Prompts that begin alike, and what transformers answers."""
    rng = np.random.default_rng(8)
    beginnings = [rng.integers(0, 512, n).tolist() for n in (24, 37)]
    prompts = [beginnings[i % 2] + rng.integers(0, 512, rng.integers(1, 25)).tolist() for i in range(14)]
    return prompts, oracle(folder, prompts, N_OUTPUT)


@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("chunking", ["off", "first_come_first_served", "equal_progress"])
@pytest.mark.parametrize("policy", ["max_util", "no_evict", "static"])
def test_policies_chunking_and_reuse(
    folder: Path, alike: tuple[Tokens, Tokens], policy: str, chunking: str, reuse: bool
) -> None:
    """With a cache of 20 blocks, of which a sequence needs up to 11."""
    prompts, wanted = alike
    options: dict[str, Any] = {"max_num_tokens": 64, "enable_chunked_context": False}
    if chunking != "off":
        options = {"max_num_tokens": 24, "context_chunking_policy": chunking}
    options |= {
        "batch_scheduler_policy": policy,
        "enable_kv_cache_reuse": reuse,
        "kv_cache_tokens": 160,
        "max_seq_len": None,
    }
    core = make_core(folder, **options)
    assert answer(core, make_batch(prompts)) == wanted
    statistics = core.statistics()
    assert (statistics["preemptions"] > 0) == (policy == "max_util")
    assert set(statistics) == {"preemptions"} | ({"reused_blocks", "reused_tokens"} if reuse else set())
    if reuse:
        assert statistics["reused_tokens"] == 8 * statistics["reused_blocks"] > 0
        core.start_test()
        assert set(core.statistics().values()) == {0}


def test_requests_that_come_while_others_run(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, max_num_tokens=50)
    batch = make_batch(prompts)
    offsets = batch.offsets()
    answers = Answers()
    for i in range(len(prompts)):
        core.enqueue(Batch(batch.rows[i : i + 1], batch.tokens[offsets[i] : offsets[i + 1]]))
        answers.poll(core)
    assert answers.run(core).tokens() == expected


def test_a_preset_has_the_weights_of_its_folder(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    assert answer(make_core("tiny-llama"), make_batch(prompts[:4])) == expected[:4]
    assert answer(make_core(folder, load_format="dummy"), make_batch(prompts[:4])) == expected[:4]


def test_dummy_weights_do_not_make_an_answer_that_repeats(expected: Tokens) -> None:
    assert np.mean([len(set(tokens)) for tokens in expected]) > N_OUTPUT / 3


def test_a_checkpoint_in_several_files(
    folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert answer(make_core(tmp_path), make_batch(prompts[:6])) == expected[:6]


@pytest.mark.parametrize(
    "change",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 8, "head_dim": None, "intermediate_size": 72},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
    ids=lambda change: next(reversed(change)),
)
def test_other_shapes_of_llama(tmp_path: Path, prompts: Tokens, change: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    save_preset("tiny-llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | {"initializer_range": 0.1}))
    model.save_pretrained(tmp_path)
    few = prompts[4:12]
    assert answer(make_core(tmp_path, max_num_tokens=60), make_batch(few)) == oracle(tmp_path, few, N_OUTPUT)


@pytest.mark.parametrize("preset", ["llama3.1-8b", "llama3.1-405b", "llama2-70b", "mixtral-8x7b"])
def test_rotary_embeddings_equal_those_of_transformers(preset: str) -> None:
    """At positions before and behind the length that Llama 3.1 was first trained for, to the last one."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = load_model_config(preset)
    raw = {
        key: value for key, value in preset_json(preset).items() if key not in ("architectures", "model_type")
    }
    last = config.max_position_embeddings - 1
    positions = torch.tensor(
        [[p for p in (0, 1, 77, 4095, 8191, 8192, 8193, 20_000, 65_536) if p < last] + [last]]
    )
    cos, sin = LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))(torch.zeros(1), positions)
    rotations = _rotations(config, last + 1)[positions[0]]
    half = config.head_dim // 2
    torch.testing.assert_close(rotations.real, cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(rotations.imag, sin[0, :, :half], atol=2e-5, rtol=0)


def test_a_prompt_beyond_the_length_of_the_first_training(tmp_path: Path) -> None:
    """Llama 3.1's own rope scaling, from a context of more than 8192 tokens on."""
    save_preset("tiny-llama", tmp_path)
    rope = {
        name: preset_json("llama3.1-8b")[name]
        for name in ("rope_theta", "rope_scaling", "max_position_embeddings")
    }
    config = json.loads((tmp_path / "config.json").read_text()) | rope | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [np.random.default_rng(i).integers(0, 512, 8230).tolist() for i in range(1)]
    core = make_core(tmp_path, max_seq_len=8300, max_num_tokens=2048, tokens_per_block=64)
    assert answer(core, make_batch(prompts, max_output=6)) == oracle(tmp_path, prompts, 6)


def test_mixtral_equals_transformers(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-mixtral", tmp_path)
    few = prompts[:10]
    wanted = oracle(tmp_path, few, N_OUTPUT)
    assert answer(make_core("tiny-mixtral", max_num_tokens=50), make_batch(few)) == wanted


def test_bfloat16_runs_and_starts_like_float32(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, dtype="bfloat16", max_num_tokens=40)
    answers = answer(core, make_batch(prompts))
    assert core.engine.worker.part.cache.keys.dtype == torch.bfloat16
    assert all(len(tokens) == N_OUTPUT for tokens in answers)
    assert sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True)) >= 0.8 * len(prompts)


@pytest.mark.parametrize("blocks", ["together", "scattered", "shared"])
def test_decode_attention_equals_the_plain_formula(blocks: str) -> None:
    """Blocks that lie close together are read in place, scattered ones and those of several sequences are
    gathered first."""
    torch.manual_seed(1)
    cache = KVCache(1, 100, 2, 4, 8, torch.float32)
    lengths = [0, 3, 4, 17]
    numbers = iter(range(1, 100, 9) if blocks == "scattered" else range(1, 20))
    tables = {slot: [next(numbers) for _ in range(n // 4 + 1)] for slot, n in enumerate(lengths)}
    if blocks == "shared":
        lengths.append(14)
        tables[4] = [*tables[3][:3], next(numbers)]
    spans = [Span(slot, n, 1) for slot, n in enumerate(lengths)]
    for pool in (cache.keys, cache.values):
        pool.normal_()
    qkv = torch.randn(len(spans), 6 + 2 + 2, 8)
    unturned = torch.ones(32, 4, dtype=torch.complex64)
    attended = StepAttention(spans, tables, cache, 6, unturned, torch.float32)(0, qkv.clone())
    for i, span in enumerate(spans):
        keys, values = (
            pool[0, tables[span.slot]]
            .transpose(0, 1)
            .reshape(2, -1, 8)[:, : span.n_cached + 1]
            .repeat_interleave(3, 0)
            for pool in (cache.keys, cache.values)
        )
        weights = (qkv[i, :6, None] * keys).sum(-1).div(8**0.5).softmax(-1)
        torch.testing.assert_close(attended[i].view(6, 8), (weights[..., None] * values).sum(1))


# --- the end of an answer ---


def test_end_tokens_and_lengths(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    ends = (expected[3][5], expected[6][2])
    core = make_core(folder, end_ids=ends)
    assert answer(core, make_batch(prompts)) == oracle(folder, prompts, N_OUTPUT, eos_token_id=list(ends))
    assert answer(core, make_batch(prompts, min_output=9)) == oracle(
        folder, prompts, N_OUTPUT, eos_token_id=list(ends), min_new_tokens=9
    )
    assert answer(core, make_batch(prompts, max_output=3)) == oracle(
        folder, prompts, 3, eos_token_id=list(ends)
    )


def until(tokens: list[int], words: list[tuple[int, ...]], min_output: int) -> list[int]:
    """Return the answer as far as the end of the first of these words that may end it."""
    for n in range(min_output, len(tokens)):
        if any(tuple(tokens[:n][-len(word) :]) == word for word in words):
            return tokens[:n]
    return tokens


@pytest.mark.parametrize("min_output", [0, 9])
def test_stop_words(folder: Path, prompts: Tokens, expected: Tokens, min_output: int) -> None:
    words = [tuple(expected[3][4:7]), tuple(expected[5][9:11]), (expected[8][12],), (*expected[9][3:5], 7)]
    core = make_core(folder, stop_words=tuple(words), max_batch_size=7)
    wanted = [until(tokens, words, min_output) for tokens in expected]
    assert len({len(tokens) for tokens in wanted}) >= 4
    assert answer(core, make_batch(prompts, min_output=min_output)) == wanted
    ignore = [i % 2 for i in range(len(prompts))]
    mixed = [whole if i % 2 else cut for i, (whole, cut) in enumerate(zip(expected, wanted, strict=True))]
    assert (
        answer(
            core,
            make_batch(prompts, min_output=min_output, flags=[i * RequestFlag.IGNORE_STOP for i in ignore]),
        )
        == mixed
        != wanted
    )
    pair = make_pair(folder, {"stop_words": tuple(words)}, {"stop_words": tuple(words)})
    assert hand_over(*pair, make_batch(prompts, min_output=min_output, generation=1)) == wanted


def test_end_tokens_come_from_the_model(
    folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path
) -> None:
    end = expected[3][5]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, end]}))
    assert make_core(tmp_path, end_ids=None).info.end_ids == (511, end)
    assert make_core(folder, end_ids=None).info.end_ids == (257,)


def test_first_and_final_in_one_row(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder)
    core.enqueue(make_batch(prompts[:3], max_output=1))
    batch = core.poll_responses()
    assert batch is not None
    assert batch.rows["flags"].tolist() == [ResponseFlag.FIRST | ResponseFlag.FINAL] * 3
    assert batch.tokens.tolist() == [tokens[0] for tokens in expected[:3]]


def test_requests_that_can_never_be_answered(
    folder: Path, prompts: Tokens, expected: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(folder, max_seq_len=64)
    core.enqueue(make_batch([[5] * 60, [], [512], [-1], prompts[3]]))
    answers = Answers().run(core)
    assert sorted(answers.errors) == [0, 1, 2, 3]
    assert answers.final == {4: expected[3]}
    assert "60 prompt tokens and 24 output tokens exceed max_seq_len 64" in caplog.text


def test_health_check_and_warm_up(folder: Path) -> None:
    core = make_core(folder, max_batch_size=16)
    core.run_health_check()
    assert len(answer(core, core.warm_up_requests())) == 16
    core.notify_stop()
    assert not core.has_work()


# --- sampling ---


def test_sampled_tokens_do_not_depend_on_the_batching(folder: Path, prompts: Tokens) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "seed": np.arange(len(prompts)),
        "top_k": [0, 20] * 10,
        "top_p": [1, 1, 0.7, 0.9] * 5,
    }
    together = answer(make_core(folder), make_batch(prompts, **fields))
    assert (
        answer(make_core(folder, max_batch_size=3, max_num_tokens=20), make_batch(prompts, **fields))
        == together
    )
    scarce = make_core(folder, kv_cache_tokens=160, max_seq_len=None)
    assert answer(scarce, make_batch(prompts, **fields)) == together
    assert scarce.statistics()["preemptions"] > 0
    other = answer(make_core(folder), make_batch(prompts, **fields | {"seed": np.arange(len(prompts)) + 100}))
    assert sum(a != b for a, b in zip(together, other, strict=True)) > len(prompts) // 2


def test_top_k_1_and_a_tiny_top_p_are_greedy(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder)
    assert answer(core, make_batch(prompts, temperature=1.0, top_k=1)) == expected
    assert answer(core, make_batch(prompts, temperature=1.0, top_p=1e-6, seed=3)) == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.6), (5, 0.75)])
def test_the_distribution_of_sampled_tokens(top_k: int, top_p: float) -> None:
    n, temperature = 20_000, 0.8
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, 1.5, -3.0, 0.8])
    probabilities = (logits / temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[: top_k or None]
    renormalized = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: int((renormalized.cumsum(-1) < top_p).sum()) + 1]
    wanted = torch.zeros(8)
    wanted[kept] = probabilities[kept] / probabilities[kept].sum()
    params = [SamplingParams(temperature, top_k, top_p, seed=i // 100) for i in range(n)]
    tokens = sample(logits.repeat(n, 1), params, [i % 100 for i in range(n)])
    found = torch.bincount(tokens, minlength=8) / n
    assert set(torch.nonzero(found).flatten().tolist()) <= set(kept.tolist())
    torch.testing.assert_close(found, wanted, atol=0.015, rtol=0)


# --- the handoff ---


def make_pair(
    model: Path, context: dict[str, Any] | None = None, generation: dict[str, Any] | None = None
) -> tuple[TorchCore, TorchCore]:
    """Return a context and a generation core, instances 0 and 1, that can hand over; options of each."""
    wire = Wire()
    return (
        make_core(model, connect=(wire.mover(0), {1: Peer(1, 1, 1)}), role="context", **context or {}),
        make_core(model, connect=(wire.mover(1), {0: Peer(0, 1, 1)}), role="generation", **generation or {}),
    )


def hand_over(
    context: TorchCore, generation: TorchCore, batch: Batch, streamed: dict[int, list[int]] | None = None
) -> Tokens:
    """Run contexts on one core, generation on the other, as the roles do: offers in order.

    Returns the answers by id.
    """
    requests = {int(request.rows["id"][0]): request for request in batch.split()}
    context.enqueue(batch)
    firsts, finals = Answers(), Answers()
    offered: list[int] = []
    arrived: set[int] = set()
    left: set[int] = set()
    for _ in range(20_000):
        if len(firsts.final | finals.final) == len(requests) and not context.engine.handoffs._leaving:
            break
        offered += context.started()
        while offered and generation.receive_kv(requests[offered[0]], 0, slot=offered[0]):
            context.send_kv(offered[0], 1, slot=offered[0])
            offered.pop(0)
        if context.has_work():
            firsts.poll(context)
        left |= set(context.poll_kv())
        arrived |= set(generation.poll_kv())
        for id_ in sorted(arrived & left & set(firsts.first)):
            context.release_kv(id_)
            if id_ in firsts.final:
                generation.release_kv(id_)
            else:
                generation.admit(requests[id_], firsts.first[id_])
            arrived.remove(id_)
        if generation.has_work():
            finals.poll(generation)
    assert not finals.first and not firsts.partial
    if streamed is not None:
        streamed |= finals.partial
    for core in (context, generation):
        assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
        assert not core.has_work()
    done = firsts.final | finals.final
    return [done[id_] for id_ in sorted(done)]


@pytest.mark.parametrize(
    "context",
    [{}, {"max_num_tokens": 30, "kv_cache_tokens": 128, "max_seq_len": None}],
    ids=["roomy", "scarce"],
)
@pytest.mark.parametrize(
    "generation",
    [{"tokens_per_block": 32}, {"kv_cache_tokens": 160, "max_seq_len": None}, {"max_batch_size": 2}],
    ids=["other blocks", "scarce", "small batch"],
)
def test_handed_over_requests_give_the_same_tokens(
    folder: Path, prompts: Tokens, expected: Tokens, context: dict[str, Any], generation: dict[str, Any]
) -> None:
    sender, receiver = make_pair(folder, context, generation)
    assert hand_over(sender, receiver, make_batch(prompts, generation=1)) == expected
    if "kv_cache_tokens" in generation:
        assert receiver.statistics()["preemptions"] > 0
    c = sender.info.config
    assert (
        sender.statistics()["kv_bytes"]
        == sum(map(len, prompts)) * c.n_layers * 2 * c.n_kv_heads * c.head_dim * 4
    )


def test_handed_over_requests_sample_the_same_tokens(folder: Path, prompts: Tokens) -> None:
    fields = {"temperature": 1.0, "top_k": 50, "seed": np.arange(len(prompts))}
    alone = answer(make_core(folder), make_batch(prompts, **fields))
    assert hand_over(*make_pair(folder), make_batch(prompts, generation=1, **fields)) == alone


def test_a_request_of_one_token_is_not_handed_over(folder: Path, prompts: Tokens) -> None:
    core = make_core(folder, role="context")
    core.enqueue(make_batch(prompts[:2], generation=1, max_output=1))
    assert core.started() == []
    assert set(Answers().run(core).final) == {0, 1}
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks


def test_an_answer_that_ends_with_its_first_token_is_given_up_at_both_ends(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """It was offered, and its KV cache has moved, before its first token was known."""
    end = {"end_ids": (expected[2][0],)}
    answers = hand_over(*make_pair(folder, end, end), make_batch(prompts, generation=1))
    assert answers[2] == expected[2][:1]
    assert answers == [
        tokens[: tokens.index(end["end_ids"][0]) + 1 if end["end_ids"][0] in tokens else None]
        for tokens in expected
    ]


def test_no_room_is_false_and_never_room_is_an_error(folder: Path) -> None:
    _, core = make_pair(folder, {}, {"kv_cache_tokens": 64, "max_seq_len": None})
    batch = make_batch([[1] * 40], max_output=8, generation=1)
    assert core.receive_kv(batch, 0, 3)
    batch.rows["id"] = 1
    assert not core.receive_kv(batch, 0, 4)
    batch.rows["max_output"] = 60
    with pytest.raises(ValueError, match="exceed max_seq_len 64"):
        core.receive_kv(batch, 0, 4)


def test_what_is_on_its_way_is_limited(folder: Path) -> None:
    """On a GPU buffers take memory of their own; one KV cache is let through whatever its size."""
    _, core = make_pair(folder, {}, {"kv_cache_tokens": 640})
    core.engine.handoffs._max_moving_tokens = 30
    answers = []
    for i, n in enumerate((40, 10)):
        batch = make_batch([[1] * n], max_output=8, generation=1)
        batch.rows["id"] = i
        answers.append(core.receive_kv(batch, 0, 3 + i))
    assert answers == [True, False]


def test_context_waits_without_work_until_its_cache_is_taken(folder: Path) -> None:
    core, _ = make_pair(folder, {"kv_cache_tokens": 64, "max_seq_len": None})
    core.enqueue(make_batch([[1] * 40, [2] * 40], generation=1))
    assert core.started() == [0]
    answers = Answers().run(core)
    assert set(answers.first) == {0}
    core.release_kv(0)
    assert core.started() == [1]
    assert set(answers.run(core).first) == {0, 1}


def test_contexts_are_offered_a_step_ahead_and_sent_as_they_are_computed(folder: Path) -> None:
    """The receiver is asked while the step before computes; then the pieces leave between the layers."""
    context, generation = make_pair(folder, {"max_num_tokens": 40})
    batch = make_batch([[1] * 40, [2] * 40, [3] * 40, [4] * 40], generation=1)
    context.enqueue(batch)
    assert context.started() == [0, 1]
    context.poll_responses()
    assert context.started() == [2]
    assert generation.receive_kv(batch.split()[1], 0, 7)
    context.send_kv(1, 1, 7)
    seen: list[int] = []
    transfers = context.engine.worker.transfers
    assert transfers is not None
    stored = transfers.layer_stored

    def layer_stored(layer: int) -> None:
        stored(layer)
        seen.append(len(transfers._under_way[0].pieces))

    transfers.layer_stored = layer_stored  # type: ignore[method-assign]
    context.poll_responses()
    assert seen == [1, 1, 2, 3, 3, 4]
    assert context.poll_kv() == [1]
    generation.poll_responses()
    assert generation.poll_kv() == [1]


# --- streaming ---


def test_those_who_stream_get_every_token_when_it_is_there(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    """All but the last, which comes with the whole answer.

    Those who don't stream get no row more than before.
    """
    core = make_core(folder, kv_cache_tokens=160, max_seq_len=None)
    streams = [i % 2 for i in range(len(prompts))]
    core.enqueue(make_batch(prompts, flags=[i * RequestFlag.STREAM for i in streams]))
    answers = Answers().run(core)
    assert answers.tokens() == expected and core.statistics()["preemptions"] > 3
    assert answers.partial == {i: tokens[1:-1] for i, tokens in enumerate(expected) if streams[i]}


def test_a_handed_over_request_streams_on_behind_its_first_token(
    folder: Path, prompts: Tokens, expected: Tokens
) -> None:
    pair = make_pair(folder, {}, {})
    streamed: dict[int, list[int]] = {}
    assert hand_over(*pair, make_batch(prompts, generation=1, flags=RequestFlag.STREAM), streamed) == expected
    assert streamed == {i: tokens[1:-1] for i, tokens in enumerate(expected)}


def test_end_tokens_can_be_ignored(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, end_ids=(expected[3][5], expected[6][2]))
    assert answer(core, make_batch(prompts, flags=RequestFlag.IGNORE_END)) == expected


# --- cancelling ---


def test_cancelled_requests(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    """One queued, one in its context, one in generation, one refused, one unknown.

    The others are answered.
    """
    core = make_core(folder, max_batch_size=3, max_num_tokens=10)
    core.enqueue(make_batch([prompts[1], [5] * 30, *prompts[2:7], []]))
    answers = Answers()
    answers.poll(core)
    answers.poll(core)
    assert [(s.id, len(s.output), s.n_uncached) for s in core.engine.scheduler.running] == [
        (0, 2, 1),
        (1, 0, 13),
    ]
    core.cancel([0, 1, 6, 7, 99])
    core.cancel([0])
    answers.run(core)
    assert sorted(answers.cancelled) == [0, 1, 6]
    assert answers.errors == [7]
    assert answers.tokens() == expected[2:6]
    core.cancel([2])
    assert not core.has_work()
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks


def test_a_request_that_is_handed_over_is_cancelled_by_its_receiver(folder: Path, prompts: Tokens) -> None:
    context, generation = make_pair(folder, {"max_num_tokens": 20}, {"batch_scheduler_policy": "no_evict"})
    batch = make_batch([[3] * 15, [4] * 16, [5] * 30, [6] * 50], generation=1)
    requests = batch.split()
    context.enqueue(batch)
    assert context.started() == [0, 1, 2]
    context.cancel([0, 1, 2, 3])  # the last one has no memory yet, so nobody was asked to take it
    firsts, finals = Answers(), Answers()
    for i in range(3):
        assert generation.receive_kv(requests[i], 0, slot=i)
        context.send_kv(i, 1, slot=i)
        if i < 2:
            generation.cancel([i])  # on its way
    left, arrived = set(), set()
    for _ in range(1000):
        if context.has_work():
            firsts.poll(context)
        if generation.has_work():
            finals.poll(generation)
        left |= set(context.poll_kv())
        arrived |= set(generation.poll_kv())
    assert firsts.cancelled == [3]
    assert left == arrived == set(firsts.first) == {0, 1, 2}
    for i in range(3):
        context.release_kv(i)
        generation.admit(requests[i], firsts.first[i])
    finals.poll(generation)
    generation.cancel([2])  # in generation
    finals.run(generation)
    assert sorted(finals.cancelled) == [0, 1, 2] and not finals.final
    for core in (context, generation):
        assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
        assert core.engine.scheduler._n_owed == 0
        assert not core.has_work()


# --- weights ---


def test_dummy_weights_depend_only_on_the_name() -> None:
    config = load_model_config("tiny-llama")
    few = dataclasses.replace(config, n_layers=2)
    a, b = DummyWeights(config), DummyWeights(few)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(a.get(name), b.get(name))
    assert torch.equal(a.get(name)[5:9], a.get(name, slice(5, 9)))
    assert not torch.equal(a.get(name), a.get("model.layers.0.mlp.down_proj.weight"))


def test_dummy_weights_are_made_where_they_are_asked_for() -> None:
    """The whole matrix would be 3.5 GB.

    The values never change: these are from other versions and machines.
    """
    source = DummyWeights(load_model_config("llama3.1-405b"))
    name = "model.layers.0.mlp.gate_proj.weight"
    part = source.get(name, slice(50_000, 50_003), slice(16_000, 16_004))
    assert torch.equal(
        part, source.get(name, slice(49_000, 51_000), slice(15_000, None))[1000:1003, 1000:1004]
    )
    assert (part * 128 * 147.8).round().int().tolist() == [
        [-198, -89, 116, -92],
        [44, 274, -10, -14],
        [-50, 192, -102, -43],
    ]


def test_dummy_weights_look_random() -> None:
    config = dataclasses.replace(load_model_config("tiny-llama"), vocab_size=1024, hidden_size=1024)
    x, y = (
        DummyWeights(config).get(name).double() * scale
        for name, scale in (("lm_head.weight", 32), ("model.embed_tokens.weight", 10))
    )
    assert abs(x.mean()) < 0.003 and abs(x.std() - 1) < 0.003
    assert abs((x * y).mean()) < 0.004
    assert abs((x[1:] * x[:-1]).mean()) < 0.004 and abs((x[:, 1:] * x[:, :-1]).mean()) < 0.004
    # of a random matrix: 2; rows or columns that are alike show here
    assert torch.linalg.svdvals(x)[0] < 2.05 * 1024**0.5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama2-7b", "llama2-13b", "llama2-70b", "llama3.1-8b", "mixtral-8x7b"])
def test_a_layer_of_a_preset_runs(tmp_path: Path, preset: str) -> None:
    """At its true width, in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(preset_json(preset) | {"num_hidden_layers": 1}))
    prompts = [np.random.default_rng(i).integers(0, 32000, 9 + i).tolist() for i in range(4)]
    answers = answer(
        make_core(tmp_path, load_format="dummy", dtype="bfloat16"), make_batch(prompts, max_output=6)
    )
    assert all(len(set(tokens)) > 1 for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) == 4


# --- a real model ---


@pytest.mark.skipif("MPILLM_TEST_MODEL" not in os.environ, reason="MPILLM_TEST_MODEL names no folder")
def test_a_real_model_equals_transformers() -> None:
    from mpillm.data.dataset import load_dataset
    from mpillm.data.tokenizer import load_tokenizer

    model = Path(os.environ["MPILLM_TEST_MODEL"])
    dataset = load_dataset(None, load_tokenizer(model))
    prompts = [dataset.sample(i).tolist() for i in range(64)]
    wanted = oracle(model, prompts, 64)
    options = {"end_ids": None, "max_seq_len": 1024, "tokens_per_block": 32}
    assert answer(make_core(model, **options), make_batch(prompts, max_output=64)) == wanted
    scarce = make_core(
        model, **options | {"max_seq_len": None, "kv_cache_tokens": 1024, "max_num_tokens": 100}
    )
    assert answer(scarce, make_batch(prompts, max_output=64)) == wanted
    assert scarce.statistics()["preemptions"] > 0
    pair = make_pair(model, options, options | {"max_seq_len": None, "kv_cache_tokens": 1024})
    assert hand_over(*pair, make_batch(prompts, max_output=64, generation=1)) == wanted
