"""Any other client: a command line of the user's, in which what it is to do takes the places of names.

It leaves its report in the file {report}, a JSON object: `completed`, `failed` and `duration_s`, and as it
knows them `version`, `tokens`, and `ttft_ms`, `tpot_ms` and `latency_ms` (each an object with `mean`, `p50`,
`p90` or `p99`) or `requests`: for each ``[issued, first token, end, tokens]`` in seconds, and its error if it
failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from mpillm.programs.load_clients.kind import (
    LATENCIES,
    HarnessKind,
    Load,
    Measured,
    Request,
    body,
    report_of,
    write_lines,
)

_REPORT, _BODIES = "report.json", "requests.jsonl"
_PLACES: dict[str, Callable[[Load], object]] = {
    "url": lambda load: load.urls[0],
    "urls": lambda load: ",".join(load.urls),
    "model": lambda load: load.model,
    "tokenizer": lambda load: load.tokenizer,
    "bodies": lambda load: load.folder / _BODIES,
    "requests": lambda load: len(load.order),
    "rate": lambda load: load.rate,
    "concurrency": lambda load: load.at_once,
    "seed": lambda load: load.seeds.arrivals,
    "report": lambda load: load.folder / _REPORT,
}
_PLACE = re.compile(r"\{(\w+)\}")


def command_kind(template: Sequence[str]) -> HarnessKind:
    """Return the kind of `command:` and these words. Raises ValueError if it can't be one."""
    names = {name for word in template for name in _PLACE.findall(word)}
    if unknown := sorted(names - _PLACES.keys()):
        raise ValueError(f"{{{unknown[0]}}} is none of {', '.join(f'{{{name}}}' for name in _PLACES)}")
    if not template or "report" not in names or not names & {"url", "urls"}:
        raise ValueError("expected command:WORDS, with {url} and {report} in them: the server, its report")

    def words(load: Load) -> Sequence[str]:
        for name, option, value in (
            ("rate", "server_target_qps", load.rate),
            ("concurrency", "concurrency", load.concurrency),
        ):
            if value is not None and name not in names:
                raise ValueError(f"has no place for --{option}: write {{{name}}}")
        if load.rate is None and "rate" in names:
            raise ValueError("has {rate}, which is known in scenario Server: --scenarios Server")
        return [_PLACE.sub(lambda found: str(_PLACES[found[1]](load)), word) for word in template]

    return HarnessKind("command:", words, _read, _write, many_urls="urls" in names)


def _write(load: Load) -> None:
    """Write the requests' bodies, each in a line, in the order in which they are to be sent."""
    write_lines(load.folder / _BODIES, (body(load, load.samples[index]) for index in load.order))


def _read(load: Load) -> Measured:
    report = report_of(load.folder / _REPORT)
    return Measured(
        str(report.get("version", "")),
        int(report["completed"]),
        int(report["failed"]),
        float(report["duration_s"]),
        report.get("tokens"),
        {name: report[name] for name in LATENCIES if report.get(name)},
        requests=[_request(load, place, row) for place, row in enumerate(report.get("requests", ()))],
    )


def _request(load: Load, place: int, row: Sequence[Any]) -> Request:
    issued, first, ended, tokens, *error = row
    sample = load.order[place] if place < len(load.order) else 0
    first = math.nan if first is None else float(first)
    return Request(float(issued), first, float(ended), int(sample), int(tokens), *map(str, error))
