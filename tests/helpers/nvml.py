"""Cards that this machine does not have: NVML as ``pynvml`` has it, as far as ``telemetry.nvml`` asks.

That names, arguments and numbers are those of the package is a test (``tests/unit/worker/test_nvml.py``).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

UUID = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
SLICE = "MIG-66666666-2222-3333-4444-555555555555"


class NvmlError(Exception):
    """As ``pynvml.NVMLError``."""


class NvmlTimeout(NvmlError):
    """As ``pynvml.NVMLError_Timeout``."""


@dataclass(eq=False)
class FakeCard:
    """A card in the units of NVML: milliwatts, MHz, per cent. None: not supported. ``whole``: of which it is
    a slice.
    """

    uuid: str = UUID
    name: str = "NVIDIA H100 80GB HBM3"
    used: int = 30 * 2**30
    total: int = 80 * 2**30
    processes: tuple[tuple[int, int | None], ...] = ()
    gpu: int | None = 97
    power: int | None = 650_500
    power_limit: int | None = 700_000
    temperature: int | None = 64
    clock: int | None = 1755
    clock_max: int | None = 1980
    throttled: int | None = 0x4
    corrected: int | None = 3
    uncorrected: int | None = 0
    whole: FakeCard | None = None


@dataclass(eq=False)
class FakeNvml:
    """NVML with ``cards``. ``hangs``: every question about memory waits until it is set. ``reads``: so many
    were answered.
    """

    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    hangs: threading.Event | None = None
    deaf: bool = False
    asked: queue.Queue[str] = field(default_factory=queue.Queue)
    events: queue.Queue[tuple[FakeCard, int]] = field(default_factory=queue.Queue)
    registered: list[str] = field(default_factory=list)
    NVMLError: type[Exception] = NvmlError
    NVMLError_Timeout: type[Exception] = NvmlTimeout

    def __post_init__(self) -> None:
        known = self._known
        self.nvmlDeviceGetName: Callable[[Any], str] = known("name")
        self.nvmlDeviceGetUUID: Callable[[Any], str] = known("uuid")
        self.nvmlDeviceGetPowerUsage: Callable[[Any], int] = known("power")
        self.nvmlDeviceGetEnforcedPowerLimit: Callable[[Any], int] = known("power_limit")
        self.nvmlDeviceGetTemperature: Callable[[Any, int], int] = known("temperature")
        self.nvmlDeviceGetClockInfo: Callable[[Any, int], int] = known("clock")
        self.nvmlDeviceGetMaxClockInfo: Callable[[Any, int], int] = known("clock_max")
        self.nvmlDeviceGetCurrentClocksThrottleReasons: Callable[[Any], int] = known("throttled")

    @staticmethod
    def _known(name: str) -> Callable[..., Any]:
        def asked(card: FakeCard, *_args: int) -> Any:
            if (value := getattr(card, name)) is None:
                raise NvmlError(f"{name}: not supported")
            return value

        return asked

    def nvmlInit(self) -> None:
        """There is a driver."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise NvmlError("not found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: FakeCard) -> FakeCard:
        if handle.whole is None:
            raise NvmlError("invalid argument")
        return handle.whole

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard) -> Any:
        self.asked.put(handle.uuid)
        if self.hangs is not None:
            self.hangs.wait()
        return SimpleNamespace(used=handle.used, total=handle.total)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeCard) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes]

    def nvmlDeviceGetUtilizationRates(self, handle: FakeCard) -> Any:
        if handle.gpu is None:
            raise NvmlError("not supported")
        return SimpleNamespace(gpu=handle.gpu, memory=1)

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeCard, kind: int, _counter: int) -> int:
        found = (handle.corrected, handle.uncorrected)[kind]
        if found is None:
            raise NvmlError("not supported")
        return found

    def nvmlEventSetCreate(self) -> object:
        if self.deaf:
            raise NvmlError("not supported")
        return self.events

    def nvmlDeviceRegisterEvents(self, handle: FakeCard, _types: int, _events: object) -> None:
        self.registered.append(handle.uuid)

    def nvmlEventSetWait_v2(self, _events: object, timeout_ms: int) -> Any:
        try:
            card, xid = self.events.get(timeout=timeout_ms / 1000)
        except queue.Empty:
            raise NvmlTimeout from None
        return SimpleNamespace(device=card, eventData=xid)
