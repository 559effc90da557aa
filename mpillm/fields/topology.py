"""What runs where."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import flag_dict, name_or_class, one_or_two, positive
from mpillm.core_names import BUILT_IN, DEFAULT, TRTLLM_HLAPI, WITH_BACKENDS, names
from mpillm.fields.effects import COMPUTED, DISAGG, PLAN, used_by

PROMPTS_ALONE = "isl_load_balancing"


class TopologyFields(Options):
    """What runs where."""

    mode = Field(
        "mode",
        "one kind of instance, or separate context and generation instances",
        default="aggregated",
        choices=("aggregated", "disaggregated"),
        effect=COMPUTED,
        group="topology",
    )
    core_type = Field(
        "core_type",
        f"the core, which computes or fetches the answers: {', '.join(BUILT_IN)},"
        " or your own as package.module:Class",
        name_or_class(tuple(BUILT_IN), names),
        default=DEFAULT,
        group="topology",
    )
    core_options = Field(
        "core_options",
        "options of the core, as key:value,key:value",
        flag_dict,
        default={},
        effect=used_by(*(name for name in WITH_BACKENDS if name not in TRTLLM_HLAPI)),
        group="topology",
    )
    disagg_config = Field(
        "disagg_config",
        "the disaggregation YAML [default: made from the options below and the number of ranks]",
        effect=COMPUTED,
        group="topology",
        aliases=("trtllm_disagg_config_path",),
    )
    num_ctx_servers = Field("num_ctx_servers", "context instances", positive, effect=DISAGG, group="topology")
    ctx_tp_size = Field(
        "ctx_tp_size", "tensor parallel size of a context instance", positive, effect=DISAGG, group="topology"
    )
    ctx_pp_size = Field(
        "ctx_pp_size",
        "pipeline parallel size of a context instance",
        positive,
        effect=DISAGG,
        group="topology",
    )
    num_gen_servers = Field(
        "num_gen_servers", "generation instances", positive, effect=DISAGG, group="topology"
    )
    gen_tp_size = Field(
        "gen_tp_size",
        "tensor parallel size of a generation instance",
        positive,
        effect=DISAGG,
        group="topology",
    )
    gen_pp_size = Field(
        "gen_pp_size",
        "pipeline parallel size of a generation instance",
        positive,
        effect=DISAGG,
        group="topology",
    )
    tensor_parallelism = Field(
        "tensor_parallelism", "tensor parallel size of an executor", positive, group="topology"
    )
    pipeline_parallelism = Field(
        "pipeline_parallelism", "pipeline parallel size of an executor", positive, group="topology"
    )
    moe_expert_parallelism = Field(
        "moe_expert_parallelism",
        "ranks of a TP group that the experts are spread over",
        positive,
        group="topology",
    )
    control_ranks = Field(
        "control_ranks",
        "ranks that compute nothing: 1 (harness and leader together) or 2 (one for each)"
        " [default: 1, unless the instances fit only beside 2]",
        one_or_two,
        group="topology",
    )
    traffic_distribution_policy = Field(
        "traffic_distribution_policy",
        "which instance gets a request: the one that owes the fewest tokens, the next in turn, or one that"
        " has the beginning of its prompt cached; NVIDIA's isl_load_balancing, which counts prompts alone, is"
        " taken as load_balancing, which counts prompts and longest answers",
        default="load_balancing",
        choices=("load_balancing", "round_robin", "kv_cache_aware", PROMPTS_ALONE),
        group="topology",
    )
    world_size = Field(
        "world_size",
        "number of ranks, control ranks included, for commands without mpirun",
        positive,
        group="plan",
    )
    nodes = Field(
        "nodes",
        "hosts and their slots, in rank order: a:4,b:8 [default: all ranks on one host]",
        effect=used_by(commands=[PLAN], measured=False),
        group="plan",
    )
