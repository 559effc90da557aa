"""Servers: started by a run, started by `run-llm-server`, and Triton's."""

from __future__ import annotations

from mpillm.core_names import DEFAULT, DUMMY, TRITON, TRTLLM_ENDPOINT
from mpillm.options.field import ANY, Effect, Options, Use, option
from mpillm.options.fields.effects import BOTH, CLIENTS, SERVERS_OF_TRITON, STAGES, used_by
from mpillm.options.parsers import (
    boolean,
    grpc_ports,
    kind_of_program,
    port,
    positive,
    rate,
    seconds,
    shell_args,
    urls,
)
from mpillm.programs.servers.kinds import KINDS

_OF_A_TRITONSERVER = Effect(
    (Use(BOTH, TRITON, needs=("server", "tritonserver")), Use(STAGES, TRITON)), measured=False
)
_OF_REPOSITORIES = used_by(*TRITON, commands=STAGES, measured=False)
_OF_GENERATED_YAML = Effect(
    (
        Use(BOTH, (DEFAULT, *DUMMY), needs=("mode", "disaggregated")),
        Use(("generate-disagg-config", "run-llm-server")),
    ),
    measured=False,
)


class OwnServerFields(
    Options, group="own servers", effect=used_by(*TRTLLM_ENDPOINT, *TRITON, needs=("server", ANY))
):
    """Servers that a run starts, owns and stops."""

    server = option(
        "start the ranks' servers, and stop them when the run ends: vllm, sglang,"
        " trtllm-serve, tritonserver, mpillm, or command:WORDS. WORDS must contain {port} and may contain"
        " {model}, {name}, {host}, {tp}, {pp} and {devices}; this also sets --core_type",
        kind_of_program(KINDS),
        effect=used_by(*TRTLLM_ENDPOINT, *TRITON),
    )
    server_args = option(
        "further options for each server's command line, as typed there", shell_args, default=()
    )
    server_memory_limit = option(
        "GiB of host memory that a server's processes may use together, shared pages counted once;"
        " using more counts as a failure",
        rate,
    )
    server_nodes = option(
        "number of nodes that each server spans; on each of them its first rank owns the part that runs"
        " there",
        positive,
        default=1,
        effect=used_by(*TRTLLM_ENDPOINT, needs=("server", ANY)),
    )
    clients_per_server = option(
        "ranks that are clients of each server, of which the first owns it; unless this is set, one on"
        " each of its nodes",
        positive,
        default=1,
    )


class ServerFields(Options, group="server"):
    """Servers that `run-llm-server` starts."""

    server_host = option(
        "address that started endpoints and tritonservers listen on, without a key; 0.0.0.0 means all",
        choices=("127.0.0.1", "0.0.0.0"),
        default="127.0.0.1",
        effect=used_by(*CLIENTS, commands=STAGES, measured=False),
    )
    server_port = option("port of a disaggregated leader", port, default=8000, effect=_OF_GENERATED_YAML)
    worker_start_port = option(
        "port of the first disaggregated worker; the others take the ports after it",
        port,
        default=8001,
        effect=_OF_GENERATED_YAML,
    )
    tritonserver = option(
        "the tritonserver program [default: the one in PATH, or /opt/tritonserver/bin/tritonserver]",
        effect=_OF_A_TRITONSERVER,
    )


class TritonFields(Options, group="triton", effect=SERVERS_OF_TRITON):
    """Triton servers and their clients."""

    triton_server_urls = option("gRPC addresses of Triton servers, host:port,host:port", urls)
    triton_num_clients_per_server = option(
        "an older name of triton_num_clients_per_frontend: the larger of both counts", positive, default=1
    )
    triton_num_models_per_server = option(
        "models per server [default: as many as the servers of this host need to use its GPUs]",
        positive,
        effect=_OF_REPOSITORIES,
    )
    triton_num_frontends_per_model = option(
        "client ranks of each tritonserver that the run starts, like --clients_per_server",
        positive,
        default=1,
        effect=Effect(
            (Use((), TRITON, needs=("server", "tritonserver")),),
            measured=False,
            instead="each worker rank is a frontend: mpirun -n decides",
        ),
    )
    triton_num_clients_per_frontend = option(
        "gRPC clients of each frontend, of the core triton_grpc: 1 for Offline; 2, 4 or 8 for Server",
        positive,
        default=1,
    )
    triton_request_timeout = option(
        "seconds after which the core triton_grpc gives up a request without a complete answer and counts an"
        " error [default: none; a silent server ends the test after --stall_timeout]",
        seconds,
    )
    triton_num_servers = option(
        "tritonserver processes per host"
        " [default: 1 for Offline; for other scenarios one for each model that its GPUs hold]",
        positive,
        effect=used_by(*TRITON, commands=(*STAGES, "run-harness"), measured=False),
    )
    triton_orchestrator = option(
        "one tritonserver whose model starts the other ranks of its engine (MPI_Comm_spawn), instead of one"
        " for each rank; so it is for several such models in a repository",
        boolean,
        default=False,
        effect=_OF_REPOSITORIES,
    )
    triton_skip_server_spawn = option(
        "the servers run already: start none", boolean, default=False, effect=used_by(*TRITON, measured=False)
    )
    triton_grpc_ports = option(
        "where the servers listen: host_0:port_0,port_1|host_1:port_0,port_1", grpc_ports
    )
    triton_model_repo = option(
        "model repositories: this path, then _0, _1, … for each server",
        default="build/triton_model_repo",
        effect=_OF_A_TRITONSERVER,
    )
    triton_text_models = option(
        "also write preprocessing, postprocessing, ensemble and tensorrt_llm_bls, and name the engine's model"
        " tensorrt_llm: for clients that send text",
        boolean,
        default=False,
        effect=_OF_REPOSITORIES,
    )
