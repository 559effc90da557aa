"""Clients of the models behind Triton, for `triton-client`, `e2e-test` and `bench core-model`.

`connection`: sequential requests over gRPC. `kserve_http`: over HTTP. `client_options`: options of both
clients. `token_client`: sends tokens to the engine's model. `text_client`: sends text to the models around
it. `end_to_end`: compares and times them.
"""

from mpillm.triton import grpc_fork  # noqa: F401 - before gRPC
