"""The place of a run inside a larger mpirun, if the run has only some of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.instances import ServedInstance


@dataclass(frozen=True)
class InstanceRun:
    """A run that is one instance of a disaggregation YAML, with others in the same mpirun."""

    instance: ServedInstance
    node_ranks: int  # ranks of that mpirun on this node, which share its CPU cores and memory
