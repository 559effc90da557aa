"""Every message tag, in one place."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """Tags are unique over all communicators, so that a stray message shows what its sender meant.

    `messages.py` says what those of control and route carry, `engine_messages.py` those of the engine.
    """

    # control
    LOST = 0  # an instance is lost, and the run goes on without it; from rank 0
    BEAT = 1  # a rank is alive; to rank 0, and from rank 0 to all
    ARRIVED = 2  # this rank has done its part of the phase; to rank 0
    RELEASE = 3  # all ranks have; from rank 0
    FAILED = 4  # this rank can't go on; to rank 0
    STOP = 5  # end now; from rank 0
    BYE = 6  # this rank has released everything and will exit; to rank 0
    # control, of the doctor (see doctor/doctor_messages.py)
    FACTS = 7  # what a rank says of itself; to rank 0
    ORDER = 8  # what to measure; from rank 0
    FOUND = 9  # what an order has found; to rank 0
    # route
    QUERY = 10  # requests; harness to leader
    WORK = 11  # requests; leader to instance
    DONE = 12  # responses; instance to leader
    ANSWER = 13  # responses; leader to harness
    GRANT = 14  # how much more it can hold; instance to leader
    WINDOW = 15  # how many more requests it can take; leader to harness
    CANCEL = 16  # requests to give up; harness to leader, or back from a context instance without them
    DROP = 17  # the same; leader to instance, and context instance to generation instance
    SETTLE = 18  # requests whose context instance is lost: which will be answered? Leader to generation
    # control again
    EVENT = 19  # a line for the console; to rank 0
    # route again, between the leaders of context and generation instances (see roles/handoff.py)
    OFFER = 20  # requests whose KV caches will follow
    ACCEPT = 21  # the slots to send them under
    FIRST = 22  # first tokens
    WARM_UP = 23  # how many requests of the warm-up will be offered
    # instance and pp: inside the engine
    PLAN = 24  # a step; leader to the other ranks of its instance
    TOKENS = 25  # the tokens that a step sampled; first rank of the last stage to leader
    HIDDEN = 26  # the activations of a step; stage to stage
    MOVED = 27  # which KV caches have left or arrived; rank to leader
    # handoff, up to the last slot
    NCCL_ID = 28  # the id of an NCCL communicator between two ranks; sender to receiver
    NOTICE = 29  # what comes next over NCCL; sender to receiver
    ROOM = 30  # the blocks that caches shall have, on a GPU that the sender reaches; receiver to sender
    PUT = 31  # those caches are there; sender to receiver
    KV = 32  # + slot: pieces of a KV cache
