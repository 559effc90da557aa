"""Whether ranks that have started can be reached where MPI listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from launch.liveness_server import unreachable
from launch.mpi_ports import Port, explain_missing_ranks, explain_separation, listen_as_mpi, unreachable_ranks

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2"}


@pytest.fixture
def closed() -> Iterator[int]:
    """Yield a port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_who_listens_is_reached_without_accepting(closed: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        problems = unreachable({0: ("127.0.0.1", port), 1: ("127.0.0.1", closed), 2: ("no address", 1)}, 1.0)
    assert problems.keys() == {1, 2} and problems[1] == "Connection refused"


def test_open_mpis_ports() -> None:
    """The first free one of its range, as it takes them."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = taken.getsockname()[1]
        names = {f"OMPI_MCA_btl_tcp_port_{what}_v4": str(n) for what, n in (("min", first), ("range", 20))}
        listener = listen_as_mpi(OPEN_MPI | names)
        assert listener is not None
        with listener:
            assert first < listener.getsockname()[1] < first + 20
        assert f"listens at {first}-{first + 19} (OMPI_MCA" in explain_separation("h2", [], OPEN_MPI | names)
    assert "Open MPI's TCP listens at 1024-65535 " in explain_separation("h2", [], OPEN_MPI)


def test_ports_that_the_system_chooses() -> None:
    listener = listen_as_mpi({"PMI_RANK": "0"})
    assert listener is not None
    with listener:
        assert listener.getsockname()[1] >= 1024
    assert "UCX_TCP_PORT_RANGE" in explain_separation("h2", [], {"PMI_RANK": "0"})


def test_one_rank_of_each_other_host_is_tried(closed: int) -> None:
    here, h1 = "127.0.0.1", socket.gethostname()
    with socket.create_server((here, 0)) as listener:
        port = listener.getsockname()[1]
        ports = [Port(0, h1, here, closed), Port(1, "h2", here, port), Port(2, "h2", here, closed)]
        assert unreachable_ranks(ports, h1) == ""
        apart = explain_separation("", ports, OPEN_MPI)
        assert "MPI does not connect them: a rank or a daemon of mpirun may be stopped" in apart
        assert "firewall" not in apart
        ports += [Port(3, "h3", here, closed), Port(4, "h3", here, port)]
        message = (
            f"host h3 (ranks 3-4) can't be reached from {h1} (127.0.0.1 port {closed}: Connection refused)"
        )
        assert unreachable_ranks(ports, h1) == message
        message = f"all ranks have started, but rank 0 … from head; {message}: is there a firewall"
        assert explain_separation("rank 0 … from head", ports, OPEN_MPI).startswith(message)


def test_an_address_of_two_hosts_is_named() -> None:
    twins = [Port(i, f"h{i}", "127.0.0.1", 0, "eth0=10.77.0.9,tmfifo_net0=192.1") for i in (1, 2)]
    assert "10.77.0.9 (eth0) is an address of h1 and of h2" in explain_separation("", twins, OPEN_MPI)


def test_missing_ranks_without_a_report_of_the_launcher() -> None:
    elsewhere = explain_missing_ranks([0, 1], 2, 4, OPEN_MPI)
    assert elsewhere.startswith(
        "ranks 2-3, on other hosts, have not started, or can't be reached: is there a fire"
    )
    assert "listens at 1024-65535 " in elsewhere and "`python -m mpillm mpirun` reports details" in elsewhere
    for here, n_here, size in (([0], 2, 4), ([0, 1], None, 4), ([0, 1], 2, None)):
        assert explain_missing_ranks(here, n_here, size, OPEN_MPI).startswith(
            "a rank has not started, or can't be reached: is"
        )
    assert explain_missing_ranks([0, 1], 2, 2, OPEN_MPI) == "a rank has not started, or can't be reached"
