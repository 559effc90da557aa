"""Findings of `mpillm doctor`: lines, each of one check, with a status and advice."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import disagg
from mpillm.options.columns import indented


class Status(str, enum.Enum):
    """Severity of a finding, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"  # the check could not run; the line has the reason
    WARNING = "warning"  # runs work, slower or with a risk
    FAILURE = "failure"  # some or all runs fail


class World(NamedTuple):
    """The ranks that are checked."""

    nodes: dict[int, str]  # by rank

    def first_ranks(self) -> dict[str, int]:
        """Return the first rank of each node, in the order of these ranks."""
        firsts: dict[str, int] = {}
        for rank, node in sorted(self.nodes.items()):
            firsts.setdefault(node, rank)
        return firsts

    def firsts_of(self, ranks: Container[int]) -> list[int]:
        """Return the members of `ranks` that are the first rank of their node."""
        return [rank for rank in self.first_ranks().values() if rank in ranks]

    def on_node(self, rank: int) -> int:
        """Return how many ranks there are on the node of `rank`."""
        return sum(node == self.nodes[rank] for node in self.nodes.values())


class Verdict(NamedTuple):
    """Result of a check on one rank."""

    status: Status
    text: str
    advice: str = ""  # "": nothing to do


class Line(NamedTuple):
    """Result of a check, with the ranks that it applies to."""

    check: str
    status: Status
    text: str
    advice: str = ""
    ranks: tuple[int, ...] = ()  # empty: all
    figures: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `figures` only if there are any."""
        fields = {
            "check": self.check,
            "status": self.status.value,
            "text": self.text,
            "advice": self.advice,
            "ranks": list(self.ranks),
        }
        return fields | ({"figures": dict(self.figures)} if self.figures else {})


def by_verdict(check: str, verdicts: Mapping[int, Verdict]) -> list[Line]:
    """Return a line for each distinct verdict; a verdict of all ranks lists no ranks. `verdicts`: by rank."""
    ranks: dict[Verdict, list[int]] = {}
    for rank, verdict in sorted(verdicts.items()):
        ranks.setdefault(verdict, []).append(rank)
    return [
        Line(check, *verdict, ranks=() if len(ranks) == 1 else tuple(where))
        for verdict, where in ranks.items()
    ]


F = TypeVar("F")
Check = Callable[[Mapping[int, F], World], list[Line]]


class RankCounts(NamedTuple):
    """Numbers of ranks around one rank."""

    n_here: int  # ranks of its node
    n_ranks: int


def check(
    name: str, *, of_nodes: bool = False, where: Callable[[Any], object] = lambda _: True
) -> Callable[[Callable[[F, RankCounts], Verdict]], Check[F]]:
    """Turn a function that judges one rank into a check.

    `of_nodes`: judges only the first rank of each node. `where`: selects ranks by their facts.
    """

    def decorate(verdict: Callable[[F, RankCounts], Verdict]) -> Check[F]:
        @functools.wraps(verdict)
        def lines(facts: Mapping[int, F], world: World) -> list[Line]:
            ranks = [rank for rank in (world.firsts_of(facts) if of_nodes else facts) if where(facts[rank])]
            counts = {rank: RankCounts(world.on_node(rank), len(world.nodes)) for rank in ranks}
            return by_verdict(name, {rank: verdict(facts[rank], count) for rank, count in counts.items()})

        return lines

    return decorate


def judge(checks: Iterable[Check[F]], facts: Mapping[int, F], world: World) -> list[Line]:
    """Return the lines of several checks of the same facts, by rank."""
    return [line for check in checks for line in check(facts, world)]


def worst(lines: Iterable[Line]) -> Status:
    """Return the worst status."""
    order = list(Status)
    return max((line.status for line in lines), key=order.index, default=Status.OK)


def report_lines(lines: Sequence[Line], nodes: Mapping[int, str] = MappingProxyType({})) -> list[str]:
    """Format lines for a terminal: columns, advice below, counts at the end. `nodes`: by rank."""
    width = max((len(line.check) for line in lines), default=0)
    texts = []
    for line in lines:
        where = f"{disagg.rank_list(line.ranks, nodes)}: " if line.ranks else ""
        head, *more = f"{where}{line.text}".split("\n")
        texts.append(indented(f"  {line.status.value:<8} {line.check:<{width}}  ", head))
        advice = line.advice.split("\n") if line.advice else []
        below = " " * (13 + width)
        texts += [indented(below, text) for text in more]
        texts += [indented(f"{below}{'->' if i == 0 else '  '} ", text) for i, text in enumerate(advice)]
    counts = {status: sum(line.status is status for line in lines) for status in reversed(Status)}
    totals = [f"{n} {_plural(status, n)}" for status, n in counts.items() if n]
    return [*texts, "", f"  {', '.join(totals)}"]


def one_line(line: Line) -> str:
    """Format a line for a failure's message."""
    return f"{line.check}: {line.text}" + (f"; {line.advice}" if line.advice else "")


def size(n_bytes: float) -> str:
    """Format bytes with decimal units: ``64 MB``, ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 999.5 or unit == "TB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.{0 if n_bytes >= 9.95 or unit == 'B' else 1}f} {unit}"


def _plural(status: Status, n: int) -> str:
    return f"{status.value}s" if n > 1 and status in (Status.FAILURE, Status.WARNING) else status.value
