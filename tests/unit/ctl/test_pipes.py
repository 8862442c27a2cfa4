"""Whatever stands at the end of a pipe: the right exit code, at most one sentence, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oobleckd.ctl.main import main
from oobleckd.ctl.output import FAILED, UNREACHABLE, USAGE
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl

CTL = f"{sys.executable} -P -m oobleckd.ctl.main"
assert main.name


def shell(command: str, tmp_path: Path, socket: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OOBLECK_SOCKET": str(socket), "OOBLECK_STATE": str(tmp_path / "none")}
    return subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        (">/dev/full", FAILED, 2), (">&-", FAILED, 2), (">/dev/full 2>/dev/full", FAILED, 0),
        (">&- 2>&- <&-", FAILED, 0), ("| true", FAILED, 0), ("2>&- >/dev/null", 0, 0),
    ],
)  # fmt: skip
def test_an_answer_that_nobody_takes_is_one_sentence(
    ctl: Ctl, tmp_path: Path, ends: str, code: int, says: int
) -> None:
    """A full disk, a closed descriptor, a reader that has gone."""
    ctl.api.jobs = [job_view()] * 3000  # more than a pipe holds
    done = shell(f"{CTL} get jobs {ends}", tmp_path, ctl.socket)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, says), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("verb", "code"), [("nosuch", USAGE), ("get jobs", UNREACHABLE)])
def test_an_error_that_nobody_reads_keeps_its_exit_code(tmp_path: Path, verb: str, code: int) -> None:
    """stderr may be full or closed as well."""
    for ends in ("2>/dev/full", "2>&-", "2> >(true)"):
        assert shell(f"{CTL} {verb} {ends}", tmp_path, tmp_path / "s").returncode == code


@pytest.mark.usefixtures("based")
def test_a_job_that_failed_says_so_by_its_exit_code_whoever_reads(ctl: Ctl, tmp_path: Path) -> None:
    """``submit --wait`` is asked how the job ended."""
    ctl.api.jobs = [job_view(state="failed", cause="not-finite")]
    file = tmp_path / "job.toml"
    file.write_text('name = "small"\n[train]\nsteps = 3\nglobal_batch = 4\nmicro_batch = 2\nsequence = 8\n')
    for ends in (">/dev/full", ">&-"):
        assert shell(f"{CTL} submit --wait {file} {ends}", tmp_path, ctl.socket).returncode == 6
