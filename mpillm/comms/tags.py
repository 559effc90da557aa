"""Every message tag, in one place."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """Tags are unique over all communicators, so that a stray message names its sender's intent.

    `messages.py` says what those of control and route carry, the engine's files what its own do.
    """

    # control
    BEAT = 1  # a rank is alive; to rank 0, and from rank 0 to all
    ARRIVED = 2  # this rank has done its part of the phase; to rank 0
    RELEASE = 3  # all ranks have; from rank 0
    FAILED = 4  # this rank can't go on; to rank 0
    STOP = 5  # end now; from rank 0
    BYE = 6  # this rank has let go of everything and will exit; to rank 0
    # route: named by what the receiver is to do with it
    QUERY = 10  # requests; harness to leader
    WORK = 11  # requests; leader to instance
    DONE = 12  # responses; instance to leader
    ANSWER = 13  # responses; leader to harness
    GRANT = 14  # how much more it can hold; instance to leader
    WINDOW = 15  # how many more requests it can take; leader to harness
    # route again, between the leaders of context and generation instances (see roles/handoff.py)
    OFFER = 20  # requests whose KV caches will come
    ACCEPT = 21  # the slots that they are expected under
    FIRST = 22  # first tokens
    WARM_UP = 23  # how many requests of the warm-up will be offered
    # instance and pp: inside the engine
    PLAN = 24  # leader to all other ranks of its instance: a step (engine/step.py)
    TOKENS = 25  # last stage to leader: int32 tokens that a step has sampled (engine/parallel/groups.py)
    HIDDEN = 26  # stage to stage: the activations of a step (engine/parallel/groups.py)
    MOVED = 27  # any rank to its leader: int32 tickets of KV caches that have left it, or arrived (engine/handoff/transfer.py)
    # handoff, up to the end of the slots
    NCCL_ID = 28  # bytes: with which two ranks on GPUs make a communicator of their own
    NOTICE = 29  # int64 tag, int64 bytes: this comes next over NCCL (engine/handoff/nccl_mover.py)
    KV = 32  # + slot: pieces of a KV cache
