"""`report.html`: the HTML report of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpillm.files import DATA_ERRORS, write_text
from mpillm.report.console import NO_PAGE
from mpillm.report.page import sections, svg
from mpillm.report.page.about_run import about_run
from mpillm.report.page.charts import distributions, lane_rows, machines, over_time
from mpillm.report.page.document import CDF, ZOOM, chart_section, document
from mpillm.report.page.run_analysis import Facts, facts_of, unrecorded
from mpillm.report.page.trace import write_trace
from mpillm.report.page.turn_lanes import turn_lanes
from mpillm.report.run_directory import PAGE, TELEMETRY, TRACE, display_path
from mpillm.report.run_files import RunFiles

_log = logging.getLogger(__name__)


def leave_page(
    path: Path, write_telemetry: Callable[[Path], None], price_per_gpu_hour: float | None = None
) -> tuple[str, str]:
    """Write telemetry.json, report.html and trace.json of the run that ends in `path`.

    Returns the summary's row: the report's path, or why the report is missing. An error here must not cost
    the test's result, which is already written.
    """
    try:
        write_telemetry(path / TELEMETRY)
        return "page", display_path(write_page(path, price_per_gpu_hour))
    except OSError as error:
        _log.exception("the run has no page")
        return NO_PAGE, f"{error.filename or path}: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - see above
        _log.exception("the run has no page")
        return NO_PAGE, f"{type(error).__name__}: {error}"


def write_page(path: Path, price_per_gpu_hour: float | None = None) -> Path:
    """Write report.html and trace.json from the files of a run; return the page's path.

    `price_per_gpu_hour`: if None, the run's option. Raises ConfigError if `path` is not a run directory,
    OSError if a file can't be written.
    """
    run = RunFiles.read(path)
    write_text(path / PAGE, page(run, price_per_gpu_hour))
    write_trace(run, path / TRACE)
    return path / PAGE


def page(run: RunFiles, price_per_gpu_hour: float | None = None) -> str:
    """Return the HTML of a run's report."""
    if price_per_gpu_hour is None:
        price_per_gpu_hour = run.value("price_per_gpu_hour")
    facts, damaged = facts_of(run)
    notes = [*run.missing, *damaged, *unrecorded(facts)]

    def build(name: str, part: Callable[..., Any], empty: Any, *arguments: object) -> Any:
        """Return a part of the report; `empty` if its files are damaged."""
        try:
            return part(*arguments)
        except (OSError, *DATA_ERRORS) as error:
            _log.info("%s: %s", name, error, exc_info=True)
            notes.append(f"{name}: a file is damaged ({type(error).__name__}: {error})")
            return empty

    times = build("what happened over time", over_time, [], facts)
    latencies = build("latencies", distributions, [], facts)
    hardware = build("CPUs and GPUs", machines, [], facts)
    rows = build("what each rank did", lane_rows, [], facts)
    end = max(facts.test_s, 1e-3)  # the lanes display the test until the user zooms
    top = build("verdict", sections.head, "", facts)
    wrong = build("failures", sections.failures, "", run)
    parts = [
        build("figures", sections.tiles, "", facts, price_per_gpu_hour),
        build("the plan", sections.plan, "", facts),
        build("about the run", about_run, "", facts),
        build("charts", chart_section, "", "Over time", times, ZOOM),
        build("charts", chart_section, "", "Latencies", latencies, CDF),
        build("turns of conversations", turn_lanes, "", facts),
        build("lanes", _lanes, "", rows, end, facts),
        build("charts", chart_section, "", "Processors", hardware, ""),
        build("energy", sections.energy, "", facts, price_per_gpu_hour),
        build("tables", sections.figures, "", facts),
        build("options", sections.options, "", run),
        build("files", sections.files, "", run),
    ]
    status = "STOPPED" if run.stopped_by else run.result.get("status", "not ended")
    title = f"{run.path.absolute().name}: {status}"
    lanes = {"rows": rows, "start": 0.0, "end": end, "kinds": run.telemetry.get("kinds") or []}
    charts = (*times, *latencies, *hardware)
    return document(title, [top, wrong, sections.missing(notes), *parts], charts, lanes)


def _lanes(rows: list[dict[str, object]], end: float, facts: Facts) -> str:
    if not rows:
        return ""
    more = len(facts.noted) - len(rows)
    more_ranks = f" {more} more ranks are in trace.json." if more > 0 else ""
    kinds = ("contexts", "decode", "both in a step", "requests open", "KV caches under way")
    key = "".join(f'<li><i class="k{kind}"></i>{text}</li>' for kind, text in enumerate(kinds))
    return (
        '<section><h2>What each rank did</h2><p class="note">Grey is idle. The thin lane below is the'
        f' handoff.{more_ranks}  <span class="js-only">Drag to zoom, or Ctrl and the wheel. Double-click to'
        " see the test. With the keyboard: + and -, ← and →, 0 for all phases.</span></p>"
        f'<ul class="key">{key}</ul>'
        f'<figure id="lanes"><div class="still scroll">{svg.lanes(rows, end)}</div></figure></section>'
    )
