"""What NVML tells of cards, and who waits for it: nobody."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import get_type_hints

import pynvml
import pytest

from oobleckd.protocol.parts import CardReport
from oobleckd.worker.telemetry import nvml as api
from oobleckd.worker.telemetry.cards import AGAIN_S, CardOf, CardWatch
from oobleckd.worker.telemetry.nvml import Card, CardReading, Nvml
from tests.helpers.nvml import OTHER, SLICE, UUID, FakeCard, FakeNvml

PID = 4711
DEVICE = {"n1/0": CardOf(UUID, PID)}


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """A thread of another's is waited for; what it tells is nobody's event."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        threading.Event().wait(0.005)


def read(fake: FakeNvml, uuid: str = UUID) -> CardReading:
    card = api.find(fake, uuid)
    assert card is not None
    return api.read(fake, card, {PID})


# --------------------------------------------------------------------------- the stand-in is like the package


def test_all_that_is_asked_is_in_the_package_and_in_the_stand_in() -> None:
    fake = FakeNvml()
    calls = {
        "nvmlInit": 0, "nvmlDeviceGetTemperature": 2, "nvmlDeviceGetClockInfo": 2, "nvmlEventSetCreate": 0,
        "nvmlDeviceGetMaxClockInfo": 2, "nvmlDeviceGetTotalEccErrors": 3, "nvmlDeviceRegisterEvents": 3,
        "nvmlEventSetWait_v2": 2,
    }  # fmt: skip
    for name in get_type_hints(Nvml):
        theirs, ours = getattr(pynvml, name), getattr(fake, name)
        if name.startswith("NVMLError"):
            assert issubclass(theirs, pynvml.NVMLError)
            assert issubclass(ours, fake.NVMLError)
            continue
        args = [object()] * calls.get(name, 1)
        inspect.signature(theirs).bind(*args)
        inspect.signature(ours).bind(*args)


def test_numbers_are_those_of_the_package() -> None:
    assert api.TEMPERATURE_GPU == pynvml.NVML_TEMPERATURE_GPU
    assert api.CLOCK_SM == pynvml.NVML_CLOCK_SM
    assert api.VOLATILE == pynvml.NVML_VOLATILE_ECC
    assert pynvml.nvmlEventTypeXidCriticalError == api.XID_EVENTS
    assert pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED == api.CORRECTED
    assert pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED == api.UNCORRECTED
    assert {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal, by software",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "thermal, by hardware",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    } == api.THROTTLED


@pytest.mark.parametrize("missing", ["package", "driver"])
def test_without_the_package_or_the_driver_nothing_is_said(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "package":
        monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    else:
        monkeypatch.setattr(pynvml, "CDLL", lambda _name: (_ for _ in ()).throw(OSError("none")))
        monkeypatch.setattr(pynvml, "nvmlLib", None)
    assert api.load() is None


# --------------------------------------------------------------------------- what a card says


def test_a_card_says_all_in_our_units() -> None:
    fake = FakeNvml([FakeCard(processes=((1, 2**30), (PID, 20 * 2**30)), throttled=0x1 | 0x4 | 0x40)])
    assert read(fake) == CardReading(
        name="NVIDIA H100 80GB HBM3",
        used_bytes=20 * 2**30,
        total_bytes=80 * 2**30,
        utilisation=0.97,
        power_w=650.5,
        power_limit_w=700.0,
        temperature_c=64,
        clock_mhz=1755,
        clock_max_mhz=1980,
        throttled=("power limit", "thermal, by hardware"),
        ecc_corrected=3,
        ecc_uncorrected=0,
    )


@pytest.mark.parametrize("processes", [(), ((1, 2**30),), ((PID, None),)])
def test_where_the_process_is_not_known_the_card_s_memory_counts(
    processes: tuple[tuple[int, int | None], ...],
) -> None:
    assert read(FakeNvml([FakeCard(processes=processes)])).used_bytes == 30 * 2**30


def test_what_a_card_does_not_have_is_not_known() -> None:
    plain = FakeCard(
        gpu=None, power=None, power_limit=None, temperature=None, clock=None, clock_max=None, throttled=None,
        corrected=None, uncorrected=None,
    )  # fmt: skip
    found = read(FakeNvml([plain]))
    assert found == CardReading(plain.name, plain.used, plain.total)
    assert api.find(FakeNvml([plain]), OTHER) is None


def test_a_slice_has_its_own_memory_and_the_power_of_the_whole_card() -> None:
    whole = FakeCard()
    part = FakeCard(uuid=SLICE, used=2**30, total=10 * 2**30, gpu=None, power=None, whole=whole)
    fake = FakeNvml([whole, part])
    assert api.find(fake, SLICE) == Card(part, whole)
    found = read(fake, SLICE)
    assert (found.used_bytes, found.total_bytes, found.utilisation) == (2**30, 10 * 2**30, -1.0)
    assert (found.power_w, found.temperature_c, found.ecc_corrected) == (650.5, 64, 3)


# --------------------------------------------------------------------------- the thread


def test_cards_are_read_beside_the_agent_and_what_is_watched_may_change() -> None:
    fake = FakeNvml([FakeCard(), FakeCard(uuid=OTHER, temperature=30)])
    watch = CardWatch(lambda: fake)
    assert watch.newest("n1/0") is None
    watch.watch(DEVICE, 3600.0)
    until(lambda: watch.newest("n1/0"))
    watch.watch({"n1/0": CardOf(OTHER, PID)}, 3600.0)
    until(lambda: (found := watch.newest("n1/0")) is not None and found.temperature_c == 30)
    watch.watch({}, 3600.0)
    assert watch.newest("n1/0") is None, "there is no such device any more"
    watch.close()


def test_an_xid_is_reported_at_once_and_not_again_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("oobleckd.worker.telemetry.cards.time.time", lambda: now)
    fake = FakeNvml()
    watch = CardWatch(lambda: fake)
    watch.watch(DEVICE, 3600.0)
    fake.events.put((fake.cards[0], 79))
    until(watch.reports)
    assert watch.reports() == (CardReport("n1/0", 1000.0, "NVIDIA H100 80GB HBM3", xid=79),)
    for _ in range(100):
        fake.events.put((fake.cards[0], 79))
    fake.events.put((fake.cards[0], 31))
    until(lambda: len(watch.reports()) == 2)
    assert [each.xid for each in watch.reports()] == [79, 31]
    now += AGAIN_S
    fake.events.put((fake.cards[0], 79))
    until(lambda: len(watch.reports()) == 3)
    assert fake.registered == [UUID], "a card is listened to once"
    watch.close()


def test_errors_that_a_card_had_before_are_no_news_and_more_of_them_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("oobleckd.worker.telemetry.cards.time.time", lambda: now)
    fake = FakeNvml([FakeCard(uncorrected=2)], deaf=True)
    card = fake.cards[0]
    watch = CardWatch(lambda: fake)
    watch.watch(DEVICE, 0.01)

    def counted(number: int | None) -> list[tuple[float, int]]:
        """What is reported once a card has counted so many, and was read twice since."""
        card.uncorrected = number
        while not fake.asked.empty():
            fake.asked.get()
        for _ in range(3):
            fake.asked.get(timeout=30.0)
        return [(each.at, each.ecc_uncorrected) for each in watch.reports()]

    assert counted(2) == []
    assert counted(5) == [(1000.0, 5)]
    assert counted(7) == [(1000.0, 5)], "not again within a minute"
    now += AGAIN_S
    assert counted(7) == [(1000.0, 5), (1060.0, 7)], "and then"
    now += AGAIN_S
    assert counted(None) == counted(0) == [(1000.0, 5), (1060.0, 7)], "a driver that is loaded anew"
    assert counted(1)[2:] == [(1120.0, 1)]
    watch.close()


def test_a_card_that_hangs_costs_nothing_but_what_is_known_of_it() -> None:
    now = 0.0
    fake = FakeNvml()
    watch = CardWatch(lambda: fake, clock=lambda: now)
    watch.watch(DEVICE, 5.0)
    until(lambda: watch.newest("n1/0"))
    fake.hangs = threading.Event()
    now = 6.0
    watch.watch(DEVICE | {"n1/1": CardOf(UUID, PID)}, 5.0)  # wakes it
    fake.asked.get(timeout=30.0)
    fake.asked.get(timeout=30.0)  # this one hangs
    began = time.process_time()
    for _ in range(1000):
        watch.watch(DEVICE, 5.0)
        watch.watch(DEVICE | {"n1/1": CardOf(UUID, PID)}, 5.0)
        assert watch.newest("n1/0") is not None
    assert time.process_time() - began < 1.0
    now = 16.0
    assert watch.newest("n1/0") is None, "it is not true any more"
    assert fake.asked.empty(), "nothing else is asked while one question hangs"
    watch.close()
    fake.hangs.set()


def test_no_thread_starts_where_there_is_no_card() -> None:
    before = threading.active_count()
    watch = CardWatch(lambda: pytest.fail("nobody is to load it"))
    watch.watch({}, 5.0)
    watch.close()
    assert threading.active_count() == before
