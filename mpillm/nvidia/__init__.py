"""The wing for what is NVIDIA's: Triton, TensorRT-LLM and configuration files in its forms.

It imports the core of mpillm; the core does not import it, but finds here by name what it brings
(`core_names.WINGS`). So this file imports nothing. NVIDIA's `llmlib` is a room of its own (`mpillm.llmlib`).

`trtllm/`: the cores `trtllm_executor` and `trtllm_hlapi`, tools, servers. `triton/`: model repositories and
servers. `triton_core/`: the core `triton_grpc`. `triton_models/`: models that tritonserver's Python backend
runs. `triton_client/`: clients of models behind Triton. `stages/`: what comes before a run. `halves/`:
context and generation servers; `leader/`: their leader. `core_model/`, `table/`: benches. `commands/`: one
file for each of its commands. `config_file`: the user's configuration.
"""

CORES = {
    "trtllm_endpoint": "mpillm.nvidia.trtllm.endpoint:TrtllmEndpointCore",
    "trtllm_disagg": "mpillm.nvidia.trtllm.endpoint:TrtllmDisaggCore",
    "trtllm_executor": "mpillm.nvidia.trtllm.executor:TrtllmExecutorCore",
    "trtllm_hlapi": "mpillm.nvidia.trtllm.hlapi:TrtllmHlApiCore",
    "triton_grpc": "mpillm.nvidia.triton_core.core:TritonGrpcCore",
}

EXTRAS = {"triton_grpc": "triton", "trtllm_executor": "trtllm", "trtllm_hlapi": "trtllm"}
"""The extra of this package that a core's class needs, if any."""

STAGES = {
    "engine_stages": "mpillm.nvidia.stages.torch_engine:engine_stages",
    "servers": "mpillm.nvidia.stages.torch_servers:torch_servers",
}
"""The stages of mpillm's own engine, by their names in `LLMCore`."""

SERVERS = {
    "trtllm-serve": "mpillm.nvidia.trtllm.server_kind:TRTLLM_SERVE",
    "tritonserver": "mpillm.nvidia.triton.server_kind:TRITONSERVER",
}
"""Kinds of servers that a run may start (--server)."""

EXAMINED = {"tritonserver": "mpillm.nvidia.triton.embedded:examined"}
"""Programs of which `mpillm doctor` says whether they fit: see `doctor.installed`."""

RUNTIME_FLAGS = {
    "trtllm_endpoint": "mpillm.nvidia.flags:SERVE_FLAGS",
    "trtllm_disagg": "mpillm.nvidia.flags:SERVE_FLAGS",
    "triton_grpc": "mpillm.nvidia.flags:TRITON_FLAGS",
}
"""The runtime flags that a core knows; one of TensorRT-LLM that is not here passes on all."""

COMMANDS = {
    "generate-engines": "quantise a model and build its engine",
    "generate-disagg-config": "write a disaggregation YAML from options",
    "run-llm-server": "start the servers that a core needs, and wait until they end",
    "run-harness": "run a test for each workload and scenario named",
    "generate-triton-config": "write Triton model repositories for an engine",
    "fill-template": "fill the placeholders of a Triton model's config.pbtxt",
    "launch-triton-server": "start a tritonserver of one model repository, and wait until it ends",
    "triton-client": "send requests to a Triton server, and print the answers",
    "e2e-test": "check and time the models around an engine behind Triton",
    "hf-lora-convert": "convert a LoRA adapter to the tensors that requests to Triton carry",
}
"""Each is the `main` of a file in `commands/`. The first four are the stages of NVIDIA's Makefile."""

_RUNS = ("run-harness", "run-llm-server")
GROUPS = {"run": _RUNS, "prepare": (*(name for name in COMMANDS if name not in _RUNS),)}
"""Where --help shows them."""

BENCHES = {
    "table": "whole runs beside the throughput that TensorRT-LLM publishes for one H200",
    "core-model": "load on the engine's model behind Triton, as benchmark_core_model.py puts it",
}
"""Each is a file `bench_NAME.py` in a room of its name, of the kind that `mpillm.bench` describes."""

SERVER_ROLES = {
    "leader": "mpillm.nvidia.leader.leader_run:lead",
    **dict.fromkeys(("context", "generation"), "mpillm.nvidia.halves.half_server:HalfServer"),
}
"""What `serve --server_role` makes of a process: a leader's main, a run's `endpoint.half.HalfServer`."""

READERS = {"config_file": "mpillm.nvidia.config_file"}
"""Modules that read files: the user's configuration, for `config.layers`."""

_CHECKPOINT = "generate-engines runs it with the options in --trtllm_checkpoint_flags"
_BUILD = "generate-engines runs it with the options in --trtllm_build_flags"
PROGRAMS = {
    **dict.fromkeys(("convert-checkpoint", "quantize"), _CHECKPOINT),
    **dict.fromkeys(("trtllm-build", "build"), _BUILD),
    "tritonserver": "run-llm-server --harness_type=triton starts it",
    "trtllm-serve": "run-llm-server starts it with --core_type=trtllm_endpoint or trtllm_disagg",
    "inflight-batcher-llm-client": "`python -m mpillm triton-client tokens` takes its options",
    "end-to-end-test": "`python -m mpillm e2e-test` takes its options",
    "benchmark-core-model": "`python -m mpillm bench core-model` takes its options",
    "end-to-end-grpc-client": "`python -m mpillm triton-client text` takes its options",
}
"""Programs that NVIDIA's documentation calls, and what replaces them here."""
