"""How rank 0 detects that its own host has lost the network, not all other hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from disagg import rank_list
from launch.interfaces import interfaces, is_local


def own_network_lost(
    hosts: Mapping[int, str],
    expected: Collection[int],
    silent: Collection[int],
    has_link: Callable[[], bool],
) -> str:
    """Return the cause if all ranks of the other hosts are silent, and none here; "" if not.

    If there is only one other host, that host may have lost its network, unless this host has no link.

    Args:
        hosts: hosts of the ranks that have joined, by rank.
        expected: the ranks that have not ended.
        silent: the ranks without a heartbeat.
        has_link: returns whether this host has a link to other hosts.
    """
    others = {rank for rank in expected if hosts.get(rank) and hosts[rank] != hosts.get(0)}
    n_hosts = len({hosts[rank] for rank in others})
    if not others or others != {*silent} or (n_hosts == 1 and has_link()):
        return ""
    silent_hosts = (
        "all other hosts are silent" if n_hosts > 1 else "it has no link, and the other host is silent"
    )
    return (
        f"host {hosts[0]} has lost its network: {silent_hosts}: {rank_list(others, hosts)};"
        f" look at the cable and the switch port of {hosts[0]}"
    )


def look_at_networks(hosts: Mapping[int, str], expected: Collection[int], silent: Collection[int]) -> str:
    """Return the end of the cause if all ranks of the only other host are silent; "" if not."""
    others = {rank: hosts[rank] for rank in expected if hosts.get(rank) and hosts[rank] != hosts.get(0)}
    names = {*others.values()}
    if len(names) != 1 or {*others} != {*silent}:
        return ""
    return f"; look at the network of {names.pop()}, and at that of {hosts[0]}"


def has_link() -> bool:
    """Return whether an interface of this host to other hosts has a link, or none is known."""
    import psutil

    stats = psutil.net_if_stats()
    up = [stats[one.name].isup for one in interfaces() if not is_local(one) and one.name in stats]
    return any(up) or not up
