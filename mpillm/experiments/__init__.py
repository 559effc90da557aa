"""Experiments with several runs: comparisons, grids, rate search, advice, benchmarks; the self test.

A plugin package: `core_names.PLUGIN_PACKAGES` names it. So this file imports nothing. `commands/`: one file
per command.
"""

COMMANDS = {
    "find-max-qps": "find the highest rate at which a Server or Interactive test is VALID",
    "ab": "run two sets of options alternately, and test whether the difference is real",
    "sweep": "run a grid of options, resumable, with a Pareto curve",
    "advise": "propose how to use some GPUs for a test: instances, layouts, contexts to generation",
    "bench": "measure a part beside a baseline; `bench` alone lists the benchmarks",
    "compare": "compare runs: options, then figures with confidence intervals",
    "selftest": "try a kind of server or a core on what is installed here, case by case, in one report",
}
"""Commands, each a file in `commands/` with a `main`."""

GROUPS = {"find": ("find-max-qps", "ab", "sweep", "advise", "bench"), "look": ("compare", "selftest")}
"""Groups of the commands in --help."""

BENCHES = {
    "endpoint": "a load test of a server over HTTP, reported like `vllm bench serve`",
    "routing": "what everything around the model costs, with dummy cores",
    "table": "whole runs beside the throughput that TensorRT-LLM publishes for one H200",
}
"""Benchmarks, each a file `bench/bench_NAME.py`."""
