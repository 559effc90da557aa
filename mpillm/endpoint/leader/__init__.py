"""`serve --server_role leader`: TensorRT-LLM's leader of disaggregated servers, ours or `trtllm-serve`'s."""
