"""Settings of clients of HTTP servers: the run's options that they need, and --core_options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from disagg.errors import ConfigError, about
from mpillm.cores.base import check_option_names


class HarnessValues(Protocol):
    """The settings of an endpoint core: see `LLMCore.settings`."""

    @property
    def streaming(self) -> bool: ...

    @property
    def endpoint_urls(self) -> tuple[str, ...]: ...

    @property
    def max_concurrency(self) -> int | None: ...  # simultaneous requests per server; None: `MAX_PER_SERVER`

    @property
    def load_deadline(self) -> float: ...  # seconds, like the next two

    @property
    def health_deadline(self) -> float: ...

    @property
    def stall_timeout(self) -> float: ...

    @property
    def endpoint_type(self) -> str: ...  # completions or chat

    @property
    def extra_body(self) -> dict[str, Any]: ...  # fields of each request

    @property
    def extra_headers(self) -> dict[str, str]: ...  # of each request

    @property
    def endpoint_path(self) -> str | None: ...  # of requests, in place of OpenAI's

    @property
    def insecure(self) -> bool: ...  # certificates are not checked

    @property
    def session_header(self) -> str: ...

    @property
    def lora_modules(self) -> tuple[str, ...] | None: ...  # models of requests, in turn

    @property
    def compliance_test(self) -> str | None: ...


@dataclass(frozen=True)
class EndpointOptions:
    """--core_options of these cores: ``key:value,key:value``."""

    model: str | None = None  # its name at the servers; None: found by --model_path, or the only model
    retry_s: float = 10.0  # longest time from a request's first failure to its last attempt

    @staticmethod
    @about("core_options")
    def from_options(options: dict[str, Any]) -> EndpointOptions:
        check_option_names(options, EndpointOptions.__dataclass_fields__)
        retry_s = options.get("retry_s", 0)
        if not (isinstance(retry_s, (int, float)) and retry_s >= 0):
            raise ConfigError(f"--core_options retry_s:{retry_s}: expected a number, at least 0")
        if "model" in options:
            options = {**options, "model": str(options["model"])}
        return EndpointOptions(**options)
