"""Whether this machine can have a local cluster: looked at before anything of it is started."""

from __future__ import annotations

from oobleckd.ctl import checkup, limitcheck
from oobleckd.ctl.local import Home
from oobleckd.ctl.output import FAILED, USAGE, fail, note
from oobleckd.host import gpus
from oobleckd.host.needs import ClusterSize

_SAID = {"few-files", "network-file-system", "unknown-file-system"}
"""Findings of ``doctor`` that do not keep a cluster from beginning, and are said all the same."""


def check_gpus(kind: str, devices: int, num_nodes: int) -> None:
    """Whether the nodes can have the GPUs that they are to share. Ends the command if not, before anything is
    started.
    """
    if kind != "cuda":
        return
    _, trouble = gpus.usable(devices, sharing=num_nodes)
    if trouble is not None:
        fail(trouble.problem, trouble.hint, FAILED if trouble.passing else USAGE)


def check_machine(home: Home, cluster: ClusterSize) -> None:
    """Whether this machine's limits let the cluster begin. Ends the command if not; what may do later is
    said.
    """
    for found in (
        limitcheck.open_files(cluster), limitcheck.tasks(cluster), checkup.state_folder(home.state / "daemon")
    ):  # fmt: skip
        if found.level == "fail" and found.name != "state folder":
            fail(f"{found.name}: {found.text}", found.hint)
        if found.level != "ok" and found.code in _SAID:
            note(f"{found.name}: {found.text}; {found.hint}")
