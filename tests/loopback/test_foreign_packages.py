"""Somebody else's packages ``worker``, ``planner`` and ``console``, and more, in the current directory and on
PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from oobleckd.ctl.reference import to_toml
from oobleckd.protocol.job import table_of
from tests.helpers.cluster import BIN, Cluster, tiny_job

FOREIGN = ("console", "planner", "worker")
TRAP = "import os, sys\nos.write(2, b'a stranger was imported')\nsys.exit(99)\n"


def strangers(folder: Path, *more: str) -> Path:
    for name in (*FOREIGN, *more):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(TRAP, encoding="utf-8")
    return folder


def test_a_job_and_its_verification_among_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = strangers(tmp_path / "path")
    # What the current directory has is not imported whatever its name is; PYTHONPATH is the user's own word.
    monkeypatch.chdir(strangers(tmp_path / "here", "oobleckd", "msgspec", "torch"))
    for name, steps in (("short", 2), ("tiny", 8)):
        job = tiny_job(name, train={"steps": steps, "global_batch": 8}, resources={"device_memory": 0})
        Path(f"{name}.toml").write_text(to_toml(table_of(job)), encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [str(on_path), before]))
    with Cluster(tmp_path / "c", 3, env={"PYTHONPATH": path}) as cluster:
        cluster.ctl("submit", "short.toml", "--wait")
        cluster.ctl("submit", "tiny.toml")
        cluster.ctl("wait", "tiny", "--for", "step=2")
        cluster.ctl("kill-node", "node-2")
        cluster.ctl("wait", "tiny", "--for", "state=done")
        cluster.ctl("start-node", "node-2")
        cluster.ctl("verify", "tiny", "--single")
        words = ("--once", "--socket", str(cluster.home.socket))
        screen = subprocess.run(
            [BIN / "oobleck-console", *words], env=cluster.env, capture_output=True, text=True, check=False
        )
        assert (screen.returncode, screen.stderr) == (0, "")
        assert "tiny" in screen.stdout
        logs = "".join(file.read_text(errors="replace") for file in cluster.home.state.rglob("*.log"))
        assert "a stranger" not in logs
