"""Looks whether CUDA can be used on this machine: ``python -P -m oobleckd.worker.tools.gpus [--try N]``.

Owns what is asked of CUDA's driver, of torch's files and of the kernel, in a process that ends at once: it
prints a ``GpuLook`` as JSON. What that means is ``oobleckd.protocol.gpus``'. torch is not imported, which
would take seconds; its driver is loaded here as torch would load it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import click
import msgspec

from oobleckd.protocol.gpus import Gpu, GpuLook

_LIBRARY, _MANAGEMENT = "libcuda.so.1", "libnvidia-ml.so.1"
_MODULE = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")
_NAME_BYTES = 128
_COMPUTE_MODE, _MAJOR, _MINOR = 20, 75, 76  # CUdevice_attribute
_Call = Callable[..., int]


class Driver(Protocol):
    """CUDA's driver, as far as it is asked: every call answers with a CUresult, 0 where all is well."""

    cuDriverGetVersion: _Call  # noqa: N815 - the library's names
    cuInit: _Call  # noqa: N815
    cuDeviceGetCount: _Call  # noqa: N815
    cuDeviceGet: _Call  # noqa: N815
    cuDeviceGetName: _Call  # noqa: N815
    cuDeviceGetAttribute: _Call  # noqa: N815
    cuDevicePrimaryCtxRetain: _Call  # noqa: N815
    cuDeviceGetPCIBusId: _Call  # noqa: N815
    cuGetErrorName: _Call  # noqa: N815


class Management(Protocol):
    """NVML, as far as it is asked."""

    nvmlInit_v2: _Call  # noqa: N815
    nvmlDeviceGetCount_v2: _Call  # noqa: N815
    nvmlDeviceGetHandleByIndex_v2: _Call  # noqa: N815
    nvmlDeviceGetMigMode: _Call  # noqa: N815


@click.command()
@click.option("--try", "num_tried", type=int, default=0, help="How many GPUs to begin on; -1: all.")
def main(num_tried: int) -> None:
    """Look at the GPUs of this machine."""
    print(msgspec.json.encode(look(num_tried)).decode())


def look(num_tried: int) -> GpuLook:
    """What there is. The first ``num_tried`` GPUs are begun on, -1: all."""
    seen = GpuLook(visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    seen = of_kernel(of_torch(seen), _MODULE, _DEVICES)
    if not seen.cuda:
        return seen
    try:
        seen = of_driver(seen, cast("Driver", ctypes.CDLL(_LIBRARY)), num_tried)
    except OSError as error:
        return msgspec.structs.replace(seen, library=str(error))
    except AttributeError as error:  # a symbol that every driver has had for ten years
        return msgspec.structs.replace(seen, library=f"it is too old: {error}")
    if seen.gpus and not seen.error:
        return seen
    try:
        return msgspec.structs.replace(seen, mig=num_sliced(cast("Management", ctypes.CDLL(_MANAGEMENT))))
    except (OSError, AttributeError):
        return seen  # it tells more of a failure, where it is there


def of_torch(seen: GpuLook) -> GpuLook:
    """What torch was built for, as its own file says."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return seen
    try:
        said = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    except OSError:
        return msgspec.structs.replace(seen, torch="of an unknown version", other=True)
    return msgspec.structs.replace(
        seen,
        torch=str(said.get("__version__") or "of an unknown version"),
        cuda=said.get("cuda") or "",
        other=bool(said.get("hip")),
    )


def of_kernel(seen: GpuLook, module: Path, devices: Path) -> GpuLook:
    """The kernel's driver, and device files."""
    try:
        said = module.read_text(encoding="utf-8", errors="replace")
    except OSError:
        said = ""
    version = re.search(r"\s([0-9]+\.[0-9.]+)\s", said)
    files = sorted(path for path in devices.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())
    needed = [path for path in (*files, devices / "nvidiactl") if path.exists()]
    closed = tuple(str(path) for path in needed if not os.access(path, os.R_OK | os.W_OK))
    return msgspec.structs.replace(
        seen, module=version[1] if version else "unknown" if said else "", files=len(files), closed=closed
    )


def of_driver(seen: GpuLook, driver: Driver, num_tried: int) -> GpuLook:
    """What CUDA itself says."""
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if error:
        return msgspec.structs.replace(
            seen, driver=version.value, error=error, error_name=_name_of(driver, error)
        )
    tried = count.value if num_tried < 0 else num_tried
    gpus = tuple(_gpu(driver, index, begin=index < tried) for index in range(count.value))
    return msgspec.structs.replace(seen, driver=version.value, gpus=gpus)


def _gpu(driver: Driver, index: int, *, begin: bool) -> Gpu:
    device = ctypes.c_int()
    name, bus = (ctypes.create_string_buffer(_NAME_BYTES) for _ in range(2))
    error = driver.cuDeviceGet(ctypes.byref(device), index)
    if not error:
        driver.cuDeviceGetName(name, _NAME_BYTES - 1, device)
        driver.cuDeviceGetPCIBusId(bus, _NAME_BYTES - 1, device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    if begin and not error:
        context = ctypes.c_void_p()  # it ends with this process
        error = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    return Gpu(
        name.value.decode(errors="replace") or "unknown",
        (attribute(_MAJOR), attribute(_MINOR)),
        attribute(_COMPUTE_MODE),
        error,
        _name_of(driver, error),
        bus.value.decode(errors="replace"),
    )


def _name_of(driver: Driver, error: int) -> str:
    name = ctypes.c_char_p()
    if not error or driver.cuGetErrorName(error, ctypes.byref(name)) or name.value is None:
        return ""
    return name.value.decode(errors="replace")


def num_sliced(management: Management) -> int:
    """How many GPUs are in MIG mode."""
    count = ctypes.c_uint()
    if management.nvmlInit_v2() or management.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    return sum(_is_sliced(management, index) for index in range(count.value))


def _is_sliced(management: Management, index: int) -> bool:
    handle, now, later = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
    return (
        management.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        and management.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(later)) == 0
        and now.value == 1
    )


if __name__ == "__main__":
    main()
