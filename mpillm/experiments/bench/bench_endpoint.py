"""``bench endpoint``: a load test of a server over HTTP, or (``--null``) of the client itself."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from disagg.errors import ConfigError, about
from launch.default_paths import RUNS
from launch.environment import clean_environment
from mpillm.cores.openai_client.dialect import Sampling
from mpillm.cores.openai_client.endpoint import EndpointError
from mpillm.cores.openai_client.server_counts import grown
from mpillm.data.dataset import Dataset, PromptLimits, Synthetic, load_dataset, unused_lengths
from mpillm.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from mpillm.errors import ExitCode
from mpillm.experiments.loadtest.endpoint_client import EndpointClient
from mpillm.experiments.loadtest.endpoint_page import endpoint_page
from mpillm.experiments.loadtest.load_test import LoadTest, Record, arrivals
from mpillm.experiments.loadtest.serving_report import DETAILS, judged, numbers, table, verdict_lines
from mpillm.experiments.warm_cache import warning
from mpillm.files import write_json, write_text
from mpillm.options import json_output
from mpillm.options.columns import indented
from mpillm.options.field import option
from mpillm.options.fields.data import GenerationFields
from mpillm.options.fields.deadlines import DeadlineFields
from mpillm.options.fields.model import ModelFields
from mpillm.options.fields.results import OutputFields
from mpillm.options.latency_limits import ARGPARSE_OPTIONS, limits_ms
from mpillm.options.parsers import boolean, one_or_more, positive, rate, seconds
from mpillm.options.values import Values
from mpillm.report.run_directory import display_path, series_folder

# Defaults of a test, and with --null.
_TEST: dict[str, Any] = {"num_prompts": 1000, "max_concurrency": None, "input_len": 1024.0, "output_len": 128}
_NULL: dict[str, Any] = {"num_prompts": 20_000, "max_concurrency": 64, "input_len": 128.0, "output_len": 16}
_END_S = 10.0  # for the server of --null
_BUSY = 0.8  # of a CPU core; a busier client may limit the result


class Options(Values, group="benchmark"):
    """Options of ``bench endpoint``."""

    url = option("the server: host:port, or a URL of http or https")
    null = option(
        "start a server whose answers cost nothing, to measure the client itself", boolean, default=False
    )
    model = option("the model's name at the server [default: the only one]")
    model_path = ModelFields.model_path.but(
        "a folder with the model's tokenizer, for text", group="benchmark"
    )
    dataset_path = option("JSONL with prompts [default: random tokens]")
    num_prompts = option("requests [default: 1000; with --null 20000]", positive)
    input_len = option("tokens of a random prompt [default: 1024; with --null 128]", one_or_more)
    output_len = option("tokens of an answer [default: 128; with --null 16]", positive)
    ignore_eos = option("answers don't stop at an end token", boolean, default=True)
    temperature = GenerationFields.temperature.but("0 is greedy", default=0.0, group="benchmark")
    request_rate = option("requests per second [default: all simultaneously]", rate)
    burstiness = option(
        "shape of the gamma distribution of intervals: 1 is a Poisson process, less is more bursty",
        rate,
        default=1.0,
    )
    max_concurrency = option("maximum concurrent requests [default: no limit; with --null 64]", positive)
    num_warmups = option("requests before the test", positive, default=8)
    goodput = option(
        "count requests within these limits, ms: ttft:500 tpot:50 e2el:10000",
        limits_ms,
        argparse_opts=ARGPARSE_OPTIONS,
    )
    metric_percentiles = option("percentiles of latencies, separated by commas", default="99")
    seed = option("seed of arrivals and random prompts", positive, default=1)
    ready_deadline = option("longest time until the server is ready", seconds, default=60.0)
    cache_salt = option(
        "test: requests share cached prompts only with requests of this test", choices=("test",)
    )
    stall_timeout = DeadlineFields.stall_timeout.but(
        "longest silence of a server with outstanding requests", default=300.0, group="benchmark"
    )
    result_filename = option("write the result as JSON to this file")
    log_dir = OutputFields.log_dir.but(
        f"folder for the page [default: {RUNS}/TIME-endpoint]", group="benchmark"
    )
    save_detailed = option("also write the latencies and texts of each request", boolean, default=False)


DESCRIPTION = "Put load on an OpenAI-compatible server, and report like `vllm bench serve`."
EPILOG = (
    "examples:\n"
    "  python -m mpillm bench endpoint --url localhost:8000 --request_rate 10 --goodput ttft:500 tpot:50\n"
    "  python -m mpillm bench endpoint --null"
)


def main(config: Options) -> int:
    """Print the table. Return NOT_READY if the server is not ready, TEST_FAILED if a request fails."""
    if bool(config.url) == config.null:
        raise ConfigError("bench endpoint needs one of --url URL and --null")
    limits = config.goodput or {}
    percentiles = _percentiles(config.metric_percentiles)
    values = dict(_NULL if config.null else _TEST)
    values |= {name: config.values[name] for name in values if config.values[name] is not None}
    folder = Path(config.model_path) if config.model_path else None
    tokenizer = (
        load_tokenizer(folder, apply_chat_template=True) if folder else NoTokenizer("without --model_path")
    )
    dataset = _dataset(config, tokenizer, values)
    try:
        with null_server() if config.null else contextlib.nullcontext(config.url or "") as url:
            result, test = _measure(config, url, tokenizer, dataset, values)
    except EndpointError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.NOT_READY
    result |= numbers(test.records, result["duration"], percentiles, limits)
    result |= judged(test.records, limits)
    lines = list(table(result, percentiles, config.request_rate, values["max_concurrency"]))
    print("\n".join(lines))
    for line in (verdict := verdict_lines(result)):
        print(line)
    busy = result["client_busy_fraction"]
    print(f"{'The client used, % of a core:':<40} {100 * busy:<10.0f}")
    if busy > _BUSY and not config.null:
        print("The client is near its limit: the server may be faster than this.")
    random_prompts = not config.dataset_path
    text = warning(result["cached_prompt_share"], random_prompts=random_prompts, of_run=False)
    if text and not (config.null or config.cache_salt):
        print(indented("warning: ", text))
    if dataset.note and not config.null:
        print(f"data set {dataset.name}:\n  {dataset.note}")
    saved = {name: value for name, value in result.items() if config.save_detailed or name not in DETAILS}
    json_output.set_figures(saved)
    if config.result_filename:
        write_json(Path(config.result_filename), saved)
    folder = series_folder(config.log_dir, "endpoint")
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "endpoint.html"
    write_text(page, endpoint_page(config.url or "--null", result, test.records, lines, verdict))
    print(f"page  {display_path(page)}")
    errors = [error for error in result["errors"] if error]
    for text in dict.fromkeys(errors[:10]):
        print(f"mpillm: {text}", file=sys.stderr)
    return ExitCode.TEST_FAILED if errors else ExitCode.DONE


def _measure(
    config: Options, url: str, tokenizer: Tokenizer, dataset: Dataset, values: dict[str, Any]
) -> tuple[dict[str, Any], LoadTest]:
    """Return the load and its duration as keys of the result, and the test with its records."""
    n, at_once = values["num_prompts"], values["max_concurrency"]
    prompts = [dataset.sample(i % len(dataset)) for i in range(n)]
    sampling = Sampling(
        values["output_len"],
        temperature=config.temperature,
        seed=config.seed,
        ignore_eos=config.ignore_eos,
        cache_salt=secrets.token_hex(8) if config.cache_salt else "",
    )
    due = arrivals(n, config.request_rate, config.burstiness, np.random.default_rng(config.seed))
    first = prompts[: config.num_warmups]
    warm_up = LoadTest(first, np.zeros(len(first)), sampling, at_once)
    test = LoadTest(prompts, due, sampling, at_once)
    with EndpointClient(
        url, tokenizer, config.model, config.model_path, config.ready_deadline, config.stall_timeout
    ) as client:
        client.run(warm_up)
        before, cpu_s = client.server_counts(), client.cpu_s()
        duration = client.run(test)
        busy = (client.cpu_s() - cpu_s) / duration
        share = _cached_share(test.records, grown([before], [client.server_counts()]))
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": client.endpoint.model,
        "tokenizer_id": config.model_path,
        "num_prompts": n,
        "request_rate": config.request_rate or "inf",
        "burstiness": config.burstiness,
        "max_concurrency": at_once,
        "duration": duration,
        "client_busy_fraction": busy,
        "cached_prompt_share": share,
    }, test


def _cached_share(records: Sequence[Record], counts: Mapping[str, float]) -> float | None:
    """Return the cached share of the prompt tokens: by the server's responses, or its counts; None: unknown.

    `counts`: growth of the server's counts in the test, for all its clients.
    """
    pairs = [one.counted for one in records if not one.error]
    if pairs and None not in pairs:
        prompts, cached = map(sum, zip(*filter(None, pairs), strict=True))
        return round(cached / prompts, 4) if prompts else None
    counted = counts.get("prompt_tokens"), counts.get("cached_tokens")
    return None if not counted[0] or counted[1] is None else round(counted[1] / counted[0], 4)


def _dataset(config: Options, tokenizer: Tokenizer, values: dict[str, Any]) -> Dataset:
    length = values["output_len"]
    if config.dataset_path:
        dataset = load_dataset(Path(config.dataset_path), tokenizer, PromptLimits(max_output_len=length))
        if dataset.output_lengths is not None:
            print(f"mpillm: {unused_lengths(dataset)}", file=sys.stderr)
        return dataset
    n = min(values["num_prompts"], 1000)  # repeated random prompts do not change the result
    source = Synthetic(values["input_len"], length, num_samples=n, seed=config.seed)
    return load_dataset(source, tokenizer)


@about("metric_percentiles")
def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(word) for word in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"--metric_percentiles {text}: expected numbers from 0 to 100, such as 50,99")
    return percentiles


@contextlib.contextmanager
def null_server(module: str = "mpillm.experiments.bench.null_server", *args: str) -> Iterator[str]:
    """Yield the URL of a server that computes nothing, in another process, which ends with this one.

    `module`, `args`: a program that prints its URL, and ends when its standard input ends.
    """
    command = [sys.executable, "-m", module, *args]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean_environment(os.environ), **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise EndpointError(f"{' '.join(command)} ended before it listened")
            yield url
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
