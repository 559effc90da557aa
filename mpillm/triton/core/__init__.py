"""The core `triton_grpc`: a client of tritonserver over gRPC.

`core` is what a rank sees, `stream` one client with its stream, `tensors` what goes over it, `triton_ready`
what is asked of a server before a test.
"""
