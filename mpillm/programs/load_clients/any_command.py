"""Any other load client: a user's command line, with placeholders for the values of the load.

It writes its report, a JSON object, to the file {report}. The object has `completed`, `failed` and
`duration_s`, and optionally `version` and `tokens`. It may have `ttft_ms`, `tpot_ms` and `latency_ms` (each
an object with `mean`, `p50`, `p90` or `p99`), or `requests`: for each ``[issued, first token, end, tokens]``
in seconds, and its error if it failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpillm.programs.kind import filled, placeholders
from mpillm.programs.load_clients.kind import (
    LATENCIES,
    LoadClientKind,
    LoadReport,
    LoadSpec,
    RequestRecord,
    body,
    report_of,
    write_lines,
)

_REPORT, _BODIES = "report.json", "requests.jsonl"
_PLACEHOLDERS: dict[str, Callable[[LoadSpec], object]] = {
    "url": lambda load: load.urls[0],
    "urls": lambda load: ",".join(load.urls),
    "model": lambda load: load.model,
    "tokenizer": lambda load: load.tokenizer,
    "bodies": lambda load: load.folder / _BODIES,
    "requests": lambda load: len(load.order),
    "rate": lambda load: load.rate,
    "concurrency": lambda load: load.max_open,
    "seed": lambda load: load.seeds.arrivals,
    "report": lambda load: load.folder / _REPORT,
}


def command_kind(template: Sequence[str]) -> LoadClientKind:
    """Return the kind of `command:` and a command line. Raises ValueError for a template without a server."""
    names = placeholders(template, _PLACEHOLDERS)
    if not template or "report" not in names or not names & {"url", "urls"}:
        raise ValueError("expected command:WORDS, with {url} and {report} in them: the server, its report")

    def arguments(load: LoadSpec) -> Sequence[str]:
        for name, option, value in (
            ("rate", "server_target_qps", load.rate),
            ("concurrency", "concurrency", load.concurrency),
        ):
            if value is not None and name not in names:
                raise ValueError(f"has no place for --{option}: write {{{name}}}")
        if load.rate is None and "rate" in names:
            raise ValueError("has {rate}, which is known in scenario Server: --scenarios Server")
        return (*filled(template, _PLACEHOLDERS, load), *load.args)

    return LoadClientKind(
        name="command:", arguments=arguments, read=_read, write=_write, many_urls="urls" in names
    )


def _write(load: LoadSpec) -> None:
    """Write the requests' bodies, each in a line, in the order in which they are to be sent."""
    write_lines(load.folder / _BODIES, (body(load, load.samples[index]) for index in load.order))


def _read(load: LoadSpec) -> LoadReport:
    report = report_of(load.folder / _REPORT)
    return LoadReport(
        str(report.get("version", "")),
        int(report["completed"]),
        int(report["failed"]),
        float(report["duration_s"]),
        report.get("tokens"),
        {name: report[name] for name in LATENCIES if report.get(name)},
        requests=[_request(load, place, row) for place, row in enumerate(report.get("requests", ()))],
    )


def _request(load: LoadSpec, place: int, row: Sequence[Any]) -> RequestRecord:
    issued, first, ended, tokens, *error = row
    sample = load.order[place] if place < len(load.order) else 0
    first = math.nan if first is None else float(first)
    return RequestRecord(float(issued), first, float(ended), int(sample), int(tokens), *map(str, error))
