"""Which folder a job's checkpoints go into, when it is submitted and when another incarnation of the daemon
finds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.core.events import FolderFound
from oobleckd.daemon.folders import Folders, JobFolder
from oobleckd.host.folder import FolderMark, ForeignFolder, claim, mark_of


def test_the_next_number_that_nobody_has(tmp_path: Path) -> None:
    ours, theirs = Folders(["ours"]), Folders(["theirs"])
    assert theirs.new(tmp_path / "ck", "q", 1) == "q-1"
    assert ours.new(tmp_path / "ck", "q", 1) == "q-2"
    assert ours.new(tmp_path / "ck", "other", 3) == "other-3"
    assert theirs.new(tmp_path / "ck", "q", 2) == "q-3"


def test_what_an_older_version_left_gets_the_mark(tmp_path: Path) -> None:
    (tmp_path / "q-1" / "step-00000010").mkdir(parents=True)
    assert Folders(["ours"]).look(JobFolder("q-1", "q", tmp_path, ""), 2) == FolderFound("q-1", "q-1")
    assert mark_of(tmp_path / "q-1") == FolderMark("ours", "q-1")


def test_two_that_an_older_version_had_write_into_one_folder_are_parted(tmp_path: Path) -> None:
    (tmp_path / "q-1" / "step-00000010").mkdir(parents=True)
    job = JobFolder("q-1", "q", tmp_path, "")
    Folders(["theirs"]).look(job, 2)
    found = Folders(["ours"]).look(job, 2)
    assert found is not None
    assert found.folder == "q-2"
    assert found.why
    assert mark_of(tmp_path / "q-1") == FolderMark("theirs", "q-1")


def test_a_disk_that_is_away_is_left_alone(tmp_path: Path) -> None:
    folders = Folders(["ours"])
    assert folders.look(JobFolder("q-1", "q", tmp_path, "q-1"), 2) is None
    folders.enter("q-1", tmp_path / "q-1")
    assert not [*tmp_path.iterdir()]


def test_another_disk_in_its_place_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "q-1" / "step-00000010").mkdir(parents=True)
    found = Folders(["ours"]).look(JobFolder("q-1", "q", tmp_path, "q-1"), 2)
    assert found is not None
    assert found.folder == "q-2"


def test_an_adopted_copy_takes_another_folder_and_completes_what_its_devices_wrote(tmp_path: Path) -> None:
    claim(tmp_path / "q-1", FolderMark("original", "q-1"))
    adopted = Folders(["copy", "original"])
    found = adopted.look(JobFolder("q-1", "q", tmp_path, "q-1"), 2)
    assert found is not None
    assert found.folder == "q-2"
    assert mark_of(tmp_path / "q-2") == FolderMark("copy", "q-2")
    adopted.enter("q-1", tmp_path / "q-1")
    assert mark_of(tmp_path / "q-1") == FolderMark("original", "q-1")
    with pytest.raises(ForeignFolder):
        Folders(["original"]).enter("q-1", tmp_path / "q-2")
