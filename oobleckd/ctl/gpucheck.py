"""What ``doctor`` finds of the GPUs of this machine: what an agent would say of them at its start
(``oobleckd.host.gpus``), and what torch makes of those that can be used.

torch is never imported: what only torch knows is asked of it in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from oobleckd.ctl.checkup import CheckupItem
from oobleckd.host import gpus
from oobleckd.protocol.gpus import GpuLook, trouble
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.words import count

_TORCH_S = 120.0
_ASK_TORCH = """
import json, torch
# Of the library that is loaded, not what torch was built with.
from oobleckd.worker.groups.nccl import nccl_version
import importlib.util
nccl = nccl_version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
print(json.dumps({
    "count": torch.cuda.device_count(), "cuda": torch.version.cuda or "", "nccl": nccl,
    "kernels": torch.cuda.get_arch_list(), "triton": importlib.util.find_spec("triton") is not None,
}))
"""


class _Torch(msgspec.Struct, frozen=True):
    count: int
    cuda: str
    nccl: tuple[int, ...]
    kernels: tuple[str, ...] = ()
    triton: bool = True


def check(kind: str, devices: int, look: Callable[[], GpuLook]) -> tuple[int, list[CheckupItem]]:
    """How many GPUs can be used, and what was found. ``kind``: what devices are to compute on ("": on GPUs
    where there are any); ``devices``: how many a node is to have, ``gpus.ALL``: all there are.
    """
    if kind == "cpu":
        return 0, []
    seen = look()
    if not kind and not seen.module and not seen.gpus:
        return 0, [CheckupItem("gpu", "ok", "none: devices compute on the CPU", code="no-driver")]
    wanted = max(1, len(seen.gpus)) if devices == gpus.ALL else devices
    found = trouble(seen, wanted)
    if found is not None:
        return 0, [CheckupItem("gpu", "fail", found.problem, found.hint, found.code, found.about)]
    return len(seen.gpus), [_of_torch(seen)]


def _of_torch(seen: GpuLook) -> CheckupItem:
    """The same as torch sees them."""
    named = f"driver {seen.module or 'unknown'}"
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TORCH_S,
        )
        told = msgspec.json.decode(asked.stdout, type=_Torch)
    except (subprocess.SubprocessError, *UNREADABLE) as error:
        hint = "try `python -c 'import torch'`"
        return CheckupItem(
            "gpu", "fail", f"{named}; torch cannot be asked: {problem_of(error)}", hint, "torch-fails"
        )
    if told.count == 0:
        hint = "install the torch of this driver's CUDA, or a newer driver; look at CUDA_VISIBLE_DEVICES"
        text = f"{named}; torch (CUDA {told.cuda or 'none'}) sees no GPU"
        return CheckupItem("gpu", "fail", text, hint, "torch-sees-none")
    for index, gpu in enumerate(seen.gpus):
        if told.kernels and not has_kernels(gpu.capability, told.kernels):
            level = ".".join(map(str, gpu.capability))
            text = f"GPU {index} ({gpu.name}) has compute capability {level}, and torch has no kernels for it"
            hint = f"install a torch that has them; this one is for {', '.join(told.kernels)}"
            return CheckupItem("gpu", "fail", text, hint, "no-kernels", (str(index),))
    nccl = ".".join(map(str, told.nccl)) or "none"
    text = f"{count(told.count, 'GPU')}, {named}, CUDA {told.cuda}, NCCL {nccl}"
    return CheckupItem("gpu", "ok", text if told.triton else f"{text}; no Triton, so none for train.compile")


def has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Whether a GPU can run one of ``kernels``: machine code ("sm_90") of its own major version and not above
    its minor one, or what the driver translates ("compute_90") of any version that is not above its own.
    """
    for kernel in kernels:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", kernel)
        if found is None:
            continue
        built = int(found[2]), int(found[3])
        if built <= capability and (found[1] == "compute" or built[0] == capability[0]):
            return True
    return False
