"""TensorRT-LLM: cores in the ranks, clients of `trtllm-serve`, its tools and servers.

A plugin package in `core_names.PLUGIN_PACKAGES`, so this file imports nothing.
"""

CORES = {
    "trtllm_endpoint": "mpillm.trtllm.endpoint:TrtllmEndpointCore",
    "trtllm_disagg": "mpillm.trtllm.endpoint:TrtllmDisaggCore",
    "trtllm_executor": "mpillm.trtllm.executor:TrtllmExecutorCore",
    "trtllm_hlapi": "mpillm.trtllm.hlapi:TrtllmHlApiCore",
}

EXTRAS = {"trtllm_executor": "trtllm", "trtllm_hlapi": "trtllm"}
"""Extra of this package that a core's class needs, if any."""

SERVERS = {"trtllm-serve": "mpillm.trtllm.server_kind:TRTLLM_SERVE"}
"""Kinds of servers that a run may start (--server)."""

GROUPS: dict[str, tuple[str, ...]] = {}
