"""``triton-client text``: send prompts to the models around the engine, like end_to_end_grpc_client.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.triton.client.client_options import (
    client_parser,
    extra_outputs,
    n_sequences,
    option_tensors,
    print_extra,
)
from mpillm.triton.client.connection import GrpcConnection, InferError, as_answer

MODELS = ("ensemble", "tensorrt_llm_bls")


def parser() -> Parser:
    """Return a parser with the script's options."""
    result = client_parser(
        "text",
        "Send prompts to the model ensemble or tensorrt_llm_bls, and print the answers.",
        '-o 5 -p \'["This is a test","The cat is"]\' --batch_inputs',
    )
    add = result.add_argument
    add("-p", "--prompt", required=True, help="a prompt, or several as a JSON list")
    add("-o", "--output_len", type=int, default=100, help="tokens of an answer")
    add("--model_name", default="ensemble", choices=MODELS, help="the model")
    add("--batch_inputs", action="store_true", help="one request for all prompts, not one for each")
    add("--stop_words", nargs="+", default=[], help="words that end an answer")
    add("--bad_words", nargs="+", default=[], help="words that must not be in it")
    add("--embedding_bias_words", nargs="+", default=[], help="words with a bias")
    add("--embedding_bias_weights", nargs="+", type=float, default=[], help="their biases")
    add("--end_id", type=int, help="end token")
    add("--pad_id", type=int, help="pad token")
    add("--overwrite_output_text", action="store_true", help="pieces of a stream hold the whole text")
    add("--check_outputs", action="store_true", help="compare the answers; exit code 4 if one differs")
    add("--expected_outputs", help="the answers that --check_outputs expects, as a JSON list")
    add("--guided_decoding_guide_type", help="kind of guide")
    add("--guided_decoding_guide", help="the guide")
    return result


def run(argv: Sequence[str]) -> int:
    """Send the requests; return TEST_FAILED if one fails, or an answer is not the expected one."""
    args = parser().parse_args(argv)
    n = n_sequences(args)
    prompts, expected = _list_of(args.prompt), _expected(args)
    tensors = {**_tensors(args), **option_tensors(args)}
    batches = [prompts] if args.batch_inputs else [[prompt] for prompt in prompts]
    outputs = ["text_output", *extra_outputs(args)]
    outputs += ["sequence_index"] if n > 1 and args.beam_width == 1 else []
    outputs += ["batch_index"] if args.batch_inputs else []
    texts: list[list[str]] = []
    failed = False
    with GrpcConnection(args.url, args.stream_timeout) as connection:
        for batch in batches:
            request = {name: np.repeat(value, len(batch), 0) for name, value in tensors.items()}
            request["text_input"] = np.array([[prompt] for prompt in batch], object)
            answers = [[""] * n for _ in batch]
            try:
                for response in connection.infer(args.model_name, request, outputs, args.request_id):
                    with as_answer(args.url):
                        _add(response, answers, args, outputs)
            except InferError as error:
                print(f"Received an error from server:\n{error}")
                print(f"mpillm: {error}", file=sys.stderr)
                failed = True
            if args.streaming:
                for answer in answers:
                    print("\n".join(answer))
            texts += answers
    if failed:
        return ExitCode.TEST_FAILED
    return _check(args, prompts, texts, expected) if expected is not None else ExitCode.DONE


def _list_of(text: str) -> list[str]:
    """Return the strings of a JSON list, or the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return [str(item) for item in value] if isinstance(value, list) else [text]


def _expected(args: argparse.Namespace) -> list[str] | None:
    if not args.check_outputs:
        return None
    if args.expected_outputs is None:
        raise ConfigError("--check_outputs needs --expected_outputs")
    return _list_of(args.expected_outputs)


def _tensors(args: argparse.Namespace) -> dict[str, NDArray[Any]]:
    """Return the tensors of this client's options, for every prompt. Raises ConfigError."""
    if len(args.embedding_bias_words) != len(args.embedding_bias_weights):
        raise ConfigError(
            "--embedding_bias_words and --embedding_bias_weights need the same number of values"
        )
    values: dict[str, tuple[Any, Any]] = {
        "max_tokens": (args.output_len, np.int32),
        "stream": (args.streaming, np.bool_),
        "end_id": (args.end_id, np.int32),
        "pad_id": (args.pad_id, np.int32),
        "bad_words": (args.bad_words or None, object),
        "stop_words": (args.stop_words or None, object),
        "embedding_bias_words": (args.embedding_bias_words or None, object),
        "embedding_bias_weights": (args.embedding_bias_weights or None, np.float32),
        "guided_decoding_guide_type": (args.guided_decoding_guide_type, object),
        "guided_decoding_guide": (args.guided_decoding_guide, object),
    }
    return {
        name: np.array([value if isinstance(value, list) else [value]], kind)
        for name, (value, kind) in values.items()
        if value is not None
    }


def _add(
    response: dict[str, NDArray[Any]],
    answers: list[list[str]],
    args: argparse.Namespace,
    outputs: Sequence[str],
) -> None:
    """Add the text of a response to the answers."""

    def index(name: str) -> int:
        return int(response[name].reshape(-1)[0]) if name in response else 0

    batch, first = index("batch_index"), index("sequence_index")
    for beam, raw in enumerate(response["text_output"].reshape(-1)):
        text, sequence = raw.decode("utf-8", "replace"), first + beam
        if args.streaming and not args.overwrite_output_text:
            answers[batch][sequence] += text
        else:
            answers[batch][sequence] = text
        if not args.streaming:
            which = f"{batch} [{sequence}]" if len(answers[batch]) > 1 else f"{batch}"
            print(f"{which}: {text}", flush=True)
        elif sequence == 0:
            print(batch, response["text_output"], flush=True)
    print_extra(response, [name for name in extra_outputs(args) if name != "cum_log_probs"])


def _check(args: argparse.Namespace, prompts: list[str], texts: list[list[str]], expected: list[str]) -> int:
    if len(expected) != len(prompts):
        raise ConfigError(f"--expected_outputs: {len(expected)} answers for {len(prompts)} prompts")
    with_prompt = not args.streaming and not args.exclude_input_in_output
    code = ExitCode.DONE
    for prompt, answers, text in zip(prompts, texts, expected, strict=True):
        expected_text = prompt + text if with_prompt else text
        for answer in answers:
            if answer != expected_text:
                print(f"mpillm: {prompt!r}: expected {expected_text!r}, not {answer!r}", file=sys.stderr)
                code = ExitCode.TEST_FAILED
    return code
