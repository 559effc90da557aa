"""`result.json`: the outcome of a run, even of a failed one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpillm.comms.messages import DrainReport
from mpillm.cores.draft_counts import draft_counts
from mpillm.cores.histogram import Histogram
from mpillm.options.run_config import RunConfig
from mpillm.report.numbers import milliseconds, rate_text
from mpillm.report.page.run_analysis import Facts, busy_share, busy_with, bypasses_ranks
from mpillm.report.percentiles import too_few
from mpillm.report.speculation import acceptance_doubt, speculation_rows
from mpillm.report.tested_servers import models_in_use, tested_servers
from mpillm.report.timeline import Timeline
from mpillm.report.validity_checks import failed_checks, queue, rates, unchecked, without_limits
from mpillm.telemetry.cpu_use import other_load
from mpillm.telemetry.gpu_meter import other_processes

if TYPE_CHECKING:  # the module imports MPI, which a reader of results does not need
    from mpillm.roles.harness import Totals

_BUSY = 0.8  # share of a CPU core: a busier client measures itself, not the servers
_REFUSED = "the server refused them, or closed the connection"
_MAX_COMPILED = 20  # kernels or graphs to list


def test_result(
    totals: Totals, reports: dict[int, DrainReport], timeline: Timeline, n_ranks: int
) -> dict[str, Any]:
    """Return the figures of the test: from the harness, from the ranks' drain reports, and from `timeline`.

    Adds the reports' final metrics to `timeline`.
    """
    elapsed = totals.lasted_s
    per_instance, compiled, streamed = [], [], True
    for rank, report in sorted(reports.items()):
        compiled += [f"rank {rank}: {name}" for role in report.roles for name in role.pop("compiled", ())]
        instance = {key: value for role in report.roles for key, value in role.items()}
        if "instance" in instance:
            lasted, noted = instance.pop("test_s"), report.telemetry
            instance["busy_fraction"] = round(busy_share(noted, elapsed), 4) if elapsed > 0 else 0.0
            instance["busy_with"] = busy_with(bool(noted.get("knows_steps")))
            if (metrics := instance.pop("metrics")) is not None:
                timeline.add(instance["instance"], lasted, metrics)
            instance["metrics"] = timeline.summary(instance["instance"])
            streamed &= instance.pop("streamed", True)
            instance |= draft_counts([instance]).figures()
            per_instance.append(instance)
    if not streamed:  # the time of the first token is unknown
        totals.ttft, totals.tpot = Histogram(), Histogram()
    return {
        "samples": totals.samples,
        "errors": totals.errors,
        "tokens": totals.tokens,
        "test_s": round(elapsed, 4),
        "samples_per_second": round(totals.samples / elapsed, 4) if elapsed > 0 else 0.0,
        "tokens_per_second": round(totals.tokens / elapsed, 4) if elapsed > 0 else 0.0,
        "streamed": streamed,
        "ttft_ms": totals.ttft.summary_ms(),
        "tpot_ms": totals.tpot.summary_ms(),
        "latency_ms": totals.latency.summary_ms(),
        "per_instance": sorted(per_instance, key=lambda instance: int(instance["instance"])),
        "compiled_in_test": len(compiled),
        "compiled": compiled[:_MAX_COMPILED],
        "route": {
            "messages": sum(report.messages for report in reports.values()),
            "message_bytes": sum(report.message_bytes for report in reports.values()),
        },
        # By rank; null: the rank was lost.
        "cpu_cores": [
            round(reports[rank].cpu.mean_cores, 4) if rank in reports else None for rank in range(n_ranks)
        ],
    }


def other_loads(nodes: Sequence[str], reports: Mapping[int, DrainReport]) -> list[dict[str, Any]]:
    """Return for `result.json` how other processes used each node's CPU cores; `nodes`: node of each rank."""
    loads = (
        other_load(node, [report.cpu for report in node_reports])
        for node, node_reports in _complete_nodes(nodes, reports)
    )
    return [load for load in loads if load is not None]


def others_on_gpus(nodes: Sequence[str], reports: Mapping[int, DrainReport]) -> list[dict[str, Any]]:
    """Return for `result.json` which other processes computed on the ranks' GPUs."""
    return [
        one
        for node, node_reports in _complete_nodes(nodes, reports)
        for one in other_processes(node, [report.gpu for report in node_reports if report.gpu is not None])
    ]


def _complete_nodes(
    nodes: Sequence[str], reports: Mapping[int, DrainReport]
) -> Iterator[tuple[str, list[DrainReport]]]:
    """Yield the nodes that have lost no rank: a lost rank would count as another process."""
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    for node, node_ranks in ranks.items():
        if {*node_ranks} <= reports.keys():
            yield node, [reports[rank] for rank in node_ranks]


def add_costs(result: dict[str, Any], totals: Totals, timeline: Timeline) -> None:
    """Add to `result`, which lists the lost instances, what each loss cost."""
    result["retried"] = sum(loss.retried for loss in totals.losses.values())
    for lost in result["lost"]:
        costs = totals.losses.get(lost["instance"])
        recovered = costs.recovered - totals.started - lost["at_s"] if costs and costs.recovered else 0.0
        lost |= {
            "retried": costs.retried if costs else 0,
            "waited_in_vain_s": round(costs.waited_s, 3) if costs else 0.0,
            "recovered_after_s": round(max(0.0, recovered), 3),
            "metrics": timeline.summary(lost["instance"]),
        }


def _lost_rows(result: Mapping[str, Any], unit: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for lost in result["lost"]:
        when = f"at {lost['at_s']:.1f} s" if lost["phase"] == "test" else f"in phase {lost['phase']}"
        where = f"instance {lost['instance']} ({lost['role']}) {when}: rank {lost['rank']}"
        rows.append(("LOST", f"{where}: {lost['cause'].splitlines()[0]}"))
        again = f"{lost['retried']} {unit} were computed again, the last was answered"
        again += f" {lost['recovered_after_s']:.1f} s later"
        none = f"no request was outstanding: no {unit} were computed again"
        rows.append(("", again if lost["retried"] else none))
    return rows


def summary_rows(
    result: Mapping[str, Any], config: RunConfig, directory: str, facts: Facts | None = None
) -> list[tuple[str, Any]]:
    """Return the summary for the console: names and values of `result.json`, which lies in `directory`.

    `facts`: those of the HTML report, so that both use the same names and shares of instances.
    """
    rows: list[tuple[str, Any]] = [
        ("LoadGen", f"{result['loadgen_result']} ({config.scenario}, {config.test_mode})")
    ]
    refusals = failed_checks(result)
    rows += [("REFUSED", f"not VALID: {text}") for text in refusals]
    rows += [("DOUBTFUL", doubt) for doubt in result.get("doubts", ()) if doubt not in refusals]
    rows += [("not checked", text) for text in unchecked(result)]
    if without_limits(result):
        rows.append(("", "no latency limit was set: LoadGen accepts every rate (--goodput ttft:500 tpot:50)"))
    if result["lost"]:
        rows.append(("", "not to be submitted: the run went on without a part of its system"))
        rows += _lost_rows(result, "samples")
    if config.compliance_test:
        rows.append(("", f"which means nothing for a {config.compliance_test} run"))
    else:
        if result["loadgen_unsatisfied"]:
            rows.append(("", f"not satisfied: {', '.join(result['loadgen_unsatisfied'])}"))
        rows += [("", advice) for advice in result["loadgen_advice"]]
    if text := rates(result):
        rows.append(("rate", f"{text}; {queue(result)}"))
    rows += _measured_rows(result, "samples", facts)
    if facts is not None and (limit := facts.limit()):
        rows.append(("limit", limit))
    judge = "compliance" if config.compliance_test else "accuracy"
    if config.compliance_test or (config.workload and config.test_mode == "AccuracyOnly"):
        rows.append(("judged by", f"python -m mpillm {judge} {shlex.quote(directory)}"))
    return [*rows, ("result", f"{directory}/result.json")]


def served_rows(result: Mapping[str, Any], directory: str) -> list[tuple[str, Any]]:
    """Do as `summary_rows`, for a run that served."""
    return [
        *(("DOUBTFUL", doubt) for doubt in [acceptance_doubt(result)] if doubt),
        *_lost_rows(result, "requests"),
        *_measured_rows(result, "requests"),
        ("given up by clients", result["aborted"]),
        ("result", f"{directory}/result.json"),
    ]


def other_harness_rows(
    result: Mapping[str, Any], directory: str, facts: Facts | None = None
) -> list[tuple[str, Any]]:
    """Do as `summary_rows`, for a test with a load client."""
    client = result["harness"]
    name = f"{client['name']} {client['version']}".strip()
    text = f"{client['completed']:,} of {client['asked']:,} requests in {client['duration_s']:,.2f} s"
    rows: list[tuple[str, Any]] = [
        ("harness", f"{name}: {text}, {client['failed']:,} failed"),
        *(("DOUBTFUL", doubt) for doubt in result["doubts"]),
        *(("not checked", text) for text in unchecked(result)),
        *_lost_rows(result, "requests"),
    ]
    if text := rates(result):
        rows.append(("rate", f"{text}; {queue(result)}"))
    rows += _measured_rows(result, "requests", facts)[1:]
    if text := counted_by_client(result):
        rows.append(("token counts", text))
    if own := result.get("endpoint"):
        counted = f"{own['samples']:,} requests, {own['tokens']:,} tokens, {own['errors']:,} errors"
        ttft = f", first token p50 {milliseconds(own['ttft_ms']['p50'])}" if own["ttft_ms"] else ""
        rows.append(("at the endpoint", f"{counted}{ttft}"))
    if facts is not None and (limit := facts.limit()):
        rows.append(("limit", limit))
    return [*rows, ("result", f"{directory}/result.json")]


def conversation_facts(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how many conversations ended, and the cached tokens of prompts if these are known.

    `of`: the entry of result.json.
    """
    rows = [("conversations", f"{of['ended']:,} of {of['started']:,} ended, {of['failed']:,} by an error")]
    if of["outgrown"]:
        first = f"; the first: {', '.join(places)}" if (places := of.get("outgrown_at")) else ""
        rows.append(("  outgrown", f"{of['outgrown']:,}: the next prompt did not fit the model{first}"))
    if of.get("requests_cancelled"):
        rows.append(("  cancelled", f"{of['requests_cancelled']:,} requests, which are in no other figure"))
    window = of.get("window_s") or (0.0, None)
    if (rate := of.get("requests_per_second")) is not None and tuple(window) != (0.0, None):
        tokens = f"{rate_text(rate)} requests/s, {rate_text(of['tokens_per_second'])} tokens/s"
        end = "" if window[1] is None else f" to {window[1]:.1f} s"
        rows.append(("  in the window", f"{tokens}, from {window[0]:.1f} s{end}"))
    rows += _interactivity(of)
    shares = [
        f"{100 * share:.0f} % in {title}"
        for name, title in (("first_turns", "first turns"), ("later_turns", "later turns"))
        if (share := of.get(name, {}).get("cached_share")) is not None
    ]
    return [*rows, ("cached prompt tokens", ", ".join(shares))] if shares else rows


def _interactivity(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    sources = (
        ("e2e_avg_interactivity", "over all requests (MLPerf Endpoints)"),
        ("e2e_normalized_interactivity_p90", "at p90 (InferenceX)"),
    )
    known = [f"{rate_text(value)} {source}" for key, source in sources if (value := of.get(key)) is not None]
    return [("tokens/s per user", ", ".join(known))] if known else []


def goodput_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how many requests and conversations met the limits of --goodput; [] without limits."""
    of = result.get("goodput")
    if not of:
        return []
    limits = ", ".join(f"{name.upper()} {milliseconds(ms)}" for name, ms in of["limits_ms"].items())
    rows = [("good requests", f"{rate_text(of['good_requests_per_second'])} per second, within {limits}")]
    if n := of.get("conversations"):
        good, rate = of["good_conversations"], of["good_conversations_per_second"]
        text = f"{good:,} of {n:,} ({100 * good / n:.0f} %), {rate_text(rate)} per second"
        rows.append(("good conversations", text))
    return rows


def conversation_rows(
    result: Mapping[str, Any], directory: str, facts: Facts | None = None
) -> list[tuple[str, Any]]:
    """Do as `summary_rows`, for a test of conversations."""
    of = result["conversations"]
    first, *more = conversation_facts(of)
    rows: list[tuple[str, Any]] = [
        first,
        *(("DOUBTFUL", doubt) for doubt in result["doubts"]),
        *(("not checked", text) for text in unchecked(result)),
        *_lost_rows(result, "requests"),
        *_measured_rows(result, "requests", facts),
    ]
    place = next((i for i, (name, _) in enumerate(rows) if name == "time to first token"), len(rows))
    for name, title in (("later_turns", "later turns"), ("first_turns", "first turns")):
        if ttft := of.get(name, {}).get("ttft_ms"):
            known = "  ".join(f"{k} {milliseconds(v)}" for k, v in ttft.items() if v is not None)
            rows.insert(place + 1, (f"  in {title}", known))
    rows[place:place] = [*more, *goodput_rows(result)]
    if facts is not None and (limit := facts.limit()):
        rows.append(("limit", limit))
    return [*rows, ("result", f"{directory}/result.json")]


def _measured_rows(result: Mapping[str, Any], unit: str, facts: Facts | None = None) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        (unit, f"{result['samples']:,} in {result['test_s']:,.2f} s, {result['errors']:,} errors"),
        (f"{unit} per second", f"{result['samples_per_second']:,.2f}"),
        ("tokens per second", f"{result['tokens_per_second']:,.1f}"),
    ]
    for name, key in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms")):
        if (latency := result[key]) is not None:
            known = [f"{k} {milliseconds(v)}" for k, v in latency.items() if v is not None]
            note = f"  ({few})" if (few := too_few(latency)) else ""
            rows.append((name, f"{'  '.join(known)}{note}"))
        elif not result.get("streamed", True):
            rows.append((name, "-  (the answers were not streamed)"))
    rows += speculation_rows(result)
    if models := models_in_use(tested_servers(result)):
        rows.append(("model at the server", ", ".join(models)))
    if n := result["compiled_in_test"]:
        when, payer = ("in the test", "the test") if unit == "samples" else ("while it served", "requests")
        text = f"{n} kernels or graphs ('compiled' in result.json), which took time of {payer}"
        rows.append((f"compiled {when}", text))
    for instance in result["per_instance"]:
        one = facts.instances.get(instance["instance"]) if facts is not None else None
        # A client that holds requests waits for its servers, which may be idle.
        share, doing = instance["busy_fraction"], instance.get("busy_with", busy_with(False))
        part = _part_of_the_tokens(instance, result["per_instance"], facts)
        work = f"{instance['samples']:,} {unit}, {instance['tokens']:,} tokens{part}"
        work += f", {doing} {100 * share:.0f} %"
        if bypasses_ranks(result):
            counted = instance.get("server_generated_tokens")
            work = "asked by the harness itself"
            work += "" if counted is None else f"; the server counts {counted:,.0f} tokens"
        rows.append((one.name if one is not None else f"instance {instance['instance']}", work))
        if piece := instance.get("context_piece"):
            rows.append(("", f"at most {piece} tokens of prompts in a step, as measured before the test"))
        counts = draft_counts([instance])
        if counts.drafted:
            share = f"{100 * counts.accepted / counts.drafted:.0f} %"
            accepted = f"{counts.accepted:.0f} of {counts.drafted:.0f} draft tokens were accepted"
            rows.append(("", f"speculation: {accepted} ({share})"))
        rows += [("", advice) for advice in _advice(instance)]
    return rows


def _part_of_the_tokens(
    instance: Mapping[str, Any], every: Sequence[Mapping[str, Any]], facts: Facts | None
) -> str:
    """Return an instance's share of the tokens of its role, to follow the number of tokens in its line.

    "" for the only instance of the role, or if the roles are unknown.
    """
    if facts is None or instance["instance"] not in facts.instances:
        return ""
    roles = {number: one.role for number, one in facts.instances.items()}
    role = roles[instance["instance"]]
    tokens = [one["tokens"] for one in every if roles.get(one["instance"]) == role]
    return f" ({100 * instance['tokens'] / sum(tokens):.0f} %)" if len(tokens) > 1 and sum(tokens) else ""


def counted_from_text(instances: Sequence[Mapping[str, Any]]) -> str:
    """Return whether clients count tokens from text, in words; "" if the servers count all of them."""
    n, others = (
        sum(one.get(name) or 0 for one in instances) for name in ("retokenized", "other_text_length")
    )
    if not n:
        return ""
    usage = f"; its usage gives {others} of them another number of tokens" if others else ""
    return f"tokens of {n} answers are counted from their text: the server gives no token ids{usage}"


def counted_by_client(result: Mapping[str, Any]) -> str:
    """Return whether a load client counts tokens itself, in words; "" if servers count all of them."""
    client = result.get("harness") or {}
    if not (n := client.get("self_counted")):
        return ""
    return f"{client['name']} counts the tokens of {n:,} answers itself: it has no counts of the server"


def _advice(instance: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes that the reader of an instance's figures needs."""
    if n := instance.get("preemptions"):
        yield f"its KV cache was full: {n} evictions; with --batch_scheduler_policy no_evict it starts fewer"
    if (busy := instance.get("client_busy_fraction", 0)) > _BUSY:
        share = f"{100 * busy:.0f} %"
        yield f"its client is busy {share} of the time: start more ranks, the servers may be faster"
    if text := counted_from_text([instance]):
        yield text
    if "socket_first_answer_p50_ms" in instance:
        known = [
            f"{k} {milliseconds(instance[f'socket_first_answer_{k}_ms'])}" for k in ("p50", "p90", "p99")
        ]
        yield f"first answer token, after reasoning, by its client's clock: {'  '.join(known)}"
    if n := instance.get("retries"):
        server = instance.get("server") or {}
        ends = [f"server {server['index']}: {one['why']}" for one in server.get("restarts", ())]
        yield f"{n} requests were sent again: {'; '.join(ends) or _REFUSED}"
