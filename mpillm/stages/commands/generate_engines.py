"""``python -m mpillm generate-engines``: build an engine of a model for each workload and scenario named."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.errors import ConfigError
from mpillm.core_names import BUILT_IN, load_object
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.options.fields import MODEL_AND_LIMITS, SIZES, command_fields
from mpillm.options.mitten import applied
from mpillm.options.run_config import RunConfig
from mpillm.stages.operation import Operation, execute
from mpillm.stages.stage_options import parse_each, print_unused_options

_ALSO = (
    *("core_type", "trtllm_runtime_flags", "dtype", "quantization", "llm_gen_config_path", "build_deadline"),
    *(*SIZES, *MODEL_AND_LIMITS),
)
_FIELDS = command_fields("workload", "stages", "checkpoint", "build", also=_ALSO)


def engine_stages(config: RunConfig) -> Operation:
    """Return the last stage of `generate-engines` for a test; the stages before it are its dependencies."""
    with applied(config):
        path = BackendRegistry.declared(config.core_type).engine_stages
        if path is None:
            able = [name for name in BUILT_IN if BackendRegistry.declared(name).engine_stages]
            raise ConfigError(
                f"--core_type {config.core_type}: nothing to build; generate-engines builds for"
                f" {', '.join(able)}",
                about=["core_type"],
            )
        stages: Operation = load_object(path)(config)
    return stages


def main(argv: Sequence[str]) -> int:
    """Execute the stages that are not up to date, and print their outputs."""
    parser = Parser(
        prog="mpillm generate-engines",
        description="Quantize a model and build its engine: TensorRT-LLM's, with its tools (until"
        " release 1.3.0rc20), or mpillm's own. Stages that are up to date are skipped.",
        epilog="examples:\n"
        "  python -m mpillm generate-engines --model_path build/models/smollm2-135m"
        " --trtllm_checkpoint_flags=qformat:int8_wo\n"
        "  python -m mpillm generate-engines --benchmarks=llama2-70b --harness_type=triton --model_path DIR"
        " --trtllm_lib_path build/TRTLLM"
        " --trtllm_checkpoint_flags=qformat:fp8,kv_cache_dtype:fp8 --tensor_parallelism 2 --dry_run",
    )
    configs = parse_each(argv, parser, _FIELDS)
    print_unused_options(configs)
    stages = [engine_stages(config) for config in configs]
    with applied(configs[0]):
        execute(stages, force=configs[0].force, dry_run=configs[0].dry_run)
    if not configs[0].dry_run:
        for stage in dict.fromkeys(str(stage.output) for stage in stages):
            print(stage)
    return ExitCode.DONE
