"""Which backend a device's tensor messages take, and why: one sentence for its log."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from oobleckd.worker.groups.backend import Backend
from oobleckd.worker.groups.gloo import GlooBackend
from oobleckd.worker.groups.nccl import MIN_BYTES, NcclBackend
from oobleckd.worker.runtime.errors import UserError

SETTING = "OOBLECK_BACKEND"
_BACKENDS = ("auto", "staged", "nccl", "gloo")


def choose(device: torch.device, environ: Mapping[str, str] = os.environ) -> tuple[Backend | None, str]:
    """The backend of ``device`` (None: the transport alone) and the reason.

    ``OOBLECK_BACKEND`` is "auto" (NCCL between GPUs, the transport else), "staged" (the transport for all),
    "nccl", or "gloo" (on a CPU, for tests). Raises UserError for a backend that this device cannot take.
    """
    wanted = environ.get(SETTING, "auto") or "auto"
    if wanted not in _BACKENDS:
        raise UserError(f"{SETTING}={wanted} is no backend", f"take one of: {', '.join(_BACKENDS)}")
    if wanted == "gloo":
        if device.type != "cpu":
            raise UserError(
                f"{SETTING}=gloo on {device}", "gloo stands in for NCCL in tests on a CPU: unset it"
            )
        return GlooBackend(), f"gloo groups, for a test ({SETTING}=gloo)"
    if wanted == "staged":
        return None, f"the transport ({SETTING}=staged)"
    problem = _problem(device)
    if not problem:
        return NcclBackend(device), f"NCCL groups for messages of {MIN_BYTES >> 10} KiB and more"
    if wanted == "nccl":
        raise UserError(f"{SETTING}=nccl, but {problem}", "unset it: messages then take the transport")
    return None, f"the transport ({problem})"


def _problem(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it computes on a {device.type}"
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return ""
