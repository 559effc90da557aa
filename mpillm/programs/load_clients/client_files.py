"""Configurations of MLCommons' client in the place of ours, named with the options that stand for them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from disagg.errors import ConfigError

_ITS_OWN = ("load_pattern", "runtime", "client")  # in `settings`
_REQUIRED = ("model_params", "datasets", "endpoint_config")
_PLACES = {
    ("endpoint_config", "endpoints"): "--url",
    ("model_params", "name"): "--model_path",
    ("model_params", "max_new_tokens"): "--max_output_len",
    ("model_params", "min_new_tokens"): "--min_output_len",
    ("model_params", "temperature"): "--temperature",
    ("model_params", "top_p"): "--top_p",
    ("model_params", "top_k"): "--top_k",
    ("settings", "load_pattern", "target_concurrency"): "--concurrency",
    ("settings", "load_pattern", "target_qps"): "--scenarios Server --server_target_qps",
    ("settings", "runtime", "n_samples_to_issue"): "--min_query_count",
}


def check_no_client_file(option: str, path: str, data: Any) -> None:
    """Raise ConfigError if the content of a file of `option` is a configuration of MLCommons' client."""
    if is_client_file(data):
        command = " ".join(("--harness inference-endpoint", *options_of(data)))
        raise ConfigError(
            f"{option} {path}: a configuration of MLCommons' client (inference-endpoint), not of mpillm;"
            f" run the client with {command}",
            about=[option.removeprefix("--")],
        )


def is_client_file(data: Any) -> bool:
    """Return whether the content of a YAML file is a configuration of MLCommons' client."""
    if not isinstance(data, Mapping):
        return False
    settings = data.get("settings")
    if isinstance(settings, Mapping) and any(name in settings for name in _ITS_OWN):
        return "model_params" in data or "endpoint_config" in data
    return all(name in data for name in _REQUIRED)


def options_of(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of `run` that stand for values of a client's configuration."""
    for place, option in _PLACES.items():
        value: Any = data
        for name in place:
            value = value.get(name) if isinstance(value, Mapping) else None
        if isinstance(value, list) and option == "--url":
            value = ",".join(map(str, value))
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            yield f"{option} {shlex.quote(str(value))}"
