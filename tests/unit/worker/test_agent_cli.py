"""The command line of the agent: what it takes, what it refuses, what it never imports."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from zmq.auth import create_certificates

from oobleckd.daemon.keys import make_node_keys, make_server_keys
from oobleckd.host import gpus
from oobleckd.protocol.gpus import GpuTrouble
from oobleckd.worker.agent import main as agent
from oobleckd.worker.agent.clouds import Aws
from oobleckd.worker.agent.node import AgentConfig


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> list[AgentConfig]:
    """The configurations with which an agent would have run."""
    seen: list[AgentConfig] = []

    def run(config: AgentConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(agent, "run_agent", run)
    return seen


def invoke(tmp_path: Path, *options: str) -> tuple[int, str]:
    arguments = ["--node=n1", "--daemon=tcp://127.0.0.1:7077", f"--run-dir={tmp_path}", *options]
    result = CliRunner().invoke(agent.main, arguments)
    return result.exit_code, result.stderr


def test_defaults(tmp_path: Path, config: list[AgentConfig]) -> None:
    assert invoke(tmp_path) == (0, "")
    (seen,) = config
    assert (seen.node, seen.num_devices, seen.keys) == ("n1", 1, None)
    assert (seen.setting.kind, seen.setting.bind, seen.setting.run_dir) == ("cpu", "127.0.0.1", tmp_path)
    assert seen.setting.host == agent.host_identity()
    assert seen.zone == ""


def test_the_zone_is_taken_from_the_command_line_or_the_environment(
    tmp_path: Path, config: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke(tmp_path, "--zone=east") == (0, "")
    monkeypatch.setenv("OOBLECK_ZONE", "west")
    assert invoke(tmp_path) == (0, "")
    assert [seen.zone for seen in config] == ["east", "west"]


def test_what_ends_a_node_is_named(tmp_path: Path, config: list[AgentConfig]) -> None:
    assert invoke(tmp_path, "--notice-s=20", "--notices=aws") == (0, "")
    assert invoke(tmp_path) == (0, "")
    assert config[0].notice_s == 20.0
    assert isinstance(config[0].notices, Aws)
    assert (config[1].notice_s, config[1].notices) == (0.0, None)


def test_keys_are_read(tmp_path: Path, config: list[AgentConfig]) -> None:
    create_certificates(tmp_path, "n1")
    create_certificates(tmp_path, "server")
    keys = (f"--key={tmp_path / 'n1.key_secret'}", f"--server-key={tmp_path / 'server.key'}")
    assert invoke(tmp_path, *keys) == (0, "")
    assert config[0].keys is not None
    assert {len(config[0].keys.public), len(config[0].keys.secret), len(config[0].keys.server)} == {40}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--bind=0.0.0.0"], "--bind 0.0.0.0 is no address that others could reach"),
        (["--bind=::"], "--bind :: is no address"),
        (["--bind=here"], "--bind 'here' is no address"),
        (["--devices=0"], "--devices '0' is no number of devices"),
        (["--devices=two"], "--devices 'two' is no number of devices"),
        (["--notices=nobody"], "--notices: no source of notices is called 'nobody'"),
        (["--key=missing"], "--server-key is missing"),
        (["--server-key=missing"], "--key is missing"),
        (["--key=missing", "--server-key=missing"], "missing: "),
    ],
)
def test_errors_say_what_and_what_next(
    tmp_path: Path, config: list[AgentConfig], options: list[str], problem: str
) -> None:
    code, stderr = invoke(tmp_path, *options)
    assert code == 2
    assert stderr.startswith(f"error: {problem}")
    assert "\nhint: " in stderr
    assert config == []


def test_values_come_from_variables_and_files(
    tmp_path: Path, config: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "oobleck.toml"
    file.write_text(
        '[worker]\ndaemon = "tcp://10.0.0.1:1"\ndevices = 3\nbind = "10.0.0.2"\n[daemon]\nx = 1\n'
    )
    monkeypatch.setenv("OOBLECK_BIND", "10.0.0.3")
    result = CliRunner().invoke(agent.main, ["--node=n1", f"--run-dir={tmp_path}"])
    assert (result.exit_code, result.stderr) == (0, "")
    (seen,) = config
    assert (seen.daemon, seen.num_devices, seen.setting.bind) == ("tcp://10.0.0.1:1", 3, "10.0.0.3")
    assert invoke(tmp_path, "--devices=2", "--bind=10.0.0.4") == (0, "")
    assert (config[1].num_devices, config[1].setting.bind) == (2, "10.0.0.4")
    file.write_text('[worker]\nbnid = "10.0.0.2"\n')
    code, stderr = invoke(tmp_path)
    assert (code, stderr) == (2, f"error: {file}: unknown key worker.bnid\nhint: did you mean 'bind'?\n")


def test_a_service_finds_its_folders(
    tmp_path: Path, config: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_node_keys(tmp_path / "keys", "n1")
    make_server_keys(tmp_path / "keys")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    assert CliRunner().invoke(agent.main, ["--node=n1"]).exit_code == 0
    assert config[0].setting.run_dir == tmp_path / "run"
    assert config[0].keys is not None
    missing = CliRunner().invoke(agent.main, ["--node=n2"])
    assert missing.stderr.startswith(
        f"error: {tmp_path}/keys/nodes/n2.key_secret: there is no such key\nhint: make"
    )


def test_keys_of_a_service_may_be_credentials(
    tmp_path: Path, config: list[AgentConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, server = make_node_keys(tmp_path / "made", "n1"), make_server_keys(tmp_path / "made")
    store = tmp_path / "credentials"
    store.mkdir()
    shutil.copy(tmp_path / "made/nodes/n1.key_secret", store / "oobleck.n1.key_secret")
    shutil.copy(tmp_path / "made/server.key", store / "oobleck.server.key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(store))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "empty"))
    assert invoke(tmp_path) == (0, "")
    assert config[0].keys is not None
    assert (config[0].keys.secret, config[0].keys.server) == (node.secret, server.public)


def test_usage_is_explained(tmp_path: Path) -> None:
    without = CliRunner().invoke(agent.main, [f"--run-dir={tmp_path}"])
    assert (without.exit_code, without.stderr) == (
        2,
        "error: --node is missing\nhint: see `oobleck-worker --help`\n",
    )
    nowhere = CliRunner().invoke(agent.main, ["--node=n1"])
    assert nowhere.stderr.startswith("error: there is no folder to run in\nhint: name one with --run-dir")


def test_a_public_key_is_no_key_pair(tmp_path: Path, config: list[AgentConfig]) -> None:
    create_certificates(tmp_path, "n1")
    public = tmp_path / "n1.key"
    code, stderr = invoke(tmp_path, f"--key={public}", f"--server-key={public}")
    assert (code, config) == (2, [])
    assert "holds no secret key" in stderr


def test_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found: tuple[int, GpuTrouble | None] = (3, None)
    monkeypatch.setattr(gpus, "usable", lambda _devices: found)
    assert agent.num_devices("auto", "cuda") == 3
    assert agent.num_devices("auto", "cpu") == 1
    found = (0, GpuTrouble("none-visible", "no CUDA device", "look at the driver"))
    with pytest.raises(agent.AgentError, match="no CUDA device"):
        agent.num_devices("auto", "cuda")


def test_the_agent_never_imports_torch() -> None:
    code = (
        "import sys, oobleckd.worker.agent.main; print([m for m in ('torch', 'numpy', 'aiohttp') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
