"""``bench core-model``: load on the engine's model, without text, like benchmark_core_model.py.

The load goes over gRPC or HTTP to a tritonserver. ``-i mpi`` runs the same requests and rate through MPI,
with LoadGen and the embedded engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError
from mpillm.data.tokenizer import load_tokenizer
from mpillm.errors import ExitCode, needs_extra
from mpillm.files import write_json
from mpillm.options import json_output
from mpillm.options.field import option
from mpillm.options.parsers import boolean, not_negative, positive, seconds, shell_args
from mpillm.options.values import Values
from mpillm.runtime.whole_runs import run_once
from mpillm.triton.bench.load_request import LoadRequest, lengths
from mpillm.triton.bench.report import statistics_of, table
from mpillm.triton.client.prompts_file import TOKENS_PER_WORD, read_prompts

WORKLOADS = ("dataset", "token_norm_dist")


class Options(Values, group="benchmark"):
    """Options of ``bench core-model``."""

    workload = option("source of prompts; the option's name may be omitted", choices=WORKLOADS)
    protocol = option("protocol of requests", default="grpc", choices=("grpc", "http", "mpi"), aliases=("i",))
    url = option("address of the server [default: localhost:8001, http 8000]", aliases=("u",))
    tensorrt_llm_model_name = option("the engine's model", default="tensorrt_llm")
    streaming = option(
        "over HTTP, tokens as they come (generate_stream); over gRPC a decoupled model always streams",
        boolean,
        default=False,
        aliases=("decoupled",),
    )
    request_rate = option("requests per second; -1: all simultaneously", float, default=-1.0)
    time_delay_dist = option(
        "times between requests", default="exponential_dist", choices=("exponential_dist", "constant")
    )
    num_requests = option("requests", positive, default=5000)
    concurrency = option("maximum concurrency [default: no limit; http 128]", positive, aliases=("c",))
    max_input_len = option("leave out longer prompts, tokens", positive)
    dataset = option("JSON list of objects with input, instruction and output")
    tokenizer_dir = option("folder of the tokenizer, for a data set")
    tokenizer_type = option("accepted and ignored; the folder determines it", default="auto")
    op_tokens_per_word = option(
        "tokens of an answer for each word of the data set's", float, default=TOKENS_PER_WORD
    )
    input_mean = option("prompt tokens", positive, default=128)
    input_stdev = option("their deviation", not_negative, default=0.0)
    output_mean = option("answer tokens", positive, default=20)
    output_stdev = option("their deviation", not_negative, default=0.0)
    vocab_size = option("random tokens are below this", positive, default=256)
    stream_timeout = option(
        "longest silence of a server with outstanding requests", seconds, default=300.0, aliases=("t",)
    )
    model_path = option("the model, with -i mpi")
    run_options = option("more options of run, as one text, with -i mpi", shell_args, default=())
    ranks = option("ranks of the run, with -i mpi", positive, default=3)
    seed = option("seed of lengths, tokens and arrivals", positive, default=420)
    result_filename = option("write the numbers as JSON to this file")


DESCRIPTION = "Put load on the engine's model behind Triton, like benchmark_core_model.py."
EPILOG = (
    "examples:\n"
    "  python -m mpillm bench core-model -i grpc --request_rate 10 dataset --dataset prompts.json"
    " --tokenizer_dir MODEL_DIR\n"
    "  python -m mpillm bench core-model -i grpc --request_rate 10 token_norm_dist --input_mean 128"
    " --input_stdev 5 --output_mean 20 --output_stdev 2 --num_requests 5000"
)


def normalize_args(args: Sequence[str]) -> list[str]:
    """Return the arguments, with ``--workload`` before a workload that stands alone between the options."""
    names = {arg: arg.replace("-", "_") for arg in args if arg.replace("-", "_") in WORKLOADS}
    return [
        part
        for i, arg in enumerate(args)
        for part in (
            ("--workload", names[arg]) if arg in names and (i == 0 or args[i - 1] != "--workload") else (arg,)
        )
    ]


def main(config: Options) -> int:
    """Print the table; return NOT_READY if the server is not ready, TEST_FAILED if a request fails."""
    if config.workload is None:
        raise ConfigError(f"bench core-model needs one of {', '.join(WORKLOADS)}", about=["workload"])
    if config.protocol == "mpi":
        return _through_mpi(config)
    with needs_extra("bench core-model", "triton"):  # -i mpi does not need it
        from mpillm.triton.bench.load import Target, arrival_times, over_grpc, over_http
        from mpillm.triton.client.end_to_end import PORTS, WARM_UPS
        from mpillm.triton.core.triton_ready import TritonError
    random = np.random.default_rng(config.seed)
    requests = _requests(config, random)
    due = arrival_times(len(requests), config.request_rate, config.time_delay_dist == "constant", random)
    url = config.url or f"localhost:{PORTS[config.protocol]}"
    target = Target(url, config.tensorrt_llm_model_name, config.stream_timeout, config.streaming)
    send = over_grpc if config.protocol == "grpc" else over_http
    at_once = config.concurrency or (len(requests) if config.protocol == "grpc" else 128)
    try:
        print("[INFO] Warm up for benchmarking.", flush=True)
        warm_up = [requests[0]] * min(WARM_UPS, len(requests))
        send(target, warm_up, np.zeros(len(warm_up)), at_once)
        print(f"[INFO] Start benchmarking on {len(requests)} prompts.", flush=True)
        records = send(target, requests, due, at_once)
    except TritonError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.NOT_READY
    statistics = statistics_of(records)
    errors = [record.error for record in records if record.error]
    if statistics["requests"]:
        _report(config, statistics)
    for text in dict.fromkeys(errors[:10]):
        print(f"mpillm: {text}", file=sys.stderr)
    return ExitCode.TEST_FAILED if errors else ExitCode.DONE


def _report(config: Options, statistics: dict[str, Any]) -> None:
    print(f"[INFO] Total Latency: {statistics['total_ms']:.3f} ms")
    if "sum_ms" in statistics:
        print(f"[INFO] Total request latencies: {statistics['sum_ms']:.3f} ms")
    print("\n".join(table(statistics)))
    json_output.set_figures(statistics)
    if config.result_filename:
        write_json(Path(config.result_filename), statistics)


def _requests(config: Options, random: np.random.Generator) -> list[LoadRequest]:
    longest = config.max_input_len or sys.maxsize
    if config.workload == "token_norm_dist":
        inputs = lengths(config.input_mean, config.input_stdev, config.num_requests, random)
        inputs = [n for n in inputs if n <= longest]
        outputs = lengths(config.output_mean, config.output_stdev, len(inputs), random)
        requests = [
            LoadRequest(random.integers(0, config.vocab_size, n).astype(np.int32), output_len)
            for n, output_len in zip(inputs, outputs, strict=True)
        ]
    else:
        if not config.dataset or not config.tokenizer_dir:
            raise ConfigError("dataset needs --dataset FILE and --tokenizer_dir DIR", about=["dataset"])
        tokenizer = load_tokenizer(Path(config.tokenizer_dir), False)
        prompts = read_prompts(Path(config.dataset), config.op_tokens_per_word)
        encoded = zip(tokenizer.encode_batch([prompt.text for prompt in prompts]), prompts, strict=True)
        requests = [
            LoadRequest(np.array(ids, np.int32), prompt.output_len)
            for ids, prompt in encoded
            if len(ids) <= longest
        ][: config.num_requests]
    if not requests:
        raise ConfigError(f"no prompt has at most --max_input_len {longest} tokens", about=["max_input_len"])
    return requests


def _through_mpi(config: Options) -> int:
    """Run the same requests and rate without a server. LoadGen's arrivals are exponential."""
    if config.workload != "token_norm_dist":
        raise ConfigError("-i mpi: only supports the workload token_norm_dist", about=["workload"])
    if config.time_delay_dist == "constant" and config.request_rate > 0:
        raise ConfigError("-i mpi: LoadGen's arrivals are exponential", about=["time_delay_dist"])
    if not config.model_path:
        raise ConfigError("-i mpi needs --model_path", about=["model_path"])
    for name in ("url", "streaming"):
        if config.is_user_set(name):
            raise ConfigError(f"-i mpi: there is no server, so --{name} has no effect", about=[name])
    requests = _requests(config, np.random.default_rng(config.seed))
    with tempfile.TemporaryDirectory(prefix="mpillm-bench-") as folder:
        file = Path(folder) / "requests.jsonl"
        file.write_text("".join(map(_row, requests)), encoding="utf-8")
        values = run_values(config, requests, file)
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        result = run_once(config.ranks, *words, *config.run_options)
    latency = result["latency_ms"]
    statistics = {
        "requests": result["samples"],
        "errors": result["errors"],
        "requests_per_second": result["samples_per_second"],
        "tokens_per_second": result["tokens_per_second"],
        "input_tokens": float(np.mean([len(request.prompt) for request in requests])),
        "output_tokens": result["tokens_per_second"] / result["samples_per_second"],
        "total_ms": 1e3 * result["samples"] / result["samples_per_second"],
        "sum_ms": latency["mean"] * result["samples"],
        # LoadGen measures latency, time to first token, and time per output token after it.
        "latency": latency,
        "ttft": result["ttft_ms"],
        "itl": result["tpot_ms"],
    }
    print(f"[INFO] Start benchmarking on {len(requests)} prompts, through MPI.")
    _report(config, statistics)
    return ExitCode.TEST_FAILED if result["errors"] else ExitCode.DONE


def _row(request: LoadRequest) -> str:
    row = {"input_tokens": request.prompt.tolist(), "output_tokens": request.output_len, "ignore_eos": True}
    return json.dumps(row) + "\n"


def run_values(config: Options, requests: Sequence[LoadRequest], file: Path) -> dict[str, object]:
    """Return the options of a run of the requests in `file`."""
    values: dict[str, object] = {
        "model_path": config.model_path,
        "dataset_path": file,
        "max_output_len": max(request.output_len for request in requests),
        "min_query_count": len(requests),
        "min_duration": 0,
        "seed": config.seed,
        "stall_timeout": config.stream_timeout,
    }
    if config.request_rate > 0:
        values |= {"scenarios": "Server", "server_target_qps": config.request_rate}
    if config.concurrency:
        values["max_batch_size"] = config.concurrency
    return values
