"""Conflicts between options that are valid by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disagg.errors import ConfigError
from mpillm.core_names import TRTLLM_ENDPOINT
from mpillm.options.field import Field
from mpillm.options.fields import BY_NAME, AllFields
from mpillm.options.synthetic_conversations import Uniform, sizes_of
from mpillm.options.unused_options import SERVER_SIZES
from mpillm.programs.load_clients.kinds import kind_of as load_client_kind
from mpillm.programs.servers.kinds import kind_of

if TYPE_CHECKING:
    from mpillm.options.run_config import RunConfig


def check_conflicts(config: RunConfig) -> None:
    """Raise ConfigError for options of a run that exclude each other; see also `unused_options`."""
    for name in ("scenarios", "benchmarks"):
        if len(getattr(config, name) or ()) > 1:
            raise ConfigError(
                f"{config.named(name)}: a run is one test of one workload; start it once for each"
            )
    if config.dry_run:
        raise ConfigError(
            f"{config.named('dry_run')}: `python -m mpillm plan` shows what a run would do, without MPI"
        )
    check_options(config)


def check_served(config: RunConfig) -> None:
    """Raise ConfigError for options with which `serve` would send requests to servers behind it."""
    for name in ("reset_prefix_cache", "profile"):
        if config.core_type in TRTLLM_ENDPOINT and config[BY_NAME[name]]:
            raise ConfigError(
                f"{config.named(name)}: serve does not pass it to servers behind it; send the request to each"
                " server",
                about=[name],
            )


def check_options(config: RunConfig) -> None:
    """Raise ConfigError for options that exclude each other in a run, and therefore in its plan."""
    if config.min_duration is not None and config.min_duration >= config.test_deadline:
        raise ConfigError(
            f"{config.named('min_duration')} must be less than {config.named('test_deadline')}, which would"
            " end the test first"
        )
    bounds: tuple[tuple[Field, Field], ...] = (
        (AllFields.min_duration, AllFields.max_duration),
        (AllFields.min_query_count, AllFields.max_query_count),
        (AllFields.min_output_len, AllFields.max_output_len),
    )
    for lower, upper in bounds:
        low, high = config[lower], config[upper]
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{config.named(lower.name)} is more than {config.named(upper.name)}")
    if config.is_user_set("output_mean") and config.output_mean > config.max_output_len:
        raise ConfigError(
            f"{config.named('output_mean')} is more than {config.named('max_output_len')}, where every answer"
            " ends"
        )
    for name in ("trtllm_server_urls", "triton_server_urls", "triton_grpc_ports", "triton_skip_server_spawn"):
        if config.server and config.is_user_set(name):
            raise ConfigError(
                f"{config.named('server')} and {config.named(name)} exclude each other: the run starts its"
                " servers, or there are some"
            )
    if config.on_instance_loss == "restart":
        _check_restart(config)
    if config.server_nodes > 1:
        _check_nodes(config)
    if config.dataset == "synthetic" and config.is_user_set("dataset_path"):
        raise ConfigError(f"{config.named('dataset')} and {config.named('dataset_path')} exclude each other")
    if config.endpoint_type == "responses" and config.mode == "disaggregated":
        raise ConfigError(
            f"{config.named('endpoint_type')}: context servers compute prompts of completions and chats only;"
            " use --endpoint_type chat",
            about=["endpoint_type", "mode"],
        )
    if config.max_local_prefill_length and config.mode != "disaggregated":
        raise ConfigError(
            f"{config.named('max_local_prefill_length')} needs --mode disaggregated",
            about=["max_local_prefill_length", "mode"],
        )
    _check_acceptance_length(config)
    if config.cache_salt == "conversation" and not config.has_conversations:
        raise ConfigError(f"{config.named('cache_salt')} needs --harness conversations", about=["cache_salt"])
    if config.request_cancellation_rate is not None and config.on_instance_loss == "continue":
        raise ConfigError(
            f"{config.named('request_cancellation_rate')} and {config.named('on_instance_loss')} exclude each"
            " other: a lost request cannot be cancelled"
        )
    if config.synthetic_conversations:
        _check_synthetic_conversations(config)
    elif config.has_conversations and (config.dataset != "prompts" or not config.dataset_path):
        raise ConfigError(
            f"{config.named('harness')}: name a file of conversations with --dataset_path, or generate"
            " conversations with --synthetic_conversations turns=5,input=128,output=32",
            about=["harness", "dataset_path", "synthetic_conversations"],
        )
    check_harness(config)
    check_mode(config)


def _check_synthetic_conversations(config: RunConfig) -> None:
    """Raise ConfigError for another data set, or for other lengths of responses."""
    of_files = ("dataset", "dataset_path", "trace_columns", "shuffle", "max_input_len")
    of_responses = ("min_output_len", "stop_words", "end_ids")  # these have exactly the length `output`
    for name in (*of_files, *of_responses):
        if config.is_user_set(name) and config[BY_NAME[name]] != BY_NAME[name].default:
            raise ConfigError(
                f"{config.named('synthetic_conversations')} and {config.named(name)} exclude each other"
            )
    output = sizes_of(config.synthetic_conversations or {}).output
    longest = output.high if isinstance(output, Uniform) else output.mean  # others are not certain to occur
    if longest > config.max_output_len:
        raise ConfigError(
            f"{config.named('synthetic_conversations')}: output of {longest:g} tokens is more than"
            f" {config.named('max_output_len')}, where every answer ends; set --max_output_len {longest:g}",
            about=["max_output_len"],
        )


def _check_acceptance_length(config: RunConfig) -> None:
    """Raise ConfigError where --acceptance_length cannot be set, or would make results meaningless."""
    if config.acceptance_length is None:
        return
    name = config.named("acceptance_length")
    if config.trtllm_server_urls:
        raise ConfigError(
            f"{name}: the servers of {config.named('trtllm_server_urls')} run already; set their own setting"
            " where they are started, or let the run start them with --server",
            about=["acceptance_length", "trtllm_server_urls"],
        )
    for other in ("test_mode", "compliance_test", "audit_conf"):
        if getattr(config, other) not in (None, "PerformanceOnly"):
            raise ConfigError(
                f"{name} and {config.named(other)} exclude each other: the tokens are not the model's",
                about=["acceptance_length", other],
            )


def check_harness(config: RunConfig) -> None:
    """Raise ConfigError for a test that only LoadGen makes, in a run with a load client."""
    if not config.harness:
        return
    is_accuracy = config.test_mode == "AccuracyOnly" and not config.has_conversations
    if is_accuracy and load_client_kind(config.harness).answers is None:
        raise ConfigError(
            f"{config.named('harness')} and {config.named('test_mode')} exclude each other: its report has no"
            " answers to score",
            about=["harness", "test_mode"],
        )
    if config.scenario == "SingleStream":
        raise ConfigError(
            f"{config.named('harness')}: SingleStream is LoadGen's; --concurrency 1 keeps one request open"
        )


def _check_nodes(config: RunConfig) -> None:
    """Raise ConfigError for a server over several nodes that is impossible, or has too few ranks."""
    n = config.server_nodes
    why = ""
    if config.mode == "disaggregated":
        why = f"with {config.named('mode')} each server is on one node"
    elif config.is_user_set("clients_per_server") and config.clients_per_server < n:
        why = f"{config.named('clients_per_server')} is fewer than that: on each node a rank owns a part"
    else:
        size = (config.tensor_parallelism or 1) * (config.pipeline_parallelism or 1)
        if config.server and kind_of(config.server).takes("tensor_parallelism") and size % n:
            why = f"a server of {size} devices can't be split into {n} equal parts"
    if why:
        raise ConfigError(f"{config.named('server_nodes')}: {why}", about=["server_nodes"])


def _check_restart(config: RunConfig) -> None:
    why = ""
    if not config.server:
        why = "the run starts no servers (--server)"
    elif kind_of(config.server).client_port:
        why = f"a {config.server} server is not started again"
    elif config.harness and not config.has_conversations:
        why = f"the client of {config.named('harness')} may use a server itself, and would not detect it"
    elif config.server_nodes > 1:
        why = "a server over several nodes is not started again"
    elif config.clients_of_a_server > 1:
        why = f"with {config.named('clients_per_server')} other ranks would not detect the restart"
    if why:
        raise ConfigError(f"{config.named('on_instance_loss')}: {why}", about=["on_instance_loss"])


def check_mode(config: RunConfig) -> None:
    """Raise ConfigError for explicit sizes of instances that another mode has."""
    context, generation, aggregated = SERVER_SIZES.values()
    disagg_sizes = ("num_ctx_servers", *context, "num_gen_servers", *generation)
    for name in aggregated if config.mode == "disaggregated" else disagg_sizes:
        if config.is_user_set(name):
            raise ConfigError(f"{config.named(name)} has no meaning with {config.named('mode')}")


def check_compliance(config: RunConfig) -> None:
    """Raise ConfigError for a compliance test that the workload does not have, or with a wrong test mode."""
    if config.compliance_test and config.audit_conf:
        raise ConfigError(
            f"{config.named('compliance_test')} and {config.named('audit_conf')} exclude each other:"
            " the compliance test has its own audit.config"
        )
    if (
        config.compliance_test
        and config.workload
        and config.compliance_test not in config.workload.compliance
    ):
        raise ConfigError(
            f"{config.named('compliance_test')}: {config.workload.name} needs"
            f" {' and '.join(config.workload.compliance)}",
            about=["compliance_test"],
        )
    if config.compliance_test and config.test_mode != "PerformanceOnly":
        raise ConfigError(
            f"{config.named('compliance_test')} is a performance run, not {config.named('test_mode')}"
        )
    if config.audit_conf and not Path(config.audit_conf).is_file():
        raise ConfigError(f"{config.named('audit_conf')}: no such file")
