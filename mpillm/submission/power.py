"""Power of the system under test for MLPerf Endpoints: a measurement, and a draft of system_power.json.

The rules (4.5, appendix E) divide by provisioned power from public sources. NVML gives the kind and the
number of GPUs, and the energy that they used. It is not such a source, so both are marked.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mpillm.devices import visible_gpus
from mpillm.files import read_object
from mpillm.report.machine import describe_machine
from mpillm.telemetry.gpu_meter import GPU_COLUMNS, GpuMeter

MEASURED = "measured_power"
"""Key of a measurement in the options of a point, and in point.yaml."""

DRAFT = "Draft by mpillm"
"""Beginning of the notes in a draft."""

_ENERGY = GPU_COLUMNS.index("energy_j")
_LOCAL = ("localhost", "::1")


def is_local(url: str) -> bool:
    """Return whether a server's URL names this host."""
    try:
        name = urlsplit(url if "://" in url else f"http://{url}").hostname or ""
    except ValueError:
        return False
    return name in (*_LOCAL, socket.gethostname()) or name.startswith("127.")


def local_meters(url: str) -> list[GpuMeter]:
    """Return a meter for each visible GPU of this host; none for a server on another host."""
    meters: list[GpuMeter] = []
    if not is_local(url):
        return meters
    while True:
        try:
            meters.append(GpuMeter(len(meters)))
        except OSError:
            return meters


class PowerWatch:
    """Mean power of GPUs, from their energy counters at two times."""

    def __init__(self, meters: list[GpuMeter]) -> None:
        self._meters = meters
        self._began, self._first_j = time.monotonic(), self._energy_j()

    def _energy_j(self) -> float:
        return sum(meter.read()[_ENERGY] for meter in self._meters)

    def result(self) -> dict[str, Any] | None:
        """Return the mean since the creation; None: no GPU of this host reports its energy."""
        used_j, lasted_s = self._energy_j() - self._first_j, time.monotonic() - self._began
        if not self._meters or math.isnan(used_j) or lasted_s <= 0:
            return None
        return {
            "source": "NVML: energy of the visible GPUs of the host, without its other parts",
            "gpus": len(self._meters),
            "mean_w": round(used_j / lasted_s, 1),
        }


def power_draft(system: str, description: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a draft of system_power.json for this host (appendix E); None without NVIDIA's GPUs.

    A component without a public figure has none: MLCommons' default applies if there is one.

    Args:
        description: The submitter's fields of system_desc.json.
    """
    gpus = visible_gpus()
    if not gpus:
        return None
    cpu = describe_machine(gpus, ())["cpu"]
    nodes = description.get("node_types")
    node = nodes[0] if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict) else {}
    cooling = str(node.get("cooling", description.get("cooling", ""))).lower()
    components: dict[str, Any] = {
        "cpu": {"model": cpu["model"], "count_per_node": cpu["sockets"]},
        "accelerator": {"model": gpus[0].name, "count_per_node": len(gpus)},
    }
    if len(gpus) == 1:
        components["scale_up_network"] = {"method": "none"}
    return {
        "system_desc_id": system,
        "cooling": "liquid" if "liquid" in cooling else "air",
        "node_sets": [
            {
                "node_set_id": 0,
                "system_node_ensemble_id": node.get("system_node_ensemble_id", 0),
                "nodes_provisioned": 1,
                "power_method": "component_sum",
                "components": components,
            }
        ],
        "scale_out": {"present": False},
        "notes": f"{DRAFT} from NVML and /proc/cpuinfo of one host. It has no figure from a public source.",
    }


def draft_line(draft: Mapping[str, Any]) -> str:
    """Return what the submitter must add to a draft."""
    components = draft["node_sets"][0]["components"]
    gpus = components["accelerator"]
    lacks = "" if "scale_up_network" in components else ", the scale-up network"
    return (
        f"system_power.json: a draft from NVML ({gpus['count_per_node']}x {gpus['model']}); it needs public"
        f" figures for the TDPs{lacks}, and the cooling ({draft['cooling']}): --system_power"
    )


def is_draft(file: Path) -> bool:
    """Return whether a system_power.json is a draft of this program."""
    return str(read_object(file).get("notes", "")).startswith(DRAFT)
