"""TensorRT-LLM's servers for `run-llm-server`: one per URL, or the servers of a disaggregation YAML."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import yaml

from disagg.errors import ConfigError
from disagg.schema import DISCOVERY
from launch.command import NotHere
from launch.default_paths import SERVERS
from launch.environment import LAUNCH_TYPE, launch_type
from launch.launcher import one_of_several
from mpillm.devices import visible_gpus
from mpillm.nvidia.configs import TrtllmEndpointConfig
from mpillm.options.mitten import configured
from mpillm.options.run_config import RunConfig
from mpillm.stages.disagg_servers import disaggregated_servers as launched
from mpillm.stages.disagg_workers import yaml_of_servers
from mpillm.stages.preconditions import raise_or_note
from mpillm.stages.servers import Server, ports_here
from mpillm.trtllm import trtllm_serve
from mpillm.trtllm.engines import TRTLLMLibraryLoader
from mpillm.trtllm.installed import check_gpus, program_or_name
from mpillm.trtllm.served import check_agreement, llm_api_options, served
from mpillm.trtllm.server_kind import TRTLLM_SERVE, config_option

_EXTRA_OPTIONS = SERVERS / "extra_llm_api_options.yaml"


def endpoint_servers(config: RunConfig, argv: Sequence[str]) -> list[Server]:
    """Return a `trtllm-serve` for each URL on this host, each with its share of the GPUs."""
    harness = configured(TrtllmEndpointConfig, config)
    source = served(config)
    if source.is_generated and not Path(source.model).is_dir():
        raise_or_note(
            config, NotHere(f"{source.options}: there is no folder {source.model}; generate-engines makes it")
        )
    layout = TRTLLMLibraryLoader(
        tp_size=config.tensor_parallelism,
        pp_size=config.pipeline_parallelism,
        ep_size=config.moe_expert_parallelism,
        build_flags=config.trtllm_build_flags,
    ).layout
    gpus = visible_gpus()
    if config.trtllm_server_urls:
        ports = [*ports_here(config.trtllm_server_urls).values()]
        if not ports:
            raise ConfigError(
                f"--trtllm_server_urls {','.join(config.trtllm_server_urls)}: none is on this host"
                f" ({socket.gethostname()})",
                about=["trtllm_server_urls"],
            )
    else:
        ports = [trtllm_serve.FIRST_PORT + index for index in range(max(1, len(gpus or ()) // layout.ranks))]
    try:
        check_gpus(len(ports) * layout.ranks, f"{len(ports)} trtllm-serve of {layout.ranks} GPUs each")
    except NotHere as error:
        raise_or_note(config, error)
    flags = {**harness.build_flags, **harness.runtime_flags}
    sizes = {
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        "ep_size": layout.ep_size if layout.ep_size > 1 else None,
    }
    limits = {
        name: flags.get(name)
        for name in ("max_batch_size", "max_num_tokens", "max_beam_width", "num_postprocess_workers")
    }
    return trtllm_serve.endpoints(
        program_or_name(config, "trtllm-serve", trtllm_serve.INSTALL),
        [source.model, *(["--tokenizer", str(source.tokenizer)] if source.tokenizer else [])],
        config.server_host,
        ports,
        {
            "backend": source.backend,
            **sizes,
            **limits,
            "max_seq_len": config.max_seq_len or flags.get("max_seq_len"),
        },
        config_option(TRTLLM_SERVE.release()),
        (_EXTRA_OPTIONS, yaml.safe_dump(llm_api_options(config), sort_keys=False)),
        layout.ranks,
        None if gpus is None else len(gpus),
    )


def disaggregated_servers(config: RunConfig, argv: Sequence[str]) -> list[Server]:
    """Return workers, leader or both.

    Under mpirun, this process becomes a worker. Otherwise one server is an mpirun of all workers.
    """
    path = config.disagg_config
    if not path:
        raise ConfigError(
            "--core_type trtllm_disagg needs --trtllm_disagg_config_path; generate-disagg-config writes"
            " that file",
            about=["core_type"],
        )
    yaml_config = yaml_of_servers(config, path)
    if Path(path).exists():
        check_agreement(config.with_yaml(), path, yaml_config)
    if DISCOVERY in yaml_config.options and launch_type() != "leader":
        # tensorrt_llm/llmapi/disagg_utils.py, extract_disagg_cfg: there are no server_configs then.
        raise ConfigError(
            f"{path}: {DISCOVERY}: trtllm-serve disaggregated_mpi_worker starts no servers that register;"
            f" name urls in both sections instead, or start the leader only ({LAUNCH_TYPE}=leader)"
        )
    serve = program_or_name(config, "trtllm-serve", trtllm_serve.INSTALL)
    programs = trtllm_serve.disaggregated(serve, path, config.load_deadline, config.stall_timeout)
    return launched(programs, path, yaml_config, launch_type(), one_of_several())
