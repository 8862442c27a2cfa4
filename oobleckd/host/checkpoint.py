"""Turns a finished ``.partial`` folder into a checkpoint, and a damaged checkpoint into none.

Owns these steps and the room that they need. What a manifest holds is ``protocol.checkpoint``'s; devices
write the bucket files (worker/state/bucket_files.py), and the daemon knows when all have arrived. A folder
without ``.partial`` in its name is complete: the rename is the last thing that happens.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from oobleckd.host.durable import sync_directory, write_whole
from oobleckd.host.hold import free
from oobleckd.protocol.checkpoint import DAMAGED, MANIFEST, PARTIAL, TEMPORARY, Manifest

_STEP = re.compile(r"step-(\d{8,})")


def complete(directory: Path, manifest: Manifest, keep: int, spared: Collection[str] = ()) -> Path:
    """Make the ``.partial`` folder ``directory`` a checkpoint, then remove all but the newest ``keep``, those
    ``spared``, and those held.

    One of a state that skipped steps led to removes none: it has the weights of the last one before them, and
    it is that one whose gradients were finite.

    Durable when it returns, and done once however often it is called. Returns the final folder. Raises
    OSError when the disk refuses; the folder is then still partial. Raises ValueError where a file that was
    written is gone. That the folder it lies in is the caller's to write is not asked here.
    """
    final = directory.with_name(directory.name.removesuffix(PARTIAL))
    if directory != final and directory.exists():
        _check_whole(directory, manifest)
        _tidy(directory, manifest)
        write_whole(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        _put_in_place(directory, final)
    assert (final / MANIFEST).exists(), f"{final} has no manifest"
    # A state that skipped steps led to has the weights of the one before them, so it may not push out the
    # last one whose gradients were finite.
    if not manifest.counters.skipped_in_row:
        _prune(final, keep, spared)
    return final


def discard_partial(folder: Path) -> None:
    """Give back the room of ``folder``, a ``.partial`` one, or of all of those in it where it is a job's:
    nobody will complete them.
    """
    found = [folder] if folder.name.endswith(PARTIAL) else sorted(folder.glob(f"step-*{PARTIAL}"))
    for path in found:
        shutil.rmtree(path, ignore_errors=True)


def room(directory: Path) -> tuple[int, int]:
    """How many bytes and files may be written where ``directory`` lies or is to be made (-1 files: the file
    system has no limit).

    Raises OSError. A quota of the user's may leave less.
    """
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else -1


def set_aside(directory: Path) -> None:
    """Name a damaged checkpoint so that nobody takes it for one: it stays on the disk, in place of one of the
    same step that was set aside before. Nothing where it is gone. Raises OSError when the disk refuses.
    """
    if directory.exists():
        aside = directory.with_name(f"{directory.name}{DAMAGED}")
        if aside.exists():
            shutil.rmtree(aside)
        directory.rename(aside)
        sync_directory(directory.parent)


def checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints in ``root``, oldest first."""
    found = [path for path in root.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted((path for path in found if (path / MANIFEST).exists()), key=_step)


def _put_in_place(directory: Path, final: Path) -> None:
    stale = final.with_name(f"{final.name}.stale")
    if final.exists():  # the same step once more, after a rollback to an older checkpoint
        shutil.rmtree(stale, ignore_errors=True)
        final.rename(stale)
    # The last step of all: a folder without .partial in its name is complete, whenever a writer or the
    # daemon dies (docs/mechanisms/checkpoints.md).
    directory.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(stale, ignore_errors=True)


def _check_whole(directory: Path, manifest: Manifest) -> None:
    """Every file was durable when it was told of; somebody who makes room may have removed it since."""
    for entry in manifest.buckets:
        try:
            size = (directory / entry.file).stat().st_size
        except FileNotFoundError:
            size = -1
        if size != entry.num_bytes:
            what = "is gone" if size < 0 else f"has {size} of {entry.num_bytes} bytes"
            raise ValueError(f"{entry.file} {what}, though it was written")


def _tidy(directory: Path, manifest: Manifest) -> None:
    """Drop what writers left that were killed in the middle of a file."""
    named = {entry.file for entry in manifest.buckets}
    for path in directory.iterdir():
        if path.name not in named and path.suffix == TEMPORARY:
            path.unlink(missing_ok=True)


def _prune(newest: Path, keep: int, spared: Collection[str]) -> None:
    """Keep the newest checkpoints, those that somebody may roll back to, and those that somebody reads; drop
    partial folders of earlier steps, which nobody will finish.
    """
    old = [path for path in checkpoints(newest.parent) if _step(path) <= _step(newest)][:-keep]
    abandoned = [
        path
        for path in newest.parent.glob(f"step-*{PARTIAL}")
        if _STEP.match(path.name) and _step(path) < _step(newest)
    ]
    there = {Path(path).resolve() for path in spared}
    for path in [*(path for path in old if path.resolve() not in there), *abandoned]:
        with free(path) as unheld:
            if unheld:
                shutil.rmtree(path, ignore_errors=True)


def _step(path: Path) -> int:
    match = _STEP.match(path.name)
    assert match is not None
    return int(match[1])
