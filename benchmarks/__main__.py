"""``python -m benchmarks NAME``"""

import sys
from collections.abc import Sequence

from benchmarks.command import ON_RANKS
from mpillm.cli import main, start


def run(argv: Sequence[str]) -> int:
    """Run a benchmark as mpillm runs a command."""
    name = " ".join(["benchmarks", *argv[:1]])
    return start(name, "benchmarks.command", argv, on_ranks=bool({*argv[:1]} & {*ON_RANKS}))


sys.exit(main(run=run))
