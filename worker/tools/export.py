"""A checkpoint as a Hugging Face folder that ``from_pretrained`` loads:
``python -m oobleckd.worker.tools.export``.

Owns what is written: configuration, weights in one file or in shards with an index, and what the folder that
the job started from had besides. The model is read and written shard by shard, so memory holds one bucket and
one shard. The folder is written beside its place and renamed: it is whole or not there. Which checkpoint is
exported is the caller's matter (``oobleckctl export``); prints ``Exported`` as JSON.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oobleckd.host.durable import sync_directory, write_whole
from oobleckd.host.export import (
    COMPANIONS,
    INDEX,
    MARK,
    Exported,
    ExportMark,
    mark_of,
    shard_name,
    why_not,
    written,
)
from oobleckd.host.hold import held
from oobleckd.protocol.checkpoint import MANIFEST, Manifest
from oobleckd.protocol.job import Job
from oobleckd.worker.models import Bucket, ModelSpec, load_config
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.bucket_files import read_manifest, read_params

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(
    checkpoint: Path,
    folder: Path,
    *,
    shard_bytes: int,
    dtype: torch.dtype,
    overwrite: bool = False,
    job: str = "",
) -> Exported:
    """Write the weights in ``checkpoint`` as ``dtype`` into ``folder``, in files of at most ``shard_bytes``;
    they are those of ``job``.

    A tensor that is larger has a file of its own. The checkpoint stays until it is read. Raises UserError;
    ``folder`` is then as it was.
    """
    if refusal := why_not(folder, overwrite=overwrite):
        raise UserError(*refusal)
    with held(checkpoint):
        return _export(checkpoint, folder, shard_bytes, dtype, overwrite=overwrite, job=job)


def _export(
    checkpoint: Path, folder: Path, shard_bytes: int, dtype: torch.dtype, *, overwrite: bool, job: str
) -> Exported:
    with _reading():
        manifest = read_manifest(checkpoint)
    spec = _spec(manifest)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        beside.mkdir(parents=True)
        _write_config(beside, spec, dtype)
        _copy_companions(beside, manifest.spec)
        source = spec
        if spec.constants and manifest.spec.model.checkpoint:
            source = ModelSpec(manifest.spec, load_config(manifest.spec))
        weights = _weights(checkpoint, manifest, spec, source, dtype)
        files, not_finite = _write_weights(beside, weights, _plan(spec, shard_bytes, dtype))
        _settle(beside)
        _mark(beside, checkpoint, manifest.counters.step, job)
        num_bytes = sum((beside / file).stat().st_size for file in files)
        left = _put_in_place(beside, folder, overwrite=overwrite)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"export: {folder} cannot be written: {error}",
            "name a folder on a disk with space that you may write",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    name = str(dtype).removeprefix("torch.")
    return Exported(
        str(folder), manifest.counters.step, spec.architecture, name, num_bytes, files,
        manifest.counters.skipped, not_finite, left,
    )  # fmt: skip


def _spec(manifest: Manifest) -> ModelSpec:
    """The model of a checkpoint. Its weights are the checkpoint's, so of a start folder only config.json is
    read.
    """
    job = manifest.spec
    config = load_config(job)
    bare = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, checkpoint=""))
    spec = ModelSpec(bare, config)
    held = {name.partition("/")[2] for bucket in manifest.buckets for name in bucket.tensors}
    if job.model.checkpoint and held - {key for bucket in spec.buckets for key in bucket.keys}:
        config.tie_word_embeddings = (
            False  # the start folder had different values for what its configuration ties
        )
        spec = ModelSpec(bare, config)
    return spec


def _plan(spec: ModelSpec, shard_bytes: int, dtype: torch.dtype) -> list[list[str]]:
    """The keys of every file, in the order of the buckets."""
    shards: list[list[str]] = [[]]
    filled = 0
    for bucket in spec.buckets:
        shapes = zip(bucket.keys, bucket.shapes, strict=True)
        empty = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in shapes}
        constants = _constants_of(spec, bucket)
        empty |= {key: torch.empty(shape, device="meta") for key, shape in constants.items()}
        for key, value in spec.as_saved(empty).items():
            if shards[-1] and filled + value.nbytes > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(key)
            filled += value.nbytes
    return shards


def _weights(
    checkpoint: Path, manifest: Manifest, spec: ModelSpec, source: ModelSpec, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """``source``: what has the model's constants, which no checkpoint holds, and which stay float32."""
    for bucket in spec.buckets:
        with _reading():
            params = read_params(checkpoint, manifest, bucket)
        values = {key: value.to(dtype) for key, value in zip(bucket.keys, params, strict=True)}
        values |= {name: source.constant(name) for name in _constants_of(spec, bucket)}
        yield from spec.as_saved(values).items()


def _constants_of(spec: ModelSpec, bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Shapes, by name, of the constants that are written with ``bucket``."""
    if bucket.index >= spec.num_layers:
        return {}
    return {name: shape for name, shape in spec.constants.items() if spec.layer_of(name) == bucket.index}


@contextmanager
def _reading() -> Iterator[None]:
    """What to do about a checkpoint that cannot be read is different here from where a job resumes."""
    try:
        yield
    except UserError as error:
        raise UserError(
            error.problem, "export again: a newer checkpoint may have replaced it meanwhile (checkpoint.keep)"
        ) from error


def _write_weights(
    folder: Path, weights: Iterator[tuple[str, Tensor]], shards: list[list[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the files of weights and, where there are several, their index. Returns the names of the files,
    and of tensors that are not finite.
    """
    places: dict[str, str] = {}
    not_finite: list[str] = []
    total = 0
    for index, keys in enumerate(shards):
        name = shard_name(index, len(shards))
        tensors = {key: _apart(value) for key, (_, value) in zip(keys, weights, strict=False)}
        assert list(tensors) == keys
        not_finite += [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(keys, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))
    return tuple(dict.fromkeys(places.values())), tuple(not_finite)


def _apart(value: Tensor) -> Tensor:
    """``value`` in memory of its own, as safetensors asks for: an expert is a slice of what is trained."""
    own = value.contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def _write_config(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
    config = copy.deepcopy(spec.config)
    config.architectures = [spec.architecture]
    config.dtype = dtype
    config.use_cache = True  # training had no use for it; generation has
    config.save_pretrained(folder)


def _copy_companions(folder: Path, job: Job) -> None:
    for name in COMPANIONS if job.model.checkpoint else ():
        with suppress(FileNotFoundError):
            shutil.copyfile(Path(job.model.checkpoint) / name, folder / name)


def _settle(folder: Path) -> None:
    """Make the files durable, and readable for whoever may enter the folder."""
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(folder)


def _mark(folder: Path, checkpoint: Path, step: int, job: str) -> None:
    """Say what was written, so that it may be replaced."""
    digest = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    files = {path.name: found for path in sorted(folder.iterdir()) if (found := written(path)) is not None}
    mark = ExportMark(job, step, digest, files)
    write_whole(folder / MARK, msgspec.json.format(msgspec.json.encode(mark), indent=1))


def _put_in_place(beside: Path, folder: Path, *, overwrite: bool) -> str:
    """Have ``beside`` take the place of ``folder``, which is there until then; where what was there is, if it
    could not be removed.

    Raises UserError where somebody has put something there meanwhile.
    """
    if refusal := why_not(folder, overwrite=overwrite):
        raise UserError(*refusal)
    stale = beside.with_suffix(".stale")
    replaced = folder.exists()
    if replaced:
        folder.rename(stale)
    try:
        beside.rename(folder)
    except OSError:
        if replaced:
            stale.rename(folder)
        raise
    sync_directory(folder.parent)
    return _remove(stale) if replaced else ""


def _remove(stale: Path) -> str:
    """Remove what an export wrote, and the folder if that was all; else say where it is."""
    mark = mark_of(stale)
    for name in (*(mark.files if mark is not None else ()), MARK):
        with suppress(OSError):
            if mark is None or name == MARK or written(stale / name) == mark.files[name]:
                (stale / name).unlink()
    with suppress(OSError):
        stale.rmdir()
    return str(stale) if stale.exists() else ""


@click.command()
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--shard-bytes", type=click.IntRange(min=1), required=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), required=True)
@click.option("--overwrite", is_flag=True)
@click.option("--job", default="", help="Whose weights they are, for the mark.")
def main(checkpoint: Path, out: Path, shard_bytes: int, dtype: str, overwrite: bool, job: str) -> None:
    """Export the weights of a checkpoint to the folder OUT."""
    kind = DTYPES[dtype]
    try:
        done = export(checkpoint, out, shard_bytes=shard_bytes, dtype=kind, overwrite=overwrite, job=job)
    except UserError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(done).decode())


if __name__ == "__main__":
    main()
