"""Servers of a test: the servers' own counts, their clients' counts, and the differences in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_NAMED = 4  # servers in one message
_MAX_COUNT = 1e18  # in an untrusted file
_LEASE = (
    'raise kv_lease_duration (seconds): --server_args=\'--kv-transfer-config {…, "kv_connector_extra_config":'
    ' {"kv_lease_duration": 120}}\''
)
_NO_COUNT = (
    "gives no count of KV cache transfers (/metrics), so nothing shows that KV caches arrived;"
    " it needs --kv-transfer-config, and must not have --disable-log-stats"
)


@dataclass
class TestedServer:
    """One server: sums over the clients that used it in a test."""

    url: str
    role: str  # context, generation, or "" for a server that does both
    owned: bool  # by the run
    may_recompute: bool  # the server computes a prompt again if no KV cache arrives
    counted: Mapping[str, float] | None = None  # the server's own counts; None: no client reads them
    sums: dict[str, float] = field(default_factory=dict)  # of the clients' counts
    unknown: set[str] = field(default_factory=set)  # counts that a client does not know
    models: set[str] = field(default_factory=set)  # that clients requested
    other_model: str = ""  # another model, which answers name

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return f"{self.role} server {self.url}" if self.role else self.url

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a client's record of this server: see `openai_client.server_records`."""
        for key, value in record.items():
            if value is None:
                self.unknown.add(key)
            elif _is_number(value):
                self.sums[key] = self.sums.get(key, 0) + value
        self.counted = record.get("counted", self.counted)
        by_model = record.get("answers_by_model")
        names = by_model if isinstance(by_model, Mapping) else (record.get("model", ""),)
        self.models.update(map(str, names))
        self.other_model = self.other_model or str(record.get("other_model", ""))

    def own(self, name: str) -> float | None:
        """Return one of the server's own counts; None: the server does not count that."""
        count = self.counted.get(name) if isinstance(self.counted, Mapping) else None
        return count if _is_number(count) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MAX_COUNT


def tested_servers(result: Mapping[str, Any]) -> list[TestedServer]:
    """Return the servers in a test's result, in the order of its instances; the file is untrusted."""
    servers: dict[str, TestedServer] = {}
    for client in result.get("per_instance", ()):
        records = client.get("servers")
        for record in records if isinstance(records, list) else ():
            if not isinstance(record, Mapping):
                continue
            url, role = str(record.get("url")), str(record.get("role", ""))
            if url not in servers:
                may_recompute = bool(record.get("may_recompute"))
                servers[url] = TestedServer(url, role, bool(record.get("owned")), may_recompute)
            servers[url].add(record)
    return [*servers.values()]


def named(servers: Iterable[tuple[str, object]]) -> str:
    """Return servers with their values, in words: ``a: 3, b: 4 and 2 more``."""
    texts = [f"{name}: {value}" for name, value in servers]
    more = len(texts) - _MAX_NAMED
    return ", ".join(texts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def counted_at(servers: Sequence[TestedServer], name: str) -> str:
    """Return the servers whose own count is not 0, for the end of a message; "" if there are none."""
    messages = [(one.name, f"{n:,.0f}") for one in servers if (n := one.own(name))]
    return f" ({named(messages)})" if messages else ""


def summed_at(servers: Sequence[TestedServer], *names: str) -> str:
    """Do as `counted_at`, for the clients' counts."""
    messages = [
        (one.name, f"{n:,.0f}") for one in servers if (n := sum(one.sums.get(name, 0) for name in names))
    ]
    return f" ({named(messages)})" if messages else ""


def expired_leases(servers: Sequence[TestedServer]) -> str:
    """Return which context servers dropped KV caches that were not read yet, in words; "" if none did."""
    messages = []
    for one in servers:
        expired, late = one.own("expired_leases") or 0, one.own("late_reads") or 0
        if expired or late:
            messages.append((one.name, f"{expired:,.0f} expired, {late:,.0f} read after that"))
    if not messages:
        return ""
    return f"leases of KV caches expired, so answers may be wrong ({named(messages)}): {_LEASE}"


def missing_contexts(servers: Sequence[TestedServer]) -> tuple[str, bool]:
    """Return which generation servers got too few KV caches, in words, and whether all transfers are known.

    SGLang's transfers are counted at its context servers, but not with all of its transports. So its counts
    are only evidence that all KV caches arrived.
    """
    users = [one for one in servers if one.role == "generation" and one.sums.get("handed_over")]
    lacking, known, n_uncounted = [], bool(users), 0
    for one in users:
        n = round(one.sums["handed_over"])
        transfers, received = one.own("transfers"), one.own("received_tokens")
        computed = one.own("computed_tokens") or 0
        if transfers is not None and transfers < n:
            lacking.append(
                f"{one.name} counts {transfers:,.0f} transfers of KV caches for {n:,} requests with one:"
                " it computed the other prompts again"
            )
        elif received is not None and computed > received + n:  # a prompt's last token is always computed
            lacking.append(
                f"{one.name} computed {computed:,.0f} prompt tokens of {n:,} requests, and received"
                f" {received:,.0f} in KV caches: has it --kv-transfer-config?"
            )
        elif transfers is None and received is None:
            n_uncounted += n
            known = known and not one.may_recompute
            if one.owned and one.may_recompute:
                lacking.append(f"{one.name} {_NO_COUNT}")
    sent = sum(one.own("transfers") or 0 for one in servers if one.role == "context")
    return "; ".join(lacking), known and sent >= n_uncounted


def failed_transfers(servers: Sequence[TestedServer]) -> str:
    """Return how many transfers of KV caches failed, in words; "" if none did.

    If the servers cannot compute a prompt again, a request fails with its transfer. The client has then seen
    the failure, or caused it by a cancellation. So the counts of these servers are left out.
    """
    users = [one for one in servers if one.may_recompute or not one.role]
    if not (n := sum(one.own("failed_transfers") or 0 for one in users)):
        return ""
    at = counted_at(users, "failed_transfers")
    return f"{n:,.0f} transfers of KV caches failed: generation servers may have computed prompts again{at}"


def other_totals(servers: Sequence[TestedServer]) -> tuple[str, bool]:
    """Return which servers' totals differ from their clients', in words, and whether all can be compared."""
    messages, known = [], bool(servers)
    for one in servers:
        for name, lost, unit in (
            ("prompt_tokens", "lost_prompt_tokens", "prompt tokens"),
            ("generated_tokens", "lost_tokens", "tokens"),
        ):
            counted = one.own(name)
            if counted is None or name in one.unknown:
                known = False
                continue
            arrived = one.sums.get(name, 0)
            more = counted - arrived - one.sums.get(lost, 0)
            if more > 0:
                side = "were sent" if name == "prompt_tokens" else "arrived"
                messages.append(f"{one.name} counts {more:,.0f} {unit} more than {side} here: others used it")
            elif counted < arrived:
                messages.append(
                    f"{one.name} counts {counted:,.0f} {unit}, fewer than the {arrived:,.0f} of its answers"
                )
    return "; ".join(messages), known


def used_by_others(servers: Sequence[TestedServer], client: Mapping[str, Any]) -> tuple[str, bool]:
    """Return how many tokens servers generated for others, in words, and whether this is known.

    `client`: the entry of a load client that sent its requests to the servers itself, in `result.json`. Which
    server answered a request is unknown, so only sums are compared.
    """
    limit, counts = client.get("max_server_tokens"), [one.own("generated_tokens") for one in servers]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts) or limit is None:
        return "", False
    if (more := sum(known) - limit) <= 0:
        return "", True
    at = counted_at(servers, "generated_tokens")
    return (
        f"servers count {more:,.0f} tokens more than {client['name']} requested: others used them{at}",
        True,
    )


def other_models(servers: Sequence[TestedServer]) -> str:
    """Return which servers answered with another model than requested, in words; "" if none did."""
    messages = [
        f"{one.name} named the model {one.other_model} in {one.sums['other_models']:,.0f} of its answers,"
        f" not {', '.join(sorted(one.models))} as requested"
        for one in servers
        if one.sums.get("other_models")
    ]
    return "; ".join(messages)


def models_in_use(servers: Sequence[TestedServer]) -> list[str]:
    """Return the names by which clients requested models, each once."""
    return sorted({name for one in servers for name in one.models if name})
