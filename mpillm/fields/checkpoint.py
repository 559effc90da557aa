"""Stage 1: the checkpoint, quantised or as it was published."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import flag_dict

llm_quantizer_outdir = Field("llm_quantizer_outdir", "folder of the quantised checkpoint", group="checkpoint")
quantizer_lib_path_override = Field(
    "quantizer_lib_path_override", "a TensorRT-LLM source tree for the quantisation alone [default: trtllm_lib_path]", group="checkpoint"
)
trtllm_lib_path = Field("trtllm_lib_path", "TensorRT-LLM's source tree, whose tools are run", group="checkpoint")
trtllm_checkpoint_flags = Field(
    "trtllm_checkpoint_flags",
    "flags of the quantisation, key:value,key:value; TRTLLM_CHECKPOINT_FLAGS is laid over them",
    flag_dict,
    default={},
    group="checkpoint",
    overlay_environ="TRTLLM_CHECKPOINT_FLAGS",
)
