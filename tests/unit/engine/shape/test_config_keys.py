"""Fields of config.json that mean the same, or are left out: read as transformers reads them, or refused."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from mpillm.engine.build_engine import build
from mpillm.engine.model.rope import rotations
from mpillm.engine.shape.families.known import FAMILIES
from mpillm.engine.shape.model_config import ModelConfig
from mpillm.engine.shape.read_config import check_architecture, load_model_config, parse_model
from tests.helpers.families import make_family, raw_family
from tests.helpers.oracle import Oracle
from tests.helpers.torch_cores import answer, make_batch, make_core

huggingface_errors = pytest.importorskip("huggingface_hub.errors")
transformers = pytest.importorskip("transformers")

SOURCE = Path("config.json")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: list[Any] = [
    None,
    {},
    YARN,
    {"type": "yarn", "factor": 4.0},
    YARN | {"rope_theta": 500.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_theta": 700.0, "rope_type": "default"},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 900.0}},
    {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 600.0}},
]
FIELDS: list[dict[str, list[Any]]] = [  # of one subject each
    {
        "rope_parameters": ROPES,
        "rope_scaling": ROPES,
        "rope_theta": [300.0],
        "rope_local_base_freq": [200.0],
        "original_max_position_embeddings": [24],
        "max_position_embeddings": [128],
        "n_positions": [64],
    },
    {"dtype": ["bfloat16"], "torch_dtype": ["float16"], "tie_word_embeddings": [True, False]},
    {
        "num_local_experts": [8, 4],
        "num_experts": [8, 6],
        "n_routed_experts": [4],
        "num_experts_per_tok": [2],
        "norm_topk_prob": [True, False],
    },
    {
        "head_dim": [8, 16],
        "qk_rope_head_dim": [8],
        "n_embd": [64],
        "hidden_size": [64, 32],
        "num_key_value_heads": [2, 8],
        "rms_norm_eps": [1e-4],
        "layer_norm_epsilon": [1e-3],
    },
    {
        "sliding_window": [None, 9],
        "use_sliding_window": [True, False],
        "max_window_layers": [1, 2],
        "layer_types": [["sliding_attention", "full_attention", "full_attention"], ["full_attention"] * 3],
        "sliding_window_pattern": [2],
        "per_layer_config": [{"1": {"sliding_window": 5}}],
    },
    {"model_type": ["mistral", "qwen3"], "architectures": [None]},
]
VALUES = {name: values for fields in FIELDS for name, values in fields.items()}
_REFUSALS = (  # of transformers
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    huggingface_errors.StrictDataclassError,
)
LENGTH = 48  # positions that are compared


def theirs(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers makes of it: what tokens depend on."""
    config = transformers.AutoConfig.for_model(**raw)
    head = next((h for h in [getattr(config, "head_dim", None)] if h), None)
    head = head or config.hidden_size // config.num_attention_heads
    n, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if type(config).model_type not in ("qwen2", "qwen3", "gpt_oss", "gemma3_text"):
        types = None  # its class does not read them
    if type(config).model_type in ("llama", "gpt2", "deepseek_v3"):
        window = 0
    windows = [window] * n if types is None else [window * (kind == "sliding_attention") for kind in types]
    if types is not None and "sliding_attention" in types and not window:
        raise ValueError("transformers cannot make this mask")
    assert not config.is_heterogeneous
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
    latent = type(config).model_type == "deepseek_v3"
    eps = getattr(config, "rms_norm_eps", None)
    return {
        "class": transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.layer_norm_epsilon if type(config).model_type == "gpt2" else eps,
        "n_kv_heads": None if latent or type(config).model_type == "gpt2" else config.num_key_value_heads,
        "head_dim": config.qk_rope_head_dim if latent else head,
        "windows": windows,
        "n_experts": experts,
        "n_experts_per_token": config.num_experts_per_tok if experts else 0,
        "norms_choice": getattr(config, "norm_topk_prob", True)
        if type(config).model_type in ("qwen3_moe", "deepseek_v3")
        else bool(experts),
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
        "rotations": their_rotations(config),
    }


def their_rotations(config: Any) -> list[torch.Tensor]:
    """Return the turns of each kind of layer, by transformers' own module."""
    if type(config).model_type == "gpt2":
        return []
    model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    module = __import__(model.__module__, fromlist=["_"])
    name = next(name for name in vars(module) if name.endswith("RotaryEmbedding"))
    rotary = getattr(module, name)(config)
    kinds: list[dict[str, str]] = [{}]
    if type(config).model_type == "gemma3_text":
        kinds = [{"layer_type": kind} for kind in ("full_attention", "sliding_attention")]
    places = torch.arange(LENGTH)[None]
    return [torch.complex(*(turn[0] for turn in rotary(torch.zeros(1), places, **kind))) for kind in kinds]


def ours(raw: dict[str, Any]) -> dict[str, Any]:
    check_architecture(raw, SOURCE)
    model = parse_model(raw, SOURCE)
    latent = model.latent
    return {
        "class": next(name for name, family in FAMILIES.items() if family is model.family),
        "hidden_size": model.hidden_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "n_kv_heads": None if latent or model.family.embedding.has_positions else model.n_kv_heads,
        "head_dim": latent.qk_rope_head_dim if latent else model.head_dim,
        "windows": [model.window(layer) for layer in range(model.n_layers)],
        "n_experts": model.n_experts,
        "n_experts_per_token": model.n_experts_per_token,
        "norms_choice": model.norms_choice and model.n_experts > 0,
        "tie_word_embeddings": model.tie_word_embeddings,
        "dtype": model.dtype,
        "rotations": our_rotations(model),
    }


def our_rotations(model: ModelConfig) -> list[torch.Tensor]:
    if model.family.embedding.has_positions:
        return []
    turns = rotations(model, LENGTH)
    if model.latent is not None:
        turns = turns[:, model.latent.kv_lora_rank // 2 :]
    return [*turns.reshape(-1, LENGTH, turns.shape[1])]


def check(raw: dict[str, Any]) -> str:
    """Check one configuration; return how it was read: refused, or equal."""
    try:
        found = ours(raw)
    except ConfigError:
        return "refused"
    try:
        wanted = theirs(json.loads(json.dumps(raw)))
    except _REFUSALS:  # no answer that ours could differ from
        return "without an answer"
    for name, value in wanted.items():
        if name != "rotations":
            assert found[name] == value, (name, found[name], value, raw)
    for mine, turns in zip(found["rotations"], wanted["rotations"], strict=False):
        assert torch.allclose(mine, turns[:, : mine.shape[1]], atol=1e-4), ("rotations", raw)
    return "equal"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long
def test_every_pair_of_a_subject(name: str) -> None:
    """With and without those that a model of transformers 5 has."""
    results = []
    for fields in FIELDS:
        whole = raw_family(name)
        for base in (whole, {field: value for field, value in whole.items() if field not in fields}):
            for pair in itertools.combinations(fields, 2):
                for values in itertools.product(*(fields[field] for field in pair)):
                    results.append(check(base | dict(zip(pair, values, strict=True))))
    assert results.count("equal") > 100


@pytest.mark.parametrize("name", FAMILIES)
def test_left_out(name: str) -> None:
    base = raw_family(name)
    results = [check({field: base[field] for field in base if field != out}) for out in base]
    assert results.count("equal") > len(base) / 2


@pytest.mark.parametrize("seed", range(3))
def test_many_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    bases = [raw_family(name) for name in FAMILIES]
    for _ in range(150):
        raw = dict(rng.choice(bases))
        for field in rng.sample(sorted(VALUES), 4):
            raw[field] = rng.choice(VALUES[field])
        for field in rng.sample(sorted(raw), rng.randrange(3)):
            del raw[field]
        check(raw)


BOTH: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen3ForCausalLM", {"rope_scaling": YARN}, "rope_scaling and rope_parameters mean the same and differ"),
    ("MixtralForCausalLM", {"num_experts": 5}, "num_local_experts 8 and num_experts 5 mean the same"),
    ("GPT2LMHeadModel", {"hidden_size": 32}, "n_embd 64 and hidden_size 32 mean the same"),
    ("DeepseekV3ForCausalLM", {"head_dim": 8}, "qk_rope_head_dim 16 and head_dim 8 mean the same"),
    (
        "MistralForCausalLM",
        {"layer_types": ["full_attention"] * 3},
        "layer_types .* has no effect in this architecture, and contradicts sliding_window",
    ),
    ("MistralForCausalLM", {"use_sliding_window": False}, "use_sliding_window false .* sliding_window 12"),
    (
        "Qwen3ForCausalLM",
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types has sliding_attention, which needs a sliding_window, and use_sliding_window true",
    ),
    (
        "LlamaForCausalLM",
        {"model_type": "mistral"},
        "LlamaForCausalLM and model_type mistral contradict each other; model_type mistral is MistralFor",
    ),
    ("Gemma3ForCausalLM", {"rope_parameters": YARN}, 'rope_parameters has "rope_type", which has no effect'),
    (
        "Qwen3MoeForCausalLM",
        {"num_experts": None, "num_local_experts": None},
        "Qwen3MoeForCausalLM has no num_local_experts",
    ),
    ("DeepseekV3ForCausalLM", {"n_routed_experts": None}, "DeepseekV3ForCausalLM has no n_routed_experts"),
    ("LlamaForCausalLM", {"num_experts": 4}, "LlamaForCausalLM has num_experts"),
    ("GPT2LMHeadModel", {"n_embd": 66}, "n_embd 66 is not a multiple of n_head 8, and there is no head_dim"),
    ("GPT2LMHeadModel", {"n_layer": 10**5}, "n_layer is 100000; must be 10000 at most"),
]


@pytest.mark.parametrize(("name", "change", "message"), BOTH, ids=[message[:40] for *_, message in BOTH])
def test_a_refusal_names_both(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(raw_family(name) | change)


def test_without_architectures() -> None:
    """transformers goes by model_type, as does this."""
    for name in FAMILIES:
        raw = raw_family(name)
        del raw["architectures"]
        assert check(raw) == "equal"
    with pytest.raises(
        ConfigError, match='there is no architectures, and model_type "bert" is not supported'
    ):
        ours({"model_type": "bert"})


PROMPTS = [[5, 6, 7], [100 + i for i in range(40)], [9], [3 + 5 * i % 300 for i in range(20)]]


def check_tokens(folder: Path) -> None:
    """Check greedy answers beside transformers'."""
    oracle = Oracle(folder)
    found = answer(make_core(folder, dtype="float32"), make_batch(PROMPTS, max_output=8))
    assert found == [oracle.tokens(prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_rope_scaling_in_place_of_rope_parameters(tmp_path: Path, name: str) -> None:
    """As Qwen's model cards tell users to write it."""
    make_family(name, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"rope_theta": 10_000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_tokens(tmp_path)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("differs", [True, False])
def test_a_tied_model_with_a_head(tmp_path: Path, name: str, differs: bool) -> None:
    """transformers ties a head that is not there, or equal to the embedding."""
    make_family(name, tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head.flip(0) if differs else head
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_tokens(tmp_path)
    assert not load_model_config(str(tmp_path)).tie_word_embeddings
    engine = build(tmp_path, tmp_path / "engine")
    assert not engine["pretrained_config"]["tie_word_embeddings"]
    found = answer(
        make_core(tmp_path, engine_dir=str(tmp_path / "engine")), make_batch(PROMPTS, max_output=8)
    )
    assert found == answer(make_core(tmp_path), make_batch(PROMPTS, max_output=8))
