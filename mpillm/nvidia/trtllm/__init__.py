"""TensorRT-LLM: in the ranks, behind `trtllm-serve`, and its tools.

`executor` and `hlapi` are cores that run it in the ranks, over `library`; `endpoint` has those that are
clients of its servers. `engines` makes checkpoints and engines with its tools (`tool_options`, `converters`),
`servers` says what `run-llm-server` starts, `served` what these serve.
"""
