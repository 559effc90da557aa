"""The leader: takes requests from the harness, sends them to instances with room, passes answers back.

Which instance gets a request is chosen by `pool`, or by `prefix_pool`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
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

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Envelope, Transport

_MIN_WINDOW = 2048  # most requests that wait at the leader, unless twice what the instances hold is more
_MAX_BATCH = 2048  # requests per message
# Plain numbers: NumPy takes three times as long for an operation on flags.
_FINAL, _LOST = int(ResponseFlag.FINAL), int(ResponseFlag.LOST)
_CONTEXT_DONE, _CANCEL_DONE = int(ResponseFlag.CONTEXT_DONE), int(ResponseFlag.CANCEL_DONE)
_ALONE = int(ResponseFlag.FIRST | ResponseFlag.FINAL)
_ENDS = _FINAL | _CONTEXT_DONE | _CANCEL_DONE


class Leader(Role):
    """Knows for every accepted request which instances owe its answer."""

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
    ) -> None:
        """`entry_policy` chooses among the instances where requests start, `generation_policy` among the
        generation instances that continue them. `report`: tells rank 0 of an instance that is silent.
        `prefix_routing`: of the policy kv_cache_aware. `all_at_once`: the test has all its requests from the
        start, and counts how long it takes.
        """
        self._route = route
        self._plan = plan
        self._stall_timeout_s = stall_timeout_s
        self._harness = plan.harness_rank
        self._rank_of = {i.index: i.leader for i in plan.instances}
        self._instance_at = {rank: instance for instance, rank in self._rank_of.items()}
        contexts = [i.index for i in plan.instances if i.role == "ctx"]
        # The instances where requests start.
        entries = contexts or [i.index for i in plan.instances]
        self._entry = make_pool(entries, entry_policy, prefix_routing)
        self._generation = (
            InstancePool([i.index for i in plan.instances if i.role == "gen"], generation_policy)
            if contexts and any(i.role == "gen" for i in plan.instances)
            else None
        )
        self._granted: set[int] = set()
        self._waiting: deque[Batch] = deque()
        self._all_at_once = all_at_once
        self._n_waiting = self._tokens_waiting = 0  # requests, and their KV tokens
        self._window = 0
        self._dispatched = 0  # since the last grant to the harness
        # KV tokens by request id; ids are small and reused, so this stays small.
        self._needs = np.zeros(0, np.int64)
        self._retries = Retries(self._entry, self._generation)
        self._cancelling: dict[int, int] = {}  # requests under way, and the instance that was told
        self._report = report
        self._lost: set[int] = set()  # instances
        self._heard = np.full(len(plan.instances), np.inf)
        self._stall_checked = 0.0
        QUERY.handle(route, self._on_query)
        GRANT.handle(route, self._on_grant)
        CANCEL.handle(route, self._on_cancel)
        route.handlers[DONE.tag] = self._on_done  # not `handle`: the message is forwarded to the harness

    def done(self, phase: Phase) -> bool:
        if phase == "ready":
            return len(self._granted) == len(self._plan.instances)
        return True

    def owed(self) -> dict[int, int]:
        """Return the requests that each instance still owes."""
        pools = [self._entry] if self._generation is None else [self._entry, self._generation]
        return {
            int(i): int(n) for pool in pools for i, n in zip(pool.instances, pool.owed_requests, strict=True)
        }

    def poll(self) -> bool:
        worked = bool(self._waiting) and self._dispatch()
        now = time.monotonic()
        if now - self._stall_checked > 1:
            self._check_stalls(now)
        return worked

    # --- messages ---

    def _on_grant(self, source: int, grant: Grant) -> None:
        instance = self._instance_at[source]
        in_generation = self._generation is not None and instance in self._generation
        pool = self._generation if in_generation and self._generation is not None else self._entry
        pool.grant(pool.position(instance), *grant)
        self._granted.add(instance)
        if len(self._granted) == len(self._plan.instances):
            for each in filter(None, (self._entry, self._generation)):
                each.weigh()
            self._window = max(_MIN_WINDOW, 2 * int(self._entry.free_requests.sum()))
            self._grant_harness(self._window)

    def _on_query(self, source: int, batch: Batch) -> None:
        self._waiting.append(batch)
        ids, needs = batch.rows["id"], batch.rows["n_tokens"].astype(np.int64) + batch.rows["max_output"]
        most = int(ids[0] if len(ids) == 1 else ids.max()) + 1
        if most > len(self._needs):
            grown = max(most, 2 * len(self._needs)) - len(self._needs)
            self._needs = np.concatenate([self._needs, np.zeros(grown, np.int64)])
            self._entry.grow(grown)
            if self._generation is not None:
                self._generation.grow(grown)
        self._needs[index_of(ids)] = needs
        self._n_waiting += len(ids)
        self._tokens_waiting += total(needs)

    def _on_done(self, received: Envelope) -> None:
        instance = self._instance_at[received.source]
        self._heard[instance] = time.monotonic()
        buffer, rows = received.buffer, DONE.read(received.buffer).rows
        if not len(rows):  # it only says that it is there
            return
        flags = rows["flags"]
        any_of = int(flags[0] if len(flags) == 1 else np.bitwise_or.reduce(flags))
        if any_of & _LOST or self._retries.any:
            batch, again = self._retries.sift(instance, DONE.read(buffer), self._needs)
            self._send_again(again)
            if not len(batch):
                return
            buffer, rows, any_of = batch.pack(), batch.rows, _ENDS
        if any_of & _ENDS:  # most messages of streams end nothing
            self._ended(instance, rows)
        self._route.send(self._harness, ANSWER.tag, buffer)

    def _ended(self, instance: int, rows: NDArray[np.void]) -> None:
        """Take back the credits of what an instance's rows end."""
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
            # The context instance is done with requests that it has handed over, and with those of which it
            # hands nothing over (see context.py).
            left = rows["id"][((flags & _CONTEXT_DONE) != 0) | ((flags & _ALONE) == _ALONE)]
            if self._retries.any:  # a lost instance's credits are not returned
                final = final[self._generation.owner[final] >= 0]
            self._return_credits(self._generation, final)
            if instance not in self._generation:
                self._return_credits(self._entry, left)

    def _on_cancel(self, source: int, ids: list[int]) -> None:
        """Give up requests: those that wait here end here, the others where each is now.

        Sent by the harness, and back by a context instance that has handed them over meanwhile, whose
        CONTEXT_DONE has arrived before. Each CANCEL of the harness is answered by one row with CANCEL_DONE:
        before that row it must not use the id again, or a later request could be given up in its place.
        """
        dropped = self._drop_waiting(ids)
        rows = [(id_, 0, int(_ALONE | ResponseFlag.CANCELLED | ResponseFlag.CANCEL_DONE)) for id_ in dropped]
        holders: dict[int, list[int]] = {}
        for id_ in ids:
            if id_ in dropped:
                continue
            if self._entry.owner[id_] >= 0:
                holders.setdefault(int(self._entry.instances[self._entry.owner[id_]]), []).append(id_)
            elif self._generation is not None and self._generation.owner[id_] >= 0:
                holders.setdefault(int(self._generation.instances[self._generation.owner[id_]]), []).append(
                    id_
                )
            else:
                # Its last row is on the way to the harness.
                rows.append((id_, 0, int(ResponseFlag.CANCEL_DONE)))
        for instance, theirs in holders.items():
            self._cancelling.update(dict.fromkeys(theirs, instance))
            DROP.send(self._route, self._rank_of[instance], theirs)
        if rows:
            ANSWER.send(self._route, self._harness, Batch(np.array(rows, RESPONSE), np.zeros(0, np.int32)))

    def _drop_waiting(self, ids: list[int]) -> set[int]:
        """Remove those of `ids` that wait here from the queue; return them."""
        dropped: set[int] = set()
        n_tokens = 0
        for _ in range(len(self._waiting)):
            batch = self._waiting.popleft()
            mine = np.isin(batch.rows["id"], ids)
            given_up = batch.rows["id"][mine]
            dropped.update(given_up.tolist())
            n_tokens += total(self._needs[index_of(given_up)])
            if not mine.all():
                self._waiting.append(batch.select(~mine) if mine.any() else batch)
        self._left_queue(len(dropped), n_tokens)
        return dropped

    # --- a run that goes on without an instance ---

    def lost(self, instance: int) -> None:
        self._heard[instance] = np.inf
        self._lost.add(instance)
        found = self._retries.lost(instance)
        for generation, ids in found.to_settle.items():
            SETTLE.send(self._route, self._rank_of[generation], [(id_, instance) for id_ in ids])
        ended = [(id_, 0, int(ResponseFlag.CONTEXT_DONE)) for id_ in found.handed_over]
        self._send_again(found.again)
        for id_ in [id_ for id_, told in self._cancelling.items() if told == instance]:
            del self._cancelling[id_]
            ended.append((id_, 0, int(ResponseFlag.CANCEL_DONE)))
        if ended:
            rows = np.array(ended, RESPONSE)
            ANSWER.send(self._route, self._harness, Batch(rows, np.zeros(0, np.int32)))

    def _send_again(self, by_instance: dict[int, list[int]]) -> None:
        """Have the harness send requests once more, by the lost instance that owed them."""
        for instance, ids in by_instance.items():
            rows = np.array([(id_, 1, self._lost_flags(id_)) for id_ in ids], RESPONSE)
            ANSWER.send(self._route, self._harness, Batch(rows, np.full(len(ids), instance, np.int32)))

    def _lost_flags(self, id_: int) -> int:
        given_up = self._cancelling.pop(id_, None) is not None
        return int(ResponseFlag.LOST | (ResponseFlag.CANCEL_DONE if given_up else 0))

    # --- dispatch ---

    def _dispatch(self) -> bool:
        sent = 0
        while self._waiting and (n := self._send_next(self._waiting[0])):
            sent += n
        return sent > 0

    def _left_queue(self, n: int, n_tokens: int) -> None:
        """Note that requests no longer wait here; tell the harness, now and then."""
        self._n_waiting -= n
        self._tokens_waiting -= n_tokens
        self._dispatched += n
        if self._dispatched * 4 >= self._window:
            self._grant_harness(self._dispatched)
            self._dispatched = 0

    def _send_next(self, batch: Batch) -> int:
        """Send the first requests of `batch`, the head of the queue; return how many."""
        rows = batch.rows[:_MAX_BATCH]
        needs = self._needs[index_of(rows["id"])]
        generation, n = -1, len(rows)
        # The harness would have sent more, had it any.
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
        if self._generation is not None:  # otherwise each has NO_INSTANCE already
            rows = rows.copy()
            self._generation.take(generation, needs)
            self._generation.owner[at] = generation
            rows["generation"] = self._generation.instances[generation]
            self._touch(int(self._generation.instances[generation]))
        n_tokens = total(rows["n_tokens"])
        for entry, part in by_value(entries, Batch(rows, batch.tokens[:n_tokens])):
            instance = int(self._entry.instances[entry])
            self._touch(instance)
            WORK.send(self._route, self._rank_of[instance], part)
        if n == len(batch):
            self._waiting.popleft()
        else:
            self._waiting[0] = Batch(batch.rows[n:], batch.tokens[n_tokens:])
        self._left_queue(n, total(needs))
        return n

    def _return_credits(self, pool: InstancePool, ids: NDArray[np.uint32]) -> None:
        if not len(ids):
            return
        at = index_of(ids)
        positions = pool.owner[at]
        if np.count_nonzero(positions < 0):
            raise RunError(Failure(f"request {int(ids[positions < 0][0])} was answered twice, or never sent"))
        pool.give_back(positions, self._needs[at])
        pool.owner[at] = -1

    def _grant_harness(self, requests: int) -> None:
        WINDOW.send(self._route, self._harness, requests)

    # --- instances that owe answers but are silent ---

    def _touch(self, instance: int) -> None:
        """Note that the instance owes something from now on, if it did not before."""
        if self._heard[instance] == np.inf:
            self._heard[instance] = time.monotonic()

    def _check_stalls(self, now: float) -> None:
        self._stall_checked = now
        owed = self.owed()
        for instance in self._plan.instances:
            n = owed[instance.index]
            if n == 0:
                self._heard[instance.index] = np.inf
            elif now - self._heard[instance.index] > self._stall_timeout_s:
                failure = Failure(
                    f"instance {instance.index} ({instance.role}) sent nothing for"
                    f" {self._stall_timeout_s:g} s (--stall_timeout); open requests: {n}",
                    instance.leader,
                    code=ExitCode.TEST_FAILED,
                )
                if instance.index in self._lost:  # it can't owe anything: say so before waiting forever
                    raise RunError(dataclasses.replace(failure, rank=self._plan.leader_rank))
                self._heard[instance.index] = now  # rank 0 decides; told once in this time
                self._report(failure)
