"""Stage 1: the checkpoint, quantised or as it was published."""

from __future__ import annotations

from mpillm.configurator import Options, option
from mpillm.configurator.parsers import flag_dict
from mpillm.fields.effects import MODELS, TOOLS, used_by


class CheckpointFields(Options, group="checkpoint"):
    """Stage 1: the checkpoint, quantised or as it was published."""

    llm_quantizer_outdir = option(
        "folder of the quantised checkpoint", effect=used_by(*MODELS, measured=False)
    )
    quantizer_lib_path_override = option(
        "the TensorRT-LLM source tree for quantisation only [default: trtllm_lib_path]", effect=TOOLS
    )
    trtllm_lib_path = option("TensorRT-LLM's source tree, whose tools are run", effect=TOOLS)
    trtllm_checkpoint_flags = option(
        "flags of the quantisation, key:value,key:value;"
        " the environment variable TRTLLM_CHECKPOINT_FLAGS overrides them",
        flag_dict,
        default={},
        effect=used_by(*MODELS),
    )
