"""Sets up, names and measures the torch device that a device process runs on. Owns nothing that changes."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from oobleckd.worker.device.traits import traits
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.host_memory import forget_most
from oobleckd.worker.transport.lending import LENDING
from oobleckd.worker.transport.pages import MESSAGE_PAGES


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Where this process runs: its name and kind, the host it shares with local peers, its folders;
    ``urgent``: whether it answers before ordinary programs have their turn. ``compiled_dir``: where it keeps
    what it compiles; None: in ``run_dir``. ``before``: all that decided the bits of the process whose place
    it took, a spare's.
    """

    device: str
    kind: str
    host: str
    bind: str
    run_dir: Path
    urgent: bool = False
    compiled_dir: Path | None = None
    before: dict[str, str] = field(default_factory=dict)

    @property
    def compiled_path(self) -> Path:
        """Where it keeps what it compiles."""
        return self.compiled_dir or self.run_dir / "compiled"


def give_back_memory() -> None:
    """Return to the system what the C library (``children``), ``pages``, ``lending``, and torch on a GPU,
    which others may be on, keep for allocations to come. What is told of the most memory that was ever used
    begins anew.
    """
    # A finished job's freed memory is kept for the next micro-batch (GLIBC_TUNABLES), so it is given back
    # here, when the job ends. (D-devices-005)
    MESSAGE_PAGES.clear()
    LENDING.clear()
    forget_most()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()  # a job's state is in cycles, and what a GPU shares is not the allocator's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)


def torch_device(context: DeviceContext) -> torch.device:
    """The torch device of this process, set up so that its results repeat bit for bit. Raises UserError when
    there is none of its kind.
    """
    if context.kind != "cuda":
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
    if why := no_cuda(os.environ):
        raise UserError(f"no CUDA device: {why}", "mend that, or run workers with --kind cpu")
    # Autograd's thread has no context of CUDA before its first kernel, and cuBLAS makes one.
    warnings.filterwarnings(
        "ignore", message=r"Attempting to run cuBLAS, but there was no current CUDA context"
    )
    torch.use_deterministic_algorithms(mode=True)
    # It would also fill whatever is made empty, pinned memory of the host too, before it is written: nothing
    # of ours reads it before.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    index = int(context.device.rpartition("/")[2]) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def no_cuda(environ: Mapping[str, str]) -> str:
    """Why this process can use no GPU; "" where it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA (pip takes that build where it sees no GPU)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "" if torch.cuda.device_count() else "torch sees none on this machine"
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if reason and visible is not None:
        return f"{reason} (CUDA_VISIBLE_DEVICES={visible!r} hides those that are not in it)"
    return reason


def device_model(device: torch.device) -> str:
    """Human name of the device, such as "NVIDIA H200" or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def arithmetic(device: torch.device) -> str:
    """What decides the bits of results on ``device`` besides its model, in short, for people: the first
    things to look at of ``traits``.
    """
    found = traits(device)
    libraries = f"torch {torch.__version__.partition('+')[0]}, transformers {found['transformers']}"
    if device.type == "cuda":
        card = f"CUDA {found['CUDA']}, cuDNN {found['cuDNN']}, driver {found['driver']}, {found['SMs']} SMs"
        return f"{libraries}, {card}"
    threads = int(found["threads"])
    return f"{found['host']}, {libraries}, {threads} thread{'s' * (threads > 1)}"


def card_of(device: torch.device, environ: Mapping[str, str] = os.environ) -> str:
    """The UUID of the card that the device is, or of its slice of one (MIG), as NVML knows it; "" where it is
    none.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    # What CUDA calls a slice, by its own UUID or by that of the whole card, depends on its version.
    named = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    if index < len(named) and named[index].strip().startswith("MIG-"):
        return named[index].strip()
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def device_memory_bytes(device: torch.device) -> int:
    """Memory of the device in bytes; for the CPU that of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
