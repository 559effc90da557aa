"""Stage 1: the checkpoint, quantised or as it was published."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import flag_dict
from mpillm.fields.effects import MODELS, TOOLS, used_by


class CheckpointFields(Options):
    """Stage 1: the checkpoint, quantised or as it was published."""

    llm_quantizer_outdir = Field(
        "llm_quantizer_outdir",
        "folder of the quantised checkpoint",
        effect=used_by(*MODELS, measured=False),
        group="checkpoint",
    )
    quantizer_lib_path_override = Field(
        "quantizer_lib_path_override",
        "the TensorRT-LLM source tree for quantisation only [default: trtllm_lib_path]",
        effect=TOOLS,
        group="checkpoint",
    )
    trtllm_lib_path = Field(
        "trtllm_lib_path", "TensorRT-LLM's source tree, whose tools are run", effect=TOOLS, group="checkpoint"
    )
    trtllm_checkpoint_flags = Field(
        "trtllm_checkpoint_flags",
        "flags of the quantisation, key:value,key:value;"
        " the environment variable TRTLLM_CHECKPOINT_FLAGS overrides them",
        flag_dict,
        default={},
        effect=used_by(*MODELS),
        group="checkpoint",
    )
