"""Where settings come from, which one wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oobleckd.daemon.config import Config, is_loopback, load_config
from oobleckd.host.settings import ConfigError, LoadedSettings, config_files


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def load(
    *files: Path, flags: dict[str, Any] | None = None, env: dict[str, str] | None = None
) -> LoadedSettings[Config]:
    return load_config(flags or {}, env or {}, files)


def test_defaults() -> None:
    loaded = load()
    assert loaded.config.curve
    assert not loaded.config.allow_injection
    assert set(loaded.origins.values()) == {"default"}


def test_flag_over_environment_over_files(tmp_path: Path) -> None:
    near = write(tmp_path / "near.toml", "[daemon]\nheartbeat_s = 2\nlease_s = 20\ngroup = 'near'\n")
    far = write(
        tmp_path / "far.toml", "[daemon]\nheartbeat_s = 1\ngrace_s = 3\ngroup = 'far'\n[ctl]\nx = 1\n"
    )
    loaded = load(
        near,
        tmp_path / "none.toml",
        far,
        flags={"group": "flag", "state_dir": None},
        env={"OOBLECK_LEASE_S": "30"},
    )
    config = loaded.config
    assert (config.heartbeat_s, config.lease_s, config.grace_s, config.group) == (2, 30, 3, "flag")
    assert loaded.origins["heartbeat_s"] == str(near)
    assert loaded.origins["lease_s"] == "OOBLECK_LEASE_S"
    assert loaded.origins["grace_s"] == str(far)
    assert loaded.origins["group"] == "--group"
    assert loaded.origins["state_dir"] == "default"


def test_files_in_order(tmp_path: Path) -> None:
    files = config_files(tmp_path / "home", tmp_path / "cwd")
    assert [path.name for path in files] == ["oobleck.toml", "config.toml", "config.toml"]
    assert files[-1] == Path("/etc/oobleck/config.toml")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load(env={"OOBLECK_ALLOW_INJECTION": text}).config.allow_injection is value


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("[daemon]\nheartbeats_s = 1\n", "unknown key daemon.heartbeats_s", "did you mean 'heartbeat_s'?"),
        ("[daemn]\n", "unknown key 'daemn'", "did you mean 'daemon'?"),
        ("heartbeat_s = 1\n", "unknown key 'heartbeat_s'", "write it under [daemon]"),
        ("daemon = 1\n", "daemon is no table", "write [daemon]"),
        ("[daemon]\nheartbeat_s = 'fast'\n", "heartbeat_s is 'fast', and has to be a number", ""),
        ("[daemon]\nheartbeat_s = 0\n", "heartbeat_s is 0, and has to be a number above 0", ""),
        ("[daemon]\nlog_level = 'loud'\n", "log_level is 'loud', and has to be 'debug'", ""),
        ("[daemon\n", "is no TOML", ""),
        ("[daemon]\nheartbeat_s = 6\n", "shorter than two heartbeats", "at least 2 * heartbeat_s"),
        ("[daemon]\nendpoint = 'here'\n", "endpoint = 'here' is none", "tcp://"),
        ("[daemon]\nendpoint = 'tcp://127.0.0.1'\n", "has no port", "tcp://"),
        ("[daemon]\nendpoint = 'tcp://0.0.0.0:1'\ncurve = false\n", "beyond this machine", "keygen"),
        ("[daemon]\nmetrics = '0.0.0.0:9464'\n", "would be read by everybody", "127.0.0.1"),
        ("[daemon]\nmetrics = 'here'\n", "metrics = 'here' has no port", "127.0.0.1:9464"),
        ("[daemon]\ntraces = 'collector:4318'\n", "is no URL", "http://127.0.0.1:4318"),
    ],
)
def test_errors_say_where_what_and_what_next(tmp_path: Path, text: str, problem: str, hint: str) -> None:
    path = write(tmp_path / "oobleck.toml", text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert problem in str(caught.value)
    assert hint in caught.value.hint
    if "beyond" not in problem and "two heartbeats" not in problem:
        assert caught.value.where == str(path)


def test_a_slip_in_a_variable_is_an_error_and_a_foreign_one_is_not() -> None:
    load(env={"OOBLECK_INCIDENT": "x", "OOBLECK_OUTPUT": "json"})
    with pytest.raises(ConfigError, match="OOBLECK_ENDPONT") as caught:
        load(env={"OOBLECK_ENDPONT": "tcp://127.0.0.1:0"})
    assert "OOBLECK_ENDPOINT" in caught.value.hint


def test_a_variable_by_its_old_name_is_an_error_that_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match="OOBLECK_ROAD: this variable has a new name") as caught:
        load(env={"OOBLECK_ROAD": "staged"})
    assert caught.value.hint == "set OOBLECK_BACKEND instead, and unset OOBLECK_ROAD"


def test_a_key_by_its_old_name_is_an_error_that_names_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[daemon]\nbeat_s = 1\n")
    with pytest.raises(ConfigError, match=r"unknown key daemon\.beat_s") as caught:
        load(path)
    assert caught.value.hint == "it has a new name: write 'heartbeat_s'"
    with pytest.raises(ConfigError, match="OOBLECK_BEAT_S") as caught:
        load(env={"OOBLECK_BEAT_S": "1"})
    assert "OOBLECK_HEARTBEAT_S" in caught.value.hint


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_paths_follow_the_state_folder(tmp_path: Path) -> None:
    config = load(flags={"state_dir": str(tmp_path)}).config
    assert config.socket_path == tmp_path / "run/oobleckd.sock"
    assert config.keys_path == tmp_path / "keys"
    assert load(flags={"socket": "/x/y.sock", "keys_dir": "/k"}).config.socket_path == Path("/x/y.sock")


def test_a_service_lives_where_systemd_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    config = load().config
    assert config.state_path == tmp_path / "state"
    assert config.keys_path == tmp_path / "state/keys"
    assert config.socket_path == tmp_path / "run/oobleckd.sock"
    assert load(flags={"state_dir": "/elsewhere"}).config.state_path == Path("/elsewhere")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://example.org:1", False),
    ],
)
def test_loopback(endpoint: str, expected: bool) -> None:
    assert is_loopback(endpoint) is expected
