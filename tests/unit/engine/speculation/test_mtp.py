"""DeepSeek's layer that guesses: as transformers' layer guesses, and answers stay the plain ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from mpillm.cores.base import CoreConfig
from mpillm.cores.torch_core import TorchCore
from mpillm.engine.shape.model_info import check_model
from tests.helpers.draft_tokens import N_OUTPUT
from tests.helpers.eagle_heads import answer_with_guesses, check_guesses
from tests.helpers.engine_configs import changed
from tests.helpers.gpu_cores import random_prompts
from tests.helpers.gpu_steps_on_cpu import KINDS
from tests.helpers.mtp_heads import NaiveMtp, mtp, save_model
from tests.helpers.oracle import Tokens
from tests.helpers.torch_cores import answer, make_batch, make_core

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NaiveMtp]:
    folder = tmp_path_factory.mktemp("deepseek")
    model = save_model(folder)
    return folder, NaiveMtp(model, folder)


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return [[token % 319 for token in prompt] for prompt in random_prompts([1, 7, 8, 9, 30, 45])]


@pytest.fixture(scope="module")
def plain(made: tuple[Path, NaiveMtp], prompts: Tokens) -> Tokens:
    return answer(make_core(made[0]), make_batch(prompts, max_output=N_OUTPUT))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 3, "max_num_tokens": 9},
        {"kv_cache_tokens": 192, "max_seq_len": None, "max_num_tokens": 24},
        {"tokens_per_block": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("way", KINDS)
def test_guesses_are_those_of_a_naive_layer(
    made: tuple[Path, NaiveMtp],
    prompts: Tokens,
    plain: Tokens,
    way: str,
    options: dict[str, Any],
    replaced: bool,
) -> None:
    """Also after correct guesses, which random weights do not make by themselves."""
    folder, naive = made
    core = make_core(folder, kind=KINDS[way], speculative_config=mtp(), **options)
    seen = answer_with_guesses(core, prompts, plain, replaced=replaced, n_output=N_OUTPUT)
    if options.get("max_seq_len", 0) is None:
        assert core.statistics()["preemptions"] > 0
    check_guesses(seen, naive.guesses)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.long
def test_a_rounded_model_guesses(made: tuple[Path, NaiveMtp], prompts: Tokens, quantization: str) -> None:
    more = {"dtype": "bfloat16", "quantization": quantization}
    plain = answer(make_core(made[0], **more), make_batch(prompts, max_output=N_OUTPUT))
    core = make_core(made[0], speculative_config=mtp(), **more)
    found = answer(core, make_batch(prompts, max_output=N_OUTPUT))
    assert [len(one) for one in found] == [len(one) for one in plain]
    assert core.statistics()["drafted_tokens"] > 0


def test_memory_of_a_gpu_is_kept_for_it(made: tuple[Path, NaiveMtp]) -> None:
    config = changed(make_core(made[0], max_batch_size=1000).config.engine, gpu_bytes=1680 << 20)
    plain = check_model(config)
    beside = check_model(changed(config, speculative_config=mtp(1)))
    assert beside.kv_cache_tokens < plain.kv_cache_tokens and beside.feature_layers == (3,)


def test_what_is_refused(made: tuple[Path, NaiveMtp], folder: Path, tmp_path: Path) -> None:
    config = make_core(made[0]).config.engine

    def refused(**options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            TorchCore.check(CoreConfig("torch", changed(config, **{"speculative_config": mtp(), **options})))
        return str(error.value)

    for options, what in (
        ({"pp_size": 2}, "in several pipeline stages"),
        ({"role": "generation"}, "in disaggregated mode"),
        ({"enable_kv_cache_reuse": True}, "with --enable_kv_cache_reuse"),
        ({"model_path": str(folder)}, "it is no DeepSeek V3"),
        ({"load_format": "dummy"}, "random weights have none"),
        ({"speculative_config": mtp() | {"max_draft_len": 3}}, "decoding_type MTP of the torch core has"),
        ({"speculative_config": {"decoding_type": "MTP"}}, "MTP needs num_nextn_predict_layers"),
        ({"speculative_config": mtp(0)}, "must be a whole number of at least 1"),
    ):
        assert what in refused(**options)
    for name, more, what in (
        ("no layer", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers of its config.json is 0"),
        ("two", {"num_nextn_predict_layers": 2}, "is 2, and can be 1"),
    ):
        shutil.copytree(made[0], tmp_path / name)
        source = tmp_path / name / "config.json"
        source.write_text(json.dumps(json.loads(source.read_text()) | more))
        assert what in refused(model_path=str(tmp_path / name))
    shutil.copytree(made[0], tmp_path / "lacks")
    tensors = load_file(made[0] / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "lacks" / "model.safetensors")
    assert "no tensor model.layers.3.eh_proj.weight" in refused(model_path=str(tmp_path / "lacks"))
