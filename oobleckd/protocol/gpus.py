"""Whether device processes can have the GPUs that they are to compute on: what a look at a machine found, and
what is wrong with it, in one sentence. Pure words and values.

Who looks is a process of its own (``oobleckd.worker.tools.gpus``), as CUDA's driver must be loaded neither in
an agent nor in what forks devices; who starts it is ``oobleckd.host.gpus``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal, get_args

import msgspec

from oobleckd.words import count

GpuCode = Literal[
    "no-torch", "cpu-build", "no-library", "bad-library", "stub-library", "no-driver", "old-driver",
    "unlike-driver", "no-compatibility", "hidden", "not-permitted", "mig", "none-visible", "too-few",
    "prohibited", "exclusive", "in-use", "no-memory", "not-ready", "cannot-begin", "driver-fails",
]  # fmt: skip
CODES: tuple[GpuCode, ...] = get_args(GpuCode)
_PASSING: frozenset[GpuCode] = frozenset({"in-use", "no-memory", "not-ready", "cannot-begin", "driver-fails"})
"""What may be over when it is tried again. All others a user must mend."""

# CUresult of CUDA's driver (cuda.h), as far as it tells kinds apart.
_OUT_OF_MEMORY, _STUB, _UNAVAILABLE, _NO_DEVICE, _OPERATING_SYSTEM = 2, 34, 46, 100, 304
_NOT_READY, _DRIVER_MISMATCH, _NO_COMPATIBILITY = 802, 803, 804
# CUcomputemode.
_PROHIBITED, _EXCLUSIVE = 2, 3
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(msgspec.Struct, frozen=True):
    """One that CUDA sees. ``capability``: such as (9, 0); ``mode``: CUcomputemode; ``error``: CUresult of its
    first use, with its name, 0 where it was not tried; ``bus``: where it is on the PCI bus, which is the same
    whatever is visible.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    mode: int = 0
    error: int = 0
    error_name: str = ""
    bus: str = ""


class GpuLook(msgspec.Struct, frozen=True):
    """What a look found. Empty words and zeros: not there, or not known.

    ``torch``: its version; ``cuda``: of what it was built with; ``other``: whether it was built for GPUs of
    another maker, or does not say what for, so that nothing is known here. ``library``: why CUDA's driver
    library cannot be loaded; ``driver``: what it can do, such as 12040 for CUDA 12.4; ``module``: the version
    of the kernel's driver. ``files``: the device files of GPUs; ``closed``: those of them that this user may
    not open. ``error``: CUresult of CUDA's beginning, with its name. ``mig``: GPUs that are to be used by
    slices. ``visible``: CUDA_VISIBLE_DEVICES, None where it is not set; ``hidden``: how many there are
    without it. ``failure``: why the look came to no end.
    """

    torch: str = ""
    cuda: str = ""
    other: bool = False
    library: str = ""
    driver: int = 0
    module: str = ""
    files: int = 0
    closed: tuple[str, ...] = ()
    error: int = 0
    error_name: str = ""
    gpus: tuple[Gpu, ...] = ()
    mig: int = 0
    visible: str | None = None
    hidden: int = 0
    failure: str = ""


class GpuTrouble(msgspec.Struct, frozen=True):
    """Why devices cannot have the GPUs that they want, and what to do. ``about``: the GPUs, by number, or the
    versions.
    """

    code: GpuCode
    problem: str
    hint: str
    about: tuple[str, ...] = ()

    @property
    def passing(self) -> bool:
        """Whether it may be over when it is tried again."""
        return self.code in _PASSING


def trouble(look: GpuLook, wanted: int = 1, sharing: int = 1) -> GpuTrouble | None:
    """What keeps ``wanted`` devices of a node from having a GPU each, ``sharing`` nodes from having the same
    ones.
    """
    found = chain(
        _of_software(look), _of_driver(look), _of_none(look), _of_number(look, wanted),
        _of_gpus(look, wanted, sharing),
    )  # fmt: skip
    return None if look.other and not look.failure else next(found, None)


def _none(code: GpuCode, why: str, hint: str, *about: str) -> GpuTrouble:
    return GpuTrouble(code, f"no CUDA device: {why}", hint, about)


# Each yields what it finds, the first of which counts: below a line holds what those above it say.


def _of_software(look: GpuLook) -> Iterator[GpuTrouble]:
    """torch, and the library of the driver."""
    if look.failure:
        yield _none("driver-fails", look.failure, "try `nvidia-smi`; where it hangs too, restart the machine")
    if not look.torch:
        hint = "install torch into the environment that oobleckd is installed in"
        yield _none("no-torch", "torch is not installed", hint)
    if not look.cuda:
        yield _none(
            "cpu-build",
            f"torch {look.torch} is built without CUDA (pip takes that build where it sees no GPU)",
            "install the torch of your driver's CUDA, or use --kind cpu",
            look.torch,
        )
    if look.library and not (look.library.startswith("libcuda.so.1:") and "No such file" in look.library):
        hint = "install the driver's libraries again, of this machine's architecture"
        yield _none("bad-library", f"the NVIDIA driver's library cannot be loaded: {look.library}", hint)
    if look.library and look.module:
        yield _none(
            "no-library",
            f"the NVIDIA driver{_version(look)} runs here, but its library libcuda.so.1 is missing: a "
            "container without GPUs?",
            "start the container with its GPUs (docker: --gpus all; Kubernetes: nvidia.com/gpu), or install "
            "the driver's libraries",
            look.module,
        )
    if look.library:
        hint = "install it, or use --kind cpu where there is no GPU"
        yield _none("no-driver", "no NVIDIA driver is installed", hint)


def _of_driver(look: GpuLook) -> Iterator[GpuTrouble]:
    """Its version, and whether its parts fit together."""
    if look.error == _STUB:
        hint = "take the folder of stubs out of LD_LIBRARY_PATH"
        yield _none("stub-library", "libcuda.so.1 is the stub that programs are linked with", hint)
    can, needs = f"{look.driver // 1000}.{look.driver % 1000 // 10}", _major(look.cuda)
    if look.driver and look.driver // 1000 < needs:
        yield _none(
            "old-driver",
            f"the NVIDIA driver{_version(look)} is too old: it can do CUDA {can}, and torch {look.torch} "
            f"needs CUDA {needs}",
            f"install a driver of CUDA {needs} or newer, or the torch of CUDA {look.driver // 1000}",
            can,
            look.cuda,
        )
    if look.error == _DRIVER_MISMATCH:
        yield _none(
            "unlike-driver",
            f"the driver in the kernel{_version(look)} and its libraries are of different versions",
            "restart the machine after an update of the driver; in a container, start it anew",
            look.module,
        )
    if look.error == _NO_COMPATIBILITY:
        hint = "take CUDA's compat folder out of LD_LIBRARY_PATH, or install a newer driver"
        yield _none("no-compatibility", "CUDA's compat library does not work with this GPU", hint)
    if look.error == _NOT_READY:
        hint = "is nvidia-fabricmanager running? GPUs with NVSwitch need it, of the driver's version"
        yield _none("not-ready", "the GPUs are not ready yet", hint)


def _of_none(look: GpuLook) -> Iterator[GpuTrouble]:
    """CUDA does not begin, or sees nothing."""
    if look.gpus and not look.error:
        return
    if look.hidden:
        numbers = "GPU 0" if look.hidden == 1 else f"GPUs of 0 to {look.hidden - 1}"
        yield _none(
            "hidden",
            f"{_VISIBLE}={look.visible!r} hides "
            f"{'the only GPU' if look.hidden == 1 else f'all {look.hidden} GPUs'}",
            f"unset it, or name {numbers}",
            look.visible or "",
        )
    if look.closed:
        yield _none(
            "not-permitted",
            f"this user may not open {', '.join(look.closed)}",
            "let it (the group of these files; DeviceAllow= of a unit), or ask who runs this machine",
            *look.closed,
        )
    if look.mig:
        yield _none(
            "mig",
            f"MIG is on for {_gpus(look.mig)}, and no instance can be used",
            f"make instances (nvidia-smi mig), name one in {_VISIBLE}, or switch MIG off",
        )
    if not look.module and not look.files:
        yield _none(
            "no-driver",
            "the NVIDIA driver's library is here, but no driver runs in the kernel",
            "load it (modprobe nvidia), or use --kind cpu where there is no GPU",
        )
    if look.error not in {0, _NO_DEVICE, _OPERATING_SYSTEM}:
        why = f"CUDA does not begin: {_error(look.error, look.error_name)}"
        yield _none("cannot-begin", why, "look at `dmesg` and `nvidia-smi`", look.error_name)
    named = f" ({_VISIBLE}={look.visible!r})" if look.visible is not None else ""
    yield _none(
        "none-visible",
        f"the NVIDIA driver{_version(look)} runs, and no GPU is visible{named}"
        f"{'' if look.files else ': a container without GPUs?'}",
        "start the container with its GPUs (docker: --gpus all; Slurm: --gpus-per-node), and look at "
        "`nvidia-smi`",
        look.module,
    )


def _of_number(look: GpuLook, wanted: int) -> Iterator[GpuTrouble]:
    """There are too few."""
    have = len(look.gpus)
    if have >= wanted:
        return
    if look.visible is not None and look.hidden >= wanted:
        why = f"{_VISIBLE}={look.visible!r} shows {_gpus(have)} of {look.hidden}"
        hint = f"name {wanted} there, or use --devices {have}"
    else:
        why = f"this machine shows {have}"
        hint = f"use --devices {have}, or auto: all there are"
        if any("MIG" in gpu.name for gpu in look.gpus):
            hint = f"a process sees one MIG instance: start a worker for each, named in {_VISIBLE}"
    about = tuple(str(index) for index in range(have))
    yield GpuTrouble("too-few", f"{_gpus(wanted)} wanted by --devices, and {why}", hint, about)


def _of_gpus(look: GpuLook, wanted: int, sharing: int) -> Iterator[GpuTrouble]:
    """One of those that are to be used cannot be."""
    for index, gpu in enumerate(look.gpus[:wanted]):
        if gpu.mode == _PROHIBITED:
            hint = f"`nvidia-smi -i {gpu.bus or index} -c DEFAULT` as root, or leave it out with {_VISIBLE}"
            yield _one("prohibited", index, gpu, "nothing may compute on it (prohibited mode)", hint)
        if gpu.mode == _EXCLUSIVE and (sharing > 1 or gpu.error == _UNAVAILABLE):
            who = f"{count(sharing, 'node')} are to share it" if sharing > 1 else "another one has it"
            hint = f"`nvidia-smi -i {gpu.bus or index} -c DEFAULT` as root, or one node on it alone"
            why = f"one process may use it (exclusive-process mode), and {who}"
            yield _one("exclusive", index, gpu, why, hint)
        if gpu.error == _UNAVAILABLE:
            hint = "see with `nvidia-smi` who has it"
            yield _one("in-use", index, gpu, "it is in use, or not available", hint)
        if gpu.error == _OUT_OF_MEMORY:
            hint = "see with `nvidia-smi` who has its memory, and end that"
            yield _one("no-memory", index, gpu, "others have all of its memory", hint)
        if gpu.error:
            hint = f"look at `dmesg` and `nvidia-smi`; leave it out with {_VISIBLE}"
            why = f"it does not begin: {_error(gpu.error, gpu.error_name)}"
            yield _one("cannot-begin", index, gpu, why, hint)


def _one(code: GpuCode, index: int, gpu: Gpu, why: str, hint: str) -> GpuTrouble:
    named = f"GPU {index} ({gpu.name}{gpu.bus and f' at {gpu.bus}'})"
    return GpuTrouble(code, f"{named} cannot be used: {why}", hint, (str(index),))


def _version(look: GpuLook) -> str:
    return f" {look.module}" if look.module else ""


def _major(version: str) -> int:
    # Since CUDA 11 a driver runs what was built with any CUDA of its own major version (NVIDIA's "minor
    # version compatibility").
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _error(code: int, name: str) -> str:
    return f"{name} ({code})" if name else f"CUDA error {code}"


def _gpus(number: int) -> str:
    return count(number, "GPU")
