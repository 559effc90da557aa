"""Settings of clients of HTTP servers: the run's options that they need, and --core_options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from disagg.errors import ConfigError, about
from mpillm.cores.base import check_option_names


class HarnessValues(Protocol):
    """The settings of an endpoint core: see `LLMCore.settings`."""

    streaming: bool
    endpoint_urls: tuple[str, ...]
    max_concurrency: int | None  # simultaneous requests per server; None: `MAX_PER_SERVER`
    load_deadline: float  # seconds, like the next two
    health_deadline: float
    stall_timeout: float
    endpoint_type: str  # completions, chat or responses
    extra_body: dict[str, Any]  # fields of each request
    extra_headers: dict[str, str]  # of each request
    endpoint_path: str | None  # of requests, in place of OpenAI's
    insecure: bool  # certificates are not checked
    session_header: str
    lora_modules: tuple[str, ...] | None  # models of requests, in turn
    compliance_test: str | None


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
