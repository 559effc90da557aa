"""`serve --server_role leader`: one endpoint for disaggregated servers, mpillm's or `trtllm-serve`'s."""
