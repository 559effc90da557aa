"""The wing for what a user measures of a part: medians, and ratios to a baseline of the same minutes.

It imports the core of mpillm; the core does not import it, but finds here by name what it brings
(`core_names.WINGS`). So this file imports nothing.

A benchmark is a file `bench_NAME.py` with its `Options`, DESCRIPTION and EPILOG for --help, and `main`;
`commands/bench.py` starts it. Those of mpillm's makers are in `benchmarks/`, which is not installed.
"""

COMMANDS = {"bench": "measure a part beside a baseline; `bench` alone lists the benchmarks"}
"""The `main` of the file in `commands/`."""

GROUPS = {"find": (*COMMANDS,)}
"""Where --help shows it."""

BENCHES = {
    "endpoint": "a load test of a server over HTTP, reported as `vllm bench serve` does",
    "engine": "the embedded engine on a CPU: against transformers, vLLM, or itself with guesses",
    "routing": "what everything around the model costs, with dummy cores",
}
"""Each is a file `bench_NAME.py`."""
