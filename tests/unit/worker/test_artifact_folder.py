"""An artifact on disk and as an archive: whole, or of no use."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from oobleckd.worker.artifacts import folder as artifact
from oobleckd.worker.artifacts.folder import DamagedArtifact


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    (folder / "ab").mkdir(parents=True)
    (folder / "locks").mkdir()
    (folder / "ab" / "x.so").write_bytes(b"\x7fELF program")
    (folder / "y.py").write_text("call = 1")
    (folder / "locks" / "x.lock").touch()
    artifact.seal(folder)
    return folder


def test_it_comes_out_as_it_went_in(tmp_path: Path, made: Path) -> None:
    artifact.pack(made, tmp_path / "archive")
    artifact.unpack(tmp_path / "archive", tmp_path / "there")
    assert artifact.is_intact(tmp_path / "there")
    files = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    there = {
        path.relative_to(tmp_path / "there") for path in (tmp_path / "there").rglob("*") if path.is_file()
    }
    assert there == files - {Path("locks/x.lock")}
    assert not artifact.has_grown(made)


@pytest.mark.parametrize(
    "harm",
    [
        lambda made: (made / "ab" / "x.so").write_bytes(b"\x7fELF Program"),
        lambda made: (made / "y.py").unlink(),
        lambda made: (made / artifact.MANIFEST).unlink(),
        lambda made: (made / artifact.MANIFEST).write_text("{"),
    ],
)
def test_a_change_of_any_file_shows(made: Path, harm) -> None:
    assert artifact.is_intact(made)
    harm(made)
    assert not artifact.is_intact(made)


def test_what_is_added_shows(made: Path) -> None:
    (made / "ab" / "z.so").touch()
    assert artifact.is_intact(made)
    assert artifact.has_grown(made)


def test_the_first_that_is_whole_stays_and_what_is_not_goes(tmp_path: Path, made: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "half").touch()
    artifact.place(made, folder)
    assert artifact.is_intact(folder)
    second = tmp_path / "second"
    second.mkdir()
    artifact.seal(second)
    artifact.place(second, folder)
    assert (folder / "y.py").exists()
    assert not second.exists()


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_half_an_archive_is_none(tmp_path: Path, made: Path, cut: int) -> None:
    artifact.pack(made, tmp_path / "archive")
    data = (tmp_path / "archive").read_bytes()
    (tmp_path / "archive").write_bytes(data[:cut])
    with pytest.raises(DamagedArtifact):
        artifact.unpack(tmp_path / "archive", tmp_path / "there")


def test_an_archive_reaches_nothing_outside_its_folder(tmp_path: Path) -> None:
    for number, (name, kind, link) in enumerate(
        (
            ("../out", tarfile.REGTYPE, ""),
            ("/etc/out", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "/etc/passwd"),
            ("hard", tarfile.LNKTYPE, "../secret"),
            ("device", tarfile.CHRTYPE, ""),
        )
    ):
        archive = tmp_path / f"archive{number}"
        with tarfile.open(archive, "w:gz") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member, io.BytesIO())
        with pytest.raises(DamagedArtifact):
            artifact.unpack(archive, tmp_path / f"there{number}")
    assert not (tmp_path / "out").exists()
    assert not Path("/etc/out").exists()


def test_an_archive_that_would_fill_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "_MAX_UNPACKED", 1 << 20)
    bomb = tmp_path / "bomb"
    bomb.mkdir()
    with (bomb / "zeros").open("wb") as file:
        os.truncate(file.fileno(), 1 << 21)
    artifact.seal(bomb)
    artifact.pack(bomb, tmp_path / "archive")
    with pytest.raises(DamagedArtifact, match="too large"):
        artifact.unpack(tmp_path / "archive", tmp_path / "there")
