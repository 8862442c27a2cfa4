"""The command line of the agent: what it takes, what it refuses, what it never imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from zmq.auth import create_certificates

from worker import agent
from worker.node import AgentConfig


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


def test_a_public_key_is_no_key_pair(tmp_path: Path, config: list[AgentConfig]) -> None:
    create_certificates(tmp_path, "n1")
    public = tmp_path / "n1.key"
    code, stderr = invoke(tmp_path, f"--key={public}", f"--server-key={public}")
    assert (code, config) == (2, [])
    assert "holds no secret key" in stderr


def test_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2, 3")
    assert agent.num_devices("auto", "cuda") == 3
    assert agent.num_devices("auto", "cpu") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(agent.AgentError, match="no GPU"):
        agent.num_devices("auto", "cuda")


def test_the_agent_never_imports_torch() -> None:
    code = "import sys, worker.agent; print([m for m in ('torch', 'numpy', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
