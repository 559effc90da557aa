"""Route requests from the harness to instances, and responses back to the harness.

The leader queues requests (QUERY) until an instance has free credits. `InstancePool` or `PrefixPool` selects
the instance, and the leader sends it the requests (WORK). The leader forwards each response (DONE) to the
harness (ANSWER). The final response returns the request's credits.

In a disaggregated run, a request takes credits of both a context and a generation instance when it is sent.
The context instance's credits return after the handoff. The generation instance's credits return with the
final response.

When an instance is lost, the leader makes the harness resend that instance's requests (see `retries`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disagg import WorldPlan
from mpillm.comms.messages import (
    ANSWER,
    CANCEL,
    DONE,
    DROP,
    GRANT,
    QUERY,
    RESET_CACHE,
    RESPONSE,
    SETTLE,
    WINDOW,
    WORK,
    Batch,
    Grant,
    ResponseFlag,
    by_value,
    index_of,
    total,
)
from mpillm.errors import ExitCode, Failure, RunError
from mpillm.phases import Phase
from mpillm.roles.pool import InstancePool
from mpillm.roles.prefix_pool import PrefixRouting, make_pool
from mpillm.roles.retries import Retries
from mpillm.roles.role import Role
from mpillm.roles.short_turns import ShortTurns

if TYPE_CHECKING:  # at run time, this import would start MPI
    from mpillm.comms.transport import Envelope, Transport

# Limit of queued requests: twice the entry instances' request credits, but at least this number.
_MIN_WINDOW = 2048
_MAX_BATCH = 2048  # requests per message
# Plain ints: with an enum flag, a NumPy operation takes three times as long.
_FINAL, _LOST = int(ResponseFlag.FINAL), int(ResponseFlag.LOST)
_CONTEXT_DONE, _CANCEL_DONE = int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.CANCEL_DONE)
_ALONE = int(ResponseFlag.FIRST | ResponseFlag.FINAL)
_ENDS = _FINAL | _CONTEXT_DONE | _CANCEL_DONE


class Leader(Role):
    """Router of a run; tracks which requests are outstanding on which instance."""

    def __init__(
        self,
        route: Transport,
        plan: WorldPlan,
        entry_policy: str,
        generation_policy: str,
        stall_timeout_s: float,
        report: Callable[[Failure], None],
        prefix_routing: PrefixRouting = PrefixRouting(),  # noqa: B008 - never changed
        *,
        all_at_once: bool = False,
        max_local_prefill_length: int = 0,
    ) -> None:
        """Register the message handlers.

        Args:
            route: transport to the harness and to the root rank of each instance.
            plan: ranks and instances of the run.
            entry_policy: value of --traffic_distribution_policy that selects a request's first instance.
            generation_policy: the same for the generation instance. Unused in aggregated runs.
            stall_timeout_s: seconds without a message after which an instance with outstanding requests
                counts as stalled.
            report: function that sends the failure of a stalled instance to rank 0.
            prefix_routing: parameters of the policy kv_cache_aware.
            all_at_once: all requests exist when the test starts, as in Offline.
            max_local_prefill_length: of `ShortTurns`; 0: context instances compute all prompts.
        """
        self._route = route
        self._plan = plan
        self._stall_timeout_s = stall_timeout_s
        self._harness = plan.harness_rank
        self._rank_of = {i.index: i.root_rank for i in plan.instances}
        self._instance_of = {rank: instance for instance, rank in self._rank_of.items()}
        contexts = [i.index for i in plan.instances if i.role == "ctx"]
        # The instances where requests start.
        entries = contexts or [i.index for i in plan.instances]
        self._entry = make_pool(entries, entry_policy, prefix_routing)
        self._generation = (
            InstancePool([i.index for i in plan.instances if i.role == "gen"], generation_policy)
            if contexts and any(i.role == "gen" for i in plan.instances)
            else None
        )
        self._short_turns = (
            ShortTurns(self._generation, max_local_prefill_length)
            if self._generation is not None and max_local_prefill_length
            else None
        )
        self._granted: set[int] = set()
        self._waiting: OrderedDict[int, Batch] = OrderedDict()  # queued requests, by number of their QUERY
        self._n_queries = 0
        self._all_at_once = all_at_once
        self._n_waiting = self._tokens_waiting = 0  # numbers of queued requests and of their KV tokens
        self._window = 0
        self._dispatched = 0  # requests that left the queue since the last grant to the harness
        # KV tokens of each request, by request id. Ids are small and reused, so the array stays small.
        self._needs = np.zeros(0, np.int64)
        self._query_of = np.zeros(0, np.int64)  # number of the QUERY that had each request, by request id
        self._retries = Retries(self._entry, self._generation)
        self._cancelling: dict[int, int] = {}  # instance that must drop each cancelled request, by request id
        self._report = report
        self._lost: set[int] = set()  # lost instances
        self._silent_since = np.full(len(plan.instances), np.inf)
        self._stall_checked = 0.0
        QUERY.handle(route, self._on_query)
        GRANT.handle(route, self._on_grant)
        CANCEL.handle(route, self._on_cancel)
        RESET_CACHE.handle(route, self._on_reset)
        route.handlers[DONE.tag] = self._on_done  # `DONE.handle` would pass on only the unpacked message

    def done(self, phase: Phase) -> bool:
        if phase == "ready":
            return len(self._granted) == len(self._plan.instances)
        return True

    def outstanding_by_instance(self) -> dict[int, int]:
        """Return the number of outstanding requests of each instance."""
        pools = [self._entry] if self._generation is None else [self._entry, self._generation]
        return {
            int(i): int(n)
            for pool in pools
            for i, n in zip(pool.instances, pool.outstanding_requests, strict=True)
        }

    def poll(self) -> bool:
        worked = bool(self._waiting) and self._dispatch()
        now = time.monotonic()
        if now - self._stall_checked > 1:
            self._check_stalls(now)
        return worked

    # --- messages ---

    def _on_grant(self, source: int, grant: Grant) -> None:
        instance = self._instance_of[source]
        in_generation = self._generation is not None and instance in self._generation
        pool = self._generation if in_generation and self._generation is not None else self._entry
        pool.grant(pool.position(instance), *grant)
        self._granted.add(instance)
        if len(self._granted) == len(self._plan.instances):
            for each in filter(None, (self._entry, self._generation)):
                each.set_weights()
            self._window = max(_MIN_WINDOW, 2 * int(self._entry.free_requests.sum()))
            self._grant_harness(self._window)

    def _on_query(self, source: int, batch: Batch) -> None:
        self._n_queries += 1
        self._waiting[self._n_queries] = batch
        ids, needs = batch.rows["id"], batch.rows["n_tokens"].astype(np.int64) + batch.rows["max_output"]
        n_ids = int(ids[0] if len(ids) == 1 else ids.max()) + 1
        if n_ids > len(self._needs):
            grown = max(n_ids, 2 * len(self._needs)) - len(self._needs)
            self._needs = np.concatenate([self._needs, np.zeros(grown, np.int64)])
            self._query_of = np.concatenate([self._query_of, np.zeros(grown, np.int64)])
            self._entry.grow(grown)
            if self._generation is not None:
                self._generation.grow(grown)
        at = index_of(ids)
        self._needs[at], self._query_of[at] = needs, self._n_queries
        self._n_waiting += len(ids)
        self._tokens_waiting += total(needs)

    def _on_done(self, received: Envelope) -> None:
        instance = self._instance_of[received.source]
        self._silent_since[instance] = time.monotonic()
        buffer, rows = received.buffer, DONE.read(received.buffer).rows
        if not len(rows):  # the instance waits for its server, and only reports that it is not stalled
            return
        flags = rows["flags"]
        any_of = int(flags[0] if len(flags) == 1 else np.bitwise_or.reduce(flags))
        if any_of & _LOST or self._retries.any:
            batch, resend = self._retries.filter(instance, DONE.read(buffer), self._needs)
            self._request_resend(resend)
            if not len(batch):
                return
            buffer, rows, any_of = batch.pack(), batch.rows, _ENDS
        if any_of & _ENDS:  # in streams, most messages end no request
            self._ended(instance, rows)
        self._route.send(self._harness, ANSWER.tag, buffer)

    def _ended(self, instance: int, rows: NDArray[np.void]) -> None:
        """Return the credits of the requests that end with these rows, which `instance` has sent."""
        flags = rows["flags"]
        if self._cancelling:
            for id_ in rows["id"][(flags & _CANCEL_DONE) != 0].tolist():
                self._cancelling.pop(id_, None)
        final = rows["id"]
        if len(flags) > 1 or not flags[0] & _FINAL:
            final = final[(flags & _FINAL) != 0]
        if self._generation is None:
            self._return_credits(self._entry, final)
        else:
            # These requests have left the context instance: handed off, or ended by their first token.
            left = rows["id"][((flags & _CONTEXT_DONE) != 0) | ((flags & _ALONE) == _ALONE)]
            if self._retries.any:  # a lost instance's credits are not returned
                final = final[self._generation.owner[final] >= 0]
            self._return_credits(self._generation, final)
            if instance not in self._generation:
                self._return_credits(self._entry, left)

    def _on_reset(self, source: int, _: None) -> None:
        """Let instances empty their prefix caches. Requests that follow arrive there after this message."""
        self._entry.forget_prompts()
        if self._short_turns is not None:
            self._short_turns.forget_all()
        RESET_CACHE.send_all(self._route, self._rank_of.values(), None)

    def _on_cancel(self, source: int, ids: list[int]) -> None:
        """Cancel requests: queued requests end here, the others in their instances.

        The frontend of `serve` sends CANCEL, and the harness of a test that cancels requests. A context
        instance sends CANCEL back for requests that have left it. Their CONTEXT_DONE or final rows arrived
        earlier, so each of these requests is outstanding in its generation instance, or has ended. Each id
        that the frontend or the harness cancels gets one row with CANCEL_DONE. Until that row arrives, the
        sender must not reuse the id: the cancellation could hit the new request.
        """
        holders, others = dict[int, list[int]](), list[int]()
        for id_ in ids:
            instance = self._holder(id_)
            (others if instance is None else holders.setdefault(instance, [])).append(id_)
        dropped = self._drop_waiting(others)
        # A request that is not queued has ended; its last row is in transit to the harness.
        ends = int(_ALONE | ResponseFlag.CANCELLED)
        rows = [(id_, 0, _CANCEL_DONE | (ends if id_ in dropped else 0)) for id_ in others]
        for instance, instance_ids in holders.items():
            self._cancelling.update(dict.fromkeys(instance_ids, instance))
            DROP.send(self._route, self._rank_of[instance], instance_ids)
        if rows:
            ANSWER.send(self._route, self._harness, Batch(np.array(rows, RESPONSE), np.zeros(0, np.int32)))

    def _holder(self, id_: int) -> int | None:
        """Return the instance where a request is outstanding: the context instance, before its handoff."""
        for pool in filter(None, (self._entry, self._generation)):
            if (position := int(pool.owner[id_])) >= 0:
                return int(pool.instances[position])
        return None

    def _drop_waiting(self, ids: list[int]) -> set[int]:
        """Remove `ids` from the queue; return the removed ids. Other queries are not read."""
        by_query: dict[int, list[int]] = {}
        for id_ in ids:
            by_query.setdefault(int(self._query_of[id_]), []).append(id_)
        dropped: set[int] = set()
        n_tokens = 0
        for query, query_ids in by_query.items():
            if (batch := self._waiting.get(query)) is None:
                continue
            queued = batch.rows["id"]
            matches = np.isin(queued, query_ids)
            dropped.update(queued[matches].tolist())
            n_tokens += total(self._needs[index_of(queued[matches])])
            if matches.all():
                del self._waiting[query]
            elif matches.any():
                self._waiting[query] = batch.select(~matches)
        self._left_queue(len(dropped), n_tokens)
        return dropped

    # --- a run that continues without an instance ---

    def lost(self, instance: int) -> None:
        self._silent_since[instance] = np.inf
        self._lost.add(instance)
        plan = self._retries.lost(instance)
        for generation, ids in plan.to_settle.items():
            SETTLE.send(self._route, self._rank_of[generation], [(id_, instance) for id_ in ids])
        ended = [(id_, 0, int(ResponseFlag.CONTEXT_DONE)) for id_ in plan.needs_context_done]
        self._request_resend(plan.resend)
        for id_ in [id_ for id_, holder in self._cancelling.items() if holder == instance]:
            del self._cancelling[id_]
            ended.append((id_, 0, int(ResponseFlag.CANCEL_DONE)))
        if ended:
            rows = np.array(ended, RESPONSE)
            ANSWER.send(self._route, self._harness, Batch(rows, np.zeros(0, np.int32)))

    def _request_resend(self, by_instance: dict[int, list[int]]) -> None:
        """Make the harness resend requests. `by_instance`: request ids by lost instance."""
        for instance, ids in by_instance.items():
            rows = np.array([(id_, 1, self._lost_flags(id_)) for id_ in ids], RESPONSE)
            ANSWER.send(self._route, self._harness, Batch(rows, np.full(len(ids), instance, np.int32)))

    def _lost_flags(self, id_: int) -> int:
        is_cancelled = self._cancelling.pop(id_, None) is not None
        return int(ResponseFlag.LOST | (ResponseFlag.CANCEL_DONE if is_cancelled else 0))

    # --- dispatch ---

    def _dispatch(self) -> bool:
        sent = 0
        while self._waiting and (n := self._send_next(next(iter(self._waiting.values())))):
            sent += n
        return sent > 0

    def _left_queue(self, n: int, n_tokens: int) -> None:
        """Count requests that left the queue. After a quarter of the window, grant the harness as many."""
        self._n_waiting -= n
        self._tokens_waiting -= n_tokens
        self._dispatched += n
        if self._dispatched * 4 >= self._window:
            self._grant_harness(self._dispatched)
            self._dispatched = 0

    def _send_next(self, batch: Batch) -> int:
        """Send the first requests of `batch`, the head of the queue; return their number."""
        rows = batch.rows[:_MAX_BATCH]
        needs = self._needs[index_of(rows["id"])]
        if self._short_turns is not None:
            n_others = self._short_turns.first(rows, needs)
            if n_others == 0:
                self._send_short_turn(batch, int(needs[0]), self._short_turns)
                return 1
            rows, needs = rows[:n_others], needs[:n_others]
        generation, n = -1, len(rows)
        # In Offline, the harness has no more requests if the queue holds less than half of the window.
        left = self._tokens_waiting if self._all_at_once and 2 * self._n_waiting < self._window else None
        if self._generation is not None:
            generation, n = self._generation.pick(needs, left)
            if not n:
                return 0
        entries = self._entry.assign(needs[:n], Batch(rows[:n], batch.tokens), left)
        n = len(entries)
        if not n:
            return 0
        rows, needs = rows[:n], needs[:n]
        at = index_of(rows["id"])
        self._entry.owner[at] = self._entry.last_owner[at] = entries
        if self._generation is not None:  # otherwise, each row already has NO_INSTANCE
            rows = rows.copy()
            self._generation.take(generation, needs)
            self._generation.owner[at] = generation
            rows["generation"] = self._generation.instances[generation]
            self._touch(int(self._generation.instances[generation]))
            if self._short_turns is not None:
                self._short_turns.remember(rows, generation)
        n_tokens = total(rows["n_tokens"])
        for entry, part in by_value(entries, Batch(rows, batch.tokens[:n_tokens])):
            instance = int(self._entry.instances[entry])
            self._touch(instance)
            WORK.send(self._route, self._rank_of[instance], part)
        self._sent(batch, n, n_tokens, total(needs))
        return n

    def _send_short_turn(self, batch: Batch, need: int, short_turns: ShortTurns) -> None:
        """Send the first request of `batch` to a generation instance, which computes its prompt as well."""
        assert self._generation is not None
        rows, n_tokens = batch.rows[:1], int(batch.rows["n_tokens"][0])
        position, id_ = short_turns.position(rows[0], need), rows["id"]
        self._generation.take(position, np.array([need]))
        self._generation.owner[id_] = position
        self._entry.last_owner[id_] = -1  # no context instance has it
        short_turns.remember(rows, position)
        instance = int(self._generation.instances[position])
        self._touch(instance)
        WORK.send(self._route, self._rank_of[instance], Batch(rows, batch.tokens[:n_tokens]))
        self._sent(batch, 1, n_tokens, need)

    def _sent(self, batch: Batch, n: int, n_tokens: int, needs: int) -> None:
        """Remove the first `n` requests, with `n_tokens` prompt tokens, from the head of the queue."""
        if n == len(batch):
            self._waiting.popitem(last=False)
        else:
            self._waiting[next(iter(self._waiting))] = Batch(batch.rows[n:], batch.tokens[n_tokens:])
        self._left_queue(n, needs)

    def _return_credits(self, pool: InstancePool, ids: NDArray[np.uint32]) -> None:
        if not len(ids):
            return
        at = index_of(ids)
        positions = pool.owner[at]
        if np.count_nonzero(positions < 0):
            raise RunError(Failure(f"request {int(ids[positions < 0][0])} was answered twice, or never sent"))
        pool.return_credits(positions, self._needs[at])
        pool.owner[at] = -1

    def _grant_harness(self, requests: int) -> None:
        WINDOW.send(self._route, self._harness, requests)

    # --- stalled instances ---

    def _touch(self, instance: int) -> None:
        """Start the stall timeout of an instance, if it had no outstanding requests."""
        if self._silent_since[instance] == np.inf:
            self._silent_since[instance] = time.monotonic()

    def _check_stalls(self, now: float) -> None:
        self._stall_checked = now
        outstanding = self.outstanding_by_instance()
        for instance in self._plan.instances:
            n = outstanding[instance.index]
            if n == 0:
                self._silent_since[instance.index] = np.inf
            elif now - self._silent_since[instance.index] > self._stall_timeout_s:
                failure = Failure(
                    f"instance {instance.index} ({instance.role}) sent nothing for"
                    f" {self._stall_timeout_s:g} s (--stall_timeout); open requests: {n}",
                    instance.root_rank,
                    code=ExitCode.TEST_FAILED,
                )
                if instance.index in self._lost:  # a lost instance cannot have requests: do not wait forever
                    raise RunError(dataclasses.replace(failure, rank=self._plan.leader_rank))
                self._silent_since[instance.index] = now  # report once per timeout; rank 0 decides
                self._report(failure)
