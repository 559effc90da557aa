"""A TensorRT-LLM engine must be what the fields say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.data.model_files import EngineConfig
from mpillm.nvidia.configs import TrtllmExecutorConfig
from tests.helpers.configured import built

ENGINE: dict[str, Any] = {
    "version": "0.20.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
    },
    "build_config": {
        "max_input_len": 1024,
        "max_seq_len": 2048,
        "max_batch_size": 64,
        "max_beam_width": 1,
        "max_num_tokens": 4096,
        "plugin_config": {"use_paged_context_fmha": False, "dtype": "auto"},
    },
}


def engine(folder: Path, **build: Any) -> Path:
    (folder / "config.json").write_text(
        json.dumps({**ENGINE, "build_config": {**ENGINE["build_config"], **build}})
    )
    return folder


def test_an_engine(tmp_path: Path) -> None:
    config = EngineConfig.from_engine_dir(engine(tmp_path))
    assert (config.build_config.max_batch_size, config.build_config.plugin_config.use_paged_context_fmha) == (
        64,
        False,
    )
    assert (config.pretrained_config.mapping.tp_size, config.pretrained_config.architecture) == (
        2,
        "LlamaForCausalLM",
    )
    made = built(TrtllmExecutorConfig, engine_dir=str(tmp_path), tensor_parallelism=2, pipeline_parallelism=2)
    assert made.engine_config == config
    assert (made.runtime_flags["max_batch_size"], made.runtime_flags["max_num_tokens"]) == (64, 4096), (
        "the engine's, when not set"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tensor_parallelism": 4}, ["was built for tensor_parallelism 2, not 4"]),
        ({"pipeline_parallelism": 1}, ["was built for pipeline_parallelism 2, not 1"]),
        ({"moe_expert_parallelism": 2}, ["was built for moe_expert_parallelism 1, not 2"]),
        (
            {"trtllm_build_flags": {"max_batch_size": 32}},
            ["was built for trtllm_build_flags max_batch_size 64, not 32"],
        ),
        (
            {"trtllm_build_flags": {"max_num_tokens": 1}},
            ["was built for trtllm_build_flags max_num_tokens 4096, not 1"],
        ),
        (
            {"trtllm_runtime_flags": {"max_batch_size": 65}},
            ["trtllm_runtime_flags max_batch_size is 65, more than the 64 of --engine_dir"],
        ),
        (
            {"trtllm_runtime_flags": {"max_num_tokens": 4097}},
            ["max_num_tokens is 4097, more than the 4096 of --engine_dir"],
        ),
        ({"llm_gen_config_path": {"runtime_beam_width": 4}}, ["was built for 1 beams", "needs 4"]),
        (
            {"llm_gen_config_path": {"max_output_len": 1025}},
            ["was built for answers of 1024 tokens", "needs 1025"],
        ),
    ],
)
def test_an_engine_that_does_not_fit(tmp_path: Path, values: dict[str, Any], words: list[str]) -> None:
    if "llm_gen_config_path" in values:
        path = tmp_path / "gen.json"
        path.write_text(json.dumps({"generation_config": values["llm_gen_config_path"]}))
        values = {"llm_gen_config_path": str(path)}
    with pytest.raises(ConfigError) as error:
        built(
            TrtllmExecutorConfig,
            **{
                "engine_dir": str(engine(tmp_path)),
                "tensor_parallelism": 2,
                "pipeline_parallelism": 2,
                **values,
            },
        )
    assert all(word in str(error.value) for word in [str(tmp_path), *words])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no engine there: it has no config.json"]),
        ("{", ["config.json:1: not valid JSON"]),
        ("3", ["config.json: 3; must be an object"]),
        ('{"build_config": []}', ["config.json: build_config: []; must be an object"]),
        (
            '{"build_config": {"max_batch_size": "64"}}',
            ['build_config: max_batch_size: "64"; must be a whole number'],
        ),
        (
            '{"pretrained_config": {"mapping": {"tp_size": 1.5}}}',
            ["mapping: tp_size: 1.5; must be a whole number"],
        ),
        (
            '{"build_config": {"plugin_config": {"use_paged_context_fmha": 1}}}',
            ["use_paged_context_fmha: 1; must be true or false"],
        ),
    ],
)
def test_a_wrong_engine(tmp_path: Path, text: str | None, words: list[str]) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        built(TrtllmExecutorConfig, engine_dir=str(tmp_path))
    assert all(word in str(error.value) for word in [str(tmp_path), *words])


def test_an_engine_for_short_answers_and_a_generation_config_without_a_length(tmp_path: Path) -> None:
    folder, path = engine(tmp_path, max_seq_len=1100), tmp_path / "generation_config.json"
    values = {
        "engine_dir": str(folder),
        "tensor_parallelism": 2,
        "pipeline_parallelism": 2,
        "llm_gen_config_path": str(path),
    }
    path.write_text('{"eos_token_id": 2}')
    assert built(TrtllmExecutorConfig, **values).gen_config.eos_token_id == (2,)
    path.write_text('{"eos_token_id": 2, "max_new_tokens": 100}')
    with pytest.raises(ConfigError, match=r"was built for answers of 76 tokens .* needs 100"):
        built(TrtllmExecutorConfig, **values)


def test_no_engine() -> None:
    with pytest.raises(ConfigError, match="--engine_dir is missing"):
        built(TrtllmExecutorConfig)
