"""How rank 0 detects that its own host has lost the network, not all other hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from disagg import rank_list

_MIN_HOSTS = 2  # if only one other host is silent, that host may have lost its network


def own_network_lost(hosts: Mapping[int, str], expected: Collection[int], silent: Collection[int]) -> str:
    """Return the cause if all ranks of the other hosts, at least two, are silent, and none here; "" if not.

    Args:
        hosts: hosts of the ranks that have joined, by rank.
        expected: the ranks that have not ended.
        silent: the ranks without a heartbeat.
    """
    others = {rank for rank in expected if hosts.get(rank) and hosts[rank] != hosts.get(0)}
    n_hosts = len({hosts[rank] for rank in others})
    if n_hosts < _MIN_HOSTS or others != {*silent}:
        return ""
    return (
        f"host {hosts[0]} has lost its network: all other hosts are silent: {rank_list(others, hosts)};"
        f" look at the cable and the switch port of {hosts[0]}"
    )
