"""`serve --server_role context` and `generation`: TensorRT-LLM's disaggregated servers.

Each is a run of its own, which answers over HTTP (`routes`) and transfers KV caches over TCP (`kv_socket`).
`server` has the parts on rank 0, `instances` the roles of the instances.
"""
