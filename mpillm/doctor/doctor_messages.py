"""The doctor's messages: facts to rank 0, orders from it, and what was found back to it."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from mpillm.comms.messages import Message, object_message
from mpillm.comms.tags import Tag
from mpillm.doctor.gpus import GpuFacts
from mpillm.doctor.installed import PackageFacts
from mpillm.doctor.launch_checks import LaunchFacts
from mpillm.doctor.limits import LimitFacts
from mpillm.doctor.network import HostFacts


class RankFacts(NamedTuple):
    """What a rank finds out by itself."""

    node: str
    pid: int
    launch: LaunchFacts
    limits: LimitFacts
    host: HostFacts
    gpus: GpuFacts
    packages: PackageFacts


class Kind(enum.Enum):
    """What a rank is to do."""

    REACH = "connect to rank 0"
    LEAD = "measure the link to a partner"
    FOLLOW = "answer the partner that measures"
    GPUS = "ask nvidia-smi"
    SEES = "look for a file of rank 0's"
    LEAD_NCCL = "measure NCCL to a partner"
    FOLLOW_NCCL = "answer the partner that measures NCCL"
    END = "there is nothing more"


class Order(NamedTuple):
    """From rank 0."""

    kind: Kind
    number: int = 0  # names it in `Found`
    partner: int = -1
    host: HostFacts | None = None  # REACH
    path: str = ""  # SEES
    seconds: float = 0.0  # that it may take
    finalize: bool = True  # END: every rank has answered, so MPI can be finalized


class Found(NamedTuple):
    """To rank 0: what an order has found. Who follows tells nothing."""

    number: int
    value: Any  # REACH: Reached; LEAD, LEAD_NCCL: LinkFound; GPUS: GpuFacts; SEES: bool, None: in vain


FACTS: Message[RankFacts] = object_message(Tag.FACTS)
ORDER: Message[Order] = object_message(Tag.ORDER)
FOUND: Message[Found] = object_message(Tag.FOUND)
