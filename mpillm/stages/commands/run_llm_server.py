"""``python -m mpillm run-llm-server``: start the servers that a core needs, and wait until they end.

For the embedded engine: the workers and the leader of a disaggregation YAML, or the one that
MLPERF_DISAGG_LAUNCH_TYPE selects. `trtllm_disagg`: the same with `trtllm-serve`. `trtllm_endpoint`: one
`trtllm-serve` for each URL. `triton_grpc` and `--harness_type=triton`: one `tritonserver` for each model
repository.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from launch.check_world import check_world
from launch.default_paths import SERVERS
from launch.environment import LAUNCH_TYPE, drop_launch_type, launch_type
from launch.launcher import one_of_several
from mpillm.comms.start import mpi_library
from mpillm.core_names import BUILT_IN, DEFAULT, DISAGGREGATED, load_object
from mpillm.cores.registry import BackendRegistry
from mpillm.errors import ExitCode
from mpillm.files import as_writable
from mpillm.options.command_line import Parser
from mpillm.options.fields import MODEL_AND_LIMITS, command_fields
from mpillm.options.mitten import applied
from mpillm.stages.ancestors import end_with_launcher
from mpillm.stages.servers import Server, ServerFailed, Servers, check_ports, files_of, write_files
from mpillm.stages.stage_options import parse_stage
from mpillm.stages.start_records import StartRecord, recorded

_ALSO = (
    *("dry_run", "trtllm_server_urls", "llm_gen_config_path", "enable_kv_cache_reuse", "end_ids"),
    *("num_threads", "log_dir", "load_deadline", "stall_timeout"),
)
_FIELDS = command_fields(
    "workload", "topology", "checkpoint", "build", "triton", "server", also=(*_ALSO, *MODEL_AND_LIMITS)
)


def main(argv: Sequence[str]) -> int:
    """Run the servers. Exit code NOT_READY or INSTANCE_LOST: one failed before or after all were ready."""
    parser = Parser(
        prog="mpillm run-llm-server",
        description="Start the servers that a core needs, and wait until they end. Ctrl-C ends them.",
        epilog="examples:\n"
        "  python -m mpillm run-llm-server --harness_type=triton --triton_model_repo"
        " build/triton_model_repo\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_endpoint --model_path DIR"
        " --tensor_parallelism 2\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_disagg"
        " --trtllm_disagg_config_path=disagg.yaml\n"
        f"  python -m mpillm run-llm-server --core_type={DEFAULT} --trtllm_disagg_config_path=disagg.yaml",
    )
    config = parse_stage(argv, parser, _FIELDS)
    if config.core_type in DISAGGREGATED:
        if launch_type() == "worker" and one_of_several():
            check_world(mpi_library(), None, ["run-llm-server", *argv], variables={LAUNCH_TYPE: "worker"})
    else:
        drop_launch_type(f"--core_type {config.core_type}")
    kind = BackendRegistry.declared(config.core_type).servers
    if kind is None:
        able = [name for name in BUILT_IN if BackendRegistry.declared(name).servers]
        raise ConfigError(
            f"--core_type {config.core_type} needs no server; these cores do: {', '.join(able)}"
        )
    with recorded(config) as record:
        with applied(config):
            servers: list[Server] = load_object(kind)(config, [arg for arg in argv if arg != "--dry_run"])
        os.environ.pop(LAUNCH_TYPE, None)  # the variable is not for the servers
        if config.dry_run:
            for path, text in files_of(servers).items():
                print(f"mkdir -p {path.parent} && cat > {path} <<'END'\n{text}END")
            for server in servers:
                print(server.command)
            return ExitCode.DONE
        return run_servers(servers, config.log_dir, config.load_deadline, config.stall_timeout, record)


def run_servers(
    servers: Sequence[Server],
    log_dir: str | None,
    load_deadline_s: float,
    stall_timeout_s: float,
    record: StartRecord | None = None,
) -> int:
    """Start servers, print when they are ready, and wait until one ends. Returns the exit code of `main`.

    `record`: removed when the servers are ready, and written again if one fails.
    """
    check_ports(servers)
    folder = Path(log_dir) if log_dir else SERVERS / time.strftime("%Y%m%d-%H%M%S")
    with as_writable(folder):
        write_files(folder, servers)
    try:
        with Servers(folder) as running:
            end_with_launcher()
            for server in servers:
                print(f"  {server.name}: log {running.start_server(server)}", flush=True)
            seconds = running.wait_ready(load_deadline_s)
            if record:
                record.end()
            for server in servers:
                if server.table:
                    print(f"  {server.name}:\n    " + "\n    ".join(server.table()), flush=True)
            if urls := [url for server in servers for url in server.urls]:
                print(f"  ready after {seconds:.1f} s: {','.join(urls)}", flush=True)
            print(f"  {running.watch(stall_timeout_s)} has ended")
    except ServerFailed as error:
        print(f"mpillm: {error}", file=sys.stderr)
        if record:
            record.fail(str(error))
        return ExitCode.INSTANCE_LOST if error.was_ready else ExitCode.NOT_READY
    return ExitCode.DONE
