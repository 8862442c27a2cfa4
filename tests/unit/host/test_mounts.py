"""On which kind of file system a path lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.host.mounts import Mount, mount_of

MOUNTS = r"""21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:21 / /proc rw - proc proc rw
23 21 0:40 /vol/home /home rw shared:9 master:2 - nfs4 filer:/home rw,vers=4.2
24 21 0:41 / /tmp rw - tmpfs tmpfs rw
25 23 8:17 / /home/local rw - xfs /dev/sdb1 rw
26 21 0:42 / /mnt/two\040words rw - cifs //filer/a rw
27 21 0:43 / /scratch rw - autofs systemd-1 rw
28 27 0:44 / /scratch rw - lustre mds@tcp:/scratch rw
29 21 0:45 / /mnt/s3 rw - fuse.mountpoint-s3 mountpoint-s3 rw
30 21 0:46 / /mnt/own rw - fuse.own own rw
31 21 0:47 / /mnt/blk rw - fuseblk /dev/sdc1 rw
32 21 0:48 / /mnt/share rw - 9p share rw
odd line
"""


@pytest.mark.parametrize(
    ("path", "kind", "unfit"),
    [
        ("/var/lib/oobleck", "ext4", ""),
        ("/home/you/.local/state/oobleck/daemon", "nfs4", "network"),
        ("/home/local/oobleck", "xfs", ""),
        ("/home2/you", "ext4", ""),
        ("/tmp", "tmpfs", "memory"),
        ("/mnt/two words/a", "cifs", "network"),
        ("/scratch/you", "lustre", ""),
        ("/mnt/s3/a", "fuse.mountpoint-s3", "network"),
        ("/mnt/own/a", "fuse.own", "unknown"),
        ("/mnt/blk/a", "fuseblk", ""),
        ("/mnt/share/a", "9p", "network"),
    ],
)
def test_kinds(path: str, kind: str, unfit: str, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = mount_of(Path(path), mounts)
    assert (found.kind, found.unfit) == (kind, unfit)


@pytest.mark.parametrize(("kind", "unfit"), [("overlay", "container"), ("ceph", ""), ("smb3", "network")])
def test_more_kinds(kind: str, unfit: str) -> None:
    assert Mount("/", kind).unfit == unfit


def test_a_link_is_followed(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    (tmp_path / "there").mkdir()
    mounts.write_text(f"1 0 8:1 / / rw - ext4 a rw\n2 1 0:9 / {tmp_path / 'there'} rw - nfs b rw\n")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert mount_of(tmp_path / "link" / "not yet", mounts).unfit == "network"


def test_this_machine(tmp_path: Path) -> None:
    assert mount_of(Path("/proc/self")).kind == "proc"
    assert mount_of(tmp_path).kind
    assert mount_of(tmp_path, tmp_path / "none") == Mount("/", "")
