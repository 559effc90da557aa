"""`serve --server_role context` and `generation`: TensorRT-LLM's disaggregated servers.

Each is a run of its own, which leads through HTTP (`disaggregated_params`) and hands KV caches over by TCP
(`kv_socket`). `half_server` is what a run asks for, `instances` what its instances do.
"""
