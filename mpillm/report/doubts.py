"""Why a test that LoadGen calls VALID is none, or may not mean what it seems to: readers must be told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mpillm.report.repeats import kept_prompts
from mpillm.report.tested_servers import (
    TestedServer,
    counted_at,
    expired_leases,
    missing_contexts,
    other_models,
    other_totals,
    summed_at,
    tested_servers,
)

_TAKEN = {
    "others": "other processes used {others:.2g} of the {cores} cores of {host}",
    "stolen": "the host of {host}, a virtual machine, took {stolen:.2g} of its {cores} cores",
}

_UNCHECKED = {
    "no_cached_prompts": "whether prompts came from a prefix cache, which MLPerf forbids: servers give no"
    " count of them (/metrics), and too few prompts came twice in a Server test to see it in first tokens",
    "no_guesses": "whether tokens were guessed, which the workload's rules forbid: servers give no count of"
    " them (/metrics)",
}
_ONLY_DOUBTED = ("server_totals", "answer_models")  # a test may be VALID nevertheless
_UNCHECKED_TRANSFERS = {
    "contexts_arrived": "whether generation servers got all KV caches, or computed prompts again: servers"
    " give no count of transfers (/metrics)"
}


def doubts(
    result: Mapping[str, Any],
    *,
    others_serve: bool = False,
    reuse_wanted: bool = False,
    guesses_forbidden: bool = False,
) -> list[str]:
    """Return for `result.json` what is doubtful of a test, a line each.

    A VALID test with any must not be shown as good. A test with any of `refused` is not VALID.
    `others_serve`: other processes on the ranks' nodes may be the servers that are measured, as the ranks are
    clients that have not started them. `reuse_wanted`: --enable_kv_cache_reuse; `guesses_forbidden`: by the
    workload's rules.
    """
    said = [*restarts(result)]
    if result.get("queue_grew"):
        said.append(f"the queue grew: {rates(result)}; answers came later and later")
    if late := late_answers(result.get("goodput") or {"late": {}, "late_allowed": 0}):
        said.append(late)
    if disturbed := _disturbances(result, {"stolen"} if others_serve else {"others", "stolen"}):
        said.append(disturbed)
    said += [_on_gpu(gpu) for gpu in result.get("other_gpu_processes", ())]
    checks = server_checks(result, reuse_wanted=reuse_wanted, guesses_forbidden=guesses_forbidden)
    said += [found for found in checks.values() if found]
    return said


def server_checks(
    result: Mapping[str, Any], *, reuse_wanted: bool = False, guesses_forbidden: bool = False
) -> dict[str, str | None]:
    """Return for `result.json` what servers' answers were checked for: "" where it holds, or what was seen.

    None: the servers do not say. {}: there are none. Arguments as of `doubts`; what is allowed is left out.
    """
    clients = [client for client in result.get("per_instance", ()) if "short_answers" in client]
    asked = any(client.get("samples") for client in clients)  # by these clients, not by another harness
    servers = tested_servers(result)
    counted = asked and not any(client.get("retokenized") for client in clients)
    found: dict[str, tuple[str, bool]] = {}
    if not reuse_wanted:
        says, seen = _says(clients, "server_cached_tokens"), result.get("repeated_prompts")
        cached = cached_prompts(result) or ("" if says or not seen else kept_prompts(seen))
        told = f"{cached}; if it is meant, say so with --enable_kv_cache_reuse" if cached else ""
        found["no_cached_prompts"] = told, says or bool(seen)
    if guesses_forbidden:
        guesses = "servers took {:,.0f} guessed tokens, which the workload's rules forbid"
        found["no_guesses"] = _said_of(result, "accepted_guesses", guesses, clients)
    failed = "{:,.0f} transfers of KV caches failed: generation servers may have computed prompts again"
    found["no_failed_transfers"] = _said_of(result, "failed_transfers", failed, clients)
    # A server that was started again counts its last life only.
    whole = not any(restarts(result)) and not result.get("lost")
    lacking, counts_transfers = missing_contexts(servers) if whole else ("", False)
    counts_leases = any(one.own("expired_leases") is not None for one in servers)
    found["no_expired_leases"] = expired_leases(servers), counts_leases
    found["contexts_arrived"] = lacking, counts_transfers
    found["token_counts"] = _other_counts(result, servers), counted
    found["server_totals"] = other_totals(servers) if whole and asked else ("", False)
    found["answer_models"] = other_models(servers), asked
    found["answer_lengths"] = _short_answers(result, servers), asked
    checks = {name: text if text or known else None for name, (text, known) in found.items()}
    return checks if clients or any(checks.values()) else {}


def refused(result: Mapping[str, Any]) -> list[str]:
    """Return what servers' answers were checked for and did not hold: a test with any is not VALID."""
    checks = result.get("server_checks")  # perhaps of a file that somebody wrote
    if not isinstance(checks, Mapping):
        return []
    return [str(found) for name, found in checks.items() if found and name not in _ONLY_DOUBTED]


def unchecked(result: Mapping[str, Any]) -> list[str]:
    """Return what matters for the verdict and could not be checked, as the servers don't say, in words."""
    checks = result.get("server_checks")  # perhaps of a file that somebody wrote
    if not isinstance(checks, Mapping):
        return []
    clients = result.get("per_instance")
    clients = clients if isinstance(clients, list) else []
    handed = any(isinstance(client, Mapping) and client.get("handed_over") for client in clients)
    told = _UNCHECKED | (_UNCHECKED_TRANSFERS if handed else {})
    return [text for name, text in told.items() if name in checks and checks[name] is None]


def _said_of(
    result: Mapping[str, Any], name: str, text: str, clients: Sequence[Mapping[str, Any]]
) -> tuple[str, bool]:
    """Return `text` with what the servers have counted, "" if nothing; and whether they count it."""
    n = _counted(result, name)
    at = counted_at(tested_servers(result), name)
    return text.format(n) + at if n else "", _says(clients, f"server_{name}")


def _says(clients: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether servers count it, and each was heard."""
    return any(name in client for client in clients) and not any(map(_silent, clients))


def _silent(client: Mapping[str, Any]) -> bool:
    return bool(client.get("server_silent"))


def cached_prompts(result: Mapping[str, Any]) -> str:
    """Return how much of the prompts came from a prefix cache, in words; "" if nothing, or unknown."""
    if not (n := _counted(result, "cached_tokens")):
        return ""
    return (
        f"{n:,.0f} prompt tokens came from a server's prefix cache"
        f"{counted_at(tested_servers(result), 'cached_tokens')}, which MLPerf forbids:"
        " vLLM has --no-enable-prefix-caching, SGLang --disable-radix-cache"
    )


def of_another_harness(harness: Mapping[str, Any], least_s: float) -> list[str]:
    """Return what is doubtful of a test whose load another client made: its entry in `result.json`."""
    name, found = harness["name"], []
    if n := harness["failed"]:
        found.append(f"{name} reports {n:,} failed request{'s' * (n > 1)}")
    if harness["completed"] + harness["failed"] < harness["asked"]:
        found.append(
            f"{name} reports {harness['completed']:,} of the {harness['asked']:,} requests it was to send"
        )
    if harness["duration_s"] < least_s:
        found.append(f"{name} took {harness['duration_s']:.4g} s, less than --min_duration {least_s:g}")
    return found


def _counted(result: Mapping[str, Any], name: str) -> float:
    """Return what the servers have counted, which one client of each reports."""
    clients = result.get("per_instance", ())
    names = f"server_{name}", f"server_context_{name}"
    return float(sum(client.get(name, 0) for client in clients for name in names))


def restarts(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield for each time that a server was started again in the test when and why, in words."""
    for client in result.get("per_instance", ()):
        server = client.get("server") or {}
        for one in server.get("restarts", ()):
            yield (
                f"server {server['index']} was lost {one['at_s']:.1f} s into the test, and there again"
                f" {one.get('back_after_s', 0):.1f} s later: {one['why']}"
            )


def _short_answers(result: Mapping[str, Any], servers: Sequence[TestedServer]) -> str:
    """Return how many answers of servers were too short, in words; "" if none."""
    n = sum(client.get("short_answers", 0) for client in result.get("per_instance", ()))
    n_cut = sum(round(one.sums.get("cut_answers", 0)) for one in servers)
    short = (
        f"{n:,} answers had fewer tokens than --min_output_len, or ignore_eos, asks for: a server ignores it"
    )
    cut = (
        f"{n_cut:,} answers ended with finish_reason length before their max_tokens: a server has a lower"
        " limit of its own"
    )
    found = [short + summed_at(servers, "short_answers")] if n else []
    return "; ".join([*found, cut + summed_at(servers, "cut_answers")] if n_cut else found)


def _other_counts(result: Mapping[str, Any], servers: Sequence[TestedServer]) -> str:
    """Return of how many answers servers count other tokens than came here; "" if of none.

    Where tokens are made from text here, that is to be expected, and told elsewhere.
    """
    clients = [client for client in result.get("per_instance", ()) if not client.get("retokenized")]
    told = " and ".join(
        f"the {what}s of {n:,} requests"
        for what in ("prompt", "answer")
        if (n := sum(client.get(f"other_{what}_length", 0) for client in clients))
    )
    at = summed_at(servers, "other_prompt_length", "other_answer_length")
    return f"servers counted other numbers of tokens than their clients in {told}{at}" if told else ""


def _disturbances(result: Mapping[str, Any], counted: AbstractSet[str]) -> str:
    """Return how others disturbed the test, where it was worst; "" if nowhere."""
    found = [
        (node[by] / node["cores"], _TAKEN[by].format(**node))
        for node in result.get("other_load", ())
        for by in counted & {*node["disturbed_by"]}
    ]
    return f"disturbed: in the test {max(found)[1]}" if found else ""


def _on_gpu(gpu: Mapping[str, Any]) -> str:
    pids = gpu["pids"]
    who = f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids[:8]))}"
    return f"disturbed: other work was on {gpu['gpu']} of {gpu['host']} when the test started or ended: {who}"


def late_answers(goodput: Mapping[str, Any]) -> str:
    """Return how many answers were late as a whole, if more than LoadGen would allow; "" otherwise.

    It looks at no other latency than those of tokens.
    """
    late, allowed = goodput["late"].get("e2el", 0), goodput["late_allowed"]
    if late <= allowed:
        return ""
    return f"{late:,} answers were later than {goodput['limits_ms']['e2el']:g} ms, {allowed:,} may be"


def rates(result: Mapping[str, Any]) -> str:
    """Return a Server test's rates in words; "" of other tests.

    A test's samples/s are fewer: they count the time of the last answer, too.
    """
    offered, answered = result.get("offered_per_second"), result.get("answered_per_second")
    if offered is None or answered is None:
        return ""
    return f"{offered:,.4g} queries/s offered, {answered:,.4g} answered, the time of one answer aside"


def queue(result: Mapping[str, Any]) -> str:
    """Return whether the queue of a Server test grew, in words."""
    grew = result.get("queue_grew")
    if grew is None:
        return "too short to tell whether the queue grew"
    return "the queue grew" if grew else "the queue did not grow"


def without_limits(result: Mapping[str, Any]) -> bool:
    """Return whether a Server test had no latency limit, so that LoadGen would call every rate VALID."""
    return result.get("latency_limits") is False
