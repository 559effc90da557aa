"""Checks whether a test that LoadGen calls VALID is valid, and whether its figures are trustworthy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mpillm.report.numbers import rate_text
from mpillm.report.repeats import prefix_cache_doubt
from mpillm.report.speculation import acceptance_doubt
from mpillm.report.tested_servers import (
    TestedServer,
    counted_at,
    expired_leases,
    failed_transfers,
    missing_contexts,
    other_models,
    other_totals,
    summed_at,
    tested_servers,
    used_by_others,
)

_DISTURBANCES = {
    "others": "other processes used {others:.2g} of the {cores} cores of {host}",
    "stolen": "the host of {host}, a virtual machine, took {stolen:.2g} of its {cores} cores",
}

_UNCHECKED = {
    "no_cached_prompts": "whether prompts came from a prefix cache, which MLPerf forbids: servers give no"
    " count of them (/metrics), and too few prompts came twice in a Server test to see it in first tokens",
    "no_guesses": "whether draft tokens were used, which the workload's rules forbid: servers give no count"
    " of them (/metrics)",
}
_DOUBTS_ONLY = ("server_totals", "answer_models")  # a test that fails these may still be VALID
_UNCHECKED_TRANSFERS = {
    "contexts_arrived": "whether generation servers got all KV caches, or computed prompts again: servers"
    " give no count of transfers (/metrics)"
}

_UNCHECKED_TOTALS = {
    "server_totals": "whether others used the servers: the servers or the load client do not count the tokens"
    " of all requests"
}


def doubts(
    result: Mapping[str, Any],
    *,
    others_serve: bool = False,
    reuse_allowed: bool = False,
    speculation_forbidden: bool = False,
) -> list[str]:
    """Return why readers of `result.json` should doubt a test, a line for each reason.

    A VALID test with a doubt must not be displayed as good. A test with any of `failed_checks` is not VALID.

    Args:
        others_serve: Other processes on the ranks' nodes may be the tested servers.
        reuse_allowed: --enable_kv_cache_reuse.
        speculation_forbidden: The workload's rules forbid speculative decoding.
    """
    texts = [*filter(None, [acceptance_doubt(result)]), *_of_profilers(result), *restarts(result)]
    if result.get("queue_grew"):
        texts.append(f"the queue grew: {rates(result)}; answers came later and later")
    if late := late_answers(result.get("goodput") or {"late": {}, "late_allowed": 0}):
        texts.append(late)
    if disturbed := _disturbances(result, {"stolen"} if others_serve else {"others", "stolen"}):
        texts.append(disturbed)
    texts += [_on_gpu(gpu) for gpu in result.get("other_gpu_processes", ())]
    checks = server_checks(result, reuse_allowed=reuse_allowed, speculation_forbidden=speculation_forbidden)
    texts += [text for text in checks.values() if text]
    return texts


def _of_profilers(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield that servers were profiled in the test, and which problems their profilers had."""
    clients = result.get("per_instance", ())
    if urls := [url for client in clients for url in client.get("profiled", ())]:
        more = f" and {len(urls) - 1} more servers" if len(urls) > 1 else ""
        yield f"{urls[0]}{more} ran under a profiler (--profile): the figures are slower than without it"
    yield from (f"--profile: {text}" for client in clients for text in client.get("profile_problems", ()))


def server_checks(
    result: Mapping[str, Any], *, reuse_allowed: bool = False, speculation_forbidden: bool = False
) -> dict[str, str | None]:
    """Return the checks of the servers' answers for `result.json`: "" if passed, otherwise the finding.

    A value None: the servers do not report the count that the check needs. {}: there are no servers.
    Arguments: see `doubts`; checks of allowed features are left out.
    """
    clients = [client for client in result.get("per_instance", ()) if "short_answers" in client]
    did_request = any(client.get("samples") for client in clients)  # not if a load client sent the requests
    servers = tested_servers(result)
    n_answers, n_texts = (
        sum(client.get(name, 0) for client in clients) for name in ("samples", "retokenized")
    )
    counted = n_answers - result.get("errors", 0) > n_texts
    outcomes: dict[str, tuple[str, bool]] = {}
    if not reuse_allowed:
        is_counted, repeats = _is_counted(clients, "server_cached_tokens"), result.get("repeated_prompts")
        cached = cached_prompts(result) or ("" if is_counted or not repeats else prefix_cache_doubt(repeats))
        message = f"{cached}; to allow it, set --enable_kv_cache_reuse" if cached else ""
        outcomes["no_cached_prompts"] = message, is_counted or bool(repeats)
    if speculation_forbidden:
        accepted = "servers accepted {:,.0f} draft tokens, which the workload's rules forbid"
        outcomes["no_guesses"] = _counted_check(result, "accepted_guesses", accepted, clients)
    counts_failures = _is_counted(clients, "server_failed_transfers")
    outcomes["no_failed_transfers"] = failed_transfers(servers), counts_failures
    # A restarted server counts only from its restart.
    is_complete = not any(restarts(result)) and not result.get("lost")
    lacking, counts_transfers = missing_contexts(servers) if is_complete else ("", False)
    counts_leases = any(one.own("expired_leases") is not None for one in servers)
    outcomes["no_expired_leases"] = expired_leases(servers), counts_leases
    outcomes["contexts_arrived"] = lacking, counts_transfers
    outcomes["token_counts"] = _other_counts(result, servers), counted
    outcomes["server_totals"] = _totals(result, servers, did_request) if is_complete else ("", False)
    outcomes["answer_models"] = other_models(servers), did_request
    outcomes["answer_lengths"] = _short_answers(result, servers), did_request
    checks = {name: text if text or known else None for name, (text, known) in outcomes.items()}
    return checks if clients or any(checks.values()) else {}


def _totals(
    result: Mapping[str, Any], servers: Sequence[TestedServer], did_request: bool
) -> tuple[str, bool]:
    """Return whether others used the servers, in words, and whether this is known."""
    if did_request:
        return other_totals(servers)
    client = result.get("harness")
    return used_by_others(servers, client) if isinstance(client, Mapping) else ("", False)


def failed_checks(result: Mapping[str, Any]) -> list[str]:
    """Return the findings of failed checks of servers' answers. A test with a finding is not VALID."""
    checks = result.get("server_checks")  # a file from outside may contain anything
    if not isinstance(checks, Mapping):
        return []
    return [str(text) for name, text in checks.items() if text and name not in _DOUBTS_ONLY]


def unchecked(result: Mapping[str, Any]) -> list[str]:
    """Return the checks that matter for the verdict but lack a count of the servers, in words."""
    checks = result.get("server_checks")  # a file from outside may contain anything
    if not isinstance(checks, Mapping):
        return []
    clients = result.get("per_instance")
    clients = clients if isinstance(clients, list) else []
    has_handoffs = any(isinstance(client, Mapping) and client.get("handed_over") for client in clients)
    texts = _UNCHECKED | (_UNCHECKED_TRANSFERS if has_handoffs else {})
    if result.get("harness"):
        texts |= _UNCHECKED_TOTALS
    return [text for name, text in texts.items() if name in checks and checks[name] is None]


def _counted_check(
    result: Mapping[str, Any], name: str, text: str, clients: Sequence[Mapping[str, Any]]
) -> tuple[str, bool]:
    """Return `text` with the servers' count ("" if the count is 0), and whether the servers report it."""
    n = _counted(result, name)
    at = counted_at(tested_servers(result), name)
    return text.format(n) + at if n else "", _is_counted(clients, f"server_{name}")


def _is_counted(clients: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether some server reports this count, and no server was silent."""
    is_silent = any(client.get("server_silent") for client in clients)
    return any(name in client for client in clients) and not is_silent


def cached_prompts(result: Mapping[str, Any]) -> str:
    """Return how many prompt tokens came from a prefix cache, in words; "" if none, or unknown."""
    if not (n := _counted(result, "cached_tokens")):
        return ""
    return (
        f"{n:,.0f} prompt tokens came from a server's prefix cache"
        f"{counted_at(tested_servers(result), 'cached_tokens')}, which MLPerf forbids:"
        " vLLM has --no-enable-prefix-caching, SGLang --disable-radix-cache"
    )


def load_client_doubts(harness: Mapping[str, Any], min_duration_s: float) -> list[str]:
    """Return the doubts about a test of a load client. `harness`: the client's entry in `result.json`."""
    name, doubts = harness["name"], []
    if n := harness["failed"]:
        doubts.append(f"{name} reports {n:,} failed request{'s' * (n > 1)}")
    if harness["completed"] + harness["failed"] < harness["asked"]:
        doubts.append(f"{name} reports {harness['completed']:,} of the {harness['asked']:,} requests to send")
    if harness["duration_s"] < min_duration_s:
        doubts.append(
            f"{name} took {harness['duration_s']:.4g} s, less than --min_duration {min_duration_s:g}"
        )
    return doubts


def _counted(result: Mapping[str, Any], name: str) -> float:
    """Return the sum of a count of all servers; one client of each server reports it."""
    clients = result.get("per_instance", ())
    names = f"server_{name}", f"server_context_{name}"
    return float(sum(client.get(name, 0) for client in clients for name in names))


def restarts(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the time and the cause of each restart of a server during the test, in words."""
    for client in result.get("per_instance", ()):
        server = client.get("server") or {}
        for one in server.get("restarts", ()):
            yield (
                f"server {server['index']} was lost {one['at_s']:.1f} s into the test, and available again"
                f" {one.get('back_after_s', 0):.1f} s later: {one['why']}"
            )


def _short_answers(result: Mapping[str, Any], servers: Sequence[TestedServer]) -> str:
    """Return how many answers were too short, in words; "" if none."""
    n = sum(client.get("short_answers", 0) for client in result.get("per_instance", ()))
    n_cut = sum(round(one.sums.get("cut_answers", 0)) for one in servers)
    short = (
        f"{n:,} answers had fewer tokens than --min_output_len, or ignore_eos, requires: a server ignores it"
    )
    cut = (
        f"{n_cut:,} answers ended with finish_reason length before their max_tokens: a server has a lower"
        " limit"
    )
    texts = [short + summed_at(servers, "short_answers")] if n else []
    return "; ".join([*texts, cut + summed_at(servers, "cut_answers")] if n_cut else texts)


def _other_counts(result: Mapping[str, Any], servers: Sequence[TestedServer]) -> str:
    """Return for how many answers servers and clients count different numbers of tokens; "" if for none.

    Answers that are counted from text are left out: their numbers are expected to differ, and the summary has
    a line about them.
    """
    clients = result.get("per_instance", ())
    counts = " and ".join(
        f"the {kind}s of {n:,} requests"
        for kind in ("prompt", "answer")
        if (n := sum(client.get(f"other_{kind}_length", 0) for client in clients))
    )
    at = summed_at(servers, "other_prompt_length", "other_answer_length")
    return f"servers counted other numbers of tokens than their clients in {counts}{at}" if counts else ""


def _disturbances(result: Mapping[str, Any], counted: AbstractSet[str]) -> str:
    """Return the worst disturbance of the test by other load; "" if there was none."""
    loads = [
        (node[kind] / node["cores"], _DISTURBANCES[kind].format(**node))
        for node in result.get("other_load", ())
        for kind in counted & {*node["disturbed_by"]}
    ]
    return f"disturbed: in the test {max(loads)[1]}" if loads else ""


def _on_gpu(gpu: Mapping[str, Any]) -> str:
    pids = gpu["pids"]
    by = f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids[:8]))}"
    return f"disturbed: other work was on {gpu['gpu']} of {gpu['host']} when the test started or ended: {by}"


def late_answers(goodput: Mapping[str, Any]) -> str:
    """Return how many answers exceeded the end-to-end limit, if more than LoadGen would allow; otherwise "".

    LoadGen itself checks only the latencies of tokens.
    """
    late, allowed = goodput["late"].get("e2el", 0), goodput["late_allowed"]
    if late <= allowed:
        return ""
    return f"{late:,} answers were later than {goodput['limits_ms']['e2el']:g} ms, {allowed:,} are allowed"


def rates(result: Mapping[str, Any]) -> str:
    """Return a Server test's rates in words; "" for other tests.

    `samples_per_second` is lower, because it includes the time of the last answer.
    """
    offered, answered = result.get("offered_per_second"), result.get("answered_per_second")
    if offered is None or answered is None:
        return ""
    return (
        f"{rate_text(offered)} queries/s offered, "
        f"{rate_text(answered)} answered, the time of one answer aside"
    )


def queue(result: Mapping[str, Any]) -> str:
    """Return whether the queue of a Server test grew, in words."""
    grew = result.get("queue_grew")
    if grew is None:
        return "too short to show whether the queue grew"
    return "the queue grew" if grew else "the queue did not grow"


def without_limits(result: Mapping[str, Any]) -> bool:
    """Return whether a Server test had no latency limit, so that LoadGen would call every rate VALID."""
    return result.get("latency_limits") is False
