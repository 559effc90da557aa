"""Measure the MPI link between two ranks: small messages back and forth, then windows of large messages."""

from __future__ import annotations

import statistics
import time

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpillm.doctor.network import LinkMeasurement

_TAG = 1  # in a communicator without other messages
_TRIPS = 60
_WARM = 5
_LARGE = 4 << 20  # bytes
_WINDOW = 8  # large messages in flight
_TURNS = 3


_abandoned: list[MPI.Request] = []  # MPI may still write to their buffers


class LinkTimeout(Exception):
    """The partner did not answer in time."""


class LinkProbe:
    """One end of a link. The ends call `lead` and `follow`; neither waits longer than its deadline."""

    def __init__(self, comm: MPI.Intracomm, partner: int, seconds: float) -> None:
        """`comm`: carries no other message of these two ranks at the same time."""
        self._comm, self._partner = comm, partner
        self._end = time.monotonic() + seconds

    def lead(self) -> LinkMeasurement:
        """Measure; the result contains a failure."""
        try:
            return self._lead()
        except LinkTimeout:
            return LinkMeasurement(0, 0, 0, f"rank {self._partner} did not answer in time")

    def follow(self) -> None:
        """Answer the partner's measurement. Raises LinkTimeout."""
        token = np.zeros(1)
        for _ in range(_WARM + _TRIPS):
            self._receive(token)
            token[0] = time.time()
            self._send(token)
        large = [np.empty(_LARGE, np.uint8) for _ in range(_WINDOW)]
        for _ in range(_TURNS):
            self._wait([self._comm.Irecv(part, self._partner, _TAG) for part in large])
            self._send(token)

    def _lead(self) -> LinkMeasurement:
        token, trips = np.zeros(1), []
        for _ in range(_WARM + _TRIPS):
            started, wall = time.perf_counter(), time.time()
            self._send(token)
            self._receive(token)
            trip = time.perf_counter() - started
            trips.append((trip, float(token[0]) - (wall + trip / 2)))
        trips = trips[_WARM:]
        large = np.zeros(_LARGE, np.uint8)
        turns = []
        for _ in range(_TURNS):
            started = time.perf_counter()
            self._wait([self._comm.Isend(large, self._partner, _TAG) for _ in range(_WINDOW)])
            self._receive(token)
            turns.append(time.perf_counter() - started)
        # The fastest trip bounds the error of the offset (Cristian's algorithm) by half of it.
        latency = statistics.median(trip for trip, _ in trips) / 2
        return LinkMeasurement(latency, _WINDOW * _LARGE / min(turns), min(trips)[1])

    def _send(self, token: NDArray[np.float64]) -> None:
        self._wait([self._comm.Isend(token, self._partner, _TAG)])

    def _receive(self, token: NDArray[np.float64]) -> None:
        self._wait([self._comm.Irecv(token, self._partner, _TAG)])

    def _wait(self, requests: list[MPI.Request]) -> None:
        n_polls = 0
        while requests:
            try:
                requests = [request for request in requests if not request.Test()]
            except MPI.Exception as error:  # the partner's process has exited
                raise LinkTimeout from error
            n_polls += 1
            if n_polls % 256 == 0:  # the partner may need this CPU core
                time.sleep(0)
            if requests and time.monotonic() > self._end:
                _abandoned.extend(requests)
                raise LinkTimeout
