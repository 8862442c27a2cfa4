"""What decides the bits of this process' results, gathered by name: the card or CPU, libraries with their
versions, settings, our own code.

Owns the list, and leans to the side of too much: two devices that are said to differ are only not compared,
and two that differ and are not said to would be taken for corrupt. What follows from it is the daemon's
(``oobleckd.protocol.traits``).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import torch

from oobleckd import __version__
from oobleckd.host.compilers import cxx_version
from oobleckd.protocol.traits import COMPILER, KIND

UNKNOWN = "unknown"
_SETTINGS = (
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "DISABLE_ADDMM_CUDA_LT",
    "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED", "USE_HUB_KERNELS",
)  # fmt: skip
"""Variables by which libraries choose how they compute."""
_KERNELS = (
    "causal-conv1d", "flash-attn", "flash-attn-3", "flash-linear-attention", "kernels", "liger-kernel",
    "mamba-ssm", "triton", "xformers",
)  # fmt: skip
"""Packages whose kernels transformers, or torch, takes where they are installed."""
_INSTRUCTIONS = frozenset({
    "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx_ne_convert",
    "amx_bf16", "amx_fp16",
    "asimd", "fphp", "sve", "sve2", "bf16", "i8mm",
})  # fmt: skip
"""By which oneDNN and MKL choose, of which torch names the class alone."""
_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\s([0-9]+\.[0-9.]+)\s")
_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SMI_S = 10.0


class CardProperties(Protocol):
    """What torch tells of a card. A MIG slice, or a process that MPS limits, has fewer multiprocessors than
    others of its name.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int


class Cuda(Protocol):
    """``torch.cuda``, as far as it is asked."""

    def get_device_properties(self, device: torch.device, /) -> CardProperties:
        """Of one card."""


def code_of(folder: Path) -> str:
    """A digest of the Python sources below ``folder``; "" where there are none to read."""
    digest = hashlib.blake2b(digest_size=6)
    files = sorted(folder.rglob("*.py"))
    for file in files:
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else ""


# The version's number stays while code changes, in a checkout above all; to read the sources takes 6 ms at
# a start. (D-exactness-014)
_CODE = code_of(Path(__file__).parents[1])
"""Of the code as it was imported: a spare that has waited for long is not what lies on the disk by then."""
_COMPILER = cxx_version()
"""At the import, too: a device that takes a dead one's place has no time for it."""


def traits(device: torch.device, cuda: Cuda = torch.cuda) -> dict[str, str]:
    """All that decides the bits of results on ``device``, as this process is set up. To ask again costs
    little.
    """
    # Rather too much than too little: nodes with other versions of transformers once counted as alike, and
    # one was named corrupt. (D-exactness-013)
    found = _of_process() | {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    found["float32 matmul"] = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        return found | _of_cuda() | _of_card(cuda.get_device_properties(device)) | _of_tf32()
    threads = torch.get_num_threads()
    return {KIND: device.type} | found | _of_cpu() | {"threads": str(threads)}


@functools.cache
def _of_process() -> dict[str, str]:
    """What stays while the process lives. The host's part counts beside a card, too: weights begin there, and
    so do learning rates.
    """
    import transformers  # as ``oobleckd.worker.models`` has imported it

    versions = {name: version for name in _KERNELS if (version := _installed(name))}
    if _COMPILER:  # what is compiled has its bits (``train.compile``)
        versions[COMPILER] = _COMPILER
    host = (
        platform.machine(),
        cpu_field("vendor_id", "CPU implementer"),
        torch.backends.cpu.get_cpu_capability(),
    )
    return {
        "torch": f"{torch.__version__} ({(torch.version.git_version or UNKNOWN)[:12]})",
        "transformers": transformers.__version__,
        "oobleckd": f"{__version__} ({_CODE or UNKNOWN})",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "libc": _libc(),
        "host": " ".join(filter(None, host)),
        **versions,
    }


@functools.cache
def _of_cpu() -> dict[str, str]:
    built = torch.__config__.show()
    model = cpu_field("cpu family"), cpu_field("model", "CPU part")
    has = _INSTRUCTIONS.intersection(cpu_field("flags", "Features").split())
    found = {
        "cpu": "/".join(filter(None, model)),
        "instructions": " ".join(sorted(has)),
        "MKL": _match(r"oneAPI Math Kernel Library Version (\S+)", built),
        "oneDNN": _match(r"MKL-DNN v(\S+)", built),
        "BLAS": _match(r"BLAS_INFO=(\w+)", built),
    }
    return {name: value for name, value in found.items() if value}


@functools.cache
def _of_cuda() -> dict[str, str]:
    return {
        "CUDA": torch.version.cuda or UNKNOWN,
        "cuDNN": _cudnn(),
        "cuBLAS": _cublas(),
        "driver": driver_version(),
    }


def _of_card(card: CardProperties) -> dict[str, str]:
    return {
        KIND: card.name,
        "SMs": str(card.multi_processor_count),
        "compute capability": f"{card.major}.{card.minor}",
    }


def _of_tf32() -> dict[str, str]:
    matmul = torch.backends.cuda.matmul
    allowed = {
        "tf32 of matmul": matmul.allow_tf32,
        "tf32 of cuDNN": torch.backends.cudnn.allow_tf32,
        "bf16 reduced": matmul.allow_bf16_reduced_precision_reduction,
    }
    return {name: "on" if on else "off" for name, on in allowed.items()}


def cpu_field(*names: str, file: Path = Path("/proc/cpuinfo")) -> str:
    """The first of the fields ``names`` that the kernel has of the first CPU; "" where it does not tell."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in named if key.strip() in names), "")


def driver_version(file: Path = _DRIVER, smi: tuple[str, ...] = _SMI) -> str:
    """The NVIDIA driver's, as its module says, or else ``smi`` (a container or WSL may hide the module)."""
    try:
        told = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        told = ""
    if found := _VERSION.search(told):
        return found[1]
    try:
        said = subprocess.run(smi, capture_output=True, text=True, check=True, timeout=_SMI_S).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return said[0] if said else UNKNOWN


def _cudnn() -> str:
    try:
        return str(torch.backends.cudnn.version() or "none")  # type: ignore[no-untyped-call]
    except RuntimeError:  # another one than torch was built for
        return UNKNOWN


def _cublas() -> str:
    """Of the library that is loaded, whatever torch was built with."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    parts: list[int] = []
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            value = ctypes.c_int()
            library.cublasGetProperty(which, ctypes.byref(value))
            parts.append(value.value)
    except (OSError, AttributeError):
        return UNKNOWN
    return ".".join(map(str, parts))


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or UNKNOWN
    except (ValueError, OSError):
        return UNKNOWN  # another one than glibc


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _match(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
