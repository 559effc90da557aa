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
    options = parser().parse_args(argv)
    n = n_sequences(options)
    prompts, expected = _list_of(options.prompt), _expected(options)
    tensors = {**_tensors(options), **option_tensors(options)}
    batches = [prompts] if options.batch_inputs else [[prompt] for prompt in prompts]
    outputs = ["text_output", *extra_outputs(options)]
    outputs += ["sequence_index"] if n > 1 and options.beam_width == 1 else []
    outputs += ["batch_index"] if options.batch_inputs else []
    texts: list[list[str]] = []
    failed = False
    with GrpcConnection(options.url, options.stream_timeout) as connection:
        for batch in batches:
            request = {name: np.repeat(value, len(batch), 0) for name, value in tensors.items()}
            request["text_input"] = np.array([[prompt] for prompt in batch], object)
            answers = [[""] * n for _ in batch]
            try:
                for response in connection.infer(options.model_name, request, outputs, options.request_id):
                    with as_answer(options.url):
                        _add(response, answers, options, outputs)
            except InferError as error:
                print(f"Received an error from server:\n{error}")
                print(f"mpillm: {error}", file=sys.stderr)
                failed = True
            if options.streaming:
                for answer in answers:
                    print("\n".join(answer))
            texts += answers
    if failed:
        return ExitCode.TEST_FAILED
    return _check(options, prompts, texts, expected) if expected is not None else ExitCode.DONE


def _list_of(text: str) -> list[str]:
    """Return the strings of a JSON list, or the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    return [str(item) for item in value] if isinstance(value, list) else [text]


def _expected(options: argparse.Namespace) -> list[str] | None:
    if not options.check_outputs:
        return None
    if options.expected_outputs is None:
        raise ConfigError("--check_outputs needs --expected_outputs")
    return _list_of(options.expected_outputs)


def _tensors(options: argparse.Namespace) -> dict[str, NDArray[Any]]:
    """Return the tensors of this client's options, for every prompt. Raises ConfigError."""
    if len(options.embedding_bias_words) != len(options.embedding_bias_weights):
        raise ConfigError(
            "--embedding_bias_words and --embedding_bias_weights need the same number of values"
        )
    values: dict[str, tuple[Any, Any]] = {
        "max_tokens": (options.output_len, np.int32),
        "stream": (options.streaming, np.bool_),
        "end_id": (options.end_id, np.int32),
        "pad_id": (options.pad_id, np.int32),
        "bad_words": (options.bad_words or None, object),
        "stop_words": (options.stop_words or None, object),
        "embedding_bias_words": (options.embedding_bias_words or None, object),
        "embedding_bias_weights": (options.embedding_bias_weights or None, np.float32),
        "guided_decoding_guide_type": (options.guided_decoding_guide_type, object),
        "guided_decoding_guide": (options.guided_decoding_guide, object),
    }
    return {
        name: np.array([value if isinstance(value, list) else [value]], kind)
        for name, (value, kind) in values.items()
        if value is not None
    }


def _add(
    response: dict[str, NDArray[Any]],
    answers: list[list[str]],
    options: argparse.Namespace,
    outputs: Sequence[str],
) -> None:
    """Add the text of a response to the answers."""

    def index(name: str) -> int:
        return int(response[name].reshape(-1)[0]) if name in response else 0

    batch, first = index("batch_index"), index("sequence_index")
    for beam, raw in enumerate(response["text_output"].reshape(-1)):
        text, sequence = raw.decode("utf-8", "replace"), first + beam
        if options.streaming and not options.overwrite_output_text:
            answers[batch][sequence] += text
        else:
            answers[batch][sequence] = text
        if not options.streaming:
            which = f"{batch} [{sequence}]" if len(answers[batch]) > 1 else f"{batch}"
            print(f"{which}: {text}", flush=True)
        elif sequence == 0:
            print(batch, response["text_output"], flush=True)
    print_extra(response, [name for name in extra_outputs(options) if name != "cum_log_probs"])


def _check(
    options: argparse.Namespace, prompts: list[str], texts: list[list[str]], expected: list[str]
) -> int:
    if len(expected) != len(prompts):
        raise ConfigError(f"--expected_outputs: {len(expected)} answers for {len(prompts)} prompts")
    with_prompt = not options.streaming and not options.exclude_input_in_output
    code = ExitCode.DONE
    for prompt, answers, text in zip(prompts, texts, expected, strict=True):
        expected_text = prompt + text if with_prompt else text
        for answer in answers:
            if answer != expected_text:
                print(f"mpillm: {prompt!r}: expected {expected_text!r}, not {answer!r}", file=sys.stderr)
                code = ExitCode.TEST_FAILED
    return code
