"""The stages before a run, from a model to servers, and the harness stage: NVIDIA's `make` targets.

A plugin package in `core_names.PLUGIN_PACKAGES`, so this file imports nothing.
"""

STAGES = {
    "engine_stages": "mpillm.stages.torch_engine:engine_stages",
    "servers": "mpillm.stages.disagg_servers:torch_servers",
}
"""Stages of mpillm's own engine, by their names in `LLMCore`."""

COMMANDS = {
    "generate-engines": "quantize a model and build its engine",
    "generate-disagg-config": "write a disaggregation YAML from options",
    "run-llm-server": "start the servers that a core needs, and wait until they end",
    "run-harness": "run a test for each workload and scenario named",
}
"""Commands, each the `main` of a file in `commands/`."""

_RUNS = ("run-harness", "run-llm-server")
GROUPS = {"run": _RUNS, "prepare": (*(name for name in COMMANDS if name not in _RUNS),)}
"""Groups of the commands in --help."""
