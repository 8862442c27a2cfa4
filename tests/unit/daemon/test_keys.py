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
