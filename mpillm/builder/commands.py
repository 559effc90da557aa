"""The commands `generate-engines` and `generate-triton-config`: from options to stages, for each workload and scenario named."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError, nearest
from mpillm.builder.operation import Operation, execute, log_of, read_stamp
from mpillm.builder.preconditions import NotHere
from mpillm.builder.torch_core import TorchBuilderOp, TorchQuantizerOp
from mpillm.builder.triton import GenerateTritonConfigOp, triton_layout
from mpillm.builder.trtllm import QuantizerConfig, TRTLLMBuilderOp, TRTLLMLibraryLoader, TRTLLMQuantizerOp, read_engine
from mpillm.command_line import Parser
from mpillm.config import RunConfig, parse, parse_each
from mpillm.errors import ExitCode
from mpillm.fields import MODEL_AND_LIMITS, SIZES, shown
from mpillm.fields.general import harness_type
from mpillm.harness_config import TritonHarnessConfig, TrtllmHlApiConfig
from mpillm.model_files import BuildConfig

ENGINE_CORES = ("trtllm_executor", "triton_grpc")
"""Cores that run an engine of `trtllm-build`."""

PYTORCH_CORES = ("trtllm_hlapi", "trtllm_endpoint", "trtllm_disagg")
"""Cores that read a Hugging Face folder, for TensorRT-LLM's PyTorch backend; or an engine, after the runtime flag trtllm_backend."""

_COMMON = ("core_type", *SIZES, *MODEL_AND_LIMITS, "trtllm_runtime_flags")
_ENGINE = shown("workload", "stages", "checkpoint", "build", also=(*_COMMON, "dtype", "quantization", "build_deadline"))
_OF_TRITON = ("triton_num_servers", "triton_num_models_per_server", "triton_model_repo")
_TRITON = shown("workload", "stages", "build", also=(*_COMMON, "llm_gen_config_path", "enable_kv_cache_reuse", *_OF_TRITON))


def engine_stages(config: RunConfig) -> Operation:
    """The last stage of what `generate-engines` makes for a test; the stages before it are its dependencies."""
    deadline_s = config.build_deadline
    with config.autoapply():
        if config.core_type == "torch":
            quantizer = TorchQuantizerOp(deadline_s=deadline_s) if QuantizerConfig().qformat != "full_prec" else None
            return TorchBuilderOp(quantizer, deadline_s=deadline_s)
        if config.core_type not in ENGINE_CORES + PYTORCH_CORES:
            known = ("torch", *ENGINE_CORES, *PYTORCH_CORES)
            near = nearest(config.core_type, known)
            raise ConfigError(f"--core_type {config.core_type}: there is nothing to build for it{near}, but for {', '.join(known)}")
        for name, flag in (("dtype", "dtype"), ("quantization", "qformat")):
            if config.given(name) and getattr(config, name) != "auto":
                raise ConfigError(f"{config.named(name)}: the torch core's alone; here it is --trtllm_checkpoint_flags={flag}:…")
        if config.core_type in PYTORCH_CORES and config.build(TrtllmHlApiConfig).backend_type == "pytorch":
            return TRTLLMQuantizerOp(export_hf=True, deadline_s=deadline_s)
        return TRTLLMBuilderOp(deadline_s=deadline_s)


def generate_engines_main(argv: Sequence[str]) -> int:
    """``python -m mpillm generate-engines``"""
    parser = Parser(
        prog="mpillm generate-engines",
        description="Quantise a model and build its engine: with TensorRT-LLM's tools, or for the torch core. What is up to date is kept.",
        epilog="examples:\n"
        "  python -m mpillm generate-engines --model_path build/models/smollm2-135m --trtllm_checkpoint_flags=qformat:int8_wo\n"
        "  python -m mpillm generate-engines --benchmarks=llama2-70b --harness_type=triton --model_path DIR --trtllm_lib_path build/TRTLLM"
        " --trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8 --tensor_parallelism 2 --dry_run",
    )
    configs = parse_each(argv, parser, _ENGINE)
    stages = [engine_stages(config) for config in configs]
    with configs[0].autoapply():
        execute(stages, force=configs[0].force, dry_run=configs[0].dry_run)
    if not configs[0].dry_run:
        for stage in dict.fromkeys(str(stage.output) for stage in stages):
            print(stage)
    return ExitCode.DONE


def generate_triton_config_main(argv: Sequence[str]) -> int:
    """``python -m mpillm generate-triton-config``: with or without --harness_type=triton."""
    parser = Parser(
        prog="mpillm generate-triton-config",
        description="Write a Triton model repository for each server, for an engine that is there.",
        epilog="example:\n  python -m mpillm generate-triton-config --benchmarks=llama2 --engine_dir=build/engines/llama2",
    )
    config = parse(argv, parser, _TRITON, {harness_type: "triton"})
    stages = triton_stages(config)
    execute(stages, force=config.force, dry_run=config.dry_run)
    if not config.dry_run:
        _remove_repositories(config.triton_model_repo, len(stages))
    return ExitCode.DONE


def _remove_repositories(repo: str, first: int) -> None:
    """Repositories of ours from server `first` on, of a test with more servers: run-llm-server would start them, too."""
    while read_stamp(old := Path(f"{repo}_{first}")):
        shutil.rmtree(old)
        log_of(old).unlink(missing_ok=True)
        print(f"  removed {old}: there are fewer servers now")
        first += 1


def triton_stages(config: RunConfig) -> list[GenerateTritonConfigOp]:
    """The model repositories of a test, one for each server. A dry run needs no engine: it says what it assumes of it."""
    if len(config.scenarios) > 1 or len(config.benchmarks or ()) > 1:
        raise ConfigError("generate-triton-config makes the repositories of one test: name one workload and one scenario")
    engine_dir = config.engine_dir
    if not engine_dir:
        if not config.model_path:
            raise ConfigError("generate-triton-config needs --engine_dir, or the --model_path that generate-engines was given")
        with config.autoapply():
            engine_dir = str(TRTLLMBuilderOp().output)
    harness = config.build(TritonHarnessConfig)
    try:
        build, cut = read_engine(Path(engine_dir))
    except NotHere:
        if not config.dry_run:
            raise
        with config.configuration().autoapply():
            cut = TRTLLMLibraryLoader().layout
        build = BuildConfig.from_json(harness.runtime_flags | harness.build_flags, "--trtllm_build_flags")
        print(f"# assumed: {engine_dir}, an engine of {cut}, as the options say")
    counts = [getattr(config, name) if config.given(name) else None for name in ("triton_num_servers", "triton_num_models_per_server")]
    layout = triton_layout(config.scenario, cut.ranks, *counts)
    return [
        GenerateTritonConfigOp(
            engine_dir=engine_dir,
            engine=build,
            repo=harness.model_repo,
            server=server,
            layout=layout,
            benchmark=config.benchmark or Path(config.model_path or engine_dir).name,
            scenario=config.scenario,
            streaming=harness.streaming,
            runtime_flags={"enable_kv_cache_reuse": config.enable_kv_cache_reuse, **harness.runtime_flags},
        )
        for server in range(layout.n_servers)
    ]
