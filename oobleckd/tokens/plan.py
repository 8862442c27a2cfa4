"""The plan of a prepared folder's rows, `plan-<digest>/` in it: which pieces of the tokens each packed or
padded row has. Row n is a look-up.

Owns the layout (``row_starts.bin``: int64, the first piece of each row and the number of pieces at the end;
``tokens.bin``: int64, and ``lengths.bin``: int32, of each piece; ``targets.bin``: int32, of each row; and
``plan.json``), its name, and reading it by maps. How rows are made is ``packing``'s, and writing them
``prepare``'s. Raises DataError, OSError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from oobleckd.protocol.unreadable import problem_of
from oobleckd.tokens.dtypes import DType
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import Manifest, again_hint, check_size, covers
from oobleckd.tokens.packing import PackRule
from oobleckd.tokens.pieces import Pieces

FORMAT = 1
PLAN = "plan.json"
_DIGITS = 32
ARRAYS: dict[str, DType] = {
    "row_starts": np.dtype("<i8"),
    "tokens": np.dtype("<i8"),
    "lengths": np.dtype("<i4"),
    "targets": np.dtype("<i4"),
}
"""What has a file of its own."""
_Count = Annotated[int, Meta(ge=0)]


class PlanManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``index``, ``asked``: SHA-256 of the files that it follows from (``asked`` "": the loss asks for all
    tokens). ``filled``: positions of all rows that hold a token; ``long``: documents that are longer than a
    row; ``idle``: rows that were left out, as nothing in them is asked for. ``sha256``: of the four files,
    one behind the other; ``crcs``: CRC-32 of each MiB of each.
    """

    index: str
    asked: str
    rule: PackRule
    rows: _Count
    pieces: _Count
    filled: _Count
    targets: _Count
    long: _Count
    idle: _Count
    sha256: str
    crcs: dict[str, bytes]
    format: int = FORMAT

    @property
    def padding(self) -> float:
        """Share of the positions of all rows that hold no token."""
        return 1 - self.filled / (self.rows * self.rule.sequence)

    @property
    def num_bytes(self) -> int:
        """Of the four files."""
        return sum(self.size_of(name) for name in ARRAYS)

    def size_of(self, name: str) -> int:
        """How many bytes a file has."""
        numbers = {"row_starts": self.rows + 1, "targets": self.rows}
        return numbers.get(name, self.pieces) * ARRAYS[name].itemsize

    def follows_from(self, manifest: Manifest, rule: PackRule) -> bool:
        """Whether it is the plan by ``rule`` of what ``manifest`` describes."""
        return (self.index, self.asked, self.rule) == (manifest.idx_sha256, manifest.loss_sha256, rule)


class _Format(msgspec.Struct):
    format: int


class Pieced(NamedTuple):
    """The pieces of a row, in order: of each its first token in all of the data's, and how many it has."""

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]


class RowPlan:
    """One that lies in ``folder``, mapped: each MiB is checked when it is first read. ``wrong``: called where
    one is not what it was.
    """

    def __init__(self, folder: Path, manifest: PlanManifest, wrong: Callable[[], None]) -> None:
        self.manifest, self._wrong = manifest, wrong
        again = again_hint(folder)
        self._row_starts, self._tokens, self._lengths, self._targets = self._arrays = tuple(
            _Checked(folder / file_of(name), kind, manifest.crcs[name], again)
            for name, kind in ARRAYS.items()
        )

    def row(self, number: int) -> Pieced:
        """The pieces of a row. Raises DataError."""
        start, stop = self._read(self._row_starts, number, number + 2).tolist()
        return Pieced(self._read(self._tokens, start, stop), self._read(self._lengths, start, stop))

    def targets(self, number: int) -> int:
        """How many of its tokens a causal model is asked for. Raises DataError."""
        return int(self._read(self._targets, number, number + 1)[0])

    def check(self) -> None:
        """Look at all of it. Raises DataError."""
        for array in self._arrays:
            self._read(array, 0, len(array))

    def _read(self, array: _Checked, start: int, stop: int) -> npt.NDArray[Any]:
        try:
            return array.read(start, stop)
        except DataError:
            self._wrong()
            raise


class _Checked:
    """A file of numbers of ``kind``."""

    def __init__(self, path: Path, kind: DType, crcs: bytes, again: str) -> None:
        data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self._numbers: npt.NDArray[Any] = data.view(kind)
        self._pieces = Pieces(data, crcs, path, again)

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        width = self._numbers.itemsize
        self._pieces.check(start * width, stop * width)
        return self._numbers[start:stop]


def plan_folder(folder: Path, manifest: Manifest, rule: PackRule) -> Path:
    """Where the plan by ``rule`` of the prepared ``folder`` lies, or would lie: named by all that it follows
    from.
    """
    said = msgspec.json.encode((FORMAT, manifest.idx_sha256, "", rule))
    return folder / f"plan-{hashlib.sha256(said).hexdigest()[:_DIGITS]}"


def files_of_plan(folder: Path) -> tuple[Path, ...]:
    """Those that ``PlanManifest.sha256`` is of, in their order."""
    return tuple(folder / file_of(name) for name in ARRAYS)


def read_plan(folder: Path, manifest: Manifest, rule: PackRule) -> PlanManifest:
    """The manifest of the plan in ``folder``, whose files are as long as it says; their bytes are not read.
    Raises DataError, and FileNotFoundError where there is none.
    """
    path, again = folder / PLAN, again_hint(folder)
    folder.stat()
    try:
        data = path.read_bytes()
        known = msgspec.json.decode(data, type=_Format).format
        if known != FORMAT:
            raise DataError(f"{path} is of format {known}, and {FORMAT} is known", again)
        found = msgspec.json.decode(data, type=PlanManifest)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", again) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {problem_of(error)}", again) from error
    whole = all(covers(found.crcs.get(name, b""), found.size_of(name)) for name in ARRAYS)
    if not whole or not found.rows:
        raise DataError(f"{path} contradicts itself", again)
    if not found.follows_from(manifest, rule):
        raise DataError(f"{path} is of other data, or of other rows", again)
    for name in ARRAYS:
        check_size(folder / file_of(name), found.size_of(name), again)
    return found


def file_of(name: str) -> str:
    """The name of the file of an array."""
    return f"{name}.bin"
