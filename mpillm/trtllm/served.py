"""The model of TensorRT-LLM's servers, their options from mpillm's options, and their YAML."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import disagg
from disagg import DisaggConfig, ServerConfig
from disagg.errors import ConfigError
from disagg.schema import DISCOVERY
from mpillm.nvidia.configs import TrtllmEndpointConfig
from mpillm.options.disagg_values import CORE, ROUTER, same
from mpillm.options.fields.model import CHUNKING_POLICIES, SCHEDULER_POLICIES
from mpillm.options.mitten import applied, configured
from mpillm.options.run_config import RunConfig
from mpillm.stages.checkpoint import QuantizerConfig
from mpillm.trtllm.engines import TRTLLMBuilderOp, TRTLLMQuantizerOp
from mpillm.trtllm.installed import check_engines


class ModelToServe(NamedTuple):
    """The folder that trtllm-serve reads: the output of generate-engines, or the published model."""

    model: str
    tokenizer: str | None  # None: the model's tokenizer
    backend: str  # trtllm-serve's name
    is_generated: bool  # by generate-engines
    options: str  # the options that determine it


def served(config: RunConfig) -> ModelToServe:
    """Return the model in the options, which may not exist yet. Raises ConfigError without a model, or for an
    engine if the installed release runs none.
    """
    backend = backend_of(config)
    if backend == "tensorrt":
        check_engines(f"--core_type {config.core_type}")
    path = config.model_path
    with applied(config):
        if backend == "tensorrt":
            if config.engine_dir:
                return ModelToServe(str(config.engine_dir), path, backend, True, config.named("engine_dir"))
            engine = str(TRTLLMBuilderOp().output)
            return ModelToServe(
                engine,
                path,
                backend,
                True,
                f"{config.named('model_path')}, from which generate-engines makes {engine}",
            )
        if config.llm_quantizer_outdir:
            return ModelToServe(
                str(config.llm_quantizer_outdir), None, backend, True, config.named("llm_quantizer_outdir")
            )
        if not path:
            raise ConfigError(
                f"--core_type {config.core_type} needs --model_path, or the --llm_quantizer_outdir of"
                " generate-engines",
                about=["core_type"],
            )
        if QuantizerConfig().qformat == "full_prec":
            return ModelToServe(str(path), None, backend, False, config.named("model_path"))
        checkpoint = str(TRTLLMQuantizerOp(export_hf=True).output)
        return ModelToServe(
            checkpoint,
            None,
            backend,
            True,
            f"{config.named('model_path')}, from which generate-engines makes {checkpoint}",
        )


def backend_of(config: RunConfig) -> str:
    return {"cpp": "tensorrt", "pytorch": "pytorch"}[configured(TrtllmEndpointConfig, config).backend_type]


def llm_api_options(config: RunConfig) -> dict[str, Any]:
    """Return TensorRT-LLM's LLM arguments for a YAML, from the harness's flags."""
    flags = config.trtllm_runtime_flags  # checked, and with the options' defaults
    cache: dict[str, Any] = {"free_gpu_memory_fraction": flags["kvcache_free_gpu_mem_frac"]}
    cache["enable_block_reuse"] = bool(flags.get("enable_kv_cache_reuse", config.enable_kv_cache_reuse))
    dtype = config.trtllm_checkpoint_flags.get("kv_cache_dtype")
    # An engine has its own dtype, and its backend does not allow another.
    if dtype and backend_of(config) == "pytorch":
        cache["dtype"] = dtype
    return {
        "kv_cache_config": cache,
        "scheduler_config": {
            "capacity_scheduler_policy": SCHEDULER_POLICIES[flags["batch_scheduler_policy"]],
            "context_chunking_policy": CHUNKING_POLICIES[flags["context_chunking_policy"]],
        },
        "enable_chunked_prefill": flags["enable_chunked_context"],
    }


def disagg_yaml(config: RunConfig, yaml: DisaggConfig) -> DisaggConfig:
    """Add the model and the flags for TensorRT-LLM's workers to the YAML of the options."""
    source = served(config)
    if source.is_generated and not Path(source.model).is_dir():
        print(
            f"# {source.options}: there is no folder {source.model} yet; generate-engines makes it",
            file=sys.stderr,
        )
    options = llm_api_options(config)
    cache = options.pop("kv_cache_config")
    if source.tokenizer:
        options["tokenizer"] = source.tokenizer

    def section(_: str, server: ServerConfig) -> ServerConfig:
        extra = {**server.extra, **options}
        if source.backend != "pytorch":
            # Only the PyTorch backend has this argument.
            extra.pop("disable_overlap_scheduler", None)
        return dataclasses.replace(server, kv_cache_config={**server.kv_cache_config, **cache}, extra=extra)

    yaml = dataclasses.replace(yaml.with_sections(section), model=source.model, backend=source.backend)
    return disagg.parse(disagg.dump(yaml), "generated configuration")


def check_agreement(config: RunConfig, path: str, yaml: DisaggConfig) -> None:
    """Raise ConfigError if the YAML, which is all that trtllm-serve reads, is incomplete or contradicts an
    option."""
    again = "run generate-disagg-config again with these options, or leave them out"
    if yaml.model is None and DISCOVERY not in yaml.options:
        raise ConfigError(
            f"{path}: there is no model in it, which trtllm-serve's workers need; add it, or {again}"
        )
    if any(
        map(
            config.is_user_set,
            ("model_path", "llm_quantizer_outdir", "engine_dir", "trtllm_checkpoint_flags"),
        )
    ):
        source = served(config)
        if not same("model_path", source.model, yaml.model):
            raise ConfigError(
                f"{source.options}, but {path}: model is {yaml.model}, which would be served; {again}"
            )
    backend = {"trt": "tensorrt"}.get(yaml.backend or "pytorch", yaml.backend or "pytorch")
    if backend == "tensorrt":
        check_engines(f"{path}: backend {yaml.backend}")
    if "trtllm_backend" in config.trtllm_runtime_flags and backend != backend_of(config):
        flag = config.trtllm_runtime_flags["trtllm_backend"]
        raise ConfigError(
            f"trtllm_runtime_flags trtllm_backend {flag}, but {path}: backend is {backend}; {again}"
        )
    ports = {"server_port": ("port", yaml.port)}
    urls = [url for _, server in yaml.sections for url in server.urls]
    if urls:
        ports["worker_start_port"] = "the first port of urls", int(urls[0].rpartition(":")[2])
    for name, (port_key, port) in ports.items():
        if config.is_user_set(name) and getattr(config, name) != port:
            raise ConfigError(f"{config.named(name)}, but {path}: {port_key} is {port}; {again}")
    for section, server in yaml.sections:
        for place in (*CORE, ROUTER):
            if config.is_user_set(place.field.name) and place.value_in(server) is None:
                raise ConfigError(
                    f"{config.named(place.field.name)}, but there is no {section}.{place.name} in"
                    f" {path}; {again}"
                )
