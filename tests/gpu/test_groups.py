"""NCCL on the ranks that this machine allows: init, payloads, a real kill in the middle, abort,
init again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from oobleckd.protocol.parts import Peer
from oobleckd.worker.groups.choose import choose
from oobleckd.worker.groups.store import ChannelStore
from tests.helpers import gpu
from tests.helpers.group_peer import TIMEOUT_S, Member

pytestmark = pytest.mark.gpu
MIB = 1 << 20
LARGE = 64 * MIB
NAMES = ("a/0", "b/0")


class Two:
    """Two processes with channels both ways, whose messages are all large enough for NCCL."""

    def __init__(self, directory: Path) -> None:
        if problem := gpu.channel_problem():
            pytest.skip(f"no channel between two processes here: {problem}")
        self.directory = directory
        self.places = dict(zip(NAMES, gpu.devices(2), strict=True))
        self.members: dict[str, Member] = {}
        self.peers: dict[str, Peer] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        """A process for ``name``: a new incarnation if there was one."""
        self.members[name] = Member(name, self.directory, self.places[name], gpu.BACKEND)
        self.peers[name] = self.members[name].hear(Peer)

    def enter(self, epoch: int) -> None:
        """A group with open channels."""
        for name in NAMES:
            self.members[name].ask("enter", epoch=epoch, peers=self.peers)
        for name, other in (NAMES, NAMES[::-1]):
            self.members[name].ask("send_large", names=(other,), num_bytes=MIB + epoch)
            assert self.members[name].ask("open", epoch=epoch, names=(other,))

    def exchange(self, epoch: int) -> None:
        """Tensor messages both ways at once, each once and with the right bits."""
        sizes = [MIB + 1000 * epoch + index for index in range(8)]
        for size in sizes:
            for name, other in (NAMES, NAMES[::-1]):
                assert self.members[name].ask("send_large", names=(other,), num_bytes=size)
        for name, other in (NAMES, NAMES[::-1]):
            got, wrong = self.members[name].ask("receive", names=(other,), count=len(sizes) + 1)
            assert wrong == []
            assert set(got.values()) == {1}
            assert {repr(("large", other, name, size)) for size in sizes} <= set(got)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    for member in made.members.values():
        member.close()


def test_messages_by_channels_a_kill_abort_and_a_new_group(two: Two) -> None:
    a, b = two.members.values()
    two.enter(1)
    two.exchange(1)
    b.signal(signal.SIGSTOP)
    assert a.ask("send_large", names=("b/0",), num_bytes=LARGE)
    b.signal(signal.SIGKILL)
    ended_s = a.ask("forget", epoch=1, names=("b/0",))
    assert ended_s < TIMEOUT_S / 2, "the abort took too long"
    b.close()

    two.start("b/0")
    began = time.monotonic()
    a.ask("clear")
    two.enter(2)
    print(
        f"abort after a kill: {ended_s:.3f} s; a new group, from nothing to open: "
        f"{time.monotonic() - began:.3f} s"
    )
    two.exchange(2)
    for member in two.members.values():
        assert member.ask("end")


def test_one_rank_inits_aborts_and_inits_again() -> None:
    """What any single GPU allows: the calls, the settings and the store with the NCCL that is installed."""
    device = torch.device(gpu.devices(1)[0])
    choose(device, {"OOBLECK_BACKEND": gpu.BACKEND})  # NCCL's settings
    for _ in range(2):
        store = ChannelStore(
            lambda _key, _value: None
        )  # torch asks it until the first operation is done, and keeps it not
        group = lone_group(store)
        ones = torch.ones(MIB, device=device)
        group.allreduce([ones]).wait()
        assert float(ones.sum()) == MIB
        ending = threading.Thread(target=group.abort, daemon=True)
        ending.start()
        ending.join(TIMEOUT_S)
        assert not ending.is_alive(), "the abort did not return"


def lone_group(store: ChannelStore) -> dist.distributed_c10d.Backend:
    """A process group of one rank over ``store``."""
    if gpu.REHEARSAL:
        return dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=TIMEOUT_S))
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    return dist.ProcessGroupNCCL(store, 0, 1, options)
