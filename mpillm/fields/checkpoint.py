"""Stage 1: the checkpoint, quantised or as it was published."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import flag_dict


class CheckpointFields(Options):
    """Stage 1: the checkpoint, quantised or as it was published."""

    llm_quantizer_outdir = Field(
        "llm_quantizer_outdir", "folder of the quantised checkpoint", group="checkpoint"
    )
    quantizer_lib_path_override = Field(
        "quantizer_lib_path_override",
        "the TensorRT-LLM source tree for quantisation only [default: trtllm_lib_path]",
        group="checkpoint",
    )
    trtllm_lib_path = Field(
        "trtllm_lib_path", "TensorRT-LLM's source tree, whose tools are run", group="checkpoint"
    )
    trtllm_checkpoint_flags = Field(
        "trtllm_checkpoint_flags",
        "flags of the quantisation, key:value,key:value;"
        " the environment variable TRTLLM_CHECKPOINT_FLAGS overrides them",
        flag_dict,
        default={},
        group="checkpoint",
    )
