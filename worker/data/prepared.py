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
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens
from oobleckd.tokens.manifest import TOKENS, Manifest, read_manifest
from oobleckd.tokens.pieces import Pieces
from oobleckd.worker.data.inputs import Opened, opened_while


class Prepared(NamedTuple):
    """``first``: called with the first token of what is about to be read, and the one behind the last; raises
    DataError where their bytes are not what they were.
    """

    inputs: Opened
    tokens: Tokens
    manifest: Manifest
    first: Callable[[int, int], None]


_wrong: dict[Path, tuple[int, int]] = {}
"""Tokens of folders that this process has found to be others than they were. Who asks whether a folder is
right again is told so only after these were read.
"""


def open_prepared(folder: Path) -> Prepared:
    """The tokens of ``folder``, held open."""
    manifest = read_manifest(folder)
    path = folder / TOKENS
    whole = f"{manifest.bin_bytes}-{manifest.bin_sha256}"
    known = Input("data", str(folder), 1, manifest.bin_bytes, whole=whole)
    inputs, data = opened_while(path, str(folder), lambda: _mapped(path), known)
    inputs.part = msgspec.structs.replace(inputs.blocks(), whole=whole)
    pieces, width = Pieces(data, manifest, folder), manifest.kind.itemsize

    def first(start: int, stop: int) -> None:
        try:
            pieces.check(start * width, stop * width)
        except DataError:
            _wrong[folder] = start, stop
            raise

    if inputs.small:
        first(0, manifest.tokens)
    elif folder in _wrong:
        first(*_wrong[folder])
    return Prepared(inputs, data.view(manifest.kind), manifest, first)


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
