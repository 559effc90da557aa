"""Parts of the HTML report: text, tables and the picture of the plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from disagg import ranges
from mpillm.report.numbers import milliseconds, short
from mpillm.report.page import svg
from mpillm.report.page.document import escape, link, section, table
from mpillm.report.page.run_analysis import Facts, InstanceFacts, limits_ms
from mpillm.report.percentiles import too_few
from mpillm.report.result import conversation_facts, counted_by_client, counted_from_text, goodput_rows
from mpillm.report.run_directory import MEASURED, PAGE, RANKS, TRACE, failures_in
from mpillm.report.run_files import SERVERS, RunFiles
from mpillm.report.speculation import speculation_rows
from mpillm.report.validity_checks import failed_checks, unchecked

_MAX_RANGES = 8  # of an instance's ranks
_MAX_CARDS = 128
_MAX_LOGS = 256
_MAX_SERVERS = 4
_FAILED = '<em class="flag">failed</em>'
_VERDICTS = {
    "VALID": "LoadGen accepts this test.",
    "INVALID": "LoadGen does not accept this test.",
    "SERVED": "This run served until it was ended.",
    MEASURED: "LoadGen did not make the load, and has not judged it.",
    "FAILED": "This run failed.",
    "STOPPED": "Ended before it was done: there is no verdict. The figures until then are below.",
    "": "This run has left no outcome: it goes on, or was killed.",
}


_REFUSED = "LoadGen accepts this test, but the servers did not meet its requirements."


def head(facts: Facts) -> str:
    """Return the verdict, its reasons, and what ran; without an outcome, what was planned to run."""
    run = facts.run
    planned = {name: run.value(name) for name in ("test_mode", "mode", "core_type")} | {
        "workload": _value_text(run.value("benchmarks") or ""),
        "model": run.value("model_path"),
        "scenario": _value_text(run.value("scenarios") or ""),
        "world_size": run.plan.get("world_size"),
    }
    result = run.result or planned
    status = "STOPPED" if (stopped := run.stopped_by) else str(result.get("status") or "")
    reasons = [f"{stopped[:1].upper()}{stopped[1:]}."] if stopped else []
    refusals = failed_checks(run.result) if status != MEASURED else []
    reasons += [f"Refused: {text}." for text in refusals]
    reasons += [f"Doubtful: {text}." for text in run.doubts if text not in refusals]
    reasons += [f"Not checked: {text}." for text in unchecked(run.result)]
    reasons += [f"Not satisfied: {text}." for text in result.get("loadgen_unsatisfied") or []]
    reasons += list(result.get("loadgen_advice") or [])
    reasons += [f"{text[:1].upper()}{text[1:]}." for text in [_counted(run.result)] if text]
    reasons += facts.verdict_notes()
    if result.get("lost"):
        reasons.append("Not to be submitted: the run went on without a part of its system.")
    model = str(result.get("model") or "").rpartition("/")[2]
    started = run.telemetry.get("started")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(started)) if started else ""
    subtitle = (
        result.get("workload") or model or result.get("core_type"),
        *(["conversations"] if run.has_conversations else [result.get("scenario"), result.get("test_mode")]),
        result.get("mode"),
        f"core {result['core_type']}" if result.get("core_type") else "",
        _server(run),
        f"{result['world_size']} ranks" if result.get("world_size") else "",
        when,
    )
    subtitle_html = " · ".join(escape(part) for part in subtitle if part)
    why = f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>" if reasons else ""
    known_status = status if status in _VERDICTS else ""
    is_refused = result.get("loadgen_result") == "VALID" and status == "INVALID"
    verdict = _REFUSED if is_refused else _VERDICTS[known_status]
    kind = "doubtful" if status in ("VALID", MEASURED) and run.doubts else known_status.lower() or "none"
    return (
        f'<header class="verdict {kind}">'
        f'<p class="badge">{escape(status or "no outcome")}</p>'
        f"<div><h1>{escape(run.path.absolute().name)}</h1><p>{subtitle_html}</p>"
        f"<p><strong>{verdict}</strong></p>{why}</div></header>"
    )


def _counted(result: Mapping[str, Any] | None) -> str:
    result = result or {}
    return counted_from_text(result.get("per_instance") or []) or counted_by_client(result)


def _server(run: RunFiles) -> str:
    """Return this run's URL if it served, or the servers that it used; "" if neither."""
    if url := run.result.get("url"):
        return str(url)
    urls = [url for name in SERVERS for url in run.value(name) or ()]
    more = f" and {len(urls) - _MAX_SERVERS} more" if len(urls) > _MAX_SERVERS else ""
    return f"of {', '.join(map(str, urls[:_MAX_SERVERS]))}{more}" if urls else ""


def missing(notes: Sequence[str]) -> str:
    """Return what the run directory lacks, a line for each."""
    if not notes:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in notes)
    return f'<section class="missing"><h2>What is missing here</h2><ul>{lines}</ul></section>'


def failures(run: RunFiles) -> str:
    """Return why the run failed, and what it lost."""
    items = []
    for failure in [] if run.stopped_by else failures_in(run.result):
        rank, trace = failure.get("rank"), failure.get("traceback")
        rank_text = "" if rank is None else f"rank {rank}: "
        cause, more = _cause(failure)
        more += f"<p>{escape(failure['doctor'])}</p>" if failure.get("doctor") else ""
        if isinstance(rank, int) and (log := run.log_of(rank)):
            more += f"<p>See {link(log)}.</p>"
        if trace:
            more += f"<details><summary>Traceback</summary><pre>{escape(trace)}</pre></details>"
        items.append(f"<li><strong>{escape(rank_text)}{cause}</strong>{more}</li>")
    for lost in run.result.get("lost") or []:
        cause, more = _cause(lost)
        items.append(
            f"<li><strong>Lost at {lost.get('at_s', 0):.1f} s:"
            f" instance {escape(lost.get('instance'))}</strong>,"
            f" rank {escape(lost.get('rank'))}: {cause}"
            f" ({escape(lost.get('retried', 0))} samples were computed again){more}</li>"
        )
    phase = run.result.get("phase")
    where = f" in phase {escape(phase)}" if phase and run.result.get("status") == "FAILED" else ""
    if not items:
        return ""
    return f'<section class="failed"><h2>What went wrong{where}</h2><ul>{"".join(items)}</ul></section>'


def _cause(failure: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first line of a cause, and an element with its other lines, such as a server's log."""
    first, _, others = str(failure.get("cause", "")).partition("\n")
    return escape(first), f"<pre>{escape(others)}</pre>" if others else ""


def tiles(facts: Facts, price: float | None) -> str:
    """Return the main figures."""
    result, limits = facts.run.result, limits_ms(facts.run)
    cells: list[tuple[str, str, str, str]] = []  # label, value, note, class
    for key, label in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if (value := result.get(key)) is not None:
            cells.append((label, short(value), "", ""))
    for key, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "end to end")):
        if (latency := result.get(f"{key}_ms")) is None:
            continue
        p99, limit = latency.get("p99"), limits.get(key)
        if p99 is None:
            cells.append((f"{label} mean", _time_or_dash(latency.get("mean")), too_few(latency), ""))
            continue
        note, kind = f"p50 {_time_or_dash(latency.get('p50'))}", ""
        if limit:
            note, kind = f"limit {milliseconds(limit)}", "good" if p99 <= limit else "bad"
        cells.append((f"{label} p99", milliseconds(p99), note, kind))
    if result.get("samples") is not None:
        errors = result.get("errors") or 0
        note = f"{errors} errors" if errors else f"in {result.get('test_s', facts.test_s):.1f} s"
        cells.append(("samples", f"{result['samples']:,}", note, "bad" if errors else ""))
    if (tokens := result.get("tokens")) and (energy := facts.energy()):
        cells.append(("energy per token", f"{energy.total / tokens:.2f} J", f"{energy.total:,.0f} J", ""))
    if price is not None and (cost := facts.cost_per_million_tokens(price)) is not None:
        n, of = facts.run.computing()
        unit = "GPUs" if of == "GPU" else "worker ranks (no GPU)"
        cells.append(("per million tokens", f"{cost:.2f}", f"{n} {unit} at {price:g} an hour", ""))
    cells_html = "".join(
        f'<div class="{kind}"><dt>{escape(label)}</dt><dd>{value}</dd>'
        f'<dd class="note">{escape(note)}</dd></div>'
        for label, value, note, kind in cells
    )
    if not cells:
        return ""
    return f'<section><h2 class="hidden">Figures</h2><dl class="tiles">{cells_html}</dl></section>'


def plan(facts: Facts) -> str:
    """Return the picture of nodes, each with its instances and how busy they were."""
    if not facts.instances:
        return ""
    worst = None if facts.failed else facts.bottleneck()
    first_rank = {one.ranks[0]: one for one in list(facts.instances.values())[:_MAX_CARDS]}
    nodes: dict[str, list[str]] = {}
    for rank in facts.run.plan_ranks:
        cards = nodes.setdefault(str(rank.get("node")), [])
        one = first_rank.get(rank.get("rank", -1))
        if one is not None:
            cards.append(_card(one, one is worst))
        elif rank.get("instance") is None:
            roles = " + ".join(rank.get("roles") or [])
            cards.append(
                f'<div class="card control"><b>{escape(roles)}</b>'
                f"<small>rank {escape(rank.get('rank'))}</small>"
                f"{_FAILED if rank.get('rank') in facts.failed else ''}</div>"
            )
    pictures = "".join(
        f'<div class="node"><h3>{escape(node)}</h3><div class="cards">{"".join(cards)}</div></div>'
        for node, cards in nodes.items()
        if cards
    )
    more = len(facts.instances) - len(first_rank)
    note = f"<p>{more} more instances are not shown.</p>" if more > 0 else ""
    return f"<section><h2>{_plan_title(facts, worst)}</h2>{pictures}{note}</section>"


def _plan_title(facts: Facts, worst: InstanceFacts | None) -> str:
    if facts.failed:
        failed = [one.name for one in facts.instances.values() if one.failed]
        return f"Failed: {escape(', '.join(failed))}" if failed else "The plan"
    if worst is None and facts.run.result.get("status") in (None, "FAILED"):  # how the run ended is unknown
        return "The plan"
    limit = facts.limit()
    return escape(limit[:1].upper() + limit[1:]) or "The plan"


def _card(one: InstanceFacts, is_worst: bool) -> str:
    share = "" if one.share is None else f"<b>{100 * one.share:.0f} %</b> {one.share_of}"
    waited = "" if not one.waited else f"requests waited {100 * one.waited:.0f} % of the time"
    notes = " · ".join(filter(None, (share, waited)))
    ranks = f"rank{'s' * (len(one.ranks) > 1)} {ranges(one.ranks, ', ', _MAX_RANGES)}"
    flag = _FAILED if one.failed else '<em class="flag">bottleneck</em>' if is_worst else ""
    lost = '<em class="flag">lost</em>' if one.lost else ""
    level = 0 if one.load is None else min(4, int(5 * one.load))
    return (
        f'<div class="card heat{level}{" worst" if is_worst or one.failed else ""}">'
        f'<b class="name"><i class="c{one.number % 8}"></i>'
        f"{escape(one.name)}</b> <small>{ranks}</small>{flag}{lost}"
        f"{svg.strip(one.strip) if one.strip else ''}<p>{notes}</p></div>"
    )


def energy(facts: Facts, price: float | None) -> str:
    """Return the joules by activity."""
    spent = facts.energy()
    if spent is None:
        return ""
    result = facts.run.result
    metrics = [(one.result or {}).get("metrics") or {} for one in facts.instances.values()]
    prompt = sum(one.get("prompt_tokens") or 0 for one in metrics)
    generated = sum(one.get("generated_tokens") or 0 for one in metrics) or result.get("tokens") or 0
    rows = [
        (
            name,
            f"{joules:,.0f} J",
            f"{100 * joules / (spent.total or 1):.0f} %",
            f"{joules / tokens:.3f} J per {of}" if tokens else "",
        )
        for name, joules, tokens, of in (
            ("context", spent.context, prompt, "prompt token"),
            ("decode", spent.decode, generated, "generated token"),
            ("handoff", spent.handoff, prompt, "prompt token"),
            ("idle", spent.idle, generated, "generated token"),
            ("all", spent.total, generated, "generated token"),
        )
    ]
    return section("Energy of the GPUs in the test", ("", "energy", "share", "per token"), rows)


def _time_or_dash(ms: float | None) -> str:
    return "-" if ms is None else milliseconds(ms)


def _latency_rows(result: Mapping[str, Any], suffix: str = "") -> list[tuple[str, ...]]:
    return [
        (f"{label}{suffix}", *(_time_or_dash(latency.get(key)) for key in ("p50", "p90", "p99", "mean")))
        for label, name in (
            ("time to first token", "ttft_ms"),
            ("time per output token", "tpot_ms"),
            ("end to end", "latency_ms"),
        )
        if (latency := result.get(name)) is not None
    ]


def _socket_rows(facts: Facts) -> list[tuple[str, ...]]:
    """Return the latencies that clients of servers measured."""
    keys = ("p50", "p90", "p99", "mean")
    return [
        (f"{label}, client of {one.name}", *(_time_or_dash(entry.get(f"{name}_{key}_ms")) for key in keys))
        for one in facts.instances.values()
        for label, name in (
            ("time to first token", "socket_ttft"),
            ("time to first answer token (after reasoning)", "socket_first_answer"),
            ("time per output token", "socket_tpot"),
        )
        if f"{name}_p50_ms" in (entry := one.result or {})
    ]


def _clocks(result: Mapping[str, Any], has_clients: bool) -> str:
    """Return whose clocks measured the latencies, in a paragraph."""
    harness = result.get("harness") or {}
    if harness.get("asked"):
        text = f"By the clock of {harness['name']}, from the request to its tokens."
    else:
        issuer = "the load driver" if result.get("conversations") else "LoadGen"
        text = f"By rank 0's clock: from when {issuer} issues a request until rank 0 has its tokens."
    if has_clients:
        text += " Rows of a client: by its rank's clock, from the request until bytes arrive at its socket."
    return f"<p>{escape(text)}</p>"


def figures(facts: Facts) -> str:
    """Return the tables: latencies, instances, phases."""
    result = facts.run.result
    latencies = _latency_rows(result)
    of = result.get("conversations") or {}
    for name in ("first turns", "later turns"):
        part = of.get(name.replace(" ", "_"))
        latencies += _latency_rows(part or {}, f", {name}")
    latencies += _latency_rows(of.get("per_conversation") or {}, ", by conversation")
    latencies += (of_clients := _socket_rows(facts))
    clocks = _clocks(result, bool(of_clients)) if latencies else ""
    instances = []
    for one in facts.instances.values():
        entry = one.result or {}
        metrics = entry.get("metrics") or {}
        kv = metrics.get("kv_cache_usage") or {}
        instances.append(
            (
                one.name,
                entry.get("samples", ""),
                entry.get("tokens", ""),
                "" if one.share is None else f"{100 * one.share:.0f} %",
                "" if one.waited is None else f"{100 * one.waited:.0f} %",
                *(
                    short(peak["peak"]) if (peak := metrics.get(name)) else ""
                    for name in ("running", "waiting")
                ),
                f"{100 * kv['peak']:.0f} %" if kv else "",
            )
        )
    shares = dict.fromkeys(one.share_of for one in facts.instances.values() if one.share is not None)
    names = ["", "samples", "tokens", " or ".join(shares), "requests waited"]
    names += ["most running", "most waiting", "KV cache at most"]
    known = [i for i in range(len(names)) if any(row[i] != "" for row in instances)]  # without empty columns
    rows = [[row[i] for i in known] for row in instances] if len(known) > 1 else []
    phases = [(name, f"{seconds:.2f} s") for name, seconds in (result.get("phases_s") or {}).items()]
    return (
        section("Conversations", ("", ""), [*conversation_facts(of), *goodput_rows(result)] if of else [])
        + section("Speculative decoding", ("", ""), speculation_rows(result))
        + section("Latencies", ("", "p50", "p90", "p99", "mean"), latencies, clocks)
        + section("Instances", [names[i] for i in known], rows)
        + section("Phases", ("", "took"), phases)
    )


def options(run: RunFiles) -> str:
    """Return each option's value and where it was set; default values are folded away."""
    rows = []
    for name, entry in sorted(run.config.items()):
        value, source = entry["value"], entry.get("source", "")
        if isinstance(value, dict) and isinstance(source, dict):  # one source for each flag
            rows += [
                (f"{name}.{key}", _value_text(one), str(source.get(key, ""))) for key, one in value.items()
            ]
        else:
            rows.append((name, _value_text(value), _value_text(source)))
    user_rows = [row for row in rows if not row[2].startswith("default")]
    defaults = [row for row in rows if row[2].startswith("default")]
    names = ("option", "value", "set by")
    summary = f"<summary>{len(defaults)} options by default</summary>"
    folded = f"<details>{summary}{table(names, defaults)}</details>" if defaults else ""
    return section("Options", names, user_rows, folded)


def _value_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def files(run: RunFiles) -> str:
    """Return links to the files beside the report, and the ranks' software versions."""
    names = {path.name for path in run.path.iterdir() if path.is_file()} | {TRACE}  # TRACE is written later
    logs = sorted(path.name for path in run.path.glob(f"{RANKS}/*.log"))
    failed = {run.log_of(rank) for rank in run.failed_ranks}
    links = "".join(_link(name) for name in sorted(names - {PAGE}))
    for log in (f"{RANKS}/{name}" for name in logs[:_MAX_LOGS]):
        links += _link(log, _FAILED if log in failed else "")
    if len(logs) > _MAX_LOGS:
        links += f"<li>{len(logs) - _MAX_LOGS} more logs in {RANKS}/</li>"
    versions = (run.ranks[0].get("versions") or {}) if run.ranks else {}
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f'<section><h2>Files</h2><p class="note">{escape(software)}. trace.json opens in ui.perfetto.dev.</p>'
        f'<ul class="files">{links}</ul></section>'
    )


def _link(name: str, more: str = "") -> str:
    return f"<li>{link(name)}{more}</li>"
