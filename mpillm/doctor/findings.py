"""What the doctor says: lines, each of one check, with a status and what to do."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import disagg
from mpillm.options.columns import indented


class Status(str, enum.Enum):
    """How bad it is, from best to worst."""

    OK = "ok"
    SKIPPED = "skipped"  # the check could not be made; the line says why
    WARNING = "warning"  # runs work, slower or with a risk
    FAILURE = "failure"  # runs fail, or some of them


class World(NamedTuple):
    """The ranks that are examined."""

    nodes: dict[int, str]  # by rank

    def first_ranks(self) -> dict[str, int]:
        """Return the first rank of each node, in the order of these ranks."""
        firsts: dict[str, int] = {}
        for rank, node in sorted(self.nodes.items()):
            firsts.setdefault(node, rank)
        return firsts

    def firsts_of(self, ranks: Container[int]) -> list[int]:
        """Return those of `ranks` that are the first ones of their nodes."""
        return [rank for rank in self.first_ranks().values() if rank in ranks]

    def on_node(self, rank: int) -> int:
        """Return how many ranks there are on the node of `rank`."""
        return sum(node == self.nodes[rank] for node in self.nodes.values())


class Verdict(NamedTuple):
    """What a check finds on one rank."""

    status: Status
    text: str
    advice: str = ""  # what to do; "" if there is nothing to be done


class Line(NamedTuple):
    """What a check has found."""

    check: str
    status: Status
    text: str
    advice: str = ""
    ranks: tuple[int, ...] = ()  # where; empty: everywhere
    figures: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return it ready for JSON; `figures` only if there are any."""
        told = {
            "check": self.check,
            "status": self.status.value,
            "text": self.text,
            "advice": self.advice,
            "ranks": list(self.ranks),
        }
        return told | ({"figures": dict(self.figures)} if self.figures else {})


def by_verdict(check: str, verdicts: Mapping[int, Verdict]) -> list[Line]:
    """Return a line for each different verdict; `verdicts`: by rank. One that all share names no ranks."""
    ranks: dict[Verdict, list[int]] = {}
    for rank, verdict in sorted(verdicts.items()):
        ranks.setdefault(verdict, []).append(rank)
    return [
        Line(check, *verdict, ranks=() if len(ranks) == 1 else tuple(where))
        for verdict, where in ranks.items()
    ]


F = TypeVar("F")
Check = Callable[[Mapping[int, F], World], list[Line]]


class Place(NamedTuple):
    """Where a rank is."""

    n_here: int  # ranks of its node
    n_ranks: int


def check(
    name: str, *, of_nodes: bool = False, where: Callable[[Any], object] = lambda _: True
) -> Callable[[Callable[[F, Place], Verdict]], Check[F]]:
    """Make a check of the verdict on a rank: of all `where` something holds, or the first `of_nodes`."""

    def decorate(verdict: Callable[[F, Place], Verdict]) -> Check[F]:
        @functools.wraps(verdict)
        def lines(facts: Mapping[int, F], world: World) -> list[Line]:
            ranks = [rank for rank in (world.firsts_of(facts) if of_nodes else facts) if where(facts[rank])]
            places = {rank: Place(world.on_node(rank), len(world.nodes)) for rank in ranks}
            return by_verdict(name, {rank: verdict(facts[rank], place) for rank, place in places.items()})

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
    """Return the lines for a person: in columns, advice below, and a count at the end.

    `nodes`: by rank.
    """
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
    told = [f"{n} {_plural(status, n)}" for status, n in counts.items() if n]
    return [*texts, "", f"  {', '.join(told)}"]


def one_line(line: Line) -> str:
    """Return a line for a failure's message."""
    return f"{line.check}: {line.text}" + (f"; {line.advice}" if line.advice else "")


def size(n_bytes: float) -> str:
    """``64 MB``, ``1.5 GB``: with decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 999.5 or unit == "TB":
            break
        n_bytes /= 1000
    return f"{n_bytes:.{0 if n_bytes >= 9.95 or unit == 'B' else 1}f} {unit}"


def _plural(status: Status, n: int) -> str:
    return f"{status.value}s" if n > 1 and status in (Status.FAILURE, Status.WARNING) else status.value
