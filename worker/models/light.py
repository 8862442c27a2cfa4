"""Transformers without what no worker uses: half the CPU time and two thirds of the memory for every process.

Owns the import of it; ``oobleckd.worker.models`` makes that before any other. Transformers' models as they
are bring in torch's compiler (to mark functions that it should leave alone), its sharded tensors, and scipy
(for the losses of detecting objects in images), and read every source file of every family, to know what each
defines; and they bring in whatever is installed of libraries for images, sound and more. Without that a
process that takes a dead one's place is up that much sooner. Whoever asks for the compiler or scipy
afterwards finds them; families are found by ``transformers``' Auto classes, and by their modules' names.
Where that does not work, with a library that we do not know, they come as they are.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

_COMPILER = "torch._dynamo"
_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
# With torch's compiler and sharded tensors such parts were more than half of the CPU time of a process's
# start, and 102 MiB, and no worker uses them. Some need each other to be imported, so this is tried and not
# insisted on. (D-devices-003, D-devices-010)
_HIDDEN = ("scipy", "sklearn", "torchvision", "accelerate", "peft", "timm", "librosa")
"""Transformers does without, and some of them cannot be imported without the compiler, or without another of
them.
"""
_log = logging.getLogger(__name__)
_whole = threading.Event()
_one_at_a_time = threading.RLock()
_OURS = ("transformers.modeling_utils", "transformers.generation.utils")


class _Nothing(ModuleType):
    """A compiler that compiles nothing: whatever is asked of it can be called, and returns what
    it decorates.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, decorated: Any = None, *_args: Any, **_options: Any) -> Any:
        return self if decorated is None else decorated


class _Masks(ModuleType):
    """The one part that computes something, for masks of rare shapes: it is imported when it is called."""

    @staticmethod
    def TransformGetItemToIndex() -> Any:  # noqa: N802 - torch's name
        """As torch's."""
        return importlib.import_module(_MASKS).TransformGetItemToIndex()


class _Entries:
    """What ``os.scandir`` returns: entered or not, entries come from it one after the other."""

    def __init__(self, entries: Iterator[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def close(self) -> None:
        """Do nothing: nothing is open."""


@contextmanager
def _without_a_look_at_all_families() -> Iterator[None]:
    """Within, of transformers' folder of families the one of the Auto classes is seen and no other."""
    real: Any = os.scandir

    def scandir(path: int | str | bytes | os.PathLike[str] | os.PathLike[bytes] = ".") -> Any:
        # What is imported scans folders of its own, also by a descriptor, as shutil.rmtree does.
        if isinstance(path, int) or Path(os.fsdecode(path)).parts[-2:] != ("transformers", "models"):
            return real(path)
        with real(path) as entries:
            return _Entries(entry for entry in list(entries) if entry.name == "auto")

    os.scandir = scandir  # type: ignore[assignment]
    try:
        yield
    finally:
        os.scandir = real


@contextmanager
def without_heavy_parts() -> Iterator[None]:
    """Within, torch's compiler does nothing, and neither the libraries of ``_HIDDEN`` nor torch's
    distribution can be found.

    For imports, and for what runs torch on the meta device. What has been imported before stays as it is.
    Where transformers could not be imported so, nothing is hidden.
    """
    if _whole.is_set():
        yield
        return
    instead = {_COMPILER: _Nothing(_COMPILER), _MASKS: _Masks(_MASKS), **dict.fromkeys(_HIDDEN)}
    with _one_at_a_time:
        hidden = {name: module for name, module in instead.items() if name not in sys.modules}
        is_available = torch.distributed.is_available
        sys.modules.update(hidden)  # type: ignore[arg-type] # None is import's own mark for "there is none"
        torch.distributed.is_available = lambda: False
        try:
            yield
        finally:
            torch.distributed.is_available = is_available
            for name in hidden:
                del sys.modules[name]


def with_compiler() -> None:
    """Import torch's compiler, the real one, for good: whatever is imported from now on finds it."""
    with _one_at_a_time:  # nobody hides it meanwhile
        importlib.import_module(_COMPILER)


@contextmanager
def without_values() -> Iterator[None]:
    """Within, modules are made without initial values. For the meta device: it has none, but imports sympy
    for them.
    """
    # Initial values on the meta device had torch import sympy: 0.4 to 0.5 s of CPU time before a new
    # process's first step. The bits are the same. (D-devices-004)
    made = {name: value for name, value in vars(nn.init).items() if name.endswith("_") and name[0] != "_"}
    with _one_at_a_time:
        vars(nn.init).update(dict.fromkeys(made, _left_as_it_is))
        try:
            yield
        finally:
            vars(nn.init).update(made)


def _left_as_it_is(tensor: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return tensor


def _import_ours() -> None:
    for name in _OURS:
        importlib.import_module(name)


def _import_light() -> None:
    try:
        with without_heavy_parts(), _without_a_look_at_all_families():
            _import_ours()
    except Exception as error:  # noqa: BLE001 - whatever others' code makes of it
        # No worker started on the first GPU machine: transformers brings in what is installed, and
        # torchvision needs the compiler. What others have installed is no reason not to run.
        # (D-devices-010)
        _whole.set()
        _log.warning(
            "transformers is imported with all its parts, which takes longer: without them, %s", error
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        _import_ours()


_import_light()
