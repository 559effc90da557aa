"""What every rank does where a core's library must be imported by all of them at once."""

from __future__ import annotations

import importlib

from mpillm.roles.role import Role


class Importer(Role):
    """Imports a package before any role of its rank loads: the import waits for all of MPI.COMM_WORLD."""

    def __init__(self, package: str) -> None:
        self._package = package

    def load(self) -> None:
        importlib.import_module(self._package)
