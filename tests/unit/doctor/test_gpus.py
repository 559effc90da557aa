"""What nvidia-smi prints, as others have recorded it, and what the doctor makes of it. No card was seen."""

from __future__ import annotations

import pytest

from mpillm.devices import Gpu
from mpillm.doctor import gpus
from mpillm.doctor.findings import Line, Status, World, judge
from mpillm.doctor.gpus import Device, GpuFacts, parse_devices, parse_matrix

# of a machine with four H100, with network cards; the terminal's underline is in the output
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPXB\t0-63,128-191\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-63,128-191\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tNODE\t0-63,128-191\t0\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tNODE\t0-63,128-191\t0\t\tN/A\n"
    "NIC0\tPXB\tNODE\tNODE\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
# of a machine with two RTX 5090
NO_PEERS = (
    " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
)
QUERY = (
    "0, NVIDIA H100 80GB HBM3, 590.44.01, 81559, 0, Disabled, 0\n"
    "1, NVIDIA H100 80GB HBM3, 590.44.01, 81559, 40123, Disabled, [N/A]\n"
)
SEEN = Gpu("GPU-1", "NVIDIA H100 80GB HBM3", 81559 << 20, 81000 << 20)


def lines(*facts: GpuFacts) -> dict[str, Line]:
    """Return the lines of one node per entry, by check."""
    world = World({rank: f"n{rank}" for rank in range(len(facts))})
    return {line.check: line for line in judge(gpus.CHECKS, dict(enumerate(facts)), world)}


def test_a_matrix_of_links() -> None:
    assert parse_matrix(NVLINK) == tuple((a, b, "NV18") for a in range(4) for b in range(a + 1, 4))
    assert parse_matrix(NO_PEERS) == ((0, 1, "GNS"),)
    assert parse_matrix("No devices were found\n") == ()


def test_the_devices() -> None:
    first, second = parse_devices(QUERY)
    assert first == Device(0, "NVIDIA H100 80GB HBM3", "590.44.01", 81559 << 20, 0, False, 0)
    assert (second.used, second.errors) == (40123 << 20, None)
    with pytest.raises(ValueError, match="unexpected line: No devices were found"):
        parse_devices("No devices were found\n")


def test_the_reason_for_no_gpu_is_reported() -> None:
    found = lines(GpuFacts((), "NVIDIA's driver is not loaded", "2.13.0+cpu", None))
    assert list(found) == ["GPUs"]
    assert found["GPUs"].status is Status.SKIPPED and "driver is not loaded" in found["GPUs"].text


def test_gpus_in_use_and_without_peer_access() -> None:
    devices = parse_devices(QUERY)
    found = lines(
        GpuFacts((SEEN, SEEN), "", "2.13.0", False, devices, ((0, 1, "PHB"),), ((0, 1),)),
    )
    assert {check: line.status for check, line in found.items()} == {
        "GPUs": Status.OK,
        "GPU memory": Status.WARNING,
        "GPU peers": Status.WARNING,
        "peer memory": Status.WARNING,
    }
    assert "GPU 1: 42 GB" in found["GPU memory"].text and "0-1" in found["GPU peers"].text


def test_memory_errors_are_a_failure_and_a_cpu_build_a_warning() -> None:
    (device, _) = parse_devices(QUERY)
    found = lines(GpuFacts((SEEN,), "", "2.13.0+cpu", None, (device._replace(errors=3),)))
    assert (found["GPU memory"].status, found["GPUs"].status) == (Status.FAILURE, Status.WARNING)


def test_nvidia_smi_without_an_answer_is_reported() -> None:
    found = lines(GpuFacts((SEEN,), "", "2.13.0", True, unanswered="nvidia-smi: timed out"))
    assert found["GPU memory"] == Line("GPU memory", Status.SKIPPED, "nvidia-smi: timed out")
