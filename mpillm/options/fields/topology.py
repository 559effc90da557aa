"""What runs where."""

from __future__ import annotations

from mpillm.core_names import BUILT_IN, DEFAULT, EMBEDDED, OTHER_NAMES, TRTLLM_HLAPI, WITH_BACKENDS, names
from mpillm.options.field import Options, option
from mpillm.options.fields.effects import BUILT, COMPUTED, DISAGG, PLAN, RUN, SIZED, used_by
from mpillm.options.parsers import flag_dict, name_or_class, natural, one_or_two, positive
from mpillm.programs.load_clients.kinds import CONVERSATIONS

PROMPTS_ALONE = "isl_load_balancing"


class TopologyFields(Options, group="topology"):
    """What runs where."""

    mode = option(
        "one kind of instance, or separate context and generation instances",
        default="aggregated",
        choices=("aggregated", "disaggregated"),
        effect=COMPUTED,
    )
    core_type = option(
        f"the core, which computes or fetches the answers: {', '.join(BUILT_IN)}"
        f" (also {', '.join(f'{name} for {core}' for name, core in OTHER_NAMES.items())}),"
        " or your own as package.module:Class",
        name_or_class(tuple(BUILT_IN), names, OTHER_NAMES),
        default=DEFAULT,
    )
    core_options = option(
        "options of the core: key:value,key:value",
        flag_dict,
        default={},
        effect=used_by(*(name for name in WITH_BACKENDS if name not in TRTLLM_HLAPI)),
    )
    disagg_config = option(
        "the disaggregation YAML [default: made from the options below and the number of ranks]",
        effect=COMPUTED,
        aliases=("trtllm_disagg_config_path",),
    )
    num_ctx_servers = option("context instances", positive, effect=DISAGG)
    ctx_tp_size = option("tensor parallel size of a context instance", positive, effect=DISAGG)
    ctx_pp_size = option("pipeline parallel size of a context instance", positive, effect=DISAGG)
    num_gen_servers = option("generation instances", positive, effect=DISAGG)
    gen_tp_size = option("tensor parallel size of a generation instance", positive, effect=DISAGG)
    gen_pp_size = option("pipeline parallel size of a generation instance", positive, effect=DISAGG)
    tensor_parallelism = option("tensor parallel size of an executor", positive, effect=BUILT)
    pipeline_parallelism = option("pipeline parallel size of an executor", positive, effect=SIZED)
    moe_expert_parallelism = option(
        "ranks of a TP group that the experts are spread over", positive, effect=SIZED
    )
    control_ranks = option(
        "ranks that compute nothing: 1 (harness and leader together) or 2 (one for each)"
        " [default: 1, unless the instances fit only beside 2]",
        one_or_two,
    )
    traffic_distribution_policy = option(
        "which instance gets a request. load_balancing: the instance with the fewest outstanding tokens,"
        " counting prompts and longest answers. round_robin: the next in turn. kv_cache_aware: an instance"
        " that has cached the beginning of the prompt. conversation: the instance of the conversation's"
        " previous request. isl_load_balancing: treated as load_balancing;"
        " NVIDIA's leader counts only prompts with it",
        default="load_balancing",
        choices=("load_balancing", "round_robin", "kv_cache_aware", "conversation", PROMPTS_ALONE),
    )
    max_local_prefill_length = option(
        "disaggregated: a conversation's later request with at most so many tokens after the previous prompt"
        " is computed by the generation instance that has the previous response in its KV cache"
        " (TensorRT-LLM's name). 0: context instances compute all prompts",
        natural,
        default=0,
        effect=used_by(
            *EMBEDDED, commands=[RUN], needs=("enable_kv_cache_reuse", True), loads=[CONVERSATIONS]
        ),
    )
    world_size = option(
        "number of ranks, control ranks included, for commands without mpirun", positive, group="plan"
    )
    nodes = option(
        "hosts and their slots, in rank order: a:4,b:8 [default: all ranks on one host]",
        effect=used_by(commands=[PLAN], measured=False),
        group="plan",
    )
