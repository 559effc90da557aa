"""Stage 2: the engine."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.parsers import batch_sizes, flag_dict
from mpillm.core_names import EMBEDDED, RUNS_ENGINES
from mpillm.fields.effects import used_by
from mpillm.fields.general import workload_names


class BuildFields(Options, group="build"):
    """Stage 2: the engine."""

    engine_dir = option(
        "folder of the engine; the ranks of mpillm's own engine map their weights from it",
        effect=used_by(*EMBEDDED, *RUNS_ENGINES),
    )
    gpu_batch_size = option(
        "largest batch of an instance, requests: a number, or workload:number,workload:number",
        batch_sizes(workload_names),
    )
    trtllm_build_flags = option(
        "flags of the engine's build, key:value,key:value;"
        " the environment variable TRTLLM_BUILD_FLAGS overrides them",
        flag_dict,
        default={},
    )
