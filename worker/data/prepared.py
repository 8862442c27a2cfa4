"""Opens a folder that `oobleckctl data prepare` made: its tokens, the plan of its rows or where documents
begin, of chats what the loss asks for, all mapped, and their identity from its manifests.

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
from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens
from oobleckd.tokens.index import Index, read_index
from oobleckd.tokens.manifest import INDEX, LOSS, TOKENS, Manifest, again_hint, read_manifest
from oobleckd.tokens.packing import PackRule
from oobleckd.tokens.pieces import Pieces
from oobleckd.tokens.plan import RowPlan, files_of_plan, plan_folder, read_plan
from oobleckd.words import count
from oobleckd.worker.data.inputs import Opened, opened_while


class Prepared(NamedTuple):
    """``first``: called with the first token of what is about to be read, and the one behind the last; raises
    DataError where their bytes are not what they were.
    """

    inputs: Opened
    tokens: Tokens
    manifest: Manifest
    first: Callable[[int, int], None]


_Bytes = npt.NDArray[np.uint8]
_Check = Callable[[int, int], None]
_wrong: dict[Path, tuple[int, int]] = {}
"""Bytes of files that this process has found to be others than they were. Who asks whether a folder is right
again is told so only after these were read.
"""
_wrong_plans: set[Path] = set()
"""Plans likewise."""


def open_prepared(folder: Path) -> Prepared:
    """The tokens of ``folder``, held open."""
    manifest = read_manifest(folder)
    whole = f"{manifest.bin_bytes}-{manifest.bin_sha256}"
    inputs, data, check = _opened(folder, TOKENS, whole, manifest.crcs)
    width = manifest.kind.itemsize
    return Prepared(
        inputs, data.view(manifest.kind), manifest, lambda start, stop: check(start * width, stop * width)
    )


def open_asked(folder: Path, manifest: Manifest) -> tuple[Opened, AskedTokens]:
    """Which tokens of the chats in ``folder`` the loss asks for, held open."""
    whole = f"{manifest.loss_bytes}-{manifest.loss_sha256}"
    inputs, data, check = _opened(folder, LOSS, whole, manifest.loss_crcs)
    return inputs, AskedTokens(data, check)


def _opened(folder: Path, name: str, whole: str, crcs: bytes) -> tuple[Opened, _Bytes, _Check]:
    """A file of ``folder``, its bytes, and what checks some of them before they are read."""
    path = folder / name
    known = Input("data", str(folder), 1, int(whole.partition("-")[0]), whole=whole)
    inputs, data = opened_while(path, str(folder), lambda: _mapped(path), known)
    inputs.part = msgspec.structs.replace(inputs.blocks(), whole=whole)
    pieces = Pieces(data, crcs, path, again_hint(folder))

    def check(start: int, stop: int) -> None:
        try:
            pieces.check(start, stop)
        except DataError:
            _wrong[path] = start, stop
            raise

    if inputs.small:
        check(0, len(data))
    elif path in _wrong:
        check(*_wrong[path])
    return inputs, data, check


def open_plan(folder: Path, manifest: Manifest, rule: PackRule) -> tuple[Opened, RowPlan]:
    """The plan of rows by ``rule`` in ``folder``, held open."""
    place = plan_folder(folder, manifest, rule)
    try:
        told = read_plan(place, manifest, rule)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not {rule.kind} into rows of {count(rule.sequence, 'token')}",
            "run `oobleckctl data prepare` on the job: it makes them of what is there, without the text",
        ) from error
    known = Input("data", str(place), 1, told.num_bytes, whole=f"{told.num_bytes}-{told.sha256}")
    inputs, plan = opened_while(
        files_of_plan(place), str(place), lambda: RowPlan(place, told, lambda: _wrong_plans.add(place)), known
    )
    if inputs.small or place in _wrong_plans:
        plan.check()
    return inputs, plan


def open_index(folder: Path, manifest: Manifest) -> tuple[Opened, Index]:
    """Where documents begin in ``folder``, held open."""
    path = folder / INDEX
    whole = f"{manifest.idx_bytes}-{manifest.idx_sha256}"
    known = Input("data", str(folder), 1, manifest.idx_bytes, whole=whole)
    inputs, index = opened_while(path, str(folder), lambda: read_index(path), known)
    if index.num_tokens != manifest.tokens or (inputs.small and inputs.digest() != whole):
        raise DataError(f"{path} is not what its manifest says", again_hint(folder))
    return inputs, index


def _mapped(path: Path) -> _Bytes:
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
