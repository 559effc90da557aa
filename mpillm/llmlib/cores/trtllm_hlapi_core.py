"""TensorRT-LLM's LLM class in this process."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class TrtllmHlApiCore(BuiltInCore):
    """TensorRT-LLM's LLM class in this process."""

    core_type = "trtllm_hlapi"
