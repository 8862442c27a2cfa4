"""What the daemon says of where it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.daemon.app import warn_of_place

STATE = Path("/home/you/oobleck/daemon")


@pytest.mark.parametrize(
    ("kind", "warned"), [("ext4", 0), ("tmpfs", 0), ("overlay", 0), ("nfs4", 1), ("cifs", 1), ("fuse.own", 1)]
)
def test_a_journal_on_another_machine_s_disk_is_warned_of(
    kind: str, warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:9 / /home rw - {kind} filer:/home rw\n")
    warn_of_place(STATE, mounts)
    assert [record.args for record in caplog.records] == [(STATE, kind, "/home")] * warned
