"""Key files: made once, private, and each naming one node."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import zmq.auth

from oobleckd.daemon import keys


def test_keys_are_made_once_and_secrets_are_private(tmp_path: Path) -> None:
    server = keys.make_server_keys(tmp_path)
    node = keys.make_node_keys(tmp_path, "node-1")
    assert keys.make_server_keys(tmp_path) == server
    assert keys.make_node_keys(tmp_path, "node-1") == node
    for path in (keys.server_secret_path(tmp_path), keys.node_secret_path(tmp_path, "node-1")):
        assert path.stat().st_mode & 0o777 == 0o600
    assert keys.load_pair(keys.node_secret_path(tmp_path, "node-1")) == node
    assert keys.load_public(keys.server_public_path(tmp_path)) == server.public
    assert not list(tmp_path.rglob(".*")), "no half-written file stays"


def test_files_are_those_of_zmq_auth(tmp_path: Path) -> None:
    pair = keys.make_node_keys(tmp_path, "node-1")
    assert zmq.auth.load_certificate(keys.node_secret_path(tmp_path, "node-1")) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(keys.authorized_path(tmp_path, "node-1")) == (pair.public, None)


def test_allow_list_maps_keys_to_nodes(tmp_path: Path) -> None:
    pairs = {node: keys.make_node_keys(tmp_path, node) for node in ("node-2", "node-1")}
    expected = {pair.public.decode(): node for node, pair in pairs.items()}
    assert keys.load_authorized(tmp_path) == expected
    assert keys.load_authorized(tmp_path / "elsewhere") == {}


def test_a_key_of_two_nodes_is_refused(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path, "a")
    shutil.copy(keys.authorized_path(tmp_path, "a"), keys.authorized_path(tmp_path, "b"))
    with pytest.raises(keys.KeyFileError, match="a has the same key") as caught:
        keys.load_authorized(tmp_path)
    assert "keygen b" in caught.value.hint


@pytest.mark.parametrize("name", ["../up", "", "UPPER", "a/b", ".hidden"])
def test_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(keys.KeyFileError, match="no name for a node"):
        keys.node_secret_path(tmp_path, name)


def test_damaged_and_missing_files_say_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "x.key_secret"
    with pytest.raises(keys.KeyFileError, match="no such key") as caught:
        keys.load_pair(path)
    assert "keygen" in caught.value.hint
    path.write_text("nonsense\n")
    with pytest.raises(keys.KeyFileError, match="no key file"):
        keys.load_pair(path)
    path.write_text('metadata\ncurve\n    public-key = "short"\n    secret-key = "short"\n')
    with pytest.raises(keys.KeyFileError, match="40 characters"):
        keys.load_pair(path)
    keys.make_server_keys(tmp_path)
    with pytest.raises(keys.KeyFileError, match="no secret key"):
        keys.load_pair(keys.server_public_path(tmp_path))


def test_a_pair_does_not_print_its_secret(tmp_path: Path) -> None:
    pair = keys.make_server_keys(tmp_path)
    assert pair.secret.decode() not in repr(pair)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_makes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12346)
    keys.make_server_keys(folder)
    keys.make_node_keys(folder, "n1")
    found = sorted(folder.rglob("*"))
    assert len(found) == 6
    assert {(path.stat().st_uid, path.stat().st_gid) for path in found} == {(12345, 12346)}


def test_a_pair_that_is_kept_elsewhere_is_taken_and_its_public_key_is_there(tmp_path: Path) -> None:
    pair = keys.make_server_keys(tmp_path / "store")
    given = keys.server_secret_path(tmp_path / "store")
    assert keys.make_server_keys(tmp_path / "keys", given) == pair
    assert keys.load_public(keys.server_public_path(tmp_path / "keys")) == pair.public
    assert not keys.server_secret_path(tmp_path / "keys").exists()
    assert keys.has_server_keys(tmp_path / "keys")


def test_a_folder_in_which_nothing_is_missing_is_not_written_to(tmp_path: Path) -> None:
    keys.make_server_keys(tmp_path)
    public = keys.server_public_path(tmp_path)
    before = public.stat()
    keys.make_server_keys(tmp_path)
    assert public.stat().st_ino == before.st_ino


# ---------------------------------------------------------------------- what was written is what is read


@pytest.mark.parametrize(
    "found", [b"", b"\n", b"0" * 63, b"g" * 64, b"0" * 128, b"\xff" * 64, b"0" * 32 + b"\n" + b"0" * 32]
)
def test_a_transport_secret_that_is_none_is_refused(tmp_path: Path, found: bytes) -> None:
    """Of one that is empty or short everybody can compute what opens the links between devices."""
    secret = tmp_path / "transport.secret"
    secret.write_bytes(found)
    with pytest.raises(keys.KeyFileError, match=r"transport\.secret: holds no secret") as caught:
        keys.job_secret(tmp_path)
    assert f"rm {secret}" in caught.value.hint
    assert secret.read_bytes() == found
    secret.unlink()
    made = keys.job_secret(tmp_path)
    assert len(bytes.fromhex(made)) == 32
    assert keys.job_secret(tmp_path) == made
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_transport_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transport.secret").mkdir()
    with pytest.raises(keys.KeyFileError, match="cannot be read"):
        keys.job_secret(tmp_path)


@pytest.mark.parametrize("left", [b"", b"\xff\xfe\x00", 20, 100, -10])
def test_a_key_file_that_was_cut_short_or_emptied_is_refused(tmp_path: Path, left: bytes | int) -> None:
    keys.make_server_keys(tmp_path)
    path = keys.server_secret_path(tmp_path)
    path.write_bytes(left if isinstance(left, bytes) else path.read_bytes()[:left])
    with pytest.raises(keys.KeyFileError, match=r"server\.key_secret") as caught:
        keys.make_server_keys(tmp_path)
    assert caught.value.hint


def test_a_secret_key_of_another_pair_and_one_of_other_characters_are_refused(tmp_path: Path) -> None:
    one, other = keys.make_node_keys(tmp_path, "a"), keys.make_node_keys(tmp_path, "b")
    path = keys.node_secret_path(tmp_path, "a")
    text = path.read_bytes()
    path.write_bytes(text.replace(one.secret, other.secret))
    with pytest.raises(keys.KeyFileError, match="not that of its public key"):
        keys.load_pair(path)
    path.write_bytes(text.replace(one.secret, b" " * 40))
    with pytest.raises(keys.KeyFileError, match=r"a\.key_secret: a key has 40 characters"):
        keys.load_pair(path)


def test_secrets_are_synced_with_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they have their name, as a power cut must leave none that is empty."""
    synced: list[str] = []
    before = os.fsync

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        before(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    keys.job_secret(tmp_path)
    keys.make_node_keys(tmp_path, "a")
    files = [path for path in synced if not Path(path).is_dir()]
    assert len(files) == 3
    assert synced[0].startswith(f"{tmp_path}/.transport.secret.")
    assert synced[1] == str(tmp_path)
    assert {str(tmp_path / "nodes"), str(tmp_path / "authorized")} < set(synced)
