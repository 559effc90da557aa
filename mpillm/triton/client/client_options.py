"""Options of both clients of Triton's LLM models, with the names and tensors of NVIDIA's scripts.

Source: TensorRT-LLM's backend 0.19, inflight_batcher_llm/client.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disagg.errors import ConfigError
from mpillm.data.preprocessed.converted import load_npy
from mpillm.options.command_line import Parser
from mpillm.triton.tensors import PERF_METRICS, tensors

DEFAULT_TIMEOUT_S = 600.0


class TensorOption(NamedTuple):
    """An option that is a tensor of the same name, shape [1, 1]."""

    name: str
    kind: type[Any]
    default: Any
    help: str
    short: str = ""


# A tensor without a default is sent only if its option is set.
TENSOR_OPTIONS = (
    TensorOption("beam_width", np.int32, 1, "beam width", "-b"),
    TensorOption("num_return_sequences", np.int32, None, "sequences to generate", "-n"),
    TensorOption("temperature", np.float32, 1.0, "temperature"),
    TensorOption("repetition_penalty", np.float32, None, "repetition penalty"),
    TensorOption("presence_penalty", np.float32, None, "presence penalty"),
    TensorOption("frequency_penalty", np.float32, None, "frequency penalty"),
    TensorOption("lora_task_id", np.uint64, None, "id of a LoRA adapter"),
    TensorOption("return_log_probs", np.bool_, None, "return log probabilities"),
    TensorOption("return_context_logits", np.bool_, None, "return the prompt's logits"),
    TensorOption("return_generation_logits", np.bool_, None, "return the answer's logits"),
    TensorOption("return_perf_metrics", np.bool_, None, "return times and KV cache blocks of the request"),
    TensorOption("exclude_input_in_output", np.bool_, False, "answers without the prompt"),
)
LOGITS = ("context_logits", "generation_logits")
LOG_PROBS = ("cum_log_probs", "output_log_probs")
_PERF_METRICS = [tensor["name"] for tensor in tensors(PERF_METRICS)]


def client_parser(name: str, description: str, epilog: str) -> Parser:
    """Return a parser with the options of both clients."""
    parser = Parser(
        prog=f"mpillm triton-client {name}",
        description=description,
        epilog=f"example:\n  python -m mpillm triton-client {name} {epilog}",
    )
    parser.add_argument("-u", "--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument(
        "-t",
        "--stream_timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="longest time until an answer is complete",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print each response")
    parser.add_argument("-S", "--streaming", action="store_true", help="one response for each step")
    parser.add_argument("--request_id", default="", help="the request's id")
    parser.add_argument(
        "--lora_path", type=Path, help="folder of an adapter's weights, as hf-lora-convert makes it"
    )
    for option in TENSOR_OPTIONS:
        names = [*([option.short] if option.short else []), f"--{option.name}"]
        if option.kind is np.bool_:
            parser.add_argument(*names, action="store_true", default=option.default, help=option.help)
        else:
            kind = float if option.kind is np.float32 else int
            parser.add_argument(*names, type=kind, default=option.default, help=option.help)
    return parser


def option_tensors(args: argparse.Namespace) -> dict[str, NDArray[Any]]:
    """Return the tensors of `TENSOR_OPTIONS`, and an adapter's weights. Raises ConfigError."""
    values = {option.name: getattr(args, option.name) for option in TENSOR_OPTIONS}
    tensors = {
        option.name: np.array([[values[option.name]]], option.kind)
        for option in TENSOR_OPTIONS
        if values[option.name] is not None
    }
    if args.lora_path is not None:
        tensors["lora_weights"] = load_array(args.lora_path / "model.lora_weights.npy")
        config = args.lora_path / "model.lora_config.npy"
        older = args.lora_path / "model.lora_keys.npy"
        tensors["lora_config"] = load_array(config if config.exists() or not older.exists() else older)
    return tensors


def load_array(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array of a .npy file. Raises ConfigError if it cannot be read."""
    try:
        array = load_npy(Path(path), is_mapped=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{path}: an archive of arrays, not a .npy file")
    return array


def n_sequences(args: argparse.Namespace) -> int:
    """Return the number of answers to each prompt. Raises ConfigError."""
    if args.num_return_sequences is not None and args.beam_width > 1:
        raise ConfigError("--num_return_sequences: cannot be combined with --beam_width above 1; remove one")
    return int(args.num_return_sequences or args.beam_width)


def extra_outputs(args: argparse.Namespace) -> list[str]:
    """Return the names of the requested outputs in addition to the answer itself."""
    requested: Sequence[tuple[bool | None, Sequence[str]]] = (
        (args.return_log_probs, LOG_PROBS),
        (args.return_context_logits, LOGITS[:1]),
        (args.return_generation_logits, LOGITS[1:]),
        (args.return_perf_metrics, _PERF_METRICS),
    )
    return [name for is_requested, names in requested if is_requested for name in names]


def print_extra(response: Mapping[str, NDArray[Any]], names: Sequence[str]) -> None:
    """Print additional outputs in the form of NVIDIA's scripts."""
    for name in names:
        if name not in response:
            continue
        value = response[name]
        if name in _PERF_METRICS:
            print(f"{name}: {value.reshape(-1)[0]}")
        else:
            if name != "cum_log_probs":
                print(f"{name}.shape: {value.shape}")
            print(f"{name}: {value}")
