"""What NVIDIA's management library (NVML) tells of a card, read by ``nvidia-ml-py`` where that is installed.

Owns the questions and what their answers mean. NVML does not begin CUDA, so an agent may load it. Any of
these calls may take long, or for ever, where a card or its driver is in trouble: who calls is ``cards``'.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, TypeVar, cast

T = TypeVar("T")
Handle = Any
"""A card, or a slice of one (MIG), as NVML names it."""
MIG = "MIG-"
"""What the UUID of a slice begins with."""

# Of nvml.h, which are the same in all versions.
TEMPERATURE_GPU = 0
CLOCK_SM = 1
CORRECTED, UNCORRECTED = 0, 1
VOLATILE = 0
XID_EVENTS = 0x8
THROTTLED = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
"""Why clocks are held down, against what the card is set to. Not that it idles, or was set to be slower."""


class Nvml(Protocol):
    """The module ``pynvml``, as far as it is asked. Its calls raise NVMLError."""

    NVMLError: type[Exception]
    NVMLError_Timeout: type[Exception]

    nvmlInit: Callable[[], None]
    nvmlDeviceGetHandleByUUID: Callable[[str], Handle]
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle: Callable[[Handle], Handle]
    nvmlDeviceGetUUID: Callable[[Handle], str]
    nvmlDeviceGetName: Callable[[Handle], str]
    nvmlDeviceGetMemoryInfo: Callable[[Handle], Any]
    nvmlDeviceGetComputeRunningProcesses: Callable[[Handle], Any]
    nvmlDeviceGetUtilizationRates: Callable[[Handle], Any]
    nvmlDeviceGetPowerUsage: Callable[[Handle], int]
    nvmlDeviceGetEnforcedPowerLimit: Callable[[Handle], int]
    nvmlDeviceGetTemperature: Callable[[Handle, int], int]
    nvmlDeviceGetClockInfo: Callable[[Handle, int], int]
    nvmlDeviceGetMaxClockInfo: Callable[[Handle, int], int]
    nvmlDeviceGetCurrentClocksThrottleReasons: Callable[[Handle], int]
    nvmlDeviceGetTotalEccErrors: Callable[[Handle, int, int], int]
    nvmlEventSetCreate: Callable[[], Any]
    nvmlDeviceRegisterEvents: Callable[[Handle, int, Any], None]
    nvmlEventSetWait_v2: Callable[[Any, int], Any]


class CardReading(NamedTuple):
    """What a card says of itself, in the units of ``DeviceFigures``; 0, or -1 where 0 is a figure: it does
    not say. ``used_bytes``: by the process that was asked for, or by all where NVML does not know it.
    """

    name: str = ""
    used_bytes: int = 0
    total_bytes: int = 0
    utilisation: float = -1.0
    power_w: float = 0.0
    power_limit_w: float = 0.0
    temperature_c: int = 0
    clock_mhz: int = 0
    clock_max_mhz: int = 0
    throttled: tuple[str, ...] = ()
    ecc_corrected: int = -1
    ecc_uncorrected: int = -1


def load() -> Nvml | None:
    """NVML, ready to be asked; None where the package, the driver or its library is not there."""
    try:
        nvml = cast("Nvml", importlib.import_module("pynvml"))
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class Card(NamedTuple):
    """A card that a device has: ``handle`` of it or of its slice, and ``whole``, of the card that the slice
    is of, which has one power limit, temperature, and so on.
    """

    handle: Handle
    whole: Handle


def find(nvml: Nvml, uuid: str) -> Card | None:
    """The card ``uuid``, by the name that NVML has for it; None where it has no such."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        is_slice = uuid.startswith(MIG)
        return Card(handle, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle)
    except nvml.NVMLError:
        return None


def read(nvml: Nvml, card: Card, pids: Collection[int]) -> CardReading:
    """All figures of ``card``, on which the processes ``pids`` compute. What a card does not have (a slice
    has no utilisation, many have no ECC) stays unknown.
    """
    asked = _Asked(nvml)
    handle, whole = card
    memory = asked(None, nvml.nvmlDeviceGetMemoryInfo, handle)
    rates = asked(None, nvml.nvmlDeviceGetUtilizationRates, handle)
    reasons = asked(0, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, whole)
    processes: Any = asked((), nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    # None where the driver does not tell, as on Windows.
    own_bytes = sum(process.usedGpuMemory or 0 for process in processes if process.pid in pids)
    return CardReading(
        name=asked("", nvml.nvmlDeviceGetName, handle),
        used_bytes=own_bytes or (memory.used if memory is not None else 0),
        total_bytes=memory.total if memory is not None else 0,
        utilisation=rates.gpu / 100 if rates is not None else -1.0,
        power_w=asked(0, nvml.nvmlDeviceGetPowerUsage, whole) / 1000,
        power_limit_w=asked(0, nvml.nvmlDeviceGetEnforcedPowerLimit, whole) / 1000,
        temperature_c=asked(0, nvml.nvmlDeviceGetTemperature, whole, TEMPERATURE_GPU),
        clock_mhz=asked(0, nvml.nvmlDeviceGetClockInfo, whole, CLOCK_SM),
        clock_max_mhz=asked(0, nvml.nvmlDeviceGetMaxClockInfo, whole, CLOCK_SM),
        throttled=tuple(words for bit, words in THROTTLED.items() if reasons & bit),
        ecc_corrected=asked(-1, nvml.nvmlDeviceGetTotalEccErrors, whole, CORRECTED, VOLATILE),
        ecc_uncorrected=asked(-1, nvml.nvmlDeviceGetTotalEccErrors, whole, UNCORRECTED, VOLATILE),
    )


class _Asked(NamedTuple):
    """Asks, and answers with the first argument where NVML does not."""

    nvml: Nvml

    def __call__(self, unknown: T, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except self.nvml.NVMLError:
            return unknown


class XidEvents:
    """The XIDs that the driver tells of, from now on."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._watched: dict[str, bool] = {}
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            self._events = None

    def watch(self, whole: Handle) -> str:
        """Listen to a card, too; its UUID, by which ``wait`` names it ("": it has none any more)."""
        try:
            uuid = self._nvml.nvmlDeviceGetUUID(whole)
        except self._nvml.NVMLError:
            return ""
        if self._events is not None and uuid not in self._watched:
            try:
                self._nvml.nvmlDeviceRegisterEvents(whole, XID_EVENTS, self._events)
                self._watched[uuid] = True
            except self._nvml.NVMLError:
                self._watched[uuid] = False  # a slice's guest, or a driver that has no events
        return uuid

    def wait(self, timeout_s: float) -> tuple[str, int] | None:
        """UUID of a card and its XID, as soon as there is one; None where there was none for so long. Raises
        ``Deaf`` where nothing can be listened to.
        """
        if self._events is None or not any(self._watched.values()):
            raise Deaf
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, round(1000 * timeout_s))
            return self._nvml.nvmlDeviceGetUUID(event.device), int(event.eventData)
        except self._nvml.NVMLError_Timeout:
            return None
        except self._nvml.NVMLError as error:
            raise Deaf from error


class Deaf(Exception):
    """There are no events to wait for, so that somebody else must see to it that time passes."""
