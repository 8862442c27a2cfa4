"""What scripts rely on: the documents of ``-o json``, word for word.

A change here is a change of the API. ``python -m tests.unit.ctl.test_golden`` writes the file anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.protocol.changes import Change
from oobleckd.protocol.jobviews import PipelineView, StepView, TemplateView
from oobleckd.protocol.nodeviews import LayerRange
from tests.helpers.api_server import Api, job_view, node_view, serving, status_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT
from tests.unit.ctl.test_watch import watched

GOLDEN = Path(__file__).with_name("golden.json")
COMMANDS = (
    "status", "get jobs", "get nodes", "get pipelines", "get templates", "get incidents",
    "describe job small", "describe node node-1", "describe incident inc-1", "events", "story node:node-1",
    "wait small --for state=done", "pause small", "config show", "get layers", "get goodput",
    "get steps small",    "describe schedule small", "what-if --without node-2",
)  # fmt: skip


def filled(api: Api) -> None:
    watched(api)
    stages = (LayerRange("node-1/0", 0, 4), LayerRange("node-2/0", 4, 5))
    pipeline = PipelineView(0, ("node-1", "node-2"), stages, (0, 1))
    api.jobs = [job_view(pipelines=(pipeline,))]
    api.nodes = [node_view("node-1", layers=stages[:1])]
    api.pipelines = [pipeline]
    api.templates = [TemplateView(2, ((0, 4), (4, 5)), 0.02, 0.01, (1 << 20, 1 << 21), 1)]
    api.incidents = [INCIDENT]
    api.steps["small"] = [
        StepView(
            step, 2.0 / step, (2.0 / step).hex(), 1.25, 0.0005, 8, "5e1f", "applied", 2, 9.5 + step, 0.25
        )
        for step in range(1, 31)
    ]
    api.changes = [
        Change(1, 100.0, "node", "info", "node-1 joined", ("node:node-1",), msgspec.Raw(b'{"pid":7}'))
    ]


def documents(ctl: Ctl) -> dict[str, Any]:
    filled(ctl.api)
    found = {command: ctl.json(*command.split()) for command in COMMANDS}
    found["status"]["state_dir"] = ""
    for setting in found["config show"]["items"]:
        if setting["value"] and setting["key"] in {"socket", "state_dir", "keys_dir"}:
            setting["value"] = "/a/path"  # of this machine and user
    return found


def test_documents_are_what_scripts_rely_on(ctl: Ctl) -> None:
    found = documents(ctl)
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "s"
        with serving(socket, Api(status_view(Path()))) as api:
            found = documents(Ctl(api, socket))
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
