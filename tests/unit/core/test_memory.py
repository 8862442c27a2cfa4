"""What a plan may count on: shares of hosts, less the spares; GPUs whole."""

from oobleckd.core.lease import Lease
from oobleckd.core.membership import Node
from oobleckd.core.memory import SPARE_BYTES, least_device_bytes
from oobleckd.protocol.parts import DeviceInfo, Spare

GIB = 2**30


def node(name, num_devices=1, *, kind="cpu", memory=16 * GIB, host="h", spare=None):
    infos = tuple(DeviceInfo(f"{name}/{i}", kind, kind, memory, "", "", 1) for i in range(num_devices))
    return Node(name, "1", Lease(5.0, 0.0), host=host, ready=True, devices=infos, spare=spare)


def test_cpu_devices_share_their_host_with_all_its_nodes():
    nodes = [node("a", 2), node("b", 2)]
    assert least_device_bytes(nodes, nodes, 0) == 4 * GIB
    assert least_device_bytes(nodes[:1], nodes, 0) == 4 * GIB
    assert least_device_bytes(nodes[:1], [*nodes[:1], node("b", 2, host="elsewhere")], 0) == 8 * GIB


def test_spares_take_theirs_first():
    nodes = [node("a", 2, spare=Spare(7, ready=True, memory_bytes=GIB)), node("b", 1, spare=Spare(8))]
    assert least_device_bytes(nodes, nodes, 0) == (15 * GIB - SPARE_BYTES) // 3


def test_a_gpu_is_its_own_and_a_spare_holds_none_of_it():
    nodes = [node("a", 4, kind="cuda", spare=Spare(7, ready=True, memory_bytes=GIB))]
    assert least_device_bytes(nodes, nodes, 0) == 16 * GIB


def test_the_cap_and_what_nobody_knows():
    nodes = [node("a")]
    assert least_device_bytes(nodes, nodes, GIB) == GIB
    assert least_device_bytes(nodes, nodes, 32 * GIB) == 16 * GIB
    unknown = [node("a", memory=0, spare=Spare(7))]
    assert least_device_bytes(unknown, unknown, 0) == 0
    assert least_device_bytes(unknown, unknown, 5) == 5
