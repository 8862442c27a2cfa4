"""Layers as torch's compiler makes them: for jobs with ``train.compile``, in every process that computes
them.

Owns the compiler of this process: its settings, the folder where what it made is kept, and that it is the
real one, which ``light`` keeps out of every other process; and how a layer is called, so that it has the same
bits whatever is asked of it. Does not own when a layer is compiled (``oobleckd.worker.device.compiling``).

The graph is a function of its inputs: a block's parameters are inputs as the hidden states are, so all blocks
of one kind share what was made of the first.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oobleckd.host.compilers import INSTALL, no_cxx
from oobleckd.worker.models import light
from oobleckd.worker.runtime.errors import UserError

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_BACKEND = "torch._inductor.compile_fx"
_CACHE = "torch._inductor.codecache"
_DYNAMO, _INDUCTOR, _VECTORS = "torch._dynamo", "torch._inductor.utils", "torch._inductor.cpu_vec_isa"
_IN_PROCESS = "TORCHINDUCTOR_COMPILE_THREADS"
_SAID = ("warning_once", "info_once", "warning")
_MANY = 1 << 14
"""Graphs of one function, of all kinds of blocks and all jobs of a process."""
Compiled = Callable[..., Tensor]


def keep_in(folder: Path) -> None:
    """From now on what is compiled is kept in ``folder``, and taken from there. Raises UserError where that
    cannot be.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        raise UserError(
            f"train.compile: {folder}: {error.strerror}", "make it writable for the worker's user"
        ) from error
    if flags & os.ST_NOEXEC:
        raise UserError(
            f"train.compile: {folder} is on a file system that runs no programs (noexec), and what is "
            "compiled lies there",
            "start the worker with --run-dir, or a STATE_DIRECTORY, elsewhere",
        )
    if os.environ.get(_FOLDER) == str(folder):
        return
    os.environ[_FOLDER] = str(folder)
    if (inductor := sys.modules.get(_INDUCTOR)) is not None:
        inductor.clear_caches()  # what is in memory would not be written to this folder


def forget() -> None:
    """Drop what this process has compiled. Nothing that was is called any more."""
    if (dynamo := sys.modules.get(_DYNAMO)) is not None and hasattr(dynamo, "reset"):
        dynamo.reset()


def num_graphs() -> int:
    """How many graphs this process has compiled, or loaded."""
    counters = getattr(sys.modules.get(f"{_DYNAMO}.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if isinstance(counters, dict) else 0


def headers_in(folder: Path | None) -> None:
    """Keep compiled headers there, 150 MB that are made with the first program; None: make none, as what is
    to be loaded is compiled.
    """
    # Torch would make them also where every program is there, and keeps them below /tmp, by a name that
    # anybody may have taken; there is no setting for either. (D-compile-009)
    cache: Any = importlib.import_module(_CACHE)
    made = _torchs_headers()
    if folder is not None:
        cache._HEADER_DIR, cache._HEADER_LOCK_DIR = str(folder), str(folder / "locks")  # noqa: SLF001
    cache._precompile_header = _no_header if folder is None else made  # noqa: SLF001


@functools.cache
def _torchs_headers() -> Any:
    return importlib.import_module(_CACHE)._precompile_header  # noqa: SLF001


def _no_header(*_: object, **__: object) -> str:
    return ""


def find_instructions() -> None:
    """Find out which instructions of the CPU the C++ compiler can use: small programs, that are compiled and
    kept as layers are.
    """
    importlib.import_module(_VECTORS).pick_vec_isa()


@functools.cache
def check_compiler(device: torch.device) -> None:
    """Load torch's compiler, if layers can be compiled for ``device`` here. Raises UserError."""
    if why := no_cxx():
        raise UserError(f"train.compile: {why}", INSTALL)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(
            "train.compile: there is no Triton, with which torch compiles for GPUs",
            "pip install the triton that this torch names",
        )
    _set_up()


def compiled(module: nn.Module, device: torch.device, *, is_head: bool) -> Compiled:
    """What is called in place of ``module``. A block as ``(x, *args, **kwargs)``: its output; the head as
    ``(x, labels)``: the loss, a scalar. Compiled in the first call of its kind, for the shapes of that call.
    Raises UserError where nothing can be compiled.
    """
    check_compiler(device)
    function = _function(_loss if is_head else _output)
    return functools.partial(_one_graph, function, module)


def _one_graph(function: Compiled, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Another graph is fused in another way, and rounds elsewhere: a micro-batch that is computed again
    # without some gradients, or none, would have other bits. So there is the one with all of them, of
    # contiguous inputs. (D-compile-002)
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        x = x.contiguous()
        x = x if x.requires_grad else x.detach().requires_grad_()
        out = function(module, x, *args, **kwargs)
    return out if wanted else out.detach()


def _output(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor | tuple[Tensor, ...] = block.forward(x, *args, **kwargs)
    return out[0] if isinstance(out, tuple) else out


def _loss(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    # The loss alone: logits that somebody could ask for would be written to memory.
    loss: Tensor = head.forward(inputs_embeds=x, labels=labels).loss
    return loss


@functools.cache
def _function(plain: Compiled) -> Compiled:
    made: Compiled = torch.compile(plain, fullgraph=True, dynamic=False)
    return made


def load() -> None:
    """Load torch's compiler, the real one, which compiles nothing yet."""
    # In this process and in no workers of its own, which would outlive a device that is killed.
    # (D-compile-004)
    os.environ.setdefault(_IN_PROCESS, "1")
    light.with_compiler()
    importlib.import_module(_BACKEND)


def _set_up() -> None:
    """Load it, set up so that it makes the same of the same graph in every process, and nothing
    else than one graph. Raises UserError where this torch has no such mode.
    """
    load()
    if _FOLDER not in os.environ:  # of a program that compiles for itself alone
        folder = tempfile.mkdtemp(prefix="oobleck-compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        keep_in(Path(folder))
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    inductor: Any = importlib.import_module("torch._inductor.config")
    if not hasattr(inductor, "deterministic"):
        raise UserError(
            f"train.compile: the compiler of torch {torch.__version__} has no deterministic mode",
            "install torch 2.11 or newer, or set train.compile = false",
        )
    inductor.deterministic = True
    inductor.compile_threads = 1
    headers_in(Path(os.environ[_FOLDER]) / "headers")
    # A try that takes too long on a busy machine would choose other instructions, and so other bits.
    inductor.cpp.vec_isa_ok = True
    # What transformers says once of a model it has said when the model was built.
    dynamo.ignore_logging_functions |= {
        getattr(logging.Logger, name) for name in _SAID if hasattr(logging.Logger, name)
    }
    # What cannot be compiled is an error: eager instead would be other bits. (D-compile-003)
    dynamo.suppress_errors = False
    dynamo.fail_on_recompile_limit_hit = True
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MANY
