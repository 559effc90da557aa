"""EAGLE-3 heads: they guess what a head computed naively guesses, and answers stay the plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.kernels import linear
from mpillm.engine.kernels.cpu_products import cpu_products
from mpillm.engine.run.cpu_steps import CpuSteps
from mpillm.engine.shape.eagle_config import read_eagle
from mpillm.engine.shape.model_info import check_model
from tests.helpers.draft_tokens import N_OUTPUT
from tests.helpers.eagle_heads import NaiveHead, Seen, answer_with_guesses, check_guesses, eagle, save_head
from tests.helpers.engine_configs import changed
from tests.helpers.gpu_cores import random_prompts
from tests.helpers.gpu_steps_on_cpu import KINDS, GpuCore
from tests.helpers.oracle import Oracle, Tokens
from tests.helpers.torch_cores import answer, make_batch, make_core

SCARCE = {"kv_cache_tokens": 256, "max_seq_len": None}


@pytest.fixture(scope="module")
def head_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("head")
    save_head(folder, path)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 3, "max_num_tokens": 9},
        {"max_num_tokens": 200, "enable_chunked_context": False},
        SCARCE | {"max_num_tokens": 24},
        {"tokens_per_block": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("way", KINDS)
def test_guesses_are_those_of_a_naive_head(
    folder: Path,
    head_folder: Path,
    oracle: Oracle,
    repetitive: Tokens,
    plain: Tokens,
    way: str,
    options: dict[str, Any],
    replaced: bool,
) -> None:
    """Also after guesses that were right, which a head of random numbers has none of by itself."""
    core = make_core(folder, kind=KINDS[way], speculative_config=eagle(head_folder), **options)
    seen = answer_with_guesses(core, repetitive, plain, replaced=replaced, n_output=N_OUTPUT)
    drafter: Any = core.engine.speculation and core.engine.speculation._drafter
    drafter.draft([])
    assert not drafter._of
    assert drafter._blocks.n_free == drafter._blocks.n_blocks
    if options.get("max_seq_len", 0) is None:
        assert core.statistics()["preemptions"] > 0
    check_guesses(seen, NaiveHead(oracle, head_folder).guesses)


def add_embedding(head: Path, path: Path, n_tokens: int) -> None:
    """Copy a head, with an embedding of its own of zeros."""
    shutil.copytree(head, path)
    tensors = load_file(head / "model.safetensors")
    width = len(tensors["norm.weight"])
    save_file(tensors | {"embed_tokens.weight": torch.zeros(n_tokens, width)}, path / "model.safetensors")


@pytest.mark.parametrize(
    ("draft_vocab_size", "more"),
    [(512, {}), (300, {"norm_before_residual": True})],
    ids=str,
)
@pytest.mark.long
def test_other_heads(
    folder: Path,
    oracle: Oracle,
    repetitive: Tokens,
    plain: Tokens,
    tmp_path: Path,
    draft_vocab_size: int,
    more: dict[str, Any],
) -> None:
    save_head(folder, tmp_path / "head", draft_vocab_size, **more)
    core = make_core(folder, speculative_config=eagle(tmp_path / "head"))
    seen = Seen(core)
    assert answer(core, make_batch(repetitive, max_output=N_OUTPUT)) == plain
    naive = NaiveHead(oracle, tmp_path / "head")
    drafts = [(tokens, guesses) for tokens, guesses in seen.drafts if guesses][::9]
    equal = [guesses == naive.guesses(tokens, len(guesses)) for tokens, guesses in drafts]
    assert len(equal) > 20 and sum(equal) >= len(equal) - 1


def test_a_head_may_have_an_embedding_and_other_names(
    folder: Path, head_folder: Path, repetitive: Tokens, plain: Tokens, tmp_path: Path
) -> None:
    found = []
    for prefix in ("midlayer", "layers.0"):
        save_head(folder, tmp_path / prefix, prefix=prefix)
        if prefix != "midlayer":
            tensors = load_file(tmp_path / prefix / "model.safetensors")
            tensors["embed_tokens.weight"] = load_file(folder / "model.safetensors")[
                "model.embed_tokens.weight"
            ]
            save_file(tensors, tmp_path / prefix / "model.safetensors")
        core = make_core(folder, speculative_config=eagle(tmp_path / prefix))
        seen = Seen(core)
        assert answer(core, make_batch(repetitive, max_output=N_OUTPUT)) == plain
        found.append(seen.drafts)
    assert found[0] == found[1]


def test_features_are_the_same_layer_by_layer(
    folder: Path, head_folder: Path, repetitive: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled layers keep what those in PyTorch keep."""
    if cpu_products(torch.float32, torch.float32) is None:
        pytest.skip("nothing is compiled here")
    monkeypatch.setattr(linear, "_compiled", cpu_products)
    found = []
    for at_once in (True, False):
        core = make_core(folder, speculative_config=eagle(head_folder))
        steps = core.engine.worker.steps
        assert isinstance(steps, CpuSteps) and steps._layers is not None
        if not at_once:
            steps._layers = None
        seen = Seen(core)
        answer(core, make_batch(repetitive, max_output=N_OUTPUT))
        features = core.engine.worker.part.model.features
        assert features is not None and features.rows.any()
        found.append((seen.drafts, features.rows))
    assert found[0][0] == found[1][0]
    assert found[0][1].equal(found[1][1])


@pytest.mark.long
def test_guesses_begin_when_few_requests_run(
    folder: Path, head_folder: Path, repetitive: Tokens, plain: Tokens, oracle: Oracle
) -> None:
    """Until then the head's input is kept."""
    core = make_core(folder, speculative_config=eagle(head_folder) | {"max_concurrency": 3})
    seen = Seen(core)
    n_output = [20] * 6 + [N_OUTPUT] * 3
    found = answer(core, make_batch(repetitive, max_output=n_output))
    assert found == [tokens[:n] for tokens, n in zip(plain, n_output, strict=True)]
    naive = NaiveHead(oracle, head_folder)
    drafts = [(tokens, guesses) for tokens, guesses in seen.drafts if guesses]
    assert len(drafts) > 20
    equal = [guesses == naive.guesses(tokens, len(guesses)) for tokens, guesses in drafts]
    assert sum(equal) >= len(equal) - 1


@pytest.mark.long
@pytest.mark.parametrize("kind", [TorchCore, GpuCore])
def test_a_preempted_sequence_is_longer_than_a_step(
    folder: Path, head_folder: Path, kind: type[TorchCore]
) -> None:
    """What a step makes for the head has room for `max_num_tokens` rows, in whole contexts, too."""
    prompts = random_prompts([20] * 4)
    options: dict[str, Any] = {
        "kind": kind,
        "enable_chunked_context": False,
        "max_num_tokens": 24,
        "max_batch_size": 4,
    }
    plain = answer(make_core(folder, **options), make_batch(prompts, max_output=60))
    core = make_core(
        folder, speculative_config=eagle(head_folder), kv_cache_tokens=160, max_seq_len=None, **options
    )
    assert answer(core, make_batch(prompts, max_output=60)) == plain
    assert core.statistics()["preemptions"] > 0


@pytest.mark.long
def test_bfloat16_runs(folder: Path, head_folder: Path, repetitive: Tokens) -> None:
    more = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "quantization": "int8"}
    core = make_core(folder, speculative_config=eagle(head_folder), **more)
    tokens = answer(core, make_batch(repetitive, max_output=N_OUTPUT))
    assert all(len(one) == N_OUTPUT for one in tokens)
    assert core.statistics()["drafted_tokens"] > 0


def test_memory_of_a_gpu_is_kept_for_a_head(folder: Path, head_folder: Path, tmp_path: Path) -> None:
    config = make_core(folder, max_batch_size=1000, max_seq_len=4096).config.engine
    config = changed(config, gpu_bytes=3 << 30)
    guessing = changed(config, speculative_config=eagle(head_folder, 1))
    plain, beside = check_model(config), check_model(guessing)
    per_token, of_head = (
        model.kv_bytes_per_token("float32")
        for model in (plain.config, read_eagle(head_folder, plain.config).model)
    )
    room, left = (info.kv_cache_tokens * per_token for info in (plain, beside))
    fraction = config.kv_cache_free_gpu_mem_fraction
    assert (
        left + beside.kv_cache_tokens * of_head
        < room - fraction * (head_folder / "model.safetensors").stat().st_size
    )
    assert beside.feature_layers == (0, 2, 4)
    TorchCore.check(CoreConfig("torch", guessing))
    add_embedding(head_folder, tmp_path / "head", 512)
    with_embedding = changed(guessing, speculative_config=eagle(tmp_path / "head", 1))
    lost = beside.kv_cache_tokens - check_model(with_embedding).kv_cache_tokens
    of_row = 4 * plain.config.hidden_size
    assert lost * (per_token + of_head + of_row) > 0.9 * fraction * 512 * of_row
    with pytest.raises(ConfigError, match="/head0 beside it does not fit"):
        check_model(changed(guessing, gpu_bytes=1 << 30))


def test_what_is_refused(folder: Path, head_folder: Path, tmp_path: Path) -> None:
    config = make_core(folder).config.engine

    def refused(head: Path = head_folder, **options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            TorchCore.check(CoreConfig("torch", changed(config, speculative_config=eagle(head), **options)))
        assert "speculative_config" in error.value.about
        return str(error.value)

    for options, what in (
        ({"pp_size": 2}, "in several pipeline stages"),
        ({"role": "generation"}, "in disaggregated mode"),
        ({"enable_kv_cache_reuse": True}, "with --enable_kv_cache_reuse"),
    ):
        assert what in refused(**options)
    assert "no such file" in refused(tmp_path / "nowhere")
    assert "is no EAGLE-3 head" in refused(folder)
    for more, what in (
        ({"vocab_size": 500}, "its vocab_size is 500, the model's 512"),
        ({"hidden_size": 64}, "its hidden_size is 64, the model's 128"),
        ({"fc_norm": True}, "fc_norm True is not supported"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}},
            "layers [2, 3, 6] of a model of 6",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3]}},
            "fc.weight has shape [128, 384], not",
        ),
        ({"draft_vocab_size": 400}, "lm_head.weight has shape [300, 128], not [400, 128]"),
    ):
        save_head(folder, tmp_path / "head")
        raw = json.loads((tmp_path / "head/config.json").read_text())
        (tmp_path / "head/config.json").write_text(json.dumps(raw | more))
        assert what in refused(tmp_path / "head")
    save_head(folder, tmp_path / "head")
    tensors = load_file(tmp_path / "head/model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, tmp_path / "head/model.safetensors")
    assert "no tensor midlayer.hidden_norm.weight" in refused(tmp_path / "head")
    add_embedding(head_folder, tmp_path / "embedding", 100)
    assert "embed_tokens.weight has shape [100, 128], not [512, 128]" in refused(tmp_path / "embedding")
