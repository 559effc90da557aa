"""``python -m mpillm serve``: an HTTP endpoint before the ranks, until a signal ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpillm.commands.run import start_rank
from mpillm.config.options import parse_serve

if TYPE_CHECKING:
    from mpillm.run.rank0 import Purpose


def main(argv: Sequence[str]) -> int:
    """On one rank."""
    code, _ = start_rank("serve", argv, parse_serve, _serve, serves=True)
    return code


def _serve() -> Purpose:
    from mpillm.run.serve_session import SERVE

    return SERVE
