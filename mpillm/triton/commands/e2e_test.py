"""``python -m mpillm e2e-test``: TensorRT-LLM's end_to_end_test.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from mpillm.errors import ExitCode, needs_extra
from mpillm.options.command_line import Parser
from mpillm.options.field import option
from mpillm.options.parsers import boolean, positive, seconds
from mpillm.options.values import Values, collect


class _Options(Values, group="e2e-test"):
    """Options of ``e2e-test``."""

    dataset = option("JSON list of objects with input, instruction and output")
    protocol = option(
        "how to talk to the server; http only to models that are not decoupled",
        default="grpc",
        choices=("grpc", "http"),
        aliases=("i",),
    )
    url = option("address of the server [default: localhost:8001, http 8000]", aliases=("u",))
    concurrency = option("concurrent requests", positive, default=128, aliases=("c",))
    max_input_len = option("leave out prompts with more tokens, at 1.3 words each", positive)
    test_bls = option("also compare tensorrt_llm_bls", boolean, default=False)
    model_name = option("the model to time", default="ensemble")
    stream_timeout = option(
        "longest time until an answer is complete", seconds, default=600.0, aliases=("t",)
    )


def main(argv: Sequence[str]) -> int:
    """Check, then measure. Exit code TEST_FAILED: an answer is wrong or missing."""
    parser = Parser(
        prog="mpillm e2e-test",
        description="Check that the ensemble answers as its steps do, then time it on all prompts.",
        epilog="example:\n  python -m mpillm e2e-test --dataset prompts.json --max_input_len 500",
    )
    options = collect(argv, _Options, parser)
    if not options.dataset:
        raise ConfigError("e2e-test needs --dataset FILE", about=["dataset"])
    with needs_extra("e2e-test", "triton"):
        from mpillm.triton.client.connection import InferError
        from mpillm.triton.client.end_to_end import PORTS, Differs, ServerAddress, check, measure
        from mpillm.triton.client.prompts_file import TOKENS_PER_WORD, read_prompts
    max_len = options.max_input_len
    prompts = [
        prompt
        for prompt in read_prompts(Path(options.dataset))
        if max_len is None or int(len(prompt.text.split(" ")) / TOKENS_PER_WORD) <= max_len
    ]
    if not prompts:
        raise ConfigError(f"{options.dataset}: no prompt has at most --max_input_len {max_len} tokens")
    url = options.url or f"localhost:{PORTS[options.protocol]}"
    server = ServerAddress(options.protocol, url, options.stream_timeout)
    models = ["ensemble", *(["tensorrt_llm_bls"] if options.test_bls else [])]
    try:
        print(f"[INFO] Start testing on {len(prompts)} prompts.", flush=True)
        check(server, prompts, models)
        print("[INFO] Functionality test succeed.", flush=True)
        for line in measure(server, prompts, options.model_name, options.concurrency):
            print(line, flush=True)
    except (InferError, Differs) as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.TEST_FAILED
    return ExitCode.DONE
