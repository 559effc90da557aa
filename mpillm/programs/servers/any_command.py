"""Any other server: a command line of the user's, with placeholders for the run's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from launch.command import Command
from mpillm.programs.kind import filled, placeholders
from mpillm.programs.servers.kind import ServerKind, ServerSpec

_PLACEHOLDERS: dict[str, Callable[[ServerSpec], object]] = {
    "model": lambda spec: spec.model,
    "name": lambda spec: spec.model_name,
    "host": lambda spec: spec.host,
    "port": lambda spec: spec.port,
    "nodes": lambda spec: spec.node.n,
    "node": lambda spec: spec.node.number,
    "first_host": lambda spec: spec.node.first_host,
    "first_port": lambda spec: spec.node.first_port,
    "devices": lambda spec: ",".join(spec.visible_devices or ()),
    "tp": lambda spec: spec.values.get("tensor_parallelism") or 1,
    "pp": lambda spec: spec.values.get("pipeline_parallelism") or 1,
}
_OPTIONS = {"tp": "tensor_parallelism", "pp": "pipeline_parallelism"}  # that have a placeholder


def command_kind(template: Sequence[str]) -> ServerKind:
    """Return the kind of `command:` and a command line. Raises ValueError for one without a port."""
    names = placeholders(template, _PLACEHOLDERS)
    if not template or "port" not in names:
        raise ValueError("expected command:WORDS, with {port} in them: where the server is to listen")

    def no_more(_: Any) -> Sequence[str]:
        return ()  # the template has it, or, as max_batch_size, only the clients need it

    return ServerKind(
        name="command:",
        arguments=partial(filled, template, _PLACEHOLDERS),
        options={option: no_more for name, option in _OPTIONS.items() if name in names}
        | {"max_batch_size": no_more},
        names_model="name" in names,
        multi_node=(lambda _: Command(())) if "node" in names else None,
    )
