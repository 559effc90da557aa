"""The executor: an instance that does both context and generation (aggregated runs)."""

from __future__ import annotations

from mpillm.roles.instance import InstanceRole


class Executor(InstanceRole):
    """Answers whole requests."""
