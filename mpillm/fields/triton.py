"""Triton servers, and the clients that talk to them."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.effect import Effect, Use
from mpillm.configurator.parsers import boolean, grpc_ports, positive, seconds, urls
from mpillm.core_names import TRITON
from mpillm.fields.effects import SERVERS_OF_TRITON, used_by


class TritonFields(Options):
    """Triton servers, and the clients that talk to them."""

    triton_server_urls = Field(
        "triton_server_urls",
        "gRPC addresses of Triton servers, host:port,host:port",
        urls,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_num_clients_per_server = Field(
        "triton_num_clients_per_server",
        "an older name of triton_num_clients_per_frontend: the larger of both counts",
        positive,
        default=1,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_num_models_per_server = Field(
        "triton_num_models_per_server",
        "models per server [default: as many as the servers of this host need to use its GPUs]",
        positive,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_num_frontends_per_model = Field(
        "triton_num_frontends_per_model",
        "client ranks of each tritonserver that the run starts, as --clients_per_server",
        positive,
        default=1,
        effect=Effect(
            (Use((), TRITON, needs=("server", "tritonserver")),),
            measured=False,
            instead="each worker rank is a frontend: mpirun -n decides",
        ),
        group="triton",
    )
    triton_num_clients_per_frontend = Field(
        "triton_num_clients_per_frontend",
        "gRPC clients of each frontend, of the core triton_grpc: 1 for Offline; 2, 4 or 8 for Server",
        positive,
        default=1,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_request_timeout = Field(
        "triton_request_timeout",
        "seconds until a request without its whole answer is given up, and counted as an error, by the core"
        " triton_grpc [default: none; a silent server ends the test after --stall_timeout]",
        seconds,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_num_servers = Field(
        "triton_num_servers",
        "tritonserver processes per host"
        " [default: 1 for Offline; for other scenarios one for each model that its GPUs hold]",
        positive,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_orchestrator = Field(
        "triton_orchestrator",
        "one tritonserver whose model starts the other ranks of its engine (MPI_Comm_spawn), instead of one"
        " for each rank; so it is for several such models in a repository",
        boolean,
        default=False,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_skip_server_spawn = Field(
        "triton_skip_server_spawn",
        "the servers run already: start none",
        boolean,
        default=False,
        effect=used_by(*TRITON, measured=False),
        group="triton",
    )
    triton_grpc_ports = Field(
        "triton_grpc_ports",
        "where the servers listen: host_0:port_0,port_1|host_1:port_0,port_1",
        grpc_ports,
        effect=SERVERS_OF_TRITON,
        group="triton",
    )
    triton_model_repo = Field(
        "triton_model_repo",
        "model repositories: this path, then _0, _1, … for each server",
        default="build/triton_model_repo",
        effect=used_by(*TRITON, measured=False),
        group="triton",
    )
    triton_text_models = Field(
        "triton_text_models",
        "write preprocessing, postprocessing, ensemble and tensorrt_llm_bls, too, and name the engine's model"
        " tensorrt_llm: for clients that send text",
        boolean,
        default=False,
        effect=used_by(*TRITON, measured=False),
        group="triton",
    )
