"""The configuration classes, and the files of models and engines that they read: good ones, and each way of
being wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm import fields
from mpillm.config.backends import (
    HarnessConfig,
    TritonHarnessConfig,
    TrtllmDisaggEndpointConfig,
    TrtllmEndpointConfig,
    TrtllmExecutorConfig,
    TrtllmHarnessConfig,
    TrtllmHlApiConfig,
)
from mpillm.config.options import parse_run
from mpillm.configurator import Configuration, HelpInfo
from mpillm.models.model_files import EngineConfig, GenerationConfig
from tests.helpers.configured import from_fields

CLASSES = (
    HarnessConfig,
    TrtllmHarnessConfig,
    TritonHarnessConfig,
    TrtllmHlApiConfig,
    TrtllmEndpointConfig,
    TrtllmDisaggEndpointConfig,
)


def built(cls: Any, **values: Any) -> Any:
    """Return an instance as the configurator makes it of fields."""
    with Configuration(
        {fields.BY_NAME[name]: value for name, value in values.items()}, options={}, environ={}
    ).autoapply():
        return cls()


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_made_from_fields_only(cls: Any) -> None:
    made = built(cls, tensor_parallelism=4, pipeline_parallelism=2, seed=5)
    assert (made.tensor_parallelism, made.pipeline_parallelism, made.random_seed) == (4, 2, 5)
    assert cls(tensor_parallelism=3).tensor_parallelism == 3
    assert {fields.tensor_parallelism, fields.llm_gen_config_path} <= set(HelpInfo.fields([cls]))


def test_built_from_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pytest", "--tensor_parallelism", "7"])
    config = parse_run(["--core_type", "dummy", "--tensor_parallelism", "2", "--triton_num_servers", "3"])
    triton = config.build(TritonHarnessConfig)
    assert (triton.tensor_parallelism, triton.num_servers, triton.core_type) == (2, 3, "dummy")
    assert config.build(TritonHarnessConfig) is triton


def test_the_environment_is_laid_over_runtime_flags_whatever_way_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By `TrtllmHarnessConfig` and what is one.

    A command does it once, for what it hands on is in force already.
    """
    monkeypatch.setattr("sys.argv", ["mpillm"])
    for stage in ("CHECKPOINT", "BUILD", "RUNTIME"):
        monkeypatch.setenv(f"TRTLLM_{stage}_FLAGS", "max_num_tokens:7,new:true")
    mine = {"max_num_tokens": 5, "old": 1}
    for cls in (TrtllmHarnessConfig, TritonHarnessConfig, TrtllmEndpointConfig):
        expected = {**cls.DEFAULT_RUNTIME_FLAGS, "max_num_tokens": 7, "old": 1, "new": True}
        assert cls(runtime_flags=mine).runtime_flags == expected
        with Configuration(
            {fields.trtllm_runtime_flags: mine, fields.trtllm_build_flags: {"max_num_tokens": 9}}
        ).autoapply():
            assert cls().runtime_flags == cls(runtime_flags=mine).runtime_flags == expected
            assert (cls().build_flags, cls().checkpoint_flags) == ({"max_num_tokens": 9}, {}), (
                "of the other flags it is not the owner"
            )
        assert from_fields(cls).runtime_flags == {
            **cls.DEFAULT_RUNTIME_FLAGS,
            "max_num_tokens": 7,
            "new": True,
        }
    command = parse_run(
        ["--core_type", "trtllm_executor", "--max_num_tokens", "3", "--trtllm_runtime_flags", "old:1"]
    )
    assert command.build(TrtllmHarnessConfig).runtime_flags["max_num_tokens"] == 3, (
        "an option goes before the environment"
    )
    assert command.build(TrtllmHarnessConfig).runtime_flags["new"] is True


# --- generation_config.json ---


def test_a_generation_config_of_the_harness(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps(
            {"generation_config": {"eos_token_id": 7, "max_output_len": 99, "top_p": 1, "unknown": []}}
        )
    )
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.max_output_len, gen.top_p, gen.top_k, gen.temperature) == (
        (7,),
        99,
        1,
        1,
        1.0,
    )


def test_a_generation_config_of_hugging_face(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(
        json.dumps({"eos_token_id": [2, 3], "max_new_tokens": 50, "temperature": 0.9, "top_p": 0.6})
    )
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.max_output_len, gen.temperature, gen.top_k, gen.top_p) == (
        (2, 3),
        50,
        0.0,
        0,
        1.0,
    ), "it is greedy"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.9, "top_p": 0.6}))
    gen = GenerationConfig.from_file(path)
    assert (gen.eos_token_id, gen.temperature, gen.top_k, gen.top_p) == ((), 0.9, 50, 0.6), (
        "50 is transformers' default"
    )


def test_what_a_generation_config_of_hugging_face_leaves_to_the_workload(tmp_path: Path) -> None:
    """The harness's own file says everything: what is not in it has the harness's defaults."""
    path = tmp_path / "generation_config.json"
    argv = [
        "--core_type",
        "dummy",
        "--benchmarks",
        "mixtral-8x7b",
        "--model_scale",
        "tiny",
        "--llm_gen_config_path",
        str(path),
    ]
    path.write_text(json.dumps({"eos_token_id": 3, "max_new_tokens": None}))
    config = parse_run(argv)
    assert (config.end_ids, config.source("end_ids")) == ((3,), str(path))
    assert (config.min_output_len, config.source("min_output_len")) == (2, "workload mixtral-8x7b (tiny)")
    assert (config.max_output_len, bool(config.stop_words)) == (16, True)
    path.write_text(json.dumps({"generation_config": {"eos_token_id": 3}}))
    config = parse_run(argv)
    assert (config.min_output_len, config.max_output_len, config.source("max_output_len")) == (
        1,
        1024,
        str(path),
    )


@pytest.mark.parametrize(
    ("said", "count"), [({"use_stop_tokens": True}, True), ({"use_stop_tokens": False}, False), ({}, False)]
)
def test_use_stop_tokens(tmp_path: Path, said: dict[str, Any], count: bool) -> None:
    """Whether the workload's stop words count, unless a person sets some."""
    path = tmp_path / "gen.json"
    path.write_text(json.dumps({"generation_config": said}))
    argv = [
        "--core_type",
        "dummy",
        "--benchmarks",
        "mixtral-8x7b",
        "--model_scale",
        "tiny",
        "--llm_gen_config_path",
        str(path),
    ]
    assert bool(parse_run(argv).stop_words) == count
    assert parse_run([*argv, "--stop_words", "###"]).stop_words == ["###"]


def test_a_run_generates_as_its_generation_config_says(tmp_path: Path) -> None:
    path = tmp_path / "gen.json"
    path.write_text(
        json.dumps(
            {
                "generation_config": {
                    "eos_token_id": [7, 8],
                    "max_output_len": 99,
                    "min_output_len": 3,
                    "top_k": 5,
                }
            }
        )
    )
    argv = ["--core_type", "dummy", "--llm_gen_config_path", str(path), "--top_k", "6"]
    config = parse_run(argv)
    assert (config.max_output_len, config.min_output_len, config.top_k) == (99, 3, 6)
    assert (config.source("max_output_len"), config.source("top_k")) == (str(path), "command line")
    assert config.build(HarnessConfig).gen_config == GenerationConfig.from_file(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no such file"]),
        ("{", [":1: not valid JSON"]),
        ("[]", ["[]; must be an object"]),
        ('{"generation_config": 3}', ["3; must be an object"]),
        ('{"generation_config": {"max_output_len": "x"}}', ['max_output_len: "x"; must be a whole number']),
        ('{"generation_config": {"top_p": true}}', ["top_p: true; must be a number"]),
        (
            '{"generation_config": {"max_output_len": 0}}',
            ["max_output_len 0: expected a whole number of at least 1"],
        ),
        ('{"generation_config": {"top_p": 7}}', ["top_p 7: expected a number above 0 and up to 1"]),
        ('{"generation_config": {"temperature": NaN}}', ["temperature nan: expected a number of at least 0"]),
        ('{"generation_config": {"top_k": -1}}', ["top_k -1: expected a whole number of at least 0"]),
        (
            '{"generation_config": {"runtime_beam_width": 0}}',
            ["runtime_beam_width 0: expected a whole number of at least 1"],
        ),
        ('{"eos_token_id": [2, -1]}', ["eos_token_id 2,-1: expected token ids"]),
        ('{"eos_token_id": ["x"]}', ['eos_token_id: ["x"]; must be a whole number, or an array of them']),
    ],
)
def test_a_wrong_generation_config(tmp_path: Path, text: str | None, words: list[str]) -> None:
    path = tmp_path / "gen.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse_run(["--core_type", "dummy", "--llm_gen_config_path", str(path)])
    assert str(error.value).startswith(str(path))
    assert all(word in str(error.value) for word in words)


# --- TensorRT-LLM engines ---

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
        ({"llm_gen_config_path": {"runtime_beam_width": 4}}, ["was built for 1 beams", "wants 4"]),
        (
            {"llm_gen_config_path": {"max_output_len": 1025}},
            ["was built for answers of 1024 tokens", "wants 1025"],
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


def test_an_engine_for_short_answers_and_a_generation_config_that_says_no_length(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"was built for answers of 76 tokens .* wants 100"):
        built(TrtllmExecutorConfig, **values)


def test_no_engine() -> None:
    with pytest.raises(ConfigError, match="--engine_dir is missing"):
        built(TrtllmExecutorConfig)


# --- flags ---


def test_limits_of_the_build_are_those_of_the_runtime() -> None:
    made = built(
        TrtllmHarnessConfig,
        trtllm_build_flags={"max_batch_size": 64, "max_num_tokens": 4096},
        trtllm_runtime_flags={"max_num_tokens": 5},
    )
    assert (made.runtime_flags["max_batch_size"], made.runtime_flags["max_num_tokens"]) == (64, 5)
    with pytest.raises(
        ConfigError, match="trtllm_runtime_flags max_batch_size is 65, more than the 64 of trtllm_build_flags"
    ):
        built(
            TrtllmHarnessConfig,
            trtllm_build_flags={"max_batch_size": 64},
            trtllm_runtime_flags={"max_batch_size": 65},
        )
    with pytest.raises(
        ConfigError, match="trtllm_build_flags tensor_parallelism is 4, but tensor_parallelism is 2"
    ):
        built(TrtllmHarnessConfig, trtllm_build_flags={"tensor_parallelism": 4}, tensor_parallelism=2)


# --- Triton and HTTP ---


def test_triton_servers() -> None:
    assert built(TritonHarnessConfig).server_urls == ()
    three = built(
        TritonHarnessConfig, triton_num_servers=3, triton_model_repo="x/repo", triton_num_models_per_server=2
    )
    assert (three.num_servers, three.model_repo, three.models_per_server) == (3, "x/repo", 2)
    clients = built(
        TritonHarnessConfig,
        triton_num_clients_per_server=4,
        triton_num_frontends_per_model=2,
        triton_num_clients_per_frontend=8,
    )
    assert (clients.clients_per_server, clients.frontends_per_model, clients.clients_per_frontend) == (
        4,
        2,
        8,
    )
    ports = {"host_foo": (8001,), "host_bar": (8003,)}
    there = built(TritonHarnessConfig, triton_grpc_ports=ports, triton_skip_server_spawn=True)
    assert there.server_urls == ("host_foo:8001", "host_bar:8003")
    assert (
        built(TritonHarnessConfig).streaming,
        built(TritonHarnessConfig, scenarios=("Server",)).streaming,
    ) == (False, True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"triton_skip_server_spawn": True},
            ["--triton_skip_server_spawn needs --triton_grpc_ports or --triton_server_urls"],
        ),
        (
            {"triton_grpc_ports": {"a": (1,)}, "triton_server_urls": ("b:1",)},
            ["--triton_server_urls b:1", "(a:1) name different servers"],
        ),
    ],
)
def test_triton_servers_that_contradict_each_other(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        built(TritonHarnessConfig, **values)
    assert all(word in str(error.value) for word in words)


def test_endpoints(tmp_path: Path) -> None:
    assert built(TrtllmHlApiConfig, model_path="m").backend_type == "pytorch"
    made = built(
        TrtllmEndpointConfig,
        trtllm_server_urls=("a:1", "b:2"),
        trtllm_runtime_flags={"max_batch_size": 8},
        tensor_parallelism=4,
    )
    assert (made.endpoint_urls, made.max_concurrency, made.runtime_flags["workers_per_core"]) == (
        ("a:1", "b:2"),
        8,
        2,
    )
    made = built(
        TrtllmEndpointConfig,
        trtllm_runtime_flags={"max_batch_size": 8},
        trtllm_build_flags={"enable_attention_dp": True},
        tensor_parallelism=4,
    )
    assert (made.endpoint_urls, made.max_concurrency) == (("0.0.0.0:30000",), 32)
    assert built(TrtllmEndpointConfig, trtllm_runtime_flags={"max_concurrency": 3}).max_concurrency == 3
    assert built(TrtllmEndpointConfig).max_concurrency is None
    yaml = tmp_path / "disagg.yaml"
    yaml.write_text(
        "hostname: leader\nport: 8123\ncontext_servers: {num_instances: 1}\ngeneration_servers:"
        " {num_instances: 1}\n"
    )
    assert built(TrtllmDisaggEndpointConfig, disagg_config=str(yaml)).endpoint_urls == ("leader:8123",)
    same = built(TrtllmDisaggEndpointConfig, disagg_config=str(yaml), trtllm_server_urls=("leader:8123",))
    assert same.endpoint_urls == ("leader:8123",)
    with pytest.raises(ConfigError, match=rf"--trtllm_server_urls a:1, but {yaml} has leader:8123"):
        built(TrtllmDisaggEndpointConfig, disagg_config=str(yaml), trtllm_server_urls=("a:1",))


@pytest.mark.parametrize(
    ("cls", "values", "words"),
    [
        (
            TrtllmHlApiConfig,
            {"trtllm_runtime_flags": {"trtllm_backend": "jax"}},
            ["trtllm_backend jax: not one of pytorch, cpp"],
        ),
        (
            TrtllmEndpointConfig,
            {"trtllm_runtime_flags": {"max_concurrency": 0}},
            ["max_concurrency 0: expected a whole number"],
        ),
        (
            TrtllmEndpointConfig,
            {"trtllm_runtime_flags": {"workers_per_core": "x"}},
            ["workers_per_core x: expected a whole number"],
        ),
        (
            TrtllmEndpointConfig,
            {"trtllm_runtime_flags": {"http_backend": "x"}},
            ["http_backend x: not one of custom_http, openai_async"],
        ),
        (
            TrtllmDisaggEndpointConfig,
            {"trtllm_server_urls": ("a:1", "b:1")},
            ["a:1,b:1: a disaggregated server has one endpoint"],
        ),
        (TrtllmDisaggEndpointConfig, {"disagg_config": "no/such.yaml"}, ["no/such.yaml"]),
    ],
)
def test_wrong_endpoints(cls: Any, values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        built(cls, **values)
    assert all(word in str(error.value) for word in words)
