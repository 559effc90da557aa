"""One stage of the torch core in a process of its own, so that it can be stopped, and its memory goes with it.

``python -m mpillm.builder.torch_stage quantize MODEL TARGET ALGORITHM``
``python -m mpillm.builder.torch_stage build CHECKPOINT TARGET TP PP EP DTYPE QUANTIZATION [LIMIT:VALUE …]``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from disagg.errors import ConfigError
from mpillm.errors import ExitCode
from mpillm.fields.parsers import flag_dict


def main(argv: Sequence[str]) -> int:
    """Run the stage; its exit code. Progress goes to stdout, bad input to stderr."""

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        stage, source, target, *rest = argv
        if stage == "quantize":
            from mpillm.engine.quantize import quantize

            (algorithm,) = rest
            quantize(Path(source), Path(target), algorithm, progress=say)
        else:
            from mpillm.engine.shards import build

            tp_size, pp_size, ep_size, dtype, quantization, *limits = rest
            sizes = (int(tp_size), int(pp_size), int(ep_size))
            build(source, Path(target), *sizes, dtype, quantization, build_config=flag_dict(",".join(limits)), progress=say)
    except ConfigError as error:
        print(f"mpillm: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
