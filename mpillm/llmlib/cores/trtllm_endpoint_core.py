"""A client of `trtllm-serve` and of servers like it."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class TrtllmEndpointCore(BuiltInCore):
    """A client of `trtllm-serve` and of servers like it."""

    core_type = "trtllm_endpoint"
