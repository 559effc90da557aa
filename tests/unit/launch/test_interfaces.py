"""Which interfaces of a host lead to no other host."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from launch.interfaces import Interface, interfaces, is_local, own_addresses


def port(sysfs: Path, name: str, ifindex: int, iflink: int, *more: str) -> None:
    folder = sysfs / name
    folder.mkdir()
    (folder / "ifindex").write_text(f"{ifindex}\n")
    (folder / "iflink").write_text(f"{iflink}\n")
    for file in more:
        (folder / file).touch()


@pytest.mark.parametrize(
    "ports, local",
    [
        pytest.param([], True, id="no port"),
        pytest.param([(7, 2)], True, id="veth"),
        pytest.param([(7, 7, "tun_flags")], True, id="tap"),
        pytest.param([(7, 2), (8, 8, "device")], False, id="network card"),
        pytest.param([(7, 2, "lower_eth0")], False, id="vlan"),
        pytest.param([(7, 7)], False, id="vxlan"),
    ],
)
def test_a_bridge(tmp_path: Path, ports: list[tuple[int, int, str]], local: bool) -> None:
    (tmp_path / "docker0/bridge").mkdir(parents=True)
    (tmp_path / "docker0/brif").mkdir()
    for i, (ifindex, iflink, *more) in enumerate(ports):
        port(tmp_path, f"port{i}", ifindex, iflink, *more)
        (tmp_path / f"docker0/brif/port{i}").mkdir()
    assert is_local(Interface("docker0", "172.17.0.1"), tmp_path) is local


def test_other_interfaces(tmp_path: Path) -> None:
    port(tmp_path, "eth0", 2, 2)
    assert not is_local(Interface("eth0", "10.0.0.1"), tmp_path)
    assert not is_local(Interface("docker0", "172.17.0.1"), tmp_path), "sysfs of another network namespace"
    assert is_local(Interface("usb0", "169.254.3.1"), tmp_path), "to the BMC"
    (tmp_path / "br0/bridge").mkdir(parents=True)
    assert not is_local(Interface("br0", "10.0.0.1"), tmp_path), "its ports cannot be read"


def test_an_address_that_others_reach_comes_first() -> None:
    own = [Interface("usb0", "169.254.3.1"), Interface("eth0", "192.0.2.1")]
    assert own_addresses(own) == ("192.0.2.1", "169.254.3.1")


def test_the_interfaces_of_this_host() -> None:
    """All but loopback: the addresses that sockets here may bind to."""
    own = interfaces()
    n_entries = sum(one.family == socket.AF_INET for many in psutil.net_if_addrs().values() for one in many)
    assert len(own) < n_entries, "the loopback interface counts"
    for name, address in own:
        assert name in psutil.net_if_addrs() and not address.startswith("127.")
        with socket.create_server((address, 0)):
            assert address in own_addresses()
