"""What is run, and where its values come from."""

from __future__ import annotations

from mpillm.configurator import Field
from mpillm.fields.parsers import accuracy, boolean, names

WORKLOADS = ("llama2-70b", "llama2-70b-interactive", "mixtral-8x7b", "llama3.1-405b", "llama3.1-405b-interactive")
SCENARIOS = ("Offline", "Server", "SingleStream")

workload_names = names(
    *WORKLOADS,
    **{
        "llama2": "llama2-70b",
        "llama2-interactive": "llama2-70b-interactive",
        "moe": "mixtral-8x7b",
        "mixtral": "mixtral-8x7b",
        "llama3_1-405b": "llama3.1-405b",
        "llama3_1-405b-interactive": "llama3.1-405b-interactive",
    },
)

benchmarks = Field(
    "benchmarks",
    f"the workload, whose values then hold for all that is not set: {', '.join(WORKLOADS)}; also llama2, moe, llama3_1-405b",
    workload_names,
    group="workload",
    aliases=("models",),
)
scenarios = Field("scenarios", f"LoadGen's scenario: {', '.join(SCENARIOS)}", names(*SCENARIOS), default=("Offline",), group="workload")
accuracy_target = Field(
    "accuracy_target", "the part of the reference accuracy that is aimed at: 0.99, 0.999", accuracy, default=0.99, group="workload"
)
harness_type = Field("harness_type", "triton: through Triton servers", default="custom", choices=("custom", "triton"), group="workload")
use_triton = Field("use_triton", "the same as --harness_type triton", boolean, default=False, group="workload")
power_setting = Field(
    "power_setting", "which of a file's configurations is meant", default="MaxP", choices=("MaxP", "MaxQ"), group="workload"
)
model_scale = Field(
    "model_scale", "the workload's model, or a tiny one of its architecture", default="full", choices=("full", "tiny"), group="workload"
)
system_name = Field("system_name", "the system's name: chooses among a file's configurations, and names results", group="workload")
config_file = Field("config_file", "a configuration of your own, Python or YAML (docs/configuration.md)", group="workload")
dry_run = Field("dry_run", "print the commands, and run none", boolean, default=False, group="stages")
force = Field("force", "do it again although its result is there and up to date", boolean, default=False, group="stages")
