"""`serve --server_role context` and `generation`: TensorRT-LLM's disaggregated servers.

Each server is a separate run. It answers over HTTP (`routes`) and transfers KV caches over TCP (`kv_socket`).
`server` has the objects of rank 0, and `instances` the roles of the instances.
"""
