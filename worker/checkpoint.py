"""Bucket files of a checkpoint: weights, moments and scales of one bucket in one safetensors file.

Owns writing (durable, under a temporary name first) and reading (size, hash, names and shapes checked). The
manifest and the folder's life are in ``oobleckd.protocol.checkpoint``. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oobleckd.protocol.checkpoint import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    Manifest,
    is_complete,
    step_name,
    sync_directory,
)
from worker.errors import UserError
from worker.models import Bucket

__all__ = [
    "Loaded",
    "Manifest",
    "read_bucket",
    "read_manifest",
    "read_params",
    "step_name",
    "write_bucket",
]

_KINDS = ("param", "exp_avg", "exp_avg_sq")
_CHECK_DISK = "check that checkpoint.dir is a folder that every node can write, with space left"
_USE_OTHER = "resume from another checkpoint of the job"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state of one bucket, every tensor float32 in memory of its own, in key order."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    exponents: tuple[int, ...]


def write_bucket(
    directory: Path,
    bucket: Bucket,
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exponents: Sequence[int],
) -> tuple[str, int, str, dict[str, str]] | None:
    """Write one bucket into ``directory`` (made if need be), synced to disk.

    Returns file name, size in bytes, SHA-256 of the file, and tensor name -> SHA-256 of its bytes; None where the
    checkpoint was completed while this was written: after a loss buckets are written once more, and what was there
    may have been enough. Raises UserError when the disk refuses.
    """
    groups = zip(_KINDS, (params, exp_avgs, exp_avg_sqs), strict=True)
    tensors = {
        f"{kind}/{key}": tensor.detach().cpu().contiguous()
        for kind, group in groups
        for key, tensor in zip(bucket.keys, group, strict=True)
    }
    metadata = {"exponents": msgspec.json.encode(list(exponents)).decode()}
    name = f"bucket-{bucket.index:05d}.safetensors"
    temporary = directory / f"{name}.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata)
        temporary.chmod(0o644)  # who may enter the folder may read it
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        num_bytes = temporary.stat().st_size
        temporary.replace(directory / name)
        sync_directory(directory)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        gone = isinstance(error, FileNotFoundError) or not directory.exists()
        if gone and is_complete(directory):
            return None
        raise UserError(f"checkpoint: {directory / name} cannot be written: {error}", _CHECK_DISK) from error
    hashes = {name: hashlib.sha256(tensor.numpy().data).hexdigest() for name, tensor in tensors.items()}
    return name, num_bytes, digest, hashes


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``. Raises UserError."""
    path = directory / MANIFEST
    if directory.name.endswith(PARTIAL):
        raise UserError(f"checkpoint: {directory} was never completed", _USE_OTHER)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"checkpoint: {path}: {error.strerror}",
            "name a step-… folder of a checkpoint, on a path that every node can read",
        ) from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise UserError(f"checkpoint: {path} is no manifest: {error}", _USE_OTHER) from error
    if manifest.format != FORMAT:
        raise UserError(
            f"checkpoint: {path} has format {manifest.format}, this version reads {FORMAT}",
            "use the version of oobleckd that wrote it",
        )
    return manifest


def read_bucket(directory: Path, manifest: Manifest, bucket: Bucket, device: torch.device) -> Loaded:
    """The state of ``bucket``, checked against ``manifest``. Raises UserError."""
    with _opened(directory, manifest, bucket) as file:
        metadata: dict[str, str] = file.metadata()  # type: ignore[no-untyped-call]
        exponents = msgspec.json.decode(metadata["exponents"], type=tuple[int, ...])
        params, exp_avgs, exp_avg_sqs = (_read(file, directory, kind, bucket, device) for kind in _KINDS)
    return Loaded(params, exp_avgs, exp_avg_sqs, exponents)


def read_params(directory: Path, manifest: Manifest, bucket: Bucket) -> list[Tensor]:
    """The weights alone of ``bucket``, in key order on the CPU, checked as a whole. Raises UserError."""
    with _opened(directory, manifest, bucket) as file:
        return _read(file, directory, "param", bucket, torch.device("cpu"))


@contextmanager
def _opened(directory: Path, manifest: Manifest, bucket: Bucket) -> Iterator[safe_open]:
    """The file of ``bucket``, whole and with the right names. Raises UserError, also for what reading raises."""
    entry = next((entry for entry in manifest.buckets if entry.bucket == bucket.index), None)
    if entry is None:
        raise _other_model(directory, f"has no bucket {bucket.index}")
    path = directory / entry.file
    try:
        _check_file(path, entry.num_bytes, entry.sha256)
        with safe_open(str(path), framework="pt", device="cpu") as file:
            wanted = {f"{kind}/{key}" for kind in _KINDS for key in bucket.keys}
            if set(file.keys()) != wanted:
                raise _other_model(directory, f"has other tensors in {entry.file}")
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint: {path} cannot be read: {error}", _USE_OTHER) from error


def _read(file: safe_open, directory: Path, kind: str, bucket: Bucket, device: torch.device) -> list[Tensor]:
    values = []
    for key, shape in zip(bucket.keys, bucket.shapes, strict=True):
        value: Tensor = file.get_tensor(f"{kind}/{key}")  # type: ignore[no-untyped-call]
        if tuple(value.shape) != shape or value.dtype != torch.float32:
            raise _other_model(directory, f"has {kind}/{key} as {value.dtype} {tuple(value.shape)}")
        values.append(torch.empty(shape, device=device).copy_(value))
    return values


def _check_file(path: Path, num_bytes: int, sha256: str) -> None:
    size = path.stat().st_size
    if size != num_bytes:
        raise UserError(f"checkpoint: {path} is torn: {size} of {num_bytes} bytes", _USE_OTHER)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise UserError(f"checkpoint: {path} is damaged: its SHA-256 is not the manifest's", _USE_OTHER)


def _other_model(path: Path, what: str) -> UserError:
    return UserError(
        f"checkpoint: {path} is of another model: it {what}",
        "resume with the [model] table of the job that wrote it (manifest.json has it under spec)",
    )
