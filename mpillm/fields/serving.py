"""The endpoint that `serve` puts in front of the ranks. The names that vLLM has, too, mean the same."""

from __future__ import annotations

from mpillm.configurator import Field, Options
from mpillm.configurator.parsers import natural, port_or_any, positive, secret
from mpillm.fields.effects import SERVED


class ServingFields(Options):
    """The endpoint that `serve` puts in front of the ranks."""

    host = Field(
        "host",
        "the address to listen at; 0.0.0.0: at all of this machine's",
        default="127.0.0.1",
        effect=SERVED,
        group="serve",
    )
    port = Field(
        "port",
        "the port to listen at; 0: any that is free",
        port_or_any,
        default=8000,
        effect=SERVED,
        group="serve",
    )
    api_key = Field(
        "api_key",
        "the key that clients must send; the environment variable MPILLM_API_KEY hides it from other users",
        secret,
        disallow_argparse=False,
        from_environ="MPILLM_API_KEY",
        effect=SERVED,
        group="serve",
    )
    kv_secret = Field(
        "kv_secret",
        "what context and generation servers of several mpiruns sign the addresses of KV caches with; better"
        " in the environment, as MPILLM_KV_SECRET",
        secret,
        disallow_argparse=False,
        from_environ="MPILLM_KV_SECRET",
        group="serve",
    )
    served_model_name = Field(
        "served_model_name",
        "the model's name in the API, or several with commas between them [default: the model's]",
        effect=SERVED,
        group="serve",
    )
    max_queue_size = Field(
        "max_queue_size",
        "requests without a first token, beyond which clients are told to come again (429)",
        positive,
        default=1024,
        effect=SERVED,
        group="serve",
    )
    perf_metrics_max_requests = Field(
        "perf_metrics_max_requests",
        "how many requests /perf_metrics keeps until it is read; 0: none, as in TensorRT-LLM",
        natural,
        default=0,
        effect=SERVED,
        group="serve",
    )
    max_body_bytes = Field(
        "max_body_bytes",
        "the largest body of a request",
        positive,
        default=1 << 24,
        effect=SERVED,
        group="serve",
    )
    server_role = Field(
        "server_role",
        "this server's part in disaggregated serving over HTTP; worker: each instance of the YAML is a server"
        " of its own; leader: it fronts the YAML's servers",
        choices=("context", "generation", "worker", "leader"),
        effect=SERVED,
        group="serve",
    )
    kv_transfer_timeout_ms = Field(
        "kv_transfer_timeout_ms",
        "how long a context server keeps a KV cache that nobody fetches, and a generation server waits for"
        " one, milliseconds",
        positive,
        default=60_000,
        effect=SERVED,
        group="serve",
    )
