"""What the tests of ``make test-gpu`` run on: the GPUs of this machine, or, in a rehearsal, nothing but the
CPU.

With ``OOBLECK_GPU_REHEARSAL=1`` the same tests run on the CPU, with gloo in place of NCCL: that keeps typing
errors out where there is no GPU, and proves nothing about one.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from oobleckd.worker.groups.nccl import nccl_version, shares_gpus

REHEARSAL = os.environ.get("OOBLECK_GPU_REHEARSAL") == "1"
KIND = "cpu" if REHEARSAL else "cuda"
BACKEND = "gloo" if REHEARSAL else "nccl"


def problem() -> str:
    """Why no test can run here; empty when all can."""
    if REHEARSAL or torch.cuda.is_available():
        return ""
    built = "" if torch.version.cuda else " (this torch was built without CUDA)"
    return f"make test-gpu needs an NVIDIA GPU, and torch sees none on this machine{built}"


def devices(count: int) -> list[str]:
    """Torch names of ``count`` devices, of several GPUs if there are."""
    if REHEARSAL:
        return ["cpu"] * count
    return [f"cuda:{index % torch.cuda.device_count()}" for index in range(count)]


def channel_problem() -> str:
    """Why two processes cannot have an NCCL channel here; empty when they can."""
    if REHEARSAL or torch.cuda.device_count() > 1:
        return ""
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    if shares_gpus(nccl_version(), os.environ):
        return ""
    version = ".".join(map(str, nccl_version()))
    return (
        f"one GPU, and NCCL {version} takes one rank a GPU (2.30 takes more with "
        "NCCL_MULTI_RANK_GPU_ENABLE=1)"
    )
