"""``triton-client tokens``: send a request to the engine's model, like inflight_batcher_llm_client.py."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from disagg.text_file import check_file
from mpillm.data.tokenizer import Tokenizer, load_tokenizer, special_tokens
from mpillm.errors import ExitCode
from mpillm.options.command_line import Parser
from mpillm.triton.client.client_options import (
    client_parser,
    extra_outputs,
    load_array,
    n_sequences,
    option_tensors,
    print_extra,
)
from mpillm.triton.client.connection import CANCELLED, GrpcConnection, InferError, Secure, StopSpec, as_answer

_MAX_PRINTED = 256  # tokens of a sequence
_DTYPES = {"float16": np.float16, "float32": np.float32}


def parser() -> Parser:
    """Return a parser with the script's options."""
    result = client_parser(
        "tokens",
        "Send a request to the tensorrt_llm model, and print the answer.",
        "--request_output_len 200 --tokenizer_dir MODEL_DIR",
    )
    add = result.add_argument
    add("--text", default="Born in north-east France, Soyer trained as a", help="the prompt")
    add("--tokenizer_dir", type=Path, help="folder of the tokenizer")
    add("--tokenizer_type", default="auto", help="accepted and ignored; the folder determines it")
    add("--input_tokens_csv", type=Path, help="the prompt's tokens, instead of a text")
    add("--draft_tokens_csv", type=Path, help="tokens of a draft")
    add("--output_tokens_csv", type=Path, help="the tokens that --check_output expects")
    add("-c", "--check_output", action="store_true", help="compare the answer; exit code 4 if it differs")
    add("--correctness_threshold", type=float, default=1.0, help="part of the tokens that must be equal")
    add("--end_id", type=int, default=-1, help="end token, without a tokenizer")
    add("--pad_id", type=int, default=50256, help="pad token, without a tokenizer")
    add("--request_output_len", type=int, default=16, help="tokens of the answer")
    add("--stop_after_ms", type=int, default=0, help="stop after so many milliseconds")
    add("--stop_via_request_cancel", action="store_true", help="stop by cancelling the gRPC request")
    add("--top_k", type=int, default=1, help="top k")
    add("--top_p", type=float, default=0.0, help="top p")
    add("--prompt_embedding_table_path", type=Path, help="table of p-tuning (.npy)")
    add("--prompt_task_id", type=int, default=0, help="the task in that table")
    add("--prompt_table_extra_id", type=int, help="id of the table, for KV cache reuse")
    add("--vocab_size", type=int, help="size of the vocabulary, for --prompt_table_extra_id")
    add("--dtype", default="float16", choices=[*_DTYPES], help="of the table")
    add("--lookahead_config", type=_numbers, help="[window size, n-gram size, verification set size]")
    add("--requested_outputs", nargs="+", default=[], help="names of the outputs to return")
    add("--model_name", default="tensorrt_llm", help="the model")
    add("-s", "--ssl", action="store_true", help="an encrypted connection")
    add("-r", "--root_certificates", help="file of root certificates (PEM)")
    add("-p", "--private_key", help="file of the private key (PEM)")
    add("-x", "--certificate_chain", help="file of the certificate chain (PEM)")
    add("-C", "--grpc_compression_algorithm", metavar="NAME", help="gzip or deflate")
    return result


def run(argv: Sequence[str]) -> int:
    """Send the request; return TEST_FAILED if it fails, or its answer is not the expected one."""
    args = parser().parse_args(argv)
    n = n_sequences(args)
    if args.requested_outputs and "output_ids" not in args.requested_outputs:
        raise ConfigError("--requested_outputs: output_ids must be one of them")
    tokenizer = load_tokenizer(args.tokenizer_dir, False) if args.tokenizer_dir else None
    prompt = _prompt(args, tokenizer)
    expected = _tokens_of(args.output_tokens_csv) if args.output_tokens_csv else None
    if args.check_output and expected is None:
        raise ConfigError("--check_output needs --output_tokens_csv")
    tensors = {**_tensors(args, prompt), **option_tensors(args)}
    stop = (
        StopSpec(args.stop_after_ms / 1e3, args.stop_via_request_cancel) if args.stop_after_ms > 0 else None
    )
    secure = Secure(args.root_certificates, args.private_key, args.certificate_chain) if args.ssl else None
    answer = _TokenResponse(n, [] if args.exclude_input_in_output or not args.streaming else prompt)
    try:
        compression = args.grpc_compression_algorithm
        with GrpcConnection(args.url, args.stream_timeout, secure, compression) as connection:
            for response in connection.infer(
                args.model_name, tensors, args.requested_outputs, args.request_id, stop
            ):
                with as_answer(args.url):
                    answer.add(response, args.streaming)
    except InferError as error:
        if error.status != CANCELLED:
            print(f"Received an error from server:\n{error}")
            print(f"mpillm: {error}", file=sys.stderr)
            return ExitCode.TEST_FAILED
        print("Request is cancelled")
    answer.print(args, tokenizer, 0 if args.exclude_input_in_output else len(prompt))
    if stop and any(
        len(tokens) - len(answer.begin) >= args.request_output_len for tokens in answer.tokens if tokens
    ):
        print("mpillm: the request had ended before it was stopped", file=sys.stderr)
    return _check(args, answer.tokens[0], expected) if expected is not None else ExitCode.DONE


class _TokenResponse:
    """Sequences of an answer, with the tokens so far."""

    def __init__(self, n: int, begin: list[int]) -> None:
        self.begin = begin
        self.tokens = [[*begin] for _ in range(n)]
        self._extra: dict[str, list[NDArray[Any]]] = {}

    def add(self, response: Mapping[str, NDArray[Any]], streaming: bool) -> None:
        """Add a response of the server. It is empty after a stop."""
        if not streaming:
            print("Got completed request", flush=True)
        if "output_ids" not in response:
            print("Got cancellation response from server")
            return
        ids, lengths = response["output_ids"][0], response.get("sequence_length")
        index = int(response["sequence_index"].reshape(-1)[0]) if "sequence_index" in response else 0
        for beam, row in enumerate(ids):
            length = len(row) if lengths is None else int(lengths.reshape(-1)[beam])
            self.tokens[index + beam] += row[:length].tolist()
        if streaming and index == 0 and ids.size:
            print(ids[0].tolist(), flush=True)
        for name, value in response.items():
            self._extra.setdefault(name, []).append(value)

    def print(self, args: argparse.Namespace, tokenizer: Tokenizer | None, n_prompt: int) -> None:
        for beam, tokens in enumerate(self.tokens):
            if tokenizer is not None:
                print(f"Input: {args.text}")
                print(f"Output beam {beam}: {tokenizer.decode(tokens[n_prompt:], keep_special=True)}")
            _print_sequence("Output", tokens)
        last = {name: values[-1] for name, values in self._extra.items()}
        print_extra(last, extra_outputs(args))


def _print_sequence(title: str, tokens: list[int]) -> None:
    begins = " starts with" if len(tokens) > _MAX_PRINTED else ""
    print(f"{title} sequence{begins}: ", tokens[:_MAX_PRINTED])


def _prompt(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[int]:
    """Return the prompt's tokens, and set `end_id` and `pad_id` from the tokenizer. Raises ConfigError."""
    if args.input_tokens_csv:
        tokens = _tokens_of(args.input_tokens_csv)
    elif tokenizer is None:
        raise ConfigError("triton-client tokens needs --tokenizer_dir or --input_tokens_csv")
    else:
        special = special_tokens(args.tokenizer_dir)
        if end := special.get("eos_token"):
            (args.end_id, *_) = tokenizer.encode_plain(end)
            (args.pad_id, *_) = tokenizer.encode_plain(special.get("pad_token") or end)
        print("Using pad_id: ", args.pad_id)
        print("Using end_id: ", args.end_id)
        tokens = tokenizer.encode_text(args.text)
    _print_sequence("Input", tokens)
    return tokens


def _tokens_of(path: Path) -> list[int]:
    """Return the tokens in the first line of a CSV file. Raises ConfigError."""
    check_file(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            tokens = [int(word) for word in next(csv.reader(file), [])]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: {str(error)[:200]}") from None
    if wrong := [token for token in tokens if not -(1 << 31) <= token < 1 << 31]:
        raise ConfigError(f"{path}: {str(wrong[0])[:40]} is not a token id; expected a 32-bit integer")
    return tokens


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.strip("[]").split(",")]


def _tensors(args: argparse.Namespace, prompt: list[int]) -> dict[str, NDArray[Any]]:
    """Return the tensors of this client's options. Raises ConfigError."""

    def one(value: Any, kind: type[Any] = np.int32) -> NDArray[Any]:
        return np.array([[value]], kind)

    tensors = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": one(len(prompt)),
        "request_output_len": one(args.request_output_len),
        "streaming": one(args.streaming, np.bool_),
        "end_id": one(args.end_id),
        "pad_id": one(args.pad_id),
        "runtime_top_k": one(args.top_k),
        "runtime_top_p": one(args.top_p, np.float32),
    }
    if args.draft_tokens_csv:
        tensors["draft_input_ids"] = np.array([_tokens_of(args.draft_tokens_csv)], np.int32)
    if args.prompt_embedding_table_path:
        table = load_array(args.prompt_embedding_table_path)[args.prompt_task_id]
        tensors["prompt_embedding_table"] = table.astype(_DTYPES[args.dtype])[None]
        tensors["prompt_vocab_size"] = one(len(table))
    if args.prompt_table_extra_id is not None:
        if not args.vocab_size:
            raise ConfigError("--prompt_table_extra_id needs --vocab_size")
        virtual = tensors["input_ids"] >= args.vocab_size
        tensors["prompt_table_extra_ids"] = np.where(virtual, args.prompt_table_extra_id, 0).astype(np.uint64)
    if args.lookahead_config:
        names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
        if len(args.lookahead_config) != len(names):
            raise ConfigError("--lookahead_config: expected three numbers, such as [7,7,7]")
        tensors |= {name: one(value) for name, value in zip(names, args.lookahead_config, strict=True)}
    return tensors


def _check(args: argparse.Namespace, tokens: list[int], expected: list[int]) -> int:
    """Compare an answer with the expected tokens; below a threshold of 1, by the fraction of equal tokens."""
    if args.correctness_threshold == 1:
        passed = tokens == expected
    else:
        rate = sum(a == b for a, b in zip(tokens, expected, strict=False)) / max(1, len(expected))
        print(f"Output token matching rate: {rate}")
        passed = rate > args.correctness_threshold
    print(f"expected_output_ids =  {expected}\n\n=====\n{'PASS!' if passed else 'FAIL!'}\n=====")
    return ExitCode.DONE if passed else ExitCode.TEST_FAILED
