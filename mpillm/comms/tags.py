"""All message tags."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """Tags of messages, unique over all communicators, so that a tag identifies a misdirected message.

    `messages.py` defines the content of messages on control and route, `engine_messages.py` in the engine.
    """

    # control
    LOST = 0  # an instance is lost, and the run continues; from rank 0
    BEAT = 1  # heartbeat; to rank 0, and from rank 0 to all
    ARRIVED = 2  # the sender has done its part of the phase; to rank 0
    RELEASE = 3  # all ranks have done their part; from rank 0
    FAILED = 4  # a failure; to rank 0
    STOP = 5  # end now; from rank 0
    BYE = 6  # the sender has released everything and will exit; to rank 0
    # control, of the doctor (see doctor/doctor_messages.py)
    FACTS = 7  # facts about a rank; to rank 0
    ORDER = 8  # an order to measure; from rank 0
    RESULTS = 9  # results of an order; to rank 0
    # route
    QUERY = 10  # requests; harness to leader
    WORK = 11  # requests; leader to instance
    DONE = 12  # responses; instance to leader
    ANSWER = 13  # responses; leader to harness
    GRANT = 14  # credits; instance to leader
    WINDOW = 15  # number of additional requests that the leader accepts; leader to harness
    CANCEL = 16  # cancelled requests; harness to leader. Also context instance to leader, if they ended there
    DROP = 17  # cancelled requests; leader to instance, and context instance to generation instance
    SETTLE = 18  # requests of a lost context instance: will they be answered? Leader to generation instance
    # control again
    EVENT = 19  # a line for the console; to rank 0
    STOPPED = 20  # a rank of the sender's host is stopped (SIGSTOP); to rank 0
    # route again, between the root ranks of context and generation instances (see roles/handoff.py)
    OFFER = 21  # requests whose KV caches will follow
    ACCEPT = 22  # the slots for sending them
    FIRST = 23  # first tokens
    WARM_UP = 24  # number of warm-up requests
    RESET_CACHE = 25  # empty the prefix caches; frontend to leader, leader to instance
    # instance and pp communicators: inside the engine
    PLAN = 26  # a step; root rank to the other ranks of its instance
    TOKENS = 27  # the tokens that a step sampled; first rank of the last stage to root rank
    HIDDEN = 28  # the activations of a step; stage to stage
    MOVED = 29  # completed KV cache transfers; rank to root rank
    # handoff, up to the last slot
    NCCL_ID = 30  # the id of an NCCL communicator between two ranks; sender to receiver
    NOTICE = 31  # the next transfer over NCCL; sender to receiver
    TARGETS = 32  # target blocks of caches, on a GPU that the cache's sender reaches; receiver to sender
    PUT = 33  # completed puts of caches; sender to receiver
    KV = 34  # + slot: pieces of a KV cache
