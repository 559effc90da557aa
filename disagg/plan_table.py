"""A world plan as text for a terminal, to check before using a cluster."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # every command imports this module for `rank_list`
    from .world_plan import InstancePlan, RankPlan, WorldPlan

_MAX_ROWS = 64  # of a table; longer tables are condensed
_MAX_HOSTS = 8  # in a list of ranks
_WIDTH = 80
_RIGHT = ("rank", "inst", "tp", "pp", "ep", "device", "ranks", "slots", "control", "ctx", "gen", "executor")
_T = TypeVar("_T")


def table(plan: WorldPlan) -> str:
    """Return the plan in aligned columns.

    The table has one row per rank. Above 64 ranks, it has rows of instances and of nodes, with equal
    neighbors in one row.
    """
    nodes = {rank.node for rank in plan.ranks}
    roles = Counter(instance.role for instance in plan.instances)
    n_workers = sum(len(instance.ranks) for instance in plan.instances)
    n_control = sum(_is_control(rank) for rank in plan.ranks)
    n_groups = sum(len(instance.tp_groups) for instance in plan.instances)
    owners = f"{_many(n, 'owner')} of context servers, " if (n := plan.n_context_servers) else ""
    head = (
        f"{_many(plan.world_size, 'rank')} on {_many(len(nodes), 'node')}: "
        f"{n_control} control, {owners}{_many(n_workers, 'worker')}; "
        f"{', '.join(_many(n, f'{role} instance') for role, n in roles.items())}"
    )
    lines = textwrap.wrap(head, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if n_groups != n_workers:
        splits = plan.tp_splits
        lines.append(
            f"{_many(n_groups, 'TP group')}, "
            + (f"{_many(splits, 'unavoidable split')} over nodes" if splits else "none over several nodes")
        )
    tables = (
        [_rank_rows(plan.ranks)]
        if plan.world_size <= _MAX_ROWS
        else [_control_rows(plan), _instance_rows(plan), _node_rows(plan)]
    )
    return "\n".join(["\n".join(lines), *map(_aligned, tables)]) + "\n"


def _rank_rows(ranks: Iterable[RankPlan]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("rank", "node", "device", "roles", "inst", "tp", "pp", "ep")]
    for r in ranks:
        rows.append(
            (r.rank, r.node, _devices(r), "+".join(r.roles), r.instance, r.tp_rank, r.pp_rank, r.ep_rank)
        )
    return rows


def _devices(rank: RankPlan) -> object:
    return ranges(rank.server_devices) if rank.server_devices else rank.device


def _control_rows(plan: WorldPlan) -> list[Sequence[object]]:
    return [
        ("rank", "node", "roles"),
        *((r.rank, r.node, "+".join(r.roles)) for r in plan.ranks if r.instance is None),
    ]


def _is_control(rank: RankPlan) -> bool:
    return rank.instance is None and rank.server is None


def _instance_rows(plan: WorldPlan) -> list[Sequence[object]]:
    def nodes(instance: InstancePlan) -> list[str]:
        return list(dict.fromkeys(plan.ranks[rank].node for rank in instance.ranks))

    def shape(i: InstancePlan) -> tuple[object, ...]:
        return i.role, i.tp_size, i.pp_size, i.ep_size, len(nodes(i))

    header = ("instances", "role", "tp", "pp", "ep", "ranks", "nodes")
    rows = []
    for run in _condensed(plan.instances, shape, lambda i: (*shape(i), *nodes(i))):
        first = run[0]
        on = list(dict.fromkeys(node for instance in run for node in nodes(instance)))
        ranks = ranges((rank for instance in run for rank in instance.ranks), max_ranges=4)
        rows.append(
            (
                _span(first.index, run[-1].index),
                first.role,
                first.tp_size,
                first.pp_size,
                first.ep_size,
                ranks,
                _ends(on),
            )
        )
    return [header, *rows]


def _node_rows(plan: WorldPlan) -> list[Sequence[object]]:
    roles = list(dict.fromkeys(rank.roles[-1] for rank in plan.ranks if not _is_control(rank)))
    on_node: dict[str, Counter[str]] = {}
    for rank in plan.ranks:
        on_node.setdefault(rank.node, Counter())["control" if _is_control(rank) else rank.roles[-1]] += 1

    def content(node: str) -> tuple[int, ...]:
        return tuple(on_node[node][kind] for kind in ("control", *roles))

    runs = _condensed(list(on_node), content, lambda node: (node,))
    return [
        ("nodes", "slots", "control", *roles),
        *((_ends(run), sum(content(run[0])), *content(run[0])) for run in runs),
    ]


def _condensed(
    items: Sequence[_T], like: Callable[[_T], object], same: Callable[[_T], object]
) -> list[list[_T]]:
    """Group consecutive items with equal `same`. If that makes too many rows, group them by `like`."""
    runs = [list(run) for _, run in groupby(items, same)]
    return runs if len(runs) <= _MAX_ROWS else [list(run) for _, run in groupby(items, like)]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def ranges(numbers: Iterable[int], separator: str = ",", max_ranges: int | None = None) -> str:
    """Return unordered numbers as text, such as `2-9,12`. After `max_ranges` ranges, an ellipsis follows."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return separator.join(
        [
            *(_span(*run) for run in runs[:max_ranges]),
            *(["..."] if len(runs[:max_ranges]) < len(runs) else []),
        ]
    )


def rank_list(ranks: Iterable[int], hosts: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return `rank 3`, or `ranks 1-4, 7`. If `hosts` (by rank) has several hosts, add the ranks' hosts.

    `host h3 (ranks 4-5)` means all ranks of a host, and `rank 2 on h2` one of its ranks. A rank that has not
    joined has no host, or "".
    """
    names = [host for host in hosts.values() if host]
    if len(set(names)) < 2:
        return _ranks(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    texts = []
    for host, some in by_host.items():
        is_complete = len(some) > 1 and len(some) == names.count(host)
        text = _ranks(some)
        texts.append(
            f"host {host} ({text})" if host and is_complete else f"{text} on {host}" if host else text
        )
    if len(texts) > _MAX_HOSTS:
        texts[_MAX_HOSTS:] = [f"ranks on {len(texts) - _MAX_HOSTS} more hosts"]
    return " and ".join(filter(None, ["; ".join(texts[:-1]), *texts[-1:]]))


def _ranks(ranks: Iterable[int]) -> str:
    some = set(ranks)
    return f"rank{'s' if len(some) > 1 else ''} {ranges(some, ', ')}"


def _ends(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ",".join(names)
    return f"{names[0]} ... {names[-1]} ({len(names)})"


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _aligned(rows: Sequence[Sequence[object]]) -> str:
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [title in _RIGHT for title in cells[0]]
    lines = (
        "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )
    return "\n" + "\n".join(lines)
