"""Bucket files of a checkpoint: the whole state of one bucket in one safetensors file, a tensor for each slot
and key, by the name ``slot/key``.

Owns writing (tensor by tensor, durable, under a temporary name first) and reading (size, hash, names and
shapes checked). The manifest and the folder's life are in ``oobleckd.protocol.checkpoint``. Nothing here is a
pickle.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oobleckd.host.durable import errno_of, sync_directory
from oobleckd.host.folder import FolderMark, ForeignFolder, enter
from oobleckd.protocol.checkpoint import (
    FORMAT,
    MANIFEST,
    OLDEST_FORMAT,
    PARTIAL,
    TEMPORARY,
    Manifest,
    step_name,
)
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.worker.models import Bucket
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.bucket_state import PARAM, BucketState, StateShape

__all__ = [
    "CannotWrite",
    "DamagedCheckpoint",
    "Manifest",
    "enter_folder",
    "read_bucket",
    "read_manifest",
    "read_params",
    "step_name",
    "write_bucket",
]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_CHECK_DISK = "check that checkpoint.dir is a folder that every node can write, with space left"
_USE_OTHER = "resume from another checkpoint of the job"
_ALIGNED_TO = 8
_NUMBERS = itertools.count()


class CannotWrite(UserError):
    """The disk does not take a file of a checkpoint; the state that was to be written is whole in memory.
    ``errno``: the name of the system's error.
    """

    def __init__(self, path: Path, why: str, errno: str = "") -> None:
        super().__init__(f"{path} cannot be written: {why}", _CHECK_DISK)
        self.errno = errno


class DamagedCheckpoint(UserError):
    """What lies there is not what was written: no node can load it, and another checkpoint is needed."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"checkpoint: {problem}", _USE_OTHER)


Written = tuple[str, int, str, dict[str, str]]
"""File name, size in bytes, SHA-256 of the file, and tensor name -> SHA-256 of its bytes."""


def write_bucket(
    directory: Path,
    bucket: Bucket,
    state: BucketState,
    halfway: Callable[[], object] = lambda: None,
) -> Written | None:
    """Write the ``state`` of one bucket, on any device, into ``directory`` (made if need be), synced to disk.

    ``halfway`` is called in the middle of the file and may raise to stop: nothing is left then.

    None where the folder is gone meanwhile: the checkpoint was completed (after a loss buckets are written
    once more, and what was there may have been enough), or given up for a newer one. Raises CannotWrite when
    the disk refuses.
    """
    tensors = {name: tensor.cpu() for name, tensor in state.named(bucket.keys).items()}
    name = f"bucket-{bucket.index:05d}.safetensors"
    # Unlike any other, also of this process: a share that was given up may still be at the same file.
    temporary = directory / f"{name}.{os.getpid()}-{next(_NUMBERS)}{TEMPORARY}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(directory / name, error.strerror or str(error), errno_of(error)) from error
    try:
        num_bytes, digest, hashes = _fill(temporary, tensors, state.exponents, halfway)
        # Renamed last: a writer that dies in the middle leaves a temporary name that no manifest has
        # (docs/mechanisms/checkpoints.md).
        temporary.replace(directory / name)
        sync_directory(directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotWrite(directory / name, error.strerror or str(error), errno_of(error)) from error
    finally:
        with suppress(OSError):  # of a disk that went away, or became read-only, in the middle
            temporary.unlink(missing_ok=True)
    return name, num_bytes, digest, hashes


def enter_folder(folder: Path, mark: FolderMark) -> None:
    """See that checkpoints may be written into ``folder``, that of a job. Raises CannotWrite: it is another
    journal's, or the disk refuses.
    """
    try:
        enter(folder, mark)
    except ForeignFolder as error:
        raise CannotWrite(folder, str(error)) from error
    except OSError as error:
        raise CannotWrite(folder, error.strerror or str(error), errno_of(error)) from error


def _fill(
    path: Path, tensors: Mapping[str, Tensor], exponents: Sequence[int], halfway: Callable[[], object]
) -> tuple[int, str, dict[str, str]]:
    """Write and sync ``path``; its size, its SHA-256, and that of each tensor. Hashed on the way: no file is
    read again.
    """
    names = sorted(tensors)
    # By ourselves and not by save_file, which writes in one call: it cannot be given up or killed in the
    # middle, and its file would have to be read again for the hash. (D-checkpoints-009)
    whole, hashes = hashlib.sha256(), {}
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o644)  # who may enter the folder may read it
        head = _header(tensors, exponents)
        file.write(head)
        whole.update(head)
        for position, name in enumerate(names):
            if position == len(names) // 2:
                file.flush()
                halfway()
            data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            whole.update(data)
            hashes[name] = hashlib.sha256(data).hexdigest()
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), whole.hexdigest(), hashes


def _header(tensors: Mapping[str, Tensor], exponents: Sequence[int]) -> bytes:
    """What a safetensors file begins with: the length of a JSON table, and the table: where each tensor lies
    behind it.
    """
    table: dict[str, object] = {"__metadata__": {"exponents": msgspec.json.encode(list(exponents)).decode()}}
    begin = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        end = begin + tensor.nbytes
        table[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGNED_TO)
    return len(text).to_bytes(8, "little") + text


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``. Raises UserError, and DamagedCheckpoint where it is
    gone or unreadable.
    """
    path = directory / MANIFEST
    if directory.name.endswith(PARTIAL):
        raise UserError(f"checkpoint: {directory} was never completed", _USE_OTHER)
    try:
        data = path.read_bytes()
    except OSError as error:
        if _is_lost(directory, error):
            raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
        raise UserError(
            f"checkpoint: {path}: {error.strerror}",
            "name a step-… folder of a checkpoint, on a path that every node can read",
        ) from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except UNREADABLE as error:
        raise DamagedCheckpoint(f"{path} is no manifest: {problem_of(error)}") from error
    if not OLDEST_FORMAT <= manifest.format <= FORMAT:
        raise UserError(
            f"checkpoint: {path} has format {manifest.format}, this version reads {OLDEST_FORMAT} to "
            f"{FORMAT}",
            "use the version of oobleckd that wrote it",
        )
    return manifest


def read_bucket(
    directory: Path, manifest: Manifest, bucket: Bucket, shape: StateShape, device: torch.device
) -> BucketState:
    """The state of ``bucket`` on ``device``, checked against ``manifest`` by size, SHA-256, names, shapes and
    dtypes. Raises UserError where this node, this model or this optimizer is wrong, and DamagedCheckpoint
    where the file is not what was written.
    """
    with _opened(directory, manifest, bucket) as file:
        metadata: dict[str, str] = file.metadata() or {}  # type: ignore[no-untyped-call]
        exponents = _exponents(directory, metadata, bucket)
        state = BucketState(shape, shape.zeros(device), exponents)
        into = state.named(bucket.keys)
        _check_names(directory, _names(file), set(into))
        for name, tensor in into.items():
            tensor.copy_(_read(file, directory, name, tuple(tensor.shape), tensor.dtype))
    return state


def read_params(directory: Path, manifest: Manifest, bucket: Bucket) -> list[Tensor]:
    """The weights alone of ``bucket``, in key order, float32 on the CPU. The file is checked as a whole.
    Raises UserError, and DamagedCheckpoint as ``read_bucket``.
    """
    with _opened(directory, manifest, bucket) as file:
        return [
            _read(file, directory, f"{PARAM}/{key}", shape, torch.float32)
            for key, shape in zip(bucket.keys, bucket.shapes, strict=True)
        ]


@contextmanager
def _opened(directory: Path, manifest: Manifest, bucket: Bucket) -> Iterator[safe_open]:
    """The file of ``bucket``, whole and with the right names. Raises UserError, also for what
    reading raises.
    """
    entry = next((entry for entry in manifest.buckets if entry.bucket == bucket.index), None)
    if entry is None:
        raise _other_model(directory, f"has no bucket {bucket.index}")
    if Path(entry.file).name != entry.file:
        raise UserError(f"checkpoint: {directory}: {entry.file!r} is no name of a file in it", _USE_OTHER)
    path = directory / entry.file
    try:
        _check_file(path, entry.num_bytes, entry.sha256)
        with safe_open(str(path), framework="pt", device="cpu") as file:
            weights = {name for name in _names(file) if name.startswith(f"{PARAM}/")}
            if weights != {f"{PARAM}/{key}" for key in bucket.keys}:
                raise _other_model(directory, f"has other tensors in {entry.file}")
            yield file
    except (SafetensorError, OSError) as error:
        if is_out_of_memory(error):
            raise  # which says nothing of the file
        if isinstance(error, SafetensorError) or _is_lost(directory, error):
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
        raise UserError(f"checkpoint: {path} cannot be read: {error}", _USE_OTHER) from error


def _is_lost(directory: Path, error: OSError) -> bool:
    """Whether a file of the checkpoint in ``directory`` is gone, or the disk cannot read it. Else ``error``
    is of this node: it may not read the file, or does not see the folder in which all checkpoints lie.
    """
    # By its class: what safetensors raises has no number.
    return (isinstance(error, FileNotFoundError) or error.errno == errno.EIO) and directory.parent.is_dir()


def _exponents(directory: Path, metadata: Mapping[str, str], bucket: Bucket) -> tuple[int, ...]:
    try:
        found = msgspec.json.decode(metadata.get("exponents", ""), type=tuple[int, ...])
    except UNREADABLE as error:
        raise _other_model(
            directory, f"has no exponents of bucket {bucket.index}: {problem_of(error)}"
        ) from error
    if len(found) != len(bucket.keys):
        raise _other_model(directory, f"has {len(found)} exponents of bucket {bucket.index}")
    return found


def _read(file: safe_open, directory: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of memory of its own."""
    value: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise _other_model(directory, f"has {name} as {value.dtype} {tuple(value.shape)}")
    return value


def _names(file: safe_open) -> set[str]:
    return set(file.keys())  # type: ignore[no-untyped-call]


def _check_names(directory: Path, found: set[str], wanted: set[str]) -> None:
    """Of a bucket whose weights are the model's: whether all else is what this job's optimizer keeps."""
    if found != wanted:
        slots = sorted({name.partition("/")[0] for name in found} - {PARAM})
        raise UserError(
            f"checkpoint: {directory} is of another optimizer: beside weights it has "
            f"{', '.join(slots) or 'nothing'}",
            "resume with the [optimizer] table of the job that wrote it (manifest.json has it under spec)",
        )


def _check_file(path: Path, num_bytes: int, sha256: str) -> None:
    size = path.stat().st_size
    if size != num_bytes:
        raise DamagedCheckpoint(f"{path} is torn: {size} of {num_bytes} bytes")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Who loads finds damage, so nobody reads all files once more to look for it. The job then rolls back to
    # the checkpoint before this one, and never begins anew by itself. (D-checkpoints-011)
    if digest != sha256:
        raise DamagedCheckpoint(f"{path} is damaged: its SHA-256 is not the manifest's")


def _other_model(path: Path, what: str) -> UserError:
    return UserError(
        f"checkpoint: {path} is of another model: it {what}",
        "resume with the [model] table of the job that wrote it (manifest.json has it under spec)",
    )
