"""``python -m mpillm e2e-test``: TensorRT-LLM's end_to_end_test.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from mpillm.config.values import Values, collect
from mpillm.configurator.command_line import Parser
from mpillm.configurator.parsers import boolean
from mpillm.errors import ExitCode, needs_extra
from mpillm.fields import Field, positive, seconds


class _Options(Values):
    """Options of ``e2e-test``."""

    dataset = Field("dataset", "JSON list of objects with input, instruction and output", group="e2e-test")
    protocol = Field(
        "protocol",
        "how to talk to the server; http only to models that are not decoupled",
        default="grpc",
        choices=("grpc", "http"),
        aliases=("i",),
        group="e2e-test",
    )
    url = Field(
        "url", "address of the server [default: localhost:8001, http 8000]", aliases=("u",), group="e2e-test"
    )
    concurrency = Field(
        "concurrency", "requests at once", positive, default=128, aliases=("c",), group="e2e-test"
    )
    max_input_len = Field(
        "max_input_len", "leave out prompts with more tokens, at 1.3 words each", positive, group="e2e-test"
    )
    test_bls = Field("test_bls", "compare tensorrt_llm_bls, too", boolean, default=False, group="e2e-test")
    model_name = Field("model_name", "the model whose time is taken", default="ensemble", group="e2e-test")
    stream_timeout = Field(
        "stream_timeout",
        "longest time until an answer is complete",
        seconds,
        default=600.0,
        aliases=("t",),
        group="e2e-test",
    )


def main(argv: Sequence[str]) -> int:
    """Check, then measure. Exit code TEST_FAILED: an answer is wrong or missing."""
    parser = Parser(
        prog="mpillm e2e-test",
        description="Check that the ensemble answers as its steps do, then time it on all prompts at once.",
        epilog="example:\n  python -m mpillm e2e-test --dataset prompts.json --max_input_len 500",
    )
    options = collect(argv, _Options, parser)
    if not options.dataset:
        raise ConfigError("e2e-test needs --dataset FILE", about=["dataset"])
    with needs_extra("e2e-test", "triton"):
        from mpillm.nvidia.triton_client.connection import AnswerError
        from mpillm.nvidia.triton_client.end_to_end import PORTS, Differs, Server, check, measure
        from mpillm.nvidia.triton_client.prompts_file import TOKENS_PER_WORD, read_prompts
    most = options.max_input_len
    prompts = [
        prompt
        for prompt in read_prompts(Path(options.dataset))
        if most is None or int(len(prompt.text.split(" ")) / TOKENS_PER_WORD) <= most
    ]
    if not prompts:
        raise ConfigError(f"{options.dataset}: no prompt has at most --max_input_len {most} tokens")
    url = options.url or f"localhost:{PORTS[options.protocol]}"
    server = Server(options.protocol, url, options.stream_timeout)
    models = ["ensemble", *(["tensorrt_llm_bls"] if options.test_bls else [])]
    try:
        print(f"[INFO] Start testing on {len(prompts)} prompts.", flush=True)
        check(server, prompts, models)
        print("[INFO] Functionality test succeed.", flush=True)
        for line in measure(server, prompts, options.model_name, options.concurrency):
            print(line, flush=True)
    except (AnswerError, Differs) as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.TEST_FAILED
    return ExitCode.DONE
