"""Whose a job's checkpoint folder is: one of many who want it has it, and nobody else writes there."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oobleckd.host.folder import MARK, FolderMark, ForeignFolder, claim, disclaim, enter, mark_of

OURS, THEIRS = FolderMark("ours", "q-1"), FolderMark("theirs", "q-1")


def test_of_many_who_claim_a_folder_one_has_it(tmp_path: Path) -> None:
    marks = [FolderMark(f"journal-{number}", "q-1") for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            folder = tmp_path / "ck" / f"q-{number}"
            won = list(pool.map(lambda mark, folder=folder: claim(folder, mark), marks))
            assert won.count(True) == 1
            assert mark_of(folder) == marks[won.index(True)]
            assert [path.name for path in folder.iterdir()] == [MARK]
    assert not [path for path in (tmp_path / "ck").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("left", ["file", "empty", "full", "link", "dangling"])
def test_what_is_there_is_never_claimed(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "q-1"
    match left:
        case "file":
            folder.write_text("mine")
        case "link":
            (tmp_path / "elsewhere").mkdir()
            folder.symlink_to(tmp_path / "elsewhere")
        case "dangling":
            folder.symlink_to(tmp_path / "nowhere")
        case _:
            folder.mkdir()
            if left == "full":
                (folder / "step-00000001").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert not claim(folder, OURS)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_gone_is_made_anew_and_a_foreign_one_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "ck" / "q-1"
    enter(folder, OURS)
    enter(folder, OURS)
    assert mark_of(folder) == OURS
    with pytest.raises(ForeignFolder, match="q-1 of another journal"):
        enter(folder, THEIRS)
    enter(folder, THEIRS, also=["ours"])
    assert mark_of(folder) == OURS


def test_many_who_make_it_anew_at_once_all_may_write(tmp_path: Path) -> None:
    def write(number: int) -> None:
        enter(folder, OURS)
        (folder / f"step-{number}").mkdir()

    with ThreadPoolExecutor(8) as pool:
        for turn in range(30):
            folder = tmp_path / f"q-{turn}"
            list(pool.map(write, range(8)))
            assert len(list(folder.iterdir())) == 9


def test_files_without_a_mark_are_foreign_but_where_one_knows_better(tmp_path: Path) -> None:
    (tmp_path / "q-1" / "step-00000001").mkdir(parents=True)
    with pytest.raises(ForeignFolder, match="has files and no"):
        enter(tmp_path / "q-1", OURS)
    enter(tmp_path / "q-1", OURS, known=True)
    enter(tmp_path / "q-1", OURS)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"journal": 7}'])
def test_a_mark_that_cannot_be_read_is_foreign(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MARK).write_bytes(data)
    with pytest.raises(ForeignFolder):
        enter(tmp_path, OURS, known=True)
    assert (tmp_path / MARK).read_bytes() == data


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_args: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    assert claim(tmp_path / "q-1", OURS)
    assert mark_of(tmp_path / "q-1") == OURS
    assert not claim(tmp_path / "q-1", THEIRS)


def test_who_may_write_beside_it_may_write_into_it(tmp_path: Path) -> None:
    for mode, expected in ((0o2775, 0o2775), (0o700, 0o700), (0o1777, 0o755)):
        root = tmp_path / oct(mode)
        root.mkdir()
        root.chmod(mode)
        claim(root / "q-1", OURS)
        assert (root / "q-1").stat().st_mode & 0o7777 == expected


def test_a_claim_that_was_not_used_is_given_back_and_one_that_was_stays(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        claim(tmp_path / name, OURS)
    (tmp_path / "used" / "step-00000001").mkdir()
    for name in ("used", "unused", "never"):
        disclaim(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
