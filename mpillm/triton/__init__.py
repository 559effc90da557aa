"""tritonserver: model repositories, the models that its Python backend runs, and clients.

A plugin package: `core_names.PLUGIN_PACKAGES` names it. So this file imports nothing.

`core/`: the core `triton_grpc`. `models/`: models that tritonserver's Python backend runs. `client/`: clients
of models behind Triton. `bench/`: load on the engine's model.
"""

CORES = {"triton_grpc": "mpillm.triton.core.core:TritonGrpcCore"}

EXTRAS = {"triton_grpc": "triton"}
"""The extra of this package that a core's class needs, if any."""

SERVERS = {"tritonserver": "mpillm.triton.server_kind:TRITONSERVER"}
"""Kinds of servers that a run may start (--server)."""

EXAMINED = {"tritonserver": "mpillm.triton.embedded:check_installed"}
"""Programs that `mpillm doctor` checks: see `doctor.installed`."""

COMMANDS = {
    "generate-triton-config": "write Triton model repositories for an engine",
    "fill-template": "fill the placeholders of a Triton model's config.pbtxt",
    "launch-triton-server": "start a tritonserver of one model repository, and wait until it ends",
    "triton-client": "send requests to a Triton server, and print the answers",
    "e2e-test": "check and time the models around an engine behind Triton",
    "hf-lora-convert": "convert a LoRA adapter to the tensors that requests to Triton carry",
}
"""Commands, each a file in `commands/` with a `main`."""

GROUPS = {"prepare": (*COMMANDS,)}
"""Groups of the commands in --help."""

BENCHES = {"core-model": "load on the engine's model behind Triton, like benchmark_core_model.py"}
"""Benchmarks, each a file `bench/bench_NAME.py`: see `mpillm.experiments.bench`."""
