"""The records of TensorRT-LLM's interface in tests/data/trtllm, by release; its README says what was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NO_ENGINES, NEWEST, WHOLE, OLDEST = "1.4.0rc", "1.3.0rc", "1.3.0rc3", "0.20"
WITH_ENGINES = (NEWEST, WHOLE, OLDEST)
"""Releases with the TensorRT backend; `NEWEST` is the newest of them that was read."""
RELEASES = (NO_ENGINES, *WITH_ENGINES)
STAND_IN = "MPILLM_TRTLLM_STAND_IN"
"""The environment variable that says which of them the stand-in is made from."""
_FOLDER = Path(__file__).parents[1] / "data/trtllm"


def record(release: str = NEWEST) -> dict[str, Any]:
    """Return a release's record. What was not read of it is the newest's."""
    made: dict[str, Any] = json.loads((_FOLDER / "record.json").read_text(encoding="utf-8"))
    if release != NEWEST:
        own = json.loads((_FOLDER / f"record_{release}.json").read_text(encoding="utf-8"))
        made |= {key: made[key] | own[key] for key in ("bindings", "python", "tools")}
        made["version"] = own["version"]
        for kind, names in own.get("removed", {}).items():
            for name in names:
                del made[kind][name]
    return made
