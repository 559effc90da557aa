"""``python -m mpillm plan``: the table or the JSON of a plan, without MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence

import disagg
from disagg.errors import ConfigError
from mpillm.cores.number_of_ranks import ranks_of
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.options import json_output
from mpillm.options.columns import prose
from mpillm.options.command_line import Parser
from mpillm.options.disagg_yaml import PORTS, disagg_config, world_plan
from mpillm.options.field import Field
from mpillm.options.fields import MODEL_AND_LIMITS, command_fields
from mpillm.options.fields.effects import PLAN
from mpillm.options.option_conflicts import check_options
from mpillm.options.option_trace import explain_option, format_explanation
from mpillm.options.options import parse
from mpillm.options.unused_options import check_unused
from mpillm.runtime.core_configs import check_flags, core_configs
from mpillm.runtime.plan_memory import memory_lines, share_lines
from mpillm.runtime.yaml_effects import check_yaml

_FIELDS = command_fields(
    *("workload", "topology", "own servers", "plan", "model"),
    also=(
        *("tritonserver", "triton_num_servers", "trtllm_server_urls", "engine_dir"),
        *(*PORTS, *MODEL_AND_LIMITS),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Print the plan."""
    format_field = Field(
        "format", "how to print it", default="table", choices=("table", "json"), group="output"
    )
    explain_field = Field(
        "explain",
        "print this option's value in each source, and the rules that changed it, instead of a plan",
        group="output",
    )
    parser = Parser(
        prog="mpillm plan",
        figures=True,
        description="Show which rank would do what, without MPI.",
        epilog="examples:\n  python -m mpillm plan --world_size 5 --mode disaggregated\n"
        "  python -m mpillm plan --disagg_config disagg.yaml\n"
        "  python -m mpillm plan --explain max_batch_size --benchmarks llama2-70b\n"
        "  python -m mpillm plan --disagg_config disagg.yaml --nodes a:4,b:4 --format json",
    )
    config = parse(argv, parser, [*_FIELDS, format_field, explain_field]).with_yaml()
    if (name := config[explain_field]) is not None:
        explained = explain_option(name, config)
        json_output.set_figures(explained)
        as_json = config[format_field] == "json"
        print(json.dumps(explained, indent=2) if as_json else format_explanation(explained))
        return ExitCode.DONE
    check_options(config)
    try:
        notes = [*check_unused(config, PLAN), *check_yaml(config)]
    except ConfigError as error:
        raise ConfigError(config.explain(error)) from None
    nodes = disagg.parse_nodes(config.nodes) if config.nodes else None
    world_size = config.world_size or (len(nodes) if nodes else ranks_of(config) if config.yaml else None)
    if world_size is None:
        raise ConfigError("mpillm plan needs --world_size N, --nodes HOST:SLOTS,… or --disagg_config FILE")
    if nodes is not None and len(nodes) != world_size:
        raise ConfigError(f"--world_size {world_size}, but --nodes has {len(nodes)} slots")
    core = BackendRegistry.declared(config.core_type)
    yaml = disagg_config(config, world_size, core.is_client)
    plan = world_plan(config, yaml, world_size, nodes)
    check_flags(config, plan)
    if not core.uses_gpus or config.device == "cpu":
        plan = plan.on_devices({}, {})
    if config.server:
        from mpillm.runtime import own_servers  # few plans need it

        notes += own_servers.server_lines(plan, own_servers.server_specs(config, plan, {}))
    if not core.is_client:
        notes += share_lines(core_configs(config, plan, [one.root_rank for one in plan.instances], {}))
    notes += memory_lines(config, plan)
    figures = {**plan.to_json(), "notes": notes}
    json_output.set_figures(figures)
    if config[format_field] == "json":
        print(json.dumps(figures, indent=2))
    else:
        print(disagg.table(plan), *(prose(line) for line in notes), sep="\n")
    return ExitCode.DONE
