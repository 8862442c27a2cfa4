"""Opens a folder that `oobleckctl data prepare` made: its tokens, mapped, and their identity from its
manifest.

Owns what of it is looked at when it is opened: the manifest and the sizes of the files, and the bytes only
where they are few, or were wrong before. Raises DataError, OSError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from oobleckd.protocol.inputs import Input
from oobleckd.tokens.asked import Asked
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens
from oobleckd.tokens.manifest import LOSS, TOKENS, Manifest, read_manifest
from oobleckd.tokens.pieces import Pieces
from oobleckd.worker.data.inputs import Opened, opened_while


class Prepared(NamedTuple):
    """``first``: called with the first token of what is about to be read, and the one behind the last; raises
    DataError where their bytes are not what they were. ``asked``: which tokens the loss asks for (None: all),
    checked in the same way.
    """

    inputs: Opened
    tokens: Tokens
    manifest: Manifest
    first: Callable[[int, int], None]
    asked: Asked | None


_wrong: dict[Path, tuple[int, int]] = {}
"""Bytes of files that this process has found to be others than they were. Who asks whether a folder is right
again is told so only after these were read.
"""


def open_prepared(folder: Path) -> Prepared:
    """The tokens of ``folder``, held open."""
    manifest = read_manifest(folder)
    path, loss = folder / TOKENS, folder / LOSS
    more = (loss,) if manifest.has_loss else ()
    known = Input(
        "data", str(folder), 1 + len(more), manifest.bin_bytes + manifest.loss_bytes, whole=manifest.whole
    )
    inputs, data = opened_while(
        path, str(folder), lambda: [_mapped(each) for each in (path, *more)], known, more
    )
    inputs.part = msgspec.structs.replace(inputs.blocks(), whole=manifest.whole)
    width = manifest.kind.itemsize
    check = _checked(path, data[0], manifest.crcs, whole=inputs.small)
    asked = None
    if manifest.has_loss:
        asked = Asked(data[1], _checked(loss, data[1], manifest.loss_crcs, whole=inputs.small))
    return Prepared(
        inputs,
        data[0].view(manifest.kind),
        manifest,
        lambda start, stop: check(start * width, stop * width),
        asked,
    )


def _checked(
    path: Path, data: npt.NDArray[np.uint8], crcs: bytes, *, whole: bool
) -> Callable[[int, int], None]:
    """What checks bytes of ``path``. Those that were wrong before are checked now, or the ``whole``."""
    pieces = Pieces(data, crcs, path)

    def check(start: int, stop: int) -> None:
        try:
            pieces.check(start, stop)
        except DataError:
            _wrong[path] = start, stop
            raise

    if whole:
        check(0, len(data))
    elif path in _wrong:
        check(*_wrong[path])
    return check


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
