"""Every message tag, in one place."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """Tags are unique over all communicators, so that a stray message names its sender's intent."""

    # control
    BEAT = 1  # Beat: a rank is alive; to rank 0, and from rank 0 to all
    ARRIVED = 2  # (phase, payload): this rank has done its part of the phase
    RELEASE = 3  # (phase, payload): all ranks have
    FAILED = 4  # Failure: this rank can't go on
    STOP = 5  # ExitCode: end now
    BYE = 6  # None: this rank has let go of everything and will exit
    # route: named by what the receiver is to do with it
    QUERY = 10  # harness to leader: a Batch of requests
    WORK = 11  # leader to instance: a Batch of requests
    DONE = 12  # instance to leader: a Batch of responses
    ANSWER = 13  # leader to harness: a Batch of responses
    GRANT = 14  # instance to leader: int64 requests, int64 KV tokens that it can hold more
    WINDOW = 15  # leader to harness: int64 requests that it can take more
    # route again, between the leaders of context and generation instances (see comms/handoff.py)
    OFFER = 20  # a Batch of requests: their KV caches will come
    ACCEPT = 21  # pairs of int64: request id, slot that its KV cache is expected under
    FIRST = 22  # pairs of int64: request id, first token
    WARM_UP = 23  # int64: so many requests of the warm-up will be offered
    # instance and pp: inside the engine
    PLAN = 24  # leader to all other ranks of its instance: a step (see engine/step.py)
    TOKENS = 25  # last stage to leader: int32 tokens that a step has sampled
    HIDDEN = 26  # stage to stage: the activations of a step
    MOVED = 27  # any rank to its leader: int32 tickets of KV caches that have left it, or arrived (see engine/transfer.py)
    # handoff, up to the end of the slots
    NCCL_ID = 28  # bytes: with which two ranks on GPUs make a communicator of their own
    NOTICE = 29  # int64 tag, int64 bytes: this comes next over NCCL (see engine/nccl_mover.py)
    KV = 32  # + slot: pieces of a KV cache
