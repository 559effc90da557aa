"""From options to a disaggregation configuration and a plan; the command `plan`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import disagg
from disagg import DisaggConfig, WorldPlan
from disagg.errors import ConfigError
from disagg.schema import SECTIONS
from mpillm.command_line import Parser
from mpillm.config import RunConfig, parse
from mpillm.configurator import Field, Level
from mpillm.devices import OwnGpu
from mpillm.fields import MODEL_AND_LIMITS, shown

# What plan shows in --help.
_PLANNING = shown("topology", "plan", also=("benchmarks", "config_file", *MODEL_AND_LIMITS))

# What a YAML says in the place of options: they may say the same.
_CTX, _GEN, _EXECUTORS = SECTIONS
_TOPOLOGY = {
    "num_ctx_servers": ((_CTX,), "num_instances"),
    "ctx_tp_size": ((_CTX,), "tensor_parallel_size"),
    "ctx_pp_size": ((_CTX,), "pipeline_parallel_size"),
    "num_gen_servers": ((_GEN,), "num_instances"),
    "gen_tp_size": ((_GEN,), "tensor_parallel_size"),
    "gen_pp_size": ((_GEN,), "pipeline_parallel_size"),
    "tensor_parallelism": ((_EXECUTORS,), "tensor_parallel_size"),
    "pipeline_parallelism": ((_EXECUTORS,), "pipeline_parallel_size"),
    "moe_expert_parallelism": (SECTIONS, "moe_expert_parallel_size"),
}


@dataclass(frozen=True)
class Setup:
    """What every rank is told when all have joined."""

    plan: WorldPlan
    log_dir: str
    rank0: tuple[str, int]  # host and pid
    gpus: dict[int, OwnGpu]  # see `devices.assign`


def disagg_config(config: RunConfig, world_size: int | None) -> DisaggConfig:
    """The given YAML, or one generated from the options for `world_size` ranks. ConfigError names the file or the option."""
    if config.disagg_config:
        loaded = disagg.load(config.disagg_config)
        if config.given("mode") and loaded.mode != config.mode:
            raise ConfigError(f"{config.named('mode')}, but {config.disagg_config} is {loaded.mode}")
        for name, (sections, key) in _TOPOLOGY.items():
            if not config.given(name):
                continue
            for section, server in loaded.sections:
                if section in sections and getattr(server, key) != getattr(config, name):
                    raise ConfigError(f"{config.named(name)}, but {section}.{key} of {config.disagg_config} is {getattr(server, key)}")
        return loaded
    return generated(config, world_size)


def generated(config: RunConfig, world_size: int | None) -> DisaggConfig:
    """What the options say, whatever YAML they name: for `world_size` ranks, or (None) for as many as their instances take."""
    try:
        return disagg.generate(
            config.mode,
            world_size,
            model=config.model_path,
            num_ctx_servers=config.num_ctx_servers,
            ctx_tp_size=config.ctx_tp_size or 1,
            ctx_pp_size=config.ctx_pp_size or 1,
            num_gen_servers=config.num_gen_servers,
            gen_tp_size=config.gen_tp_size or 1,
            gen_pp_size=config.gen_pp_size or 1,
            tensor_parallelism=config.tensor_parallelism or 1,
            pipeline_parallelism=config.pipeline_parallelism or 1,
            moe_expert_parallelism=config.moe_expert_parallelism or 1,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_seq_len=config.max_seq_len,
            router=config.traffic_distribution_policy,
        )
    except ConfigError as error:
        mine = {_CTX, _GEN} if config.mode == "disaggregated" else {_EXECUTORS}
        said = [name for name, (sections, _) in _TOPOLOGY.items() if mine & {*sections} and config.origin(name).level > Level.DEFAULT]
        raise ConfigError("\n".join([str(error), *map(config.named, said)])) from None


def plan_main(argv: Sequence[str]) -> int:
    """``python -m mpillm plan``: the table or the JSON of a plan, without MPI."""
    format_field = Field("format", "how to print it", default="table", choices=("table", "json"), group="output")
    parser = Parser(
        prog="mpillm plan",
        description="Show which rank would do what, without MPI.",
        epilog="examples:\n  python -m mpillm plan --world_size 5 --mode disaggregated\n"
        "  python -m mpillm plan --disagg_config disagg.yaml --nodes a:4,b:4 --format json",
    )
    config = parse(argv, parser, [*_PLANNING, format_field])
    nodes = disagg.parse_nodes(config.nodes) if config.nodes else None
    world_size = config.world_size or (len(nodes) if nodes else None)
    if world_size is None:
        raise ConfigError("mpillm plan needs --world_size N or --nodes HOST:SLOTS,…")
    if nodes is not None and len(nodes) != world_size:
        raise ConfigError(f"--world_size {world_size}, but --nodes has {len(nodes)} slots")
    made: WorldPlan = disagg.plan(disagg_config(config, world_size), world_size, nodes)
    print(json.dumps(made.to_json(), indent=2) if config.format == "json" else disagg.table(made))
    return 0
