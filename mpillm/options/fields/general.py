"""The test: workload, scenario, model, configuration file."""

from __future__ import annotations

from mpillm.options.field import ANY, Effect, Options, Use, option
from mpillm.options.fields.effects import REPORTED, RUN, SERVE, used_by
from mpillm.options.parsers import accuracy, boolean, names
from mpillm.workloads import TARGETS, WORKLOADS

# Name of NVIDIA and of the submission checker for scenario Server with a workload's interactive form.
INTERACTIVE = "Interactive"
SINGLE_STREAM = "SingleStream"
SCENARIOS = ("Offline", "Server", SINGLE_STREAM)
HARNESS_TYPES = ("custom", "triton")
POWER_SETTINGS = ("MaxP", "MaxQ")

_ALIASES = {alias: workload.name for workload in WORKLOADS.values() for alias in workload.aliases}
_NAMES = {**_ALIASES, **{name: name for name in WORKLOADS}}
_WITH_TARGET = {name + target: known + target for name, known in _NAMES.items() for target in TARGETS}

workload_names = names(*WORKLOADS, **_ALIASES)
benchmark_names = names(*WORKLOADS, **_ALIASES, **_WITH_TARGET)


class GeneralFields(Options, group="workload"):
    """The test: workload, scenario, model, configuration file."""

    benchmarks = option(
        f"the workload, which sets the defaults of other options: {', '.join(WORKLOADS)},"
        " or llama2, moe, llama3_1-405b; the suffix -99 or -99.9 sets accuracy_target",
        benchmark_names,
        aliases=("models",),
    )
    scenarios = option(
        f"LoadGen's scenario: {', '.join(SCENARIOS)};"
        f" {INTERACTIVE} is Server with a workload's interactive form",
        names(*SCENARIOS, INTERACTIVE, **{"single-stream": "SingleStream", "single_stream": "SingleStream"}),
        default=("Offline",),
        # In `serve`, the value only selects a configuration in --config_file.
        effect=Effect((Use((RUN,)), Use((SERVE,), needs=("config_file", ANY))), measured=False),
    )
    accuracy_target = option(
        "the share of the reference accuracy to reach: 0.99, 0.999", accuracy, default=0.99, effect=REPORTED
    )
    harness_type = option("triton: through Triton servers", default="custom", choices=HARNESS_TYPES)
    use_triton = option("the same as --harness_type triton", boolean, default=False)
    power_setting = option(
        "chooses among a file's configurations",
        default="MaxP",
        choices=POWER_SETTINGS,
        effect=used_by(needs=("config_file", ANY), measured=False),
    )
    model_scale = option(
        "the workload's model, or a tiny one of its architecture",
        default="full",
        choices=("full", "tiny"),
        effect=used_by(needs=("benchmarks", ANY)),
    )
    system_name = option(
        "the system's name: chooses among a file's configurations, and names results", effect=REPORTED
    )
    config_file = option("a configuration of your own, Python or YAML (docs/reference/configuration.md)")
    config_suffix = option(
        "chooses among variants of a configuration, which are in files of NVIDIA's older form [default: the"
        " first]",
        effect=used_by(needs=("config_file", ANY), measured=False),
    )
    dry_run = option("print the commands without running them", boolean, default=False, group="stages")
    force = option(
        "redo a stage even if its result is up to date; for a run: replace the results in log_dir",
        boolean,
        default=False,
        group="stages",
    )
