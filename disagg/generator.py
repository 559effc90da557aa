"""Generates a configuration from options: for runs without a YAML, and for `generate-disagg-config`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from .config import DisaggConfig, from_mapping
from .errors import ConfigError, nearest
from .schema import Rule, checked

MODES = ("aggregated", "disaggregated")
CONTROL_RANKS = (1, 2)
"""Numbers of ranks for harness and leader, the preferred number first."""
_MAX_COUNT = 1 << 20  # a larger count is a typing error, and would fill the memory
_CONTROL: Rule = ("1 or 2", lambda x: type(x) is int and (x == 0 or x in CONTROL_RANKS))
_SHARES = {None: "1 or 2 ranks are control", 0: "all ranks are workers"}
_FLAG: Rule = (f"an integer from 1 to {_MAX_COUNT}", lambda x: type(x) is int and 1 <= x <= _MAX_COUNT)


def ranks_for(n_workers: int, control_ranks: int | None = None) -> int:
    """Return the world size for `n_workers` workers and `control_ranks` control ranks; None: one."""
    return n_workers + (control_ranks or CONTROL_RANKS[0])


def generate(
    mode: str,
    world_size: int | None = None,
    *,
    control_ranks: int | None = None,
    model: str | None = None,
    backend: str = "pytorch",
    port: int = 8000,
    num_ctx_servers: int | None = None,
    ctx_tp_size: int = 1,
    ctx_pp_size: int = 1,
    num_gen_servers: int | None = None,
    gen_tp_size: int = 1,
    gen_pp_size: int = 1,
    num_executors: int | None = None,
    tensor_parallelism: int = 1,
    pipeline_parallelism: int = 1,
    moe_expert_parallelism: int = 1,
    first_worker_port: int = 8001,
) -> DisaggConfig:
    """Return a configuration whose plan fits `world_size` ranks.

    If `world_size` is None, numbers of instances that are None become 1.

    Otherwise, numbers of instances that are None follow from the world size, and all worker ranks are used.
    At most a third of these, but at least one instance, are context ranks. All ranks except `control_ranks`
    are workers. If `control_ranks` is None, there is one control rank, or two if no numbers fit one. A world
    of one rank has no control rank. `control_ranks` 0 is for the workers of an external leader.

    The ctx and gen options and `first_worker_port` apply to disaggregated mode. `num_executors`,
    `tensor_parallelism` and `pipeline_parallelism` apply to aggregated mode. Options of the other mode are
    ignored. `moe_expert_parallelism` applies to every section.

    TensorRT-LLM needs `urls` in a disaggregated file. The URLs have ports of this host from
    `first_worker_port` on. `with_hosts` sets other hosts.

    Raises ConfigError, which names the option, or the section's field that contains its value.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode: {mode!r}; must be {' or '.join(MODES)}{nearest(mode, MODES)}")
    flags: dict[str, int | None]
    fixed: dict[str, int | None]
    if mode == "disaggregated":
        shapes = {
            "context_servers": (ctx_tp_size, ctx_pp_size),
            "generation_servers": (gen_tp_size, gen_pp_size),
        }
        fixed = {"context_servers": num_ctx_servers, "generation_servers": num_gen_servers}
        flags = {"num_ctx_servers": num_ctx_servers, "ctx_tp_size": ctx_tp_size, "ctx_pp_size": ctx_pp_size}
        flags |= {"num_gen_servers": num_gen_servers, "gen_tp_size": gen_tp_size, "gen_pp_size": gen_pp_size}
    else:
        shapes = {"executors": (tensor_parallelism, pipeline_parallelism)}
        fixed = {"executors": num_executors}
        flags = {
            "num_executors": num_executors,
            "tensor_parallelism": tensor_parallelism,
            "pipeline_parallelism": pipeline_parallelism,
        }
    for flag, value in {**flags, "moe_expert_parallelism": moe_expert_parallelism}.items():
        if value is not None:
            checked(f"--{flag}", value, _FLAG)
    if world_size is not None:
        checked("world size", world_size, _FLAG)
    if control_ranks is not None:
        checked("--control_ranks", control_ranks, _CONTROL)
    sizes = [tp * pp for tp, pp in shapes.values()]
    counts = _counts(list(fixed.values()), sizes, world_size, mode, control_ranks)

    data: dict[str, Any] = {"port": port, "model": model, "backend": backend}
    index = 0
    for (name, (tp, pp)), count in zip(shapes.items(), counts, strict=True):
        section: dict[str, Any] = {
            "num_instances": count,
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
        }
        section["moe_expert_parallel_size"] = moe_expert_parallelism
        if mode == "disaggregated":
            # TensorRT-LLM requires this for the handoff of KV caches.
            section["cache_transceiver_config"] = {"backend": "DEFAULT"}
            section["urls"] = [f"localhost:{first_worker_port + i}" for i in range(index, index + count)]
        if name == "context_servers":
            # TensorRT-LLM's context servers do not support the overlap scheduler.
            section["disable_overlap_scheduler"] = True
        index += count
        data[name] = section
    return from_mapping(data, "generated configuration")


def with_hosts(config: DisaggConfig, hostname: str, hosts: Sequence[str]) -> DisaggConfig:
    """Put the leader on `hostname`, and instance i's URL, if any, on ``hosts[i]``. Ports do not change."""
    sections: dict[str, Any] = {}
    waiting = iter(hosts)
    for name, server in config.sections:
        own = [next(waiting) for _ in range(server.num_instances)]
        urls = tuple(f"{host}:{url.rpartition(':')[2]}" for host, url in zip(own, server.urls, strict=False))
        sections[name] = replace(server, urls=urls)
    return replace(config, hostname=hostname, **sections)


def _counts(
    fixed: Sequence[int | None],
    sizes: Sequence[int],
    world_size: int | None,
    mode: str,
    control_ranks: int | None,
) -> list[int]:
    """Return each section's number of instances. None is replaced so that every worker rank is used.

    `sizes`: ranks per instance, by section.
    """
    if world_size is None:
        return [count or 1 for count in fixed]
    fitting = _fit(fixed, sizes, world_size, control_ranks)
    if fitting is not None:
        return fitting
    kinds = ("context", "generation") if mode == "disaggregated" else ("executor",)
    request = " and ".join(
        f"{count or ''} {kind} instance{'s' * (count != 1)} of {size} rank{'s' * (size > 1)}".lstrip()
        for count, kind, size in zip(fixed, kinds, sizes, strict=True)
    )
    works = _sizes_that_work(fixed, sizes, world_size, control_ranks)
    if None not in fixed:
        needed = sum((count or 0) * size for count, size in zip(fixed, sizes, strict=True))
        request += f" need {needed} worker ranks, which"
    raise ConfigError(
        f"world size: {world_size}; {request} do not fit; must be {' or '.join(map(str, works))} "
        f"({_SHARES.get(control_ranks, f'--control_ranks {control_ranks}')})"
    )


def _fit(
    fixed: Sequence[int | None], sizes: Sequence[int], world_size: int, control_ranks: int | None
) -> list[int] | None:
    """Return the best counts for `world_size`, or None if no counts use all of its worker ranks."""
    usual = CONTROL_RANKS if world_size > 1 else (0,)
    for control in usual if control_ranks is None else (control_ranks,):
        workers = world_size - control
        if len(sizes) == 1:
            candidates: Iterable[list[int]] = [[fixed[0] or workers // sizes[0]]]
        elif world_size > 1:
            firsts = _first_counts(fixed[0], sizes[0], workers)
            candidates = ([first, fixed[1] or (workers - first * sizes[0]) // sizes[1]] for first in firsts)
        else:
            candidates = ()  # a single rank can only be an executor
        for counts in candidates:
            if min(counts) >= 1 and sum(n * size for n, size in zip(counts, sizes, strict=True)) == workers:
                return counts
    return None


def _first_counts(fixed: int | None, size: int, workers: int) -> Sequence[int]:
    """Return numbers of context instances, best first: from a third of the worker ranks down, then more."""
    if fixed is not None:
        return [fixed]
    third = workers // 3 // size
    return [*range(third, 0, -1), *range(third + 1, workers // size + 1)]


def _sizes_that_work(
    fixed: Sequence[int | None], sizes: Sequence[int], world_size: int, control_ranks: int | None
) -> list[int]:
    """Return the nearest fitting world sizes below and above `world_size`; if no count is None, all sizes."""
    min_size = sum((count or 1) * size for count, size in zip(fixed, sizes, strict=True))
    if None not in fixed:
        tried = sorted({1, min_size, min_size + 1, min_size + 2})
        return [n for n in tried if _fit(fixed, sizes, n, control_ranks)]
    # One more instance of a section that is not fixed always fits, so the search upwards is short.
    step = max(size for count, size in zip(fixed, sizes, strict=True) if count is None)
    below = next(
        (
            n
            for n in range(world_size - 1, max(min_size, world_size - 2 * step) - 1, -1)
            if _fit(fixed, sizes, n, control_ranks)
        ),
        None,
    )
    above = next(
        n
        for n in range(max(world_size + 1, min_size), max(world_size, min_size) + 2 * step + 3)
        if _fit(fixed, sizes, n, control_ranks)
    )
    return [above] if below is None else [below, above]
