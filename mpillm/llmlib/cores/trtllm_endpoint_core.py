"""A client of `trtllm-serve` and similar servers."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class TrtllmEndpointCore(BuiltInCore):
    """A client of `trtllm-serve` and similar servers."""

    core_type = "trtllm_endpoint"
