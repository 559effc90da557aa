"""TensorRT-LLM's and Triton's cores: they build engines and start servers, but cannot run a test yet."""

from __future__ import annotations

from mpillm.cores.base import LLMCore


class TrtllmExecutorCore(LLMCore):
    """An engine of `trtllm-build`, in this process."""

    engine_stages = "mpillm.builder.trtllm:engine_stages"
    framework = "TensorRT-LLM"
    packages = ("tensorrt_llm",)


class TritonGrpcCore(TrtllmExecutorCore):
    """The same engine behind `tritonserver`."""

    servers = "mpillm.builder.triton_servers:triton_servers"


class TrtllmHlApiCore(TrtllmExecutorCore):
    """TensorRT-LLM's `LLM` class: a Hugging Face folder for its PyTorch backend, or an engine."""

    engine_stages = "mpillm.builder.trtllm:checkpoint_stages"
