"""The engine against transformers, token by token, and the torch core's contract."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.attention import Span, StepAttention
from mpillm.engine.kv_cache import KVCache
from mpillm.engine.model_config import load_model_config
from mpillm.engine.sampler import SamplingParams, sample
from mpillm.engine.weights import DummyWeights, save_preset
from mpillm.messages import NO_INSTANCE, REQUEST, Batch, ResponseFlag

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
    """What transformers answers, one prompt at a time, the end token included."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # small products: a second thread costs more than it gives, above all on a busy machine
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_output, pad_token_id=0, **options
            )
            answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: Tokens) -> Tokens:
    return oracle(folder, prompts, N_OUTPUT, min_new_tokens=N_OUTPUT)


def make_core(model: Path | str, **options: Any) -> TorchCore:
    defaults: dict[str, Any] = {"tokens_per_block": 8, "n_threads": 1, "end_ids": (), "max_seq_len": 256}
    core = TorchCore(CoreConfig("torch", model_path=str(model), **(defaults | options)))
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
    """Collects response rows and checks the contract: one FIRST and one FINAL for each id, in that order, or both at once."""

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        self.final: dict[int, list[int]] = {}
        self.errors: list[int] = []

    def poll(self, core: TorchCore) -> None:
        batch = core.poll_responses()
        if batch is None:
            return
        assert len(batch)
        offsets = batch.offsets()
        assert offsets[-1] == len(batch.tokens)
        for i, row in enumerate(batch.rows):
            id_, flags, tokens = int(row["id"]), int(row["flags"]), batch.tokens[offsets[i] : offsets[i + 1]].tolist()
            assert id_ not in self.final
            if flags & ResponseFlag.ERROR:
                assert flags & ResponseFlag.FINAL and not tokens
                self.errors.append(id_)
                continue
            if flags & ResponseFlag.FIRST:
                assert id_ not in self.first
                self.first[id_] = tokens[0]
                assert len(tokens) == 1 or flags & ResponseFlag.FINAL
            if flags & ResponseFlag.FINAL:
                assert id_ not in self.first or tokens[0] == self.first[id_]
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
def test_greedy_tokens_equal_transformers(folder: Path, prompts: Tokens, expected: Tokens, options: dict[str, Any]) -> None:
    assert answer(make_core(folder, **options), make_batch(prompts)) == expected


@pytest.mark.parametrize("max_num_tokens", [16, 2048])
def test_a_preempted_request_gives_the_same_tokens(folder: Path, prompts: Tokens, expected: Tokens, max_num_tokens: int) -> None:
    core = make_core(folder, kv_cache_tokens=160, max_seq_len=None, max_num_tokens=max_num_tokens)
    assert answer(core, make_batch(prompts)) == expected
    assert core.statistics()["preemptions"] > 3


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


def test_a_checkpoint_in_several_files(folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path) -> None:
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
    assert answer(make_core(tmp_path, max_num_tokens=60), make_batch(few)) == oracle(tmp_path, few, N_OUTPUT, min_new_tokens=N_OUTPUT)


def test_mixtral_equals_transformers(prompts: Tokens, tmp_path: Path) -> None:
    save_preset("tiny-mixtral", tmp_path)
    few = prompts[:10]
    wanted = oracle(tmp_path, few, N_OUTPUT, min_new_tokens=N_OUTPUT)
    assert answer(make_core("tiny-mixtral", max_num_tokens=50), make_batch(few)) == wanted


def test_bfloat16_runs_and_starts_like_float32(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    core = make_core(folder, dtype="bfloat16", max_num_tokens=40)
    answers = answer(core, make_batch(prompts))
    assert core.engine.cache.keys.dtype == torch.bfloat16
    assert all(len(tokens) == N_OUTPUT for tokens in answers)
    assert sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True)) >= 0.8 * len(prompts)


@pytest.mark.parametrize("scattered", [False, True])
def test_decode_attention_equals_the_plain_formula(scattered: bool) -> None:
    """Blocks that lie close together are read in place, scattered ones are gathered first."""
    torch.manual_seed(1)
    cache = KVCache(1, 100, 2, 4, 8, torch.float32)
    lengths = [0, 3, 4, 17]
    blocks = iter(range(1, 100, 9) if scattered else range(1, 20))
    spans = [Span(n, 1, [next(blocks) for _ in range(n // 4 + 1)]) for n in lengths]
    for pool in (cache.keys, cache.values):
        pool.normal_()
    qkv = torch.randn(len(spans), 6 + 2 + 2, 8)
    unturned = torch.ones(32, 4, dtype=torch.complex64)
    attended = StepAttention(spans, cache, 6, unturned)(0, qkv.clone())
    for i, span in enumerate(spans):
        keys, values = (
            pool[0, span.blocks].transpose(0, 1).reshape(2, -1, 8)[:, : span.n_cached + 1].repeat_interleave(3, 0)
            for pool in (cache.keys, cache.values)
        )
        weights = (qkv[i, :6, None] * keys).sum(-1).div(8**0.5).softmax(-1)
        torch.testing.assert_close(attended[i].view(6, 8), (weights[..., None] * values).sum(1))


# --- the end of an answer ---


def test_end_tokens_and_lengths(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    ends = (expected[3][5], expected[6][2])
    core = make_core(folder, end_ids=ends)
    assert answer(core, make_batch(prompts)) == oracle(folder, prompts, N_OUTPUT, eos_token_id=list(ends))
    assert answer(core, make_batch(prompts, min_output=9)) == oracle(folder, prompts, N_OUTPUT, eos_token_id=list(ends), min_new_tokens=9)
    assert answer(core, make_batch(prompts, max_output=3)) == oracle(folder, prompts, 3, eos_token_id=list(ends))


def test_end_tokens_come_from_the_model(folder: Path, prompts: Tokens, expected: Tokens, tmp_path: Path) -> None:
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


def test_requests_that_can_never_be_answered(folder: Path, prompts: Tokens, expected: Tokens, caplog: pytest.LogCaptureFixture) -> None:
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
    fields: dict[str, Any] = {"temperature": 1.0, "seed": np.arange(len(prompts)), "top_k": [0, 20] * 10, "top_p": [1, 1, 0.7, 0.9] * 5}
    together = answer(make_core(folder), make_batch(prompts, **fields))
    assert answer(make_core(folder, max_batch_size=3, max_num_tokens=20), make_batch(prompts, **fields)) == together
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


def hand_over(context: TorchCore, generation: TorchCore, batch: Batch, check: Callable[[], None] = lambda: None) -> Tokens:
    """Context on one core, generation on the other, as the roles do it: offers in order, first one first."""
    offsets = batch.offsets()
    requests = {int(row["id"]): Batch(batch.rows[i : i + 1], batch.tokens[offsets[i] : offsets[i + 1]]) for i, row in enumerate(batch.rows)}
    context.enqueue(batch)
    firsts, finals = Answers(), Answers()
    offered: list[int] = []
    done: dict[int, list[int]] = {}
    for _ in range(20_000):
        if len(done) == len(requests):
            break
        if context.has_work():
            before = set(firsts.first)
            firsts.poll(context)
            done |= firsts.final
            offered += [id_ for id_ in firsts.first if id_ not in before and id_ not in firsts.final]
        while offered:
            request = requests[offered[0]]
            buffer = generation.reserve_kv(request.rows[0])
            if buffer is None:
                break
            id_ = offered.pop(0)
            sent = context.export_kv(id_)
            assert sent.shape == buffer.shape
            buffer[:] = sent
            context.release_kv(id_)
            generation.admit(request, firsts.first[id_])
        if generation.has_work():
            finals.poll(generation)
            done |= finals.final
        check()
    assert not finals.first
    for core in (context, generation):
        assert core.engine.blocks.n_free == core.engine.blocks.n_blocks
        assert not core.has_work()
    return [done[id_] for id_ in sorted(done)]


@pytest.mark.parametrize("context", [{}, {"max_num_tokens": 30, "kv_cache_tokens": 128, "max_seq_len": None}], ids=["roomy", "scarce"])
@pytest.mark.parametrize(
    "generation",
    [{"tokens_per_block": 32}, {"kv_cache_tokens": 160, "max_seq_len": None}, {"max_batch_size": 2}],
    ids=["other blocks", "scarce", "small batch"],
)
def test_handed_over_requests_give_the_same_tokens(
    folder: Path, prompts: Tokens, expected: Tokens, context: dict[str, Any], generation: dict[str, Any]
) -> None:
    receiver = make_core(folder, **generation)
    assert hand_over(make_core(folder, **context), receiver, make_batch(prompts, generation=1)) == expected
    if "kv_cache_tokens" in generation:
        assert receiver.statistics()["preemptions"] > 0


def test_handed_over_requests_sample_the_same_tokens(folder: Path, prompts: Tokens) -> None:
    fields = {"temperature": 1.0, "top_k": 50, "seed": np.arange(len(prompts))}
    alone = answer(make_core(folder), make_batch(prompts, **fields))
    assert hand_over(make_core(folder), make_core(folder), make_batch(prompts, generation=1, **fields)) == alone


def test_an_answer_that_ends_with_its_first_token_is_not_handed_over(folder: Path, prompts: Tokens, expected: Tokens) -> None:
    end = expected[2][0]
    core = make_core(folder, end_ids=(end,))
    core.enqueue(make_batch(prompts[:4], generation=0, max_output=[1, 5, 5, 1]))
    answers = Answers().run(core)
    assert set(answers.first) == {0, 1, 2, 3}
    assert {0, 2, 3} <= set(answers.final)
    for id_ in set(answers.first) - set(answers.final):
        core.release_kv(id_)
    assert core.engine.blocks.n_free == core.engine.blocks.n_blocks


def test_no_room_is_none_and_never_room_is_an_error(folder: Path) -> None:
    core = make_core(folder, kv_cache_tokens=64, max_seq_len=None)
    row = make_batch([[1] * 40], max_output=8, generation=1).rows[0]
    buffer = core.reserve_kv(row)
    c = core.info.config
    assert buffer is not None
    assert buffer.nbytes == c.n_layers * 2 * c.n_kv_heads * 40 * c.head_dim * 4
    assert core.reserve_kv(row) is None
    row["max_output"] = 60
    with pytest.raises(ValueError, match="exceed max_seq_len 64"):
        core.reserve_kv(row)


def test_context_waits_without_work_until_its_cache_is_taken(folder: Path) -> None:
    core = make_core(folder, kv_cache_tokens=64, max_seq_len=None)
    core.enqueue(make_batch([[1] * 40, [2] * 40], generation=1))
    answers = Answers().run(core)
    assert set(answers.first) == {0}
    core.release_kv(0)
    assert set(answers.run(core).first) == {0, 1}


# --- weights ---


def test_dummy_weights_depend_on_the_name_alone() -> None:
    config = load_model_config("tiny-llama")
    few = dataclasses.replace(config, n_layers=2)
    a, b = DummyWeights(config), DummyWeights(few)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(a.get(name), b.get(name))
    assert torch.equal(a.get(name)[5:9], a.get(name, slice(5, 9)))
    assert not torch.equal(a.get(name), a.get("model.layers.0.mlp.down_proj.weight"))


# --- a real model ---


@pytest.mark.skipif("MPILLM_TEST_MODEL" not in os.environ, reason="MPILLM_TEST_MODEL names no folder")
def test_a_real_model_equals_transformers() -> None:
    from mpillm.dataset import load_dataset
    from mpillm.tokenizer import load_tokenizer

    model = Path(os.environ["MPILLM_TEST_MODEL"])
    dataset = load_dataset(None, load_tokenizer(model))
    prompts = [dataset.sample(i).tolist() for i in range(64)]
    wanted = oracle(model, prompts, 64)
    options = {"end_ids": None, "max_seq_len": 1024, "tokens_per_block": 32}
    assert answer(make_core(model, **options), make_batch(prompts, max_output=64)) == wanted
    scarce = make_core(model, **options | {"max_seq_len": None, "kv_cache_tokens": 1024, "max_num_tokens": 100})
    assert answer(scarce, make_batch(prompts, max_output=64)) == wanted
    assert scarce.statistics()["preemptions"] > 0
    receiver = make_core(model, **options | {"max_seq_len": None, "kv_cache_tokens": 1024})
    assert hand_over(make_core(model, **options), receiver, make_batch(prompts, max_output=64, generation=1)) == wanted
