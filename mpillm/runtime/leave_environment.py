"""What a test or a server leaves of where it ran: `environment.json` and `machines.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpillm.comms.messages import DrainReport
from mpillm.files import write_json
from mpillm.report.run_environment import ENVIRONMENT, describe_environment
from mpillm.runtime.join import Planned


def leave_environment(
    directory: Path, planned: Planned, reports: Mapping[int, DrainReport], result: Mapping[str, Any]
) -> None:
    """Write software and machines, and by name the servers of a test. Raises OSError."""
    machines = {
        planned.plan.ranks[rank].node: report.machine
        for rank, report in sorted(reports.items())
        if report.machine
    }
    write_json(directory / "machines.json", machines)
    told = {name for one in result["per_instance"] for name in one.get("frameworks", ())}
    had = {"servers": ", ".join(sorted(told))}
    if other := result.get("harness"):
        had["harness"] = f"{other['name']} {other['version']}".rstrip()
    write_json(directory / ENVIRONMENT, describe_environment(planned.reports[0].versions["MPI"]) | had)
