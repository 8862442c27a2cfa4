"""What an agent tells of its devices: how much, how often, and from where."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleckd.protocol.agentmessages import FiguresTold, Welcome
from oobleckd.protocol.parts import CardReport, DeviceInfo
from oobleckd.worker.device.context import card_of
from oobleckd.worker.telemetry.cards import CardOf, CardWatch
from oobleckd.worker.telemetry.figures import IDLE_S, FigureTeller, UpDevice, rss_bytes
from oobleckd.worker.telemetry.nvml import CardReading

CPU = DeviceInfo("n1/0", "cpu", "cpu", 2**34, "", "", os.getpid())
CUDA = DeviceInfo("n1/1", "cuda", "NVIDIA H100", 80 * 2**30, "", "", 5, card="GPU-1")
READING = CardReading("NVIDIA H100 80GB HBM3", 7, 9, 0.5, 1.0, 2.0, 3, 4, 5, ("power limit",), 0, 1)


class Loop:
    """An event loop's clock and timers, as far as they are used. ``later``: the one timer."""

    def __init__(self) -> None:
        self.now, self.later = 100.0, None

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Loop:
        self.later = (self.now + delay_s, call, args)
        return self

    def cancel(self) -> None:
        self.later = None

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.later is not None and self.later[0] <= end:
            self.now, call, args = self.later
            call(*args)
        self.now = end


class Cards(CardWatch):
    """Cards that were read by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, CardReading] = {}
        self.told: tuple[CardReport, ...] = ()
        self.watched: dict[str, CardOf] = {}

    def watch(self, wanted, every_s) -> None:
        self.watched = dict(wanted)

    def newest(self, device: str) -> CardReading | None:
        return self.found.get(device)

    def reports(self) -> tuple[CardReport, ...]:
        return self.told


class Node:
    """An agent with one device of each kind."""

    def __init__(self) -> None:
        self.loop, self.cards, self.said = Loop(), Cards(), []
        self.idle = False
        self.processes = [UpDevice(CPU, os.getpid()), UpDevice(CUDA, 2**22 + 1)]
        self.teller = FigureTeller(
            self.loop,
            processes=lambda: self.processes,
            incarnation=lambda: "i.1",
            is_idle=lambda: self.idle,
            say=self.said.append,
            total_bytes=2**33,
            cards=self.cards,
        )

    def welcome(self, figures_s: float) -> list[FiguresTold]:
        self.teller.welcome(Welcome(9, "d", 0.25, 10.0, figures_s=figures_s))
        return self.said


def kib(field: str) -> int:
    """A field of the kernel's own sum over all pages of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024 * int(re.findall(rf"^{field}: +(\d+) kB$", rollup, re.MULTILINE)[0])


def test_the_memory_of_a_process_is_what_the_kernel_counts() -> None:
    before = rss_bytes(os.getpid())
    kept = bytearray(os.urandom(1)) * (64 * 2**20)
    now = rss_bytes(os.getpid())
    assert now - before > 60 * 2**20
    assert abs(now - kib("Rss")) < 8 * 2**20  # it counts by the page, some 64 of which a thread holds back
    assert len(kept) > 0
    assert rss_bytes(2**22 + 1) == 0, "there is no such process"


def test_figures_of_a_cpu_and_of_a_card() -> None:
    node = Node()
    node.cards.found["n1/1"] = READING
    node.cards.told = (CardReport("n1/1", 1.0, xid=31), CardReport("n1/1", 2.0, ecc_uncorrected=1))
    (told,) = node.welcome(5.0)
    cpu, cuda = told.figures
    assert (told.incarnation, told.reports) == ("i.1", node.cards.told)
    assert cpu.rss_bytes == cpu.used_bytes > 2**20
    assert (cpu.total_bytes, cpu.card, cpu.utilisation, cpu.ecc_corrected) == (2**33, "", -1.0, -1)
    assert (cuda.device, cuda.used_bytes, cuda.total_bytes, cuda.card) == ("n1/1", 7, 9, READING.name)
    assert (cuda.utilisation, cuda.power_w, cuda.power_limit_w, cuda.temperature_c) == (0.5, 1.0, 2.0, 3)
    assert (cuda.clock_mhz, cuda.clock_max_mhz, cuda.throttled) == (4, 5, ("power limit",))
    assert (cuda.ecc_corrected, cuda.ecc_uncorrected, cuda.xids) == (0, 1, (31,))
    assert node.cards.watched == {"n1/1": CardOf("GPU-1", 2**22 + 1)}


def test_without_nvml_a_card_s_memory_and_name_are_known_all_the_same() -> None:
    (told,) = Node().welcome(5.0)
    cuda = told.figures[1]
    assert (cuda.used_bytes, cuda.total_bytes, cuda.card) == (0, 80 * 2**30, "NVIDIA H100")
    assert (cuda.utilisation, cuda.power_w, cuda.ecc_uncorrected) == (-1.0, 0.0, -1)


def test_a_node_that_trains_tells_as_often_as_the_daemon_wants() -> None:
    node = Node()
    node.welcome(5.0)
    node.loop.run(50.0)
    assert len(node.said) == 11
    node.welcome(20.0)
    node.loop.run(59.0)
    assert len(node.said) == 14


def test_a_daemon_that_does_not_know_figures_is_told_none() -> None:
    node = Node()
    assert node.welcome(0.0) == []
    assert node.loop.later is None
    node.welcome(5.0)
    assert len(node.welcome(0.0)) == 1
    node.loop.run(60.0)
    assert len(node.said) == 1


def test_an_idle_node_tells_once_a_minute_and_news_at_once() -> None:
    node = Node()
    node.idle = True
    node.welcome(5.0)
    node.loop.run(IDLE_S - 5.0)
    assert len(node.said) == 1
    node.loop.run(5.0)
    assert len(node.said) == 2
    node.cards.found["n1/1"] = READING
    node.loop.run(5.0)
    assert len(node.said) == 3
    node.cards.told = (CardReport("n1/1", 1.0, xid=79),)
    node.loop.run(10.0)
    assert len(node.said) == 4
    node.idle = False
    node.loop.run(5.0)
    assert len(node.said) == 5


def test_a_node_without_devices_has_nothing_to_tell() -> None:
    node = Node()
    node.processes = []
    assert node.welcome(5.0) == []
    node.teller.close()
    assert node.loop.later is None


@pytest.mark.parametrize(
    ("visible", "card"),
    [
        (None, "GPU-abc"),
        ("0,1,2", "GPU-abc"),
        ("MIG-a, MIG-b", "MIG-b"),
        ("MIG-a", "GPU-abc"),
    ],
)
def test_a_device_knows_its_card_or_its_slice(
    visible: str | None, card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        uuid = "abc"

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert card_of(torch.device("cuda", 1), environ) == card
    assert card_of(torch.device("cpu"), environ) == ""
