"""``python -m mpillm run-llm-server``: starts the servers that a core talks to, and stays until they end, or a person ends them.

`triton_grpc` and `--harness_type=triton`: a `tritonserver` for each model repository. `trtllm_endpoint`: `trtllm-serve` for each URL.
`trtllm_disagg`: the workers and the leader of a disaggregation YAML, or one of the two: MLPERF_DISAGG_LAUNCH_TYPE says which.
"""

from __future__ import annotations

import http.client
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from disagg.errors import ConfigError, nearest
from launch.children import Child, Children
from mpillm.command_line import Parser
from mpillm.config import RunConfig, parse
from mpillm.errors import ExitCode
from mpillm.fields import MODEL_AND_LIMITS, SIZES, shown
from mpillm.json_files import as_writable
from mpillm.serving import Server, disaggregated, endpoints, triton

_OF_TRITON = (
    "triton_model_repo",
    "triton_num_servers",
    "triton_server_urls",
    "triton_grpc_ports",
    "triton_skip_server_spawn",
    "tritonserver",
)
_OF_TRTLLM = (
    *("disagg_config", "trtllm_server_urls", "llm_quantizer_outdir", "engine_dir", "trtllm_checkpoint_flags", "trtllm_build_flags"),
    *("trtllm_runtime_flags", "enable_kv_cache_reuse", *SIZES, *MODEL_AND_LIMITS),
)
_SHOWN = shown("workload", also=("dry_run", "core_type", *_OF_TRITON, *_OF_TRTLLM, "log_dir", "load_deadline", "stall_timeout"))
_POLL_S = 0.5
_LOOK_S = 10.0  # between health checks of servers that were ready
_ANSWER_S = 5.0  # for one health check


def main(argv: Sequence[str]) -> int:
    """The command; its exit code: NOT_READY or INSTANCE_LOST when a server ends by itself before or after it was ready."""
    parser = Parser(
        prog="mpillm run-llm-server",
        description="Start the servers that a core needs, and stay until they end. Ctrl-C ends them.",
        epilog="examples:\n"
        "  python -m mpillm run-llm-server --harness_type=triton --triton_model_repo build/triton_model_repo\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_endpoint --model_path DIR --tensor_parallelism 2\n"
        "  python -m mpillm run-llm-server --core_type=trtllm_disagg --trtllm_disagg_config_path=disagg.yaml",
    )
    config = parse(argv, parser, _SHOWN)
    with config.autoapply():
        servers = servers_of(config)
    if config.dry_run:
        for path, text in _files(servers).items():
            print(f"mkdir -p {path.parent} && cat > {path} <<'END'\n{text}END")
        for server in servers:
            print(server.command)
        return ExitCode.DONE
    check_ports(servers)
    folder = Path(config.log_dir) if config.log_dir else Path("build/servers") / time.strftime("%Y%m%d-%H%M%S")
    with as_writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in _files(servers).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return serve(servers, folder, config.load_deadline, config.stall_timeout)


def servers_of(config: RunConfig) -> list[Server]:
    """The servers that the options ask for on this host."""
    kinds = {"triton_grpc": triton, "trtllm_endpoint": endpoints, "trtllm_disagg": disaggregated}
    if config.core_type not in kinds:
        raise ConfigError(f"--core_type {config.core_type} needs no server{nearest(config.core_type, kinds)}: {', '.join(kinds)} do")
    return kinds[config.core_type](config)


def _files(servers: Sequence[Server]) -> dict[Path, str]:
    return {path: text for server in servers for path, text in server.files.items()}


def check_ports(servers: Sequence[Server]) -> None:
    """Every port is free on this host, and nobody else's; ConfigError naming who has it."""
    wanted: dict[int, str] = {}
    for server in servers:
        for purpose, port in server.ports.items():
            what = f"{purpose} of {server.name}"
            if port in wanted:
                raise ConfigError(f"port {port} is wanted for {what} and for {wanted[port]}")
            wanted[port] = what
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", port))
                except OSError as error:
                    raise ConfigError(f"port {port}, for {what}, can't be had: {_holder(port) or error.strerror}") from None


def _holder(port: int) -> str:
    try:
        taken = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN]
        process = next(psutil.Process(c.pid) for c in taken if c.pid)
        return f"process {process.pid} ({process.name()}) listens there"
    except (StopIteration, psutil.Error):
        return ""


def serve(servers: Sequence[Server], folder: Path, deadline_s: float, stall_s: float) -> int:
    """Start the servers, wait until all are ready, and then until one ends, or is silent for `stall_s`. Logs go to `folder`."""
    with Children() as children:
        for server in servers:
            log = folder / f"{server.name.replace(' ', '_')}.log"
            log.write_text(f"$ {server.command}\n", encoding="utf-8")
            children.start(server.name, server.command.argv, server.command.environment(server.keeps_job), log)
            print(f"  {server.name}: log {log}", flush=True)
        began = time.monotonic()
        names = {url: server.name for server in servers for url in server.health}
        waiting = list(names)
        while waiting:
            if child := children.ended():
                return _lost(child, "before it was ready", ExitCode.NOT_READY)
            waiting = [url for url in waiting if not _answers(url)]
            if waiting and time.monotonic() - began > deadline_s:
                _silent(children, {names[url] for url in waiting}, f"not ready within {deadline_s:g} s (--load_deadline)")
                return ExitCode.NOT_READY
            time.sleep(_POLL_S if waiting else 0)
        urls = [url for server in servers for url in server.urls]
        if urls:
            print(f"  ready after {time.monotonic() - began:.1f} s: {','.join(urls)}", flush=True)
        heard = dict.fromkeys(names, time.monotonic())
        next_look = time.monotonic() + _LOOK_S
        while (ended := children.ended()) is None:
            time.sleep(_POLL_S)
            if time.monotonic() < next_look:
                continue
            heard |= {url: time.monotonic() for url in heard if _answers(url)}
            next_look = time.monotonic() + _LOOK_S
            if silent := {names[url] for url, last in heard.items() if time.monotonic() - last > stall_s}:
                _silent(children, silent, f"no answer to a health check for {stall_s:g} s (--stall_timeout)")
                return ExitCode.INSTANCE_LOST
        return _lost(ended, "after it was ready" if urls else "", ExitCode.INSTANCE_LOST)


def _silent(children: Children, names: Collection[str], what: str) -> None:
    tails = "\n".join(child.tail() for child in children.running() if child.name in names)
    print(f"mpillm: {what}: {', '.join(sorted(names))}; the log ends:\n{tails}", file=sys.stderr)


def _lost(child: Child, when: str, code: ExitCode) -> int:
    status = child.process.returncode
    if status == 0 and code is ExitCode.INSTANCE_LOST:
        print(f"  {child.name} has ended")
        return ExitCode.DONE
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    print(f"mpillm: {child.name} {how} {when}".rstrip() + f"; its log, {child.log}, ends:\n{child.tail()}", file=sys.stderr)
    return code


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False
