"""What a run knows of the mpirun around it, if it has only some of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.instances import Instance


@dataclass(frozen=True)
class Part:
    """A run that is one instance of a disaggregation YAML, beside others in the same mpirun."""

    instance: Instance
    node_ranks: int  # ranks of that mpirun on this node: they share its cores and its memory
