"""The configuration classes are made from fields, and refuse what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.errors import ConfigError
from mpillm.nvidia.backends import HarnessConfig, TrtllmHarnessConfig
from mpillm.nvidia.configs import (
    TritonHarnessConfig,
    TrtllmDisaggEndpointConfig,
    TrtllmEndpointConfig,
    TrtllmHlApiConfig,
)
from mpillm.options.fields import AllFields
from mpillm.options.mitten import Configuration, HelpInfo, configured
from mpillm.options.options import parse_run
from tests.helpers.configured import built, from_fields

CLASSES = (
    HarnessConfig,
    TrtllmHarnessConfig,
    TritonHarnessConfig,
    TrtllmHlApiConfig,
    TrtllmEndpointConfig,
    TrtllmDisaggEndpointConfig,
)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_is_made_from_fields_only(cls: Any) -> None:
    made = built(cls, tensor_parallelism=4, pipeline_parallelism=2, seed=5)
    assert (made.tensor_parallelism, made.pipeline_parallelism, made.random_seed) == (4, 2, 5)
    assert cls(tensor_parallelism=3).tensor_parallelism == 3
    assert {AllFields.tensor_parallelism, AllFields.llm_gen_config_path} <= set(HelpInfo.fields([cls]))


def test_built_from_a_command_line(command_line: list[str]) -> None:
    command_line += ["--tensor_parallelism", "7"]
    config = parse_run(
        ["--core_type", "triton_grpc", "--tensor_parallelism", "2", "--triton_num_servers", "3"]
    )
    triton = configured(TritonHarnessConfig, config)
    assert (triton.tensor_parallelism, triton.num_servers, triton.core_type) == (2, 3, "triton_grpc")


def test_the_environment_is_laid_over_runtime_flags_whatever_way_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`TrtllmHarnessConfig` and its subclasses do so.

    A command does it once, for what it hands on is in force already.
    """
    for stage in ("CHECKPOINT", "BUILD", "RUNTIME"):
        monkeypatch.setenv(f"TRTLLM_{stage}_FLAGS", "max_num_tokens:7,new:true")
    mine = {"max_num_tokens": 5, "old": 1}
    for cls in (TrtllmHarnessConfig, TritonHarnessConfig, TrtllmEndpointConfig):
        expected = {**cls.DEFAULT_RUNTIME_FLAGS, "max_num_tokens": 7, "old": 1, "new": True}
        assert cls(runtime_flags=mine).runtime_flags == expected
        with Configuration(
            {AllFields.trtllm_runtime_flags: mine, AllFields.trtllm_build_flags: {"max_num_tokens": 9}}
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
    assert configured(TrtllmHarnessConfig, command).runtime_flags["max_num_tokens"] == 3, (
        "an option goes before the environment"
    )
    assert configured(TrtllmHarnessConfig, command).runtime_flags["new"] is True


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
        triton_num_clients_per_frontend=8,
    )
    assert (clients.clients_per_server, clients.clients_per_frontend) == (4, 8)
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


def test_names_of_llmlibs_attributes() -> None:
    """Its README has them."""
    servers = ["--triton_server_urls=a:1,b:2", "--benchmarks=llama3.1-405b", "--core_type=triton_grpc"]
    triton = configured(TritonHarnessConfig, parse_run(servers))
    assert (triton.server_url, triton.model_name) == ("a:1", "llama3_1-405b-offline-0")
    endpoints = ["--trtllm_server_urls=a:1,b:2", "--model_path=llama", "--core_type=trtllm_endpoint"]
    endpoint = configured(TrtllmEndpointConfig, parse_run(endpoints))
    assert (endpoint.endpoint_url, endpoint.model_name) == ("a:1", "llama")
    trt = ["--core_type=trtllm_hlapi", "--trtllm_runtime_flags=trtllm_backend:trt", "--model_path=llama"]
    library = configured(TrtllmHlApiConfig, parse_run(trt))
    assert library.backend_type == "cpp", "trt is NVIDIA's word for it"
    alone = TrtllmHlApiConfig(runtime_flags={"trtllm_backend": "trt"})
    assert alone.backend_type == "cpp"
