"""When some of the requests were issued and answered: enough to draw, in constant memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpillm.telemetry.series import Series

_SLOTS = 64  # requests in these are noted: slots are used again, so they come all through the test
_MOST = 2048


class RequestSample:
    """Requests of the lowest slots, fewer of them as the test goes on."""

    def __init__(self) -> None:
        self._rows = Series(("answered", "issued", "first", "slot"), _MOST)

    def answered(
        self,
        slots: NDArray[np.uint32],
        issued_at: NDArray[np.float64],
        first_at: NDArray[np.float64],
        now: float,
    ) -> None:
        """Note whole answers. `issued_at`, `first_at`: by slot, of `time.perf_counter`; 0: unknown."""
        for slot in slots[slots < _SLOTS].tolist():
            self._rows.add(now, issued_at[slot], first_at[slot] or now, slot)

    def to_json(self, since: float) -> dict[str, list[Any]]:
        """Return columns, in seconds after `since`: issued, first token, answered; and the slot."""
        columns = self._rows.to_json(since, digits=5)
        for name in ("issued", "first"):
            columns[name] = [round(at - since, 5) for at in columns[name]]
        return columns
