"""The core `triton_grpc`: a client of tritonserver over gRPC.

`core`: the core's class. `stream`: clients and their gRPC streams. `tensors`: requests and responses.
`triton_ready`: queries to a server before a test. `triton_counts`: a server's metrics.
"""

from mpillm.triton import grpc_fork  # noqa: F401 - before gRPC
