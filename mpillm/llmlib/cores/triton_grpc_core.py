"""A client of tritonservers over gRPC."""

from mpillm.llmlib.cores.built_in import BuiltInCore


class TritonGrpcCore(BuiltInCore):
    """A client of tritonservers over gRPC."""

    core_type = "triton_grpc"
