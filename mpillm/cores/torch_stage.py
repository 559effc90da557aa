"""One stage of the torch core in its own process, so that it can be stopped and frees its memory.

``python -m mpillm.cores.torch_stage quantize MODEL TARGET ALGORITHM [CALIBRATION_PROMPTS]``
``python -m mpillm.cores.torch_stage build CHECKPOINT TARGET TP PP EP DTYPE QUANTIZATION [LIMIT:VALUE …]``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.options.parsers import flag_dict


def main(argv: Sequence[str]) -> int:
    """Run the stage; return its exit code. Progress goes to stdout, errors of the input to stderr."""

    def print_line(line: str) -> None:
        print(line, flush=True)

    try:
        stage, source, target, *arguments = argv
        if stage == "quantize":
            from mpillm.engine.weights.quantize import quantize

            algorithm, *n_prompts = arguments
            scales = _calibrated(Path(source), int(n_prompts[0]), print_line) if n_prompts else None
            quantize(Path(source), Path(target), algorithm, kv_scales=scales, progress=print_line)
        else:
            from mpillm.engine.build_engine import build

            tp_size, pp_size, ep_size, dtype, quantization, *limits = arguments
            sizes = (int(tp_size), int(pp_size), int(ep_size))
            build(
                source,
                Path(target),
                *sizes,
                dtype,
                quantization,
                build_config=flag_dict(",".join(limits)),
                progress=print_line,
            )
    except ConfigError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.DONE


def _calibrated(model: Path, n_prompts: int, progress: Callable[[str], object]) -> Any:
    """Return scales for an fp8 KV cache, from prompts that come with mpillm."""
    from mpillm.data.dataset import PromptLimits, load_dataset
    from mpillm.data.tokenizer import load_tokenizer
    from mpillm.engine.calibrate import kv_scales
    from mpillm.engine.shape.read_config import load_model_config

    config = load_model_config(str(model))
    limits = PromptLimits(config.vocab_size, max_seq_len=config.max_position_embeddings)
    dataset = load_dataset(None, load_tokenizer(model), limits)
    prompts = [dataset.sample(i).tolist() for i in range(min(n_prompts, len(dataset)))]
    return kv_scales(model, prompts, len(os.sched_getaffinity(0)), progress)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
