"""TensorRT-LLM's executor in this process."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class TrtllmExecutorCore(BuiltInCore):
    """TensorRT-LLM's executor in this process."""

    core_type = "trtllm_executor"
