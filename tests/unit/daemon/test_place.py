"""A state folder that was moved is the same one, and a copy is not: it is refused until it is adopted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from oobleckd.daemon import place
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.place import CopiedState, DaemonPlace, check, is_same


def incarnation(folder: Path, *, adopt: bool = False) -> tuple[str, ...]:
    journal = Journal(folder, step_of=lambda _: None, on_trouble=lambda _: None)
    try:
        check(journal, adopt=adopt)
        return journal.names
    finally:
        journal.close()


def test_a_copy_is_refused_until_it_is_adopted(tmp_path: Path) -> None:
    name = incarnation(tmp_path / "state")
    for number in range(3):
        shutil.copytree(tmp_path / "state", tmp_path / f"copy-{number}")
    with pytest.raises(CopiedState) as caught:
        incarnation(tmp_path / "copy-0")
    assert f"{tmp_path}/copy-0 is a copy: its journal is that of {tmp_path}/state" in caught.value.problem
    assert "--adopt" in caught.value.hint
    adopted = incarnation(tmp_path / "copy-0", adopt=True)
    assert adopted[1:] == name
    assert adopted[0] not in name
    assert incarnation(tmp_path / "copy-0") == adopted
    assert incarnation(tmp_path / "copy-0", adopt=True) == adopted, "what is no copy is what it was"
    assert incarnation(tmp_path / "state") == name
    assert incarnation(tmp_path / "copy-1", adopt=True)[0] not in adopted


def test_what_was_moved_starts_and_knows_its_copies(tmp_path: Path) -> None:
    name = incarnation(tmp_path / "state")
    (tmp_path / "state").rename(tmp_path / "moved")
    assert incarnation(tmp_path / "moved") == name
    shutil.copytree(tmp_path / "moved", tmp_path / "state")
    with pytest.raises(CopiedState):
        incarnation(tmp_path / "state")


def test_one_that_was_restored_where_it_was_starts(tmp_path: Path) -> None:
    if not place.place_of(tmp_path).machine:
        return  # of such a machine nobody can tell
    name = incarnation(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    shutil.rmtree(tmp_path / "state")
    shutil.copytree(tmp_path / "backup", tmp_path / "state")
    assert incarnation(tmp_path / "state") == name


def test_a_mended_journal_is_no_copy(tmp_path: Path) -> None:
    name = incarnation(tmp_path / "state")
    (tmp_path / "state" / "journal.sqlite").write_bytes(b"")
    assert incarnation(tmp_path / "state") == name


@pytest.mark.parametrize(
    ("here", "same"),
    [
        (DaemonPlace("/state", "m", 7, 1), True),
        (DaemonPlace("/state", "m", 7, 2), True),  # the machine started anew and numbers its disks otherwise
        (DaemonPlace("/state", "other", 7, 2), True),  # a volume that another container has now
        (DaemonPlace("/moved", "m", 7, 1), True),
        (
            DaemonPlace("/state", "m", 8, 1),
            True,
        ),  # a file system that numbers its files anew, or a backup in its place
        (DaemonPlace("/copy", "m", 8, 1), False),
        (DaemonPlace("/copy", "m", 7, 2), False),  # another disk has given out the same number
        (DaemonPlace("/state", "other", 8, 1), False),  # a backup on another machine
    ],
)
def test_what_tells_a_folder_from_its_copy(here: DaemonPlace, same: bool) -> None:
    assert is_same(DaemonPlace("/state", "m", 7, 1), here) is same


def test_a_path_says_nothing_where_machines_have_no_names() -> None:
    assert not is_same(DaemonPlace("/state", "", 7, 1), DaemonPlace("/state", "", 8, 1))
    assert is_same(DaemonPlace("/state", "", 7, 1), DaemonPlace("/state", "", 7, 3))


def test_the_file_that_tells_is_never_written_again(tmp_path: Path) -> None:
    incarnation(tmp_path / "state")
    before = (tmp_path / "state" / place.FILE).stat()
    incarnation(tmp_path / "state")
    assert (tmp_path / "state" / place.FILE).stat() == before
