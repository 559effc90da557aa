"""The options of clients of HTTP servers, --core_options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from disagg.errors import ConfigError, about, nearest


@dataclass(frozen=True)
class EndpointOptions:
    """--core_options of these cores: ``key:value,key:value``."""

    model: str | None = None  # its name at the servers; None: by --model_path, or the only model
    retry_s: float = 10.0  # longest time from a request's first failure to its last attempt

    @staticmethod
    @about("core_options")
    def from_options(options: dict[str, Any]) -> EndpointOptions:
        known = [option.name for option in fields(EndpointOptions)]
        for key, value in options.items():
            if key not in known:
                raise ConfigError(
                    f"--core_options {key}: this core has no such option{nearest(key, known)};"
                    f" it has: {', '.join(known)}"
                )
            if key == "retry_s" and not (isinstance(value, (int, float)) and value >= 0):
                raise ConfigError(f"--core_options {key}:{value}: expected a number, at least 0")
        if "model" in options:
            options = {**options, "model": str(options["model"])}
        return EndpointOptions(**options)
