"""What a plan may count on: shares of hosts, less the spares; GPUs whole."""

import msgspec
import pytest

from oobleckd.core.lease import Lease
from oobleckd.core.membership import Node
from oobleckd.core.memory import SPARE_BYTES, held_besides, min_device_bytes
from oobleckd.protocol.job import Checkpoint
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.parts import DeviceInfo, Spare
from tests.helpers.simjobs import make_job, profile

GIB = 2**30


def node(name, num_devices=1, *, kind="cpu", memory=16 * GIB, host="h", spare=None):
    infos = tuple(DeviceInfo(f"{name}/{i}", kind, kind, memory, "", "", 1) for i in range(num_devices))
    return Node(name, "1", Lease(5.0, 0.0), host=host, ready=True, devices=infos, spare=spare)


def test_cpu_devices_share_their_host_with_all_its_nodes():
    nodes = [node("a", 2), node("b", 2)]
    assert min_device_bytes(nodes, nodes, 0) == 4 * GIB
    assert min_device_bytes(nodes[:1], nodes, 0) == 4 * GIB
    assert min_device_bytes(nodes[:1], [*nodes[:1], node("b", 2, host="elsewhere")], 0) == 8 * GIB


def test_spares_take_theirs_first():
    nodes = [node("a", 2, spare=Spare(7, ready=True, memory_bytes=GIB)), node("b", 1, spare=Spare(8))]
    assert min_device_bytes(nodes, nodes, 0) == (15 * GIB - SPARE_BYTES) // 3


def test_a_gpu_is_its_own_and_a_spare_holds_none_of_it():
    nodes = [node("a", 4, kind="cuda", spare=Spare(7, ready=True, memory_bytes=GIB))]
    assert min_device_bytes(nodes, nodes, 0) == 16 * GIB


def test_the_cap_and_what_nobody_knows():
    nodes = [node("a")]
    assert min_device_bytes(nodes, nodes, GIB) == GIB
    assert min_device_bytes(nodes, nodes, 32 * GIB) == 16 * GIB
    unknown = [node("a", memory=0, spare=Spare(7))]
    assert min_device_bytes(unknown, unknown, 0) == 0
    assert min_device_bytes(unknown, unknown, 5) == 5


@pytest.mark.parametrize(
    ("update", "every", "kind", "copies"),
    [
        ("flushed", 0, "cpu", 0), ("flushed", "auto", "cpu", 1), ("flushed", 5, "cpu", 1),
        ("staggered", 0, "cpu", 1),
        ("staggered", "auto", "cpu", 2), ("flushed", "auto", "cuda", 0), ("staggered", "auto", "cuda", 1),
    ],
)  # fmt: skip
def test_copies_of_weights_and_moments(update: str, every: int | str, kind: str, copies: int) -> None:
    """One to roll back to, one to write a checkpoint from; beside a GPU that one is in the host's memory."""
    job = msgspec.structs.replace(
        make_job(schedule=Schedule(update=update)), checkpoint=Checkpoint(every=every)
    )
    found = held_besides(job, msgspec.structs.replace(profile(6), device=kind))
    assert found.state_copies == pytest.approx(copies * 12 / 32)


@pytest.mark.parametrize(
    ("kind", "exact", "share"), [("cpu", True, 24 / 32), ("cpu", False, 12 / 24), ("cuda", True, 0)]
)
def test_copies_of_sums(kind: str, exact: bool, share: float) -> None:
    """On their way out, on their way in, and kept: beside a GPU in the host's memory."""
    job = make_job(schedule=Schedule(sum_copies=2))
    job = msgspec.structs.replace(
        job, checkpoint=Checkpoint(every=0), train=msgspec.structs.replace(job.train, exact=exact)
    )
    found = held_besides(job, msgspec.structs.replace(profile(6), device=kind))
    assert found.state_copies == pytest.approx(share)


def test_of_a_smaller_state_copies_are_a_smaller_part() -> None:
    """4 bytes of momentum in place of 8 of moments."""
    job = make_job(schedule=Schedule(update="staggered"))
    layers = [
        msgspec.structs.replace(layer, param_bytes=400, slot_bytes=400, state_bytes=2800)
        for layer in profile(6).layers
    ]
    found = held_besides(job, msgspec.structs.replace(profile(6), device="cuda", layers=tuple(layers)))
    assert found.state_copies == pytest.approx(8 / 28)
