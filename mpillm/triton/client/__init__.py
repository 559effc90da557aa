"""Clients of the models behind Triton, for `triton-client`, `e2e-test` and `bench core-model`.

`connection` is a gRPC stream for one request at a time, `client_options` says what both clients can ask for;
`token_client` sends tokens to the engine's model, `text_client` text to the models around it.
"""
