"""Says why this process is about to die: for want of memory, or of an error that nobody expected.

Owns telling these apart, and what the dying process can say of its memory. Whom it tells is ``errors``' and
the device's. Imports no torch: it is needed before that is there.
"""

from __future__ import annotations

import errno
import mmap
import re
import resource
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from oobleckd.protocol.deaths import OUT_OF_MEMORY, TO_MEND, Death, Memory
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.host_memory import memory_of_host, most_of

if TYPE_CHECKING:
    import torch

_OURS = Path(__file__).parents[1]
_LONGEST = 300  # characters of an error, for people
_ALLOCATION_FAILED = 2  # cudaErrorMemoryAllocation
_SAYS_SO = re.compile(
    r"can't allocate memory|Cannot allocate memory|not enough memory: you tried|CUDA error: out of "
    r"memory|CU\w+_STATUS_ALLOC_FAILED|std::bad_alloc"
)
_NO_THREAD = "can't start new thread"
_STACK_BYTES = 8 << 20  # where the stack has no limit
_WANTED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
# A card that fails is no fault of the job: no device, ECC, NVLink, launch time-out or failure, a hardware
# stack error, anything unknown.
_BROKEN_CARD = frozenset({46, 100, 214, 220, 226, 702, 714, 719, 721, 802, 999})


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that there was no memory to be had, on the device or on its host."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's
        return True
    if getattr(error, "error_code", None) == _ALLOCATION_FAILED:  # of torch.AcceleratorError
        return True
    if isinstance(error, UserError):
        return False
    # torch's CPU allocator raises a RuntimeError, safetensors an error of its own, or an OSError without a
    # number.
    return _SAYS_SO.search(str(error)) is not None or (_NO_THREAD in str(error) and not _room_for_a_stack())


def _room_for_a_stack() -> bool:
    """Whether a thread's stack could be mapped: what a thread that cannot be started lacks is that, or a
    place among the tasks, and its error says neither.
    """
    size, _ = resource.getrlimit(resource.RLIMIT_STACK)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mmap.mmap(-1, _STACK_BYTES if size == resource.RLIM_INFINITY else size, flags=flags).close()
    except (OSError, MemoryError):
        return False
    return True


def is_broken_card(error: BaseException) -> bool:
    """Whether ``error`` is one of a card rather than of what it computes."""
    return getattr(error, "error_code", None) in _BROKEN_CARD


def death_in_full(
    error: BaseException, phase: str, job: str, epoch: int, device: torch.device, idle: int
) -> Death | None:
    """The same as ``death_of``, with what is known of the memory of ``device``, if that is what it died of.
    Lets go of all that the work had which failed, and says it in the log, too.
    """
    death = death_of(error, phase, job, epoch)
    if death is None or death.kind != OUT_OF_MEMORY:
        return death
    traceback.clear_frames(error.__traceback__)  # words take memory, too
    death = msgspec.structs.replace(death, memory=memory_of(device, error, idle))
    print(f"error: {death} ({death.error})", file=sys.stderr, flush=True)
    return death


def death_of(error: BaseException, phase: str, job: str = "", epoch: int = 0) -> Death | None:
    """What to say of an end by ``error``; None where that says nothing of what was being done."""
    if is_broken_card(error):
        return None
    if isinstance(error, UserError):
        return Death(TO_MEND, phase, error.problem, job, epoch, _place(error), error.hint)
    first = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if is_out_of_memory(error):
        return Death(OUT_OF_MEMORY, phase, text[:_LONGEST], job, epoch, _place(error))
    return Death(type(error).__name__, phase, text[:_LONGEST], job, epoch, _place(error))


def _place(error: BaseException) -> str:
    """The innermost line of ours that ``error`` went through, or of whose it is."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [(file, line) for file, line in lines if Path(file).is_relative_to(_OURS)]
    file, line = (ours or lines or [("", 0)])[-1]
    return f"{Path(file).name}:{line}" if file else ""


def memory_of(device: torch.device, error: BaseException, idle: int = 0) -> Memory:
    """What this process, and others, have of the memory of ``device``, for want of which it met ``error``. On
    a host only what came on top of the ``idle`` bytes that the program takes without a job, as that is what
    is planned.
    """
    wanted = _wanted(str(error))
    if device.type == "cuda":
        return _of_card(device, wanted)
    return memory_of_host(max(0, most_of("self") - idle), wanted)


def _of_card(device: torch.device, wanted: int) -> Memory:
    from oobleckd.worker.runtime.card_memory import mapped_bytes  # which needs torch

    cuda = sys.modules["torch"].cuda
    free, whole = cuda.mem_get_info(device)
    beside = mapped_bytes(device)
    others = max(0, whole - free - cuda.memory_reserved(device) - beside)
    return Memory(cuda.max_memory_allocated(device) + beside, whole, wanted, others)


def _wanted(text: str) -> int:
    found = _WANTED.search(text)
    return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
