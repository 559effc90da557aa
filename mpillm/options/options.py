"""The options of a command: from its command line and the other sources to a `RunConfig`.

`fields` declares the options.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpillm.options.command_line import Parser, add_fields
from mpillm.options.field import Field
from mpillm.options.fields import FIELDS, AllFields, command_fields
from mpillm.options.fields.effects import RUN, SERVE
from mpillm.options.layers import layers_of
from mpillm.options.option_conflicts import check_compliance, check_conflicts, check_served
from mpillm.options.run_config import RunConfig
from mpillm.options.unused_options import check_unused

# The options in `run --help`.
RUN_FIELDS = command_fields(
    *("workload", "topology", "model", "own servers", "other harness", "conversations", "build", "harness"),
    *("triton", "data", "generation", "test", "output", "deadlines"),
    # The ports are written to the YAML in the run directory.
    also=("server_port", "worker_start_port", "tritonserver", "force"),
)
# The options in `serve --help`.
SERVE_FIELDS = command_fields(
    *("serve", "workload", "topology", "model", "own servers", "triton", "build", "harness", "generation"),
    "deadlines",
    also=("apply_chat_template", "tritonserver", "log_dir", "force"),
)


def parse(
    argv: Sequence[str], parser: Parser, visible: Sequence[Field], defaults: Mapping[Field, Any] | None = None
) -> RunConfig:
    """Return all fields' values, from the command line, the environment, a user's file and the workload.

    `visible`: fields in --help, some of which only this command may have. Other fields are also accepted,
    because the commands of a test share their options. The command's `defaults` override the fields'.
    ConfigError names the source.
    """
    known = with_all(visible)
    add_fields(parser, known, visible, defaults)
    return RunConfig(layers_of(parser.texts(argv), known, defaults))


def with_all(visible: Sequence[Field]) -> list[Field]:
    """Return the fields that a command accepts: its own, and all others."""
    return list({field.name: field for field in (*FIELDS, *visible)}.values())


# The options in `run --help` and `serve --help` without a topic: the most common ones.
_MAIN = (
    *("benchmarks", "scenarios", "model_scale", "core_type", "mode", "disagg_config", "config_file"),
    *("tensor_parallelism", "pipeline_parallelism", "num_ctx_servers", "ctx_tp_size", "gen_tp_size"),
    *("model_path", "device", "quantization", "kv_cache_dtype", "max_batch_size", "max_num_tokens"),
    *("enable_chunked_context", "kv_cache_free_gpu_mem_fraction"),
    *("server", "server_args", "clients_per_server", "server_nodes"),
    *("trtllm_server_urls", "harness", "harness_args", "concurrency", "host", "port"),
    *("dataset_path", "max_output_len", "server_target_qps", "goodput", "min_duration", "min_query_count"),
    *("test_mode", "user_conf", "log_dir", "save_outputs", "requests_file", "force", "on_instance_loss"),
)


def parse_run(argv: Sequence[str], behind: Parser | None = None, command: str = RUN) -> RunConfig:
    """Return the configuration from a command line of `run`.

    `behind`: the parser of a command that starts runs with the options which that parser does not have.
    `command`: that command, if it uses more options than `run` (see `unused_options`).
    """
    parser = Parser(
        prog="mpillm run",
        behind=behind,
        main=_MAIN,
        description="Run an MLPerf Inference LLM test on the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 4 python -m mpillm run --mode disaggregated --model_path DIR --save_outputs\n"
        "  mpirun -n 3 python -m mpillm run --core_type dummy --scenarios Server --server_target_qps 100"
        " --min_duration 10",
    )
    config = parse(argv, parser, RUN_FIELDS).with_yaml()
    check_conflicts(config)
    check_compliance(config)
    check_unused(config, command)
    return config


# Clients choose the prompts, so a server must compute any prompt that fits the model's context.
_SERVE_DEFAULTS: Mapping[Field, Any] = {
    AllFields.on_instance_loss: "continue",
    AllFields.enable_chunked_context: True,
}


def parse_serve(argv: Sequence[str]) -> RunConfig:
    """Return the configuration that a command line of `serve` gives."""
    parser = Parser(
        prog="mpillm serve",
        main=_MAIN,
        description="Put an OpenAI-compatible HTTP endpoint in front of the ranks of this mpirun.",
        epilog="examples:\n"
        "  mpirun -n 4 python -m mpillm serve --mode disaggregated --model_path DIR\n"
        "  mpirun -n 3 python -m mpillm serve --core_type dummy --port 8080",
    )
    config = parse(argv, parser, SERVE_FIELDS, _SERVE_DEFAULTS).with_yaml()
    check_conflicts(config)
    check_served(config)
    check_unused(config, SERVE)
    if config.server_role in ("context", "generation"):
        config.disagg_role = config.server_role
    return config


def without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the options as typed, except `names`."""
    remaining: list[str] = []
    drop = False  # whether `arg` is the name or a value of an option in `names`
    for arg in argv:
        if arg.startswith("--"):
            drop = arg[2:].partition("=")[0].replace("-", "_") in names
        if not drop:
            remaining.append(arg)
    return remaining


def run_name(config: RunConfig) -> str:
    """Return ``<workload or model>-<scenario or conversations>``, for the run directory's name."""
    load = config.harness if config.has_conversations else config.scenario
    return plain_name(f"{model_name(config)}-{load}")


def model_name(config: RunConfig) -> str:
    """Return the name of the workload, the model or the core."""
    return config.benchmark_name or (Path(config.model_path).name if config.model_path else config.core_type)


def plain_name(text: str) -> str:
    """Return `text` as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
