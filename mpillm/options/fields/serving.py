"""The endpoint that `serve` puts in front of the ranks. Names that vLLM also has mean the same."""

from __future__ import annotations

from mpillm.options.field import ANY, Effect, Options, Use, option
from mpillm.options.fields.effects import SERVE, SERVED, STAGES
from mpillm.options.parsers import natural, port_or_any, positive, secret


class ServingFields(Options, group="serve", effect=SERVED):
    """The endpoint that `serve` puts in front of the ranks."""

    host = option("address to listen on; 0.0.0.0 means all of this machine's", default="127.0.0.1")
    port = option("port to listen on; 0 means any free one", port_or_any, default=8000)
    api_key = option(
        "the key that clients must send; the environment variable MPILLM_API_KEY hides it from other users",
        secret,
        disallow_argparse=False,
        from_environ="MPILLM_API_KEY",
    )
    kv_secret = option(
        "what context and generation servers of several mpiruns sign the addresses of KV caches with; better"
        " in the environment, as MPILLM_KV_SECRET",
        secret,
        disallow_argparse=False,
        from_environ="MPILLM_KV_SECRET",
        effect=Effect(
            (
                Use((SERVE,), needs=("server_role", ANY)),
                Use(STAGES, needs=("disagg_config", ANY)),  # `run-llm-server` starts such servers
            ),
            measured=False,
        ),
    )
    served_model_name = option(
        "the model's name in the API, or several with commas between them [default: the model's]"
    )
    max_queue_size = option(
        "requests that wait for a first token; beyond this number, clients get status 429 and must retry",
        positive,
        default=1024,
    )
    perf_metrics_max_requests = option(
        "how many requests /perf_metrics keeps until it is read; 0 keeps none, as in TensorRT-LLM",
        natural,
        default=0,
    )
    max_body_bytes = option("the largest body of a request", positive, default=1 << 24)
    server_role = option(
        "this server's part in disaggregated serving over HTTP. worker: each instance of the YAML is a"
        " separate server. leader: it routes to the YAML's servers",
        choices=("context", "generation", "worker", "leader"),
    )
    kv_transfer_timeout_ms = option(
        "milliseconds after which a context server drops an unfetched KV cache, and a generation server stops"
        " waiting for one",
        positive,
        default=60_000,
    )
