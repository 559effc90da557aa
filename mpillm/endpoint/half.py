"""What one half of disaggregated serving adds to a run's endpoint. A wing brings it (SERVER_ROLES)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from mpillm.cores.base import LLMCore
from mpillm.cores.capabilities import Cache
from mpillm.endpoint.api_error import Json
from mpillm.endpoint.choices import Choice, Piece
from mpillm.endpoint.open_requests import Answer
from mpillm.endpoint.protocol import Asked, Served
from mpillm.endpoint.shapes import Shapes
from mpillm.roles.instance import InstanceRole

if TYPE_CHECKING:  # its import starts MPI
    from mpillm.comms.transport import Transport


class Arrival(NamedTuple):
    """What a context server has computed of a request."""

    first_token: int
    cache: Cache


class Half(Protocol):
    """What the routes ask of it, in the HTTP thread alone."""

    is_context: bool
    transfers: int  # KV caches that a generation server has fetched
    failed_transfers: int

    def check(self, asked: Asked, served: Served) -> Asked:
        """Return what is asked for, with what the other half's word changes.

        Raises ApiError if that can't be done here.
        """

    def ctx_request_id(self, choice: Choice) -> object:
        """Return the id by which both servers' `/perf_metrics` know a request; None if no leader sent it."""

    async def server_info(self, request: web.Request) -> web.Response:
        """Answer what a leader asks first."""

    async def wait_for_room(self) -> None:
        """Wait until one more context-only request leaves room for those of other kinds.

        Raises ApiError if that takes too long.
        """

    def began(self, answer: Answer) -> None:
        """Note a context-only request."""

    def first(self, shapes: Shapes, choice: Choice, piece: Piece) -> Json:
        """Return the answer to a context-only request, whose first token is there."""

    async def fetch(self, asked: Asked, prompt: NDArray[np.int32], served: Served) -> Arrival:
        """Return the KV cache of a generation-only request.

        Raises ApiError if it can't be had, and from whom.
        """

    def opened(self, answer: Answer, arrival: Arrival) -> None:
        """Note that a request whose KV cache was fetched is on its way."""

    def ended(self, answer: Answer, arrival: Arrival) -> None:
        """Note that its handler has ended, whether or not its instance has taken the cache."""


class HalfServer(Protocol):
    """What rank 0 has of it."""

    routes: Half

    def role(self, core: LLMCore, route: Transport, leader: int, instance: int) -> InstanceRole:
        """Return the role of the instance's first rank."""
