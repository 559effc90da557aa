"""The HTTP thread's part of one half of disaggregated serving."""

from __future__ import annotations

import numpy as np

from mpillm.roles.half import Arrival
from mpillm.serve.disaggregated_params import Half, KvFormat
from mpillm.serve.open_requests import Answer


def test_a_handler_that_ends_late_leaves_the_next_request_with_its_id_alone() -> None:
    """An id is free with a request's last row; the request's handler runs a turn of the loop later."""
    arrivals: dict[int, Arrival] = {}
    half = Half("generation", "it", KvFormat("any", 1), "localhost", None, arrivals, 1.0)
    first, second = (Arrival(token, np.zeros(1, np.uint8)) for token in (1, 2))
    half.opened(Answer(0, 1), first)
    del arrivals[0]  # its instance takes it, and answers
    half.opened(Answer(0, 1), second)
    half.ended(Answer(0, 1), first)
    assert arrivals == {0: second}
    half.ended(Answer(0, 1), second)
    assert not arrivals
