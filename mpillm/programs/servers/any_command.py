"""Any other server: a command line of the user's, in which the run's values take the places of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from launch.command import Command
from mpillm.programs.servers.kind import ServerKind, Wanted

# What a name stands for, and of which of our options it is the value.
_PLACES: dict[str, tuple[Callable[[Wanted], object], str]] = {
    "model": (lambda wanted: wanted.model, ""),
    "name": (lambda wanted: wanted.name, ""),
    "host": (lambda wanted: wanted.host, ""),
    "port": (lambda wanted: wanted.port, ""),
    "nodes": (lambda wanted: wanted.part.n, ""),
    "node": (lambda wanted: wanted.part.node, ""),
    "first_host": (lambda wanted: wanted.part.host, ""),
    "first_port": (lambda wanted: wanted.part.port, ""),
    "devices": (lambda wanted: ",".join(wanted.devices or ()), ""),
    "tp": (lambda wanted: wanted.values.get("tensor_parallelism") or 1, "tensor_parallelism"),
    "pp": (lambda wanted: wanted.values.get("pipeline_parallelism") or 1, "pipeline_parallelism"),
}
_PLACE = re.compile(r"\{(\w+)\}")


def command_kind(template: Sequence[str]) -> ServerKind:
    """Return the kind of `command:` and these words. Raises ValueError if it can't be one."""
    names = {name for word in template for name in _PLACE.findall(word)}
    if unknown := sorted(names - _PLACES.keys()):
        raise ValueError(f"{{{unknown[0]}}} is none of {', '.join(f'{{{name}}}' for name in _PLACES)}")
    if not template or "port" not in names:
        raise ValueError("expected command:WORDS, with {port} in them: where the server is to listen")

    def words(wanted: Wanted) -> Sequence[str]:
        return [_PLACE.sub(lambda found: str(_PLACES[found[1]][0](wanted)), word) for word in template]

    def taken(_: Any) -> Sequence[str]:
        return ()  # it is in its place

    options = [option for name in names if (option := _PLACES[name][1])]
    # The clients keep to this one.
    of_nodes = (lambda _: Command(())) if "node" in names else None  # it is in its place, too
    return ServerKind(
        "command:",
        words,
        dict.fromkeys([*options, "max_batch_size"], taken),
        names_model="name" in names,
        of_nodes=of_nodes,
    )
