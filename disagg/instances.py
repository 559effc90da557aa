"""The instances of a disaggregation YAML as servers: names, addresses, ranks."""

from __future__ import annotations

from dataclasses import dataclass

from .config import DisaggConfig
from .errors import ConfigError
from .schema import SECTIONS, section_kind

_KINDS = dict(zip(SECTIONS, ("context", "generation", "executor"), strict=True))


@dataclass(frozen=True)
class ServedInstance:
    """One instance. TensorRT-LLM's worker command assigns ranks to instances in the same order."""

    index: int  # among the instances of all sections of the file
    kind: str  # context, generation or executor
    section: str
    url: str  # host:port
    ranks: range  # in an mpirun of all workers

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.kind} instance {self.index} at http://{self.url}"


def served_instances(config: DisaggConfig, path: str) -> list[ServedInstance]:
    """Return the instances in the file's order.

    Raises ConfigError if an instance has no URL, or there are no instances. `path` is the file's name.
    """
    if not config.n_workers:
        raise ConfigError(f"{path} has no instances")
    instances: list[ServedInstance] = []
    first = 0
    for section, server in config.sections:
        if section != section_kind(section):
            raise ConfigError(
                f"{path}: {section_kind(section)} is a list, which is for the instances of one run; of"
                " servers each section is one mapping"
            )
        if len(server.urls) != server.num_instances:
            raise ConfigError(f"{path}: {section} has no urls, which its servers need")
        for url in server.urls:
            ranks = range(first, first + server.ranks_per_instance)
            instances.append(
                ServedInstance(len(instances), _KINDS[section_kind(section)], section, url, ranks)
            )
            first = ranks.stop
    return instances
