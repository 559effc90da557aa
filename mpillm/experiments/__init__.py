"""The wing for several runs: compared, alternating, over a grid, in search of the best rate; the self test.

It imports the core of mpillm; the core does not import it, but finds here by name what it brings
(`core_names.PLUGIN_PACKAGES`). So this file imports nothing. `commands/`: one file for each of its commands.
"""

COMMANDS = {
    "find-max-qps": "find the highest rate at which a Server or Interactive test is VALID",
    "ab": "run two sets of options alternately, and say whether the difference is real",
    "sweep": "run a grid of options, resumable, with a Pareto curve",
    "advise": "propose how to use some GPUs for a test: instances, layouts, contexts to generation",
    "bench": "measure a part beside a baseline; `bench` alone lists the benchmarks",
    "compare": "compare runs: options, then figures with confidence intervals",
    "selftest": "try a kind of server or a core on what is installed here, case by case, in one report",
}
"""Each is the `main` of a file in `commands/`."""

GROUPS = {"find": ("find-max-qps", "ab", "sweep", "advise", "bench"), "look": ("compare", "selftest")}
"""Where --help shows them."""

BENCHES = {
    "endpoint": "a load test of a server over HTTP, reported as `vllm bench serve` does",
    "routing": "what everything around the model costs, with dummy cores",
    "table": "whole runs beside the throughput that TensorRT-LLM publishes for one H200",
}
"""Each is a file `bench/bench_NAME.py`."""
