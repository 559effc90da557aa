"""The trace of an option, for `plan --explain`: its value by source, and the rules that change its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.errors import ConfigError, nearest
from launch.masking import masked_value
from mpillm.options.fields import BY_NAME, SETS
from mpillm.options.parsers import Secret
from mpillm.options.rules import Trace
from mpillm.options.run_config import RunConfig
from mpillm.options.sources import OptionValue


def explain_option(name: str, config: RunConfig) -> dict[str, Any]:
    """Return the trace of an option, ready for JSON. Raises ConfigError if there is no such option."""
    typed = name.lstrip("-").replace("-", "_")
    if typed not in BY_NAME:
        raise ConfigError(f"--explain {name}: there is no such option{nearest(typed, BY_NAME)}")
    field = BY_NAME[typed]
    trace: Trace = []
    config.layers.resolved(trace)
    values = [value for value in config.layers.sources_of(field.name) if value != OptionValue(None)]
    sections = {
        section: _entry(value.option_values[field.name]) for section, value in config.sections.items()
    }
    return {
        "option": field.name,
        **_entry(config.option_values[field.name]),
        "stated": [_entry(value) for value in reversed(values)],
        "rules": [
            {"rule": rule.name, "source": rule.origin, **_entry(value)}
            for rule, changed, value in trace
            if changed == field.name
        ],
        "sections": sections if len({repr(value) for value in sections.values()}) > 1 else {},
        "set_by": [setting.name for setting, others in SETS.items() if field in others],
    }


def format_explanation(explained: dict[str, Any]) -> str:
    """Return the trace of a value as text."""
    lines = [f"{explained['option']} is {_text(explained)}, from {explained['from']}"]
    for section, one in explained["sections"].items():
        lines.append(f"  in {section}: {_text(one)}, from {one['from']}")
    values = explained["stated"]
    lines += ["", "values by source, the highest first" if values else "no source has a value"]
    lines += _columns([(_text(one), one["from"]) for one in values])
    lines += ["", "rules that changed it" if explained["rules"] else "no rule changed it"]
    for one in explained["rules"]:
        lines += [f"  {one['rule']} ({one['source']})", f"    {_text(one)}, from {one['from']}"]
    if explained["set_by"]:
        lines += ["", f"options that may set it: {', '.join(explained['set_by'])}"]
    return "\n".join(lines)


def _entry(one: OptionValue) -> dict[str, Any]:
    value = str(one.value) if isinstance(one.value, Secret) else masked_value(one.value)
    entry = {"value": value, "from": one.where}
    if one.keys:
        entry["keys"] = {name: key.where for name, key in one.keys.items()}
    return entry


def _text(entry: dict[str, Any]) -> str:
    value, keys = entry["value"], entry.get("keys", {})
    if isinstance(value, dict):
        return (
            ", ".join(f"{key}:{one}{f' ({keys[key]})' if key in keys else ''}" for key, one in value.items())
            or "empty"
        )
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(value) for value, _ in rows), default=0)
    return [f"  {value:<{width}}  {where}" for value, where in rows]
