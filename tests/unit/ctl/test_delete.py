"""``delete`` asks a person, never a script, and deletes nothing but jobs that are over; kubectl's forms of
it, and of names elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import pytest

from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT


@pytest.fixture
def full(ctl: Ctl) -> Ctl:
    ctl.api.jobs = [
        job_view(id="job-1", checkpoint="/c/job-1/step-3"),
        job_view(id="job-2", name="other", state="failed"),
        job_view(id="job-3", name="big", state="running", finished_at=None),
    ]
    ctl.api.nodes = [node_view("node-1")]
    ctl.api.incidents = [INCIDENT]
    ctl.api.on_act = lambda path, _body: Accepted(path.rpartition("/")[2], f"{path} is deleted")
    return ctl


@pytest.mark.parametrize(
    ("words", "deleted"),
    [
        ("job-1", ["job-1"]),
        ("small other", ["job-1", "job-2"]),
        ("job small", ["job-1"]),
        ("jobs job-1 job-2", ["job-1", "job-2"]),
        ("job/job-1 job/other", ["job-1", "job-2"]),
        ("job-1 small", ["job-1"]),
    ],
)
def test_forms(full: Ctl, words: str, deleted: list[str]) -> None:
    result = full("delete", *words.split())
    assert result.exit_code == 0, result.stderr
    assert [path for path, _ in full.api.asked] == [f"/v1/jobs/{job}" for job in deleted]
    assert result.stderr.count("is deleted") == len(deleted)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("big", 5, "job-3 is running: only what is over is deleted\nhint: `oobleckctl cancel job-3 --wait`"),
        ("job-1 big", 5, "only what is over is deleted"),
        ("job-1 nobody", 3, "nothing is at"),
        ("node/node-1", 2, "`oobleckctl forget-node NODE`"),
        ("node node-1", 2, "`oobleckctl forget-node NODE`"),
        ("inc/inc-1", 2, "only jobs are deleted"),
        ("", 2, "JOB... is missing"),
    ],
)
def test_nothing_is_deleted_where_something_is_wrong(full: Ctl, words: str, code: int, said: str) -> None:
    result = full("delete", *words.split())
    assert (result.exit_code, full.api.asked) == (code, [])
    assert said in result.stderr


@pytest.mark.parametrize(
    ("answer", "more", "code", "asked"), [("y", (), 0, 1), ("n", (), 130, 0), ("", ("--yes",), 0, 1)]
)
def test_a_person_is_asked(full: Ctl, answer: str, more: tuple[str, ...], code: int, asked: int) -> None:
    """On a terminal, and told what stays."""
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    words = [sys.executable, "-P", "-m", "oobleckd.ctl.main", "--socket", str(full.socket), "delete", "small"]
    done = subprocess.run([*words, *more], stdin=theirs, stderr=theirs, stdout=theirs, check=False)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how a terminal ends on Linux; what it has comes in pieces
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    assert (done.returncode, len(full.api.asked)) == (code, asked), said
    assert (b"its checkpoints stay, the newest in /c/job-1/step-3" in said) == (not more)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("describe job small", "small (job-1)"),
        ("describe jobs small", "small (job-1)"),
        ("describe j job-1", "small (job-1)"),
        ("describe job/small", "small (job-1)"),
        ("describe no node-1", "node-1/0 (cpu, pid 1)"),
        ("describe node/node-1 inc/inc-1", "shrink pipeline 0"),
        ("describe jobs small big", "big (job-3)"),
    ],
)
def test_describe_has_the_same_forms(full: Ctl, words: str, said: str) -> None:
    result = full(*words.split())
    assert result.exit_code == 0, result.stderr
    assert said.replace("big (job-3)", "job-3") in result.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("describe job", 2, "NAME is missing"),
        ("describe template 3", 2, "no template is described\nhint: `oobleckctl get template -o wide`"),
        ("describe pod x", 2, "no kind 'pod'"),
        ("describe job nobody", 3, "nothing is at"),
    ],
)
def test_what_is_not_described(full: Ctl, words: str, code: int, said: str) -> None:
    result = full(*words.split())
    assert result.exit_code == code
    assert said in result.stderr


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("cancel job/job-1", "/v1/jobs/job-1/cancel"),
        ("pause job/small", "/v1/jobs/small/pause"),
        ("drain node/node-1", "/v1/nodes/node-1/drain"),
        ("forget-node node/node-1", "/v1/nodes/node-1"),
    ],
)
def test_what_get_prints_as_a_name_is_one_everywhere(full: Ctl, words: str, path: str) -> None:
    assert full(*words.split()).exit_code == 0
    assert full.api.asked[-1][0] == path
