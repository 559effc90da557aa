"""``python -m mpillm generate-triton-config``: a Triton model repository for each server."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.options.fields import MODEL_AND_LIMITS, SIZES, command_fields
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.topology import TopologyFields
from mpillm.stages.operation import execute
from mpillm.stages.stage_options import parse_stage
from mpillm.triton.embedded import numpy_note
from mpillm.triton.repository import remove_repositories, triton_stages

_ALSO = (
    "core_type",
    *SIZES,
    *MODEL_AND_LIMITS,
    "trtllm_runtime_flags",
    "llm_gen_config_path",
    "enable_kv_cache_reuse",
    "quantization",
    "end_ids",
    "num_threads",
)
_FIELDS = command_fields("workload", "stages", "checkpoint", "build", "triton", also=_ALSO)


def main(argv: Sequence[str]) -> int:
    """Write the repositories, with or without --harness_type=triton."""
    parser = Parser(
        prog="mpillm generate-triton-config",
        description="Write a Triton model repository for each server, for an engine that exists.",
        epilog="example:\n  python -m mpillm generate-triton-config --benchmarks=llama2"
        " --engine_dir=build/engines/llama2",
    )
    config = parse_stage(
        argv, parser, _FIELDS, {GeneralFields.harness_type: "triton", TopologyFields.core_type: "triton_grpc"}
    )
    stages = triton_stages(config)
    notes = [stage.unused_parameters() for stage in stages]
    notes += [numpy_note() for stage in stages if stage.embedded is not None]
    for line in dict.fromkeys(filter(None, notes)):
        print(f"mpillm: note: {line}", file=sys.stderr)
    execute(stages, force=config.force, dry_run=config.dry_run)
    if not config.dry_run:
        remove_repositories(config.triton_model_repo, len(stages))
    return ExitCode.DONE
