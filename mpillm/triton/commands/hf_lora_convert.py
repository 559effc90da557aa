"""``python -m mpillm hf-lora-convert``: convert a LoRA adapter for requests to Triton."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mpillm.errors import ExitCode


def main(argv: Sequence[str]) -> int:
    """Write the tensors of an adapter, with the names and layout of TensorRT-LLM's hf_lora_convert.py."""
    parser = argparse.ArgumentParser(
        prog="python -m mpillm hf-lora-convert",
        description="Convert a LoRA adapter of PEFT to the tensors that requests to Triton carry.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-i", "--in-file", type=Path, required=True, metavar="DIR", help="the adapter's folder"
    )
    parser.add_argument(
        "-o",
        "--out-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets model.lora_weights.npy and model.lora_config.npy",
    )
    parser.add_argument(
        "--storage-type",
        choices=("float16", "float32"),
        default="float16",
        help="type of the weights; a request carries float16 (default: float16)",
    )
    arguments = parser.parse_args(argv)
    import numpy as np

    from mpillm.triton.peft_adapter import convert

    weights, config = convert(arguments.in_file, arguments.storage_type)
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    np.save(arguments.out_dir / "model.lora_weights.npy", weights)
    np.save(arguments.out_dir / "model.lora_config.npy", config)
    print(f"{config.shape[1]} modules, {weights.nbytes} bytes: {arguments.out_dir}")
    return ExitCode.DONE
