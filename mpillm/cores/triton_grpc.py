"""Triton's core: what builds its engines and starts its servers. It cannot run a test yet."""

from __future__ import annotations

from mpillm.cores.base import LLMCore


class TritonGrpcCore(LLMCore):
    """An engine of `trtllm-build` behind `tritonserver`."""

    engine_stages = "mpillm.builder.trtllm:engine_stages"
    servers = "mpillm.builder.triton_servers:triton_servers"
    framework = "TensorRT-LLM"
    packages = ("tensorrt_llm",)
