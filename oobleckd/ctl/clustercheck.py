"""What ``doctor`` looks at in a cluster: settings, daemon, keys, nodes, and whether their results can be
exact.

Each check is a function of what the daemon said or of a folder. The machine's own checks are ``checkup``'s.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from oobleckd import __version__
from oobleckd.client import Client
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.daemon.config import Config, load_config
from oobleckd.draw.times import day
from oobleckd.host.settings import ConfigError
from oobleckd.protocol.api import API_VERSION, LostRecords, Status
from oobleckd.protocol.nodeviews import NodeView
from oobleckd.protocol.traits import differences
from oobleckd.unixhttp import ClientError, Unreachable
from oobleckd.words import being, count

_USABLE = {"active", "standby"}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def settings(env: Mapping[str, str], files: Iterable[Path]) -> tuple[Config | None, CheckupItem]:
    """The daemon's configuration as it would be read here and now."""
    files = tuple(files)
    try:
        config = load_config({}, env, files).config
    except ConfigError as error:
        return None, CheckupItem("settings", "fail", str(error), error.hint, "invalid-settings")
    read = [str(path) for path in files if path.exists()]
    return config, CheckupItem("settings", "ok", ", ".join(read) or "no files, only defaults and variables")


def daemon(client: Client, *, named: bool = True) -> tuple[Status | None, list[CheckupItem]]:
    """Whether a daemon answers, is of our version, and can write. ``named``: whether the user said that there
    is one.
    """
    try:
        status, healthy = client.status(), client.healthy()
    except ClientError as error:
        # A machine that only trains has none, nor has one on which nothing was started yet.
        if isinstance(error, Unreachable) and not named and not client.socket_path.exists():
            return None, [CheckupItem("daemon", "warn", error.problem, error.hint, "no-daemon")]
        return None, [CheckupItem("daemon", "fail", error.problem, error.hint, "no-answer")]
    checks = [CheckupItem("daemon", "ok", f"{status.version}, {status.line}, agents at {status.endpoint}")]
    if (status.version, status.apiVersion) != (__version__, API_VERSION):
        text = f"it is {status.version} ({status.apiVersion}), this command {__version__} ({API_VERSION})"
        hint = "restart it after an upgrade: training goes on meanwhile"
        checks.append(CheckupItem("protocol", "warn", text, hint, "other-version"))
    if not healthy:
        hint = "`oobleckctl status` says why"
        checks.append(CheckupItem("journal", "fail", "it cannot be written", hint, "journal-not-writable"))
    checks += [_lost(records) for records in status.lost_records]
    return status, checks


def _lost(records: LostRecords) -> CheckupItem:
    kept = f"; {records.kept_as} is what was left" if records.kept_as else ""
    hint = (
        "look through `oobleckctl get jobs`: what is missing goes on with `submit --resume DIR` from its "
        "checkpoint folder, which stays"
    )
    text = f"records were lost on {day(records.at)}: {records.what}{kept}"
    about = (records.kept_as,) if records.kept_as else ()
    return CheckupItem("journal", "warn", text, hint, "records-lost", about)


def key_folder(folder: Path) -> CheckupItem:
    """Whether keys are there, belong together, and are closed to others."""
    from oobleckd.daemon import keys

    remake = "move the folder away, make keys anew with `oobleckctl keygen`, and carry them to the nodes"
    try:
        secrets = [keys.server_secret_path(folder), *sorted((folder / "nodes").glob("*.key_secret"))]
        if not secrets[0].exists():
            hint = "the daemon makes its own at its start; `oobleckctl keygen NODE` makes one for a node"
            return CheckupItem("keys", "warn", f"no key of a daemon in {folder}", hint, "no-keys")
        if opened := [str(path) for path in secrets if path.stat().st_mode & _OTHERS]:
            return CheckupItem(
                "keys", "fail", f"others can read {', '.join(opened)}", f"chmod 600 {' '.join(opened)}",
                "keys-open", tuple(opened),
            )  # fmt: skip
        pairs = [keys.load_pair(path) for path in secrets]
        if keys.load_public(keys.server_public_path(folder)) != pairs[0].public:
            text = f"{folder}: server.key is not of server.key_secret"
            return CheckupItem("keys", "fail", text, remake, "keys-unlike")
        nodes = sorted(keys.load_authorized(folder).values())
    except keys.KeyFileError as error:
        return CheckupItem("keys", "fail", error.problem, error.hint or remake, "keys-invalid")
    except PermissionError as error:
        return CheckupItem(
            "keys", "warn", f"not checked: {error.filename} is closed to this user", "look again with sudo",
            "not-checked",
        )  # fmt: skip
    return _may_join(tuple(nodes))


def _may_join(nodes: tuple[str, ...]) -> CheckupItem:
    if not nodes:
        return CheckupItem("keys", "ok", "no node may join yet", code="no-node-keys")
    return CheckupItem("keys", "ok", f"{count(len(nodes), 'node')} may join: {', '.join(nodes)}", about=nodes)


def nodes(found: Sequence[NodeView]) -> list[CheckupItem]:
    """Who is there, and who is not ready and why."""
    usable = [node.name for node in found if node.state in _USABLE]
    missing = [
        CheckupItem(
            "nodes",
            "warn",
            f"{node.name} {being(node.state)}{node.reason and f': {node.reason}'}",
            _remedy(node),
            "not-usable",
            (node.name,),
        )
        for node in found
        if node.state not in _USABLE
    ]
    if not usable:
        hint = "start `oobleck-worker` there; its log says what keeps it from joining"
        return [*missing, CheckupItem("nodes", "warn", "none can be used", hint, "none-usable")]
    text = f"{len(usable)} can be used: {', '.join(usable)}"
    return [CheckupItem("nodes", "ok", text, about=tuple(usable)), *missing]


def _remedy(node: NodeView) -> str:
    if node.state in {"drained", "draining"}:
        return f"`oobleckctl undrain {node.name}` lets it take part again"
    if node.state == "joining":
        return "its devices are starting; if that takes minutes, look into its log"
    gone = f"; `oobleckctl forget-node {node.name}` if it is gone for good" if node.state == "lost" else ""
    return f"look into the log of oobleck-worker on {node.host or node.name}, and start it again{gone}"


def exactness(found: Sequence[NodeView]) -> list[CheckupItem]:
    """What makes runs differ in their last bits: devices of several kinds, with other libraries, drivers,
    settings, or other code of ours.
    """
    unlike = differences({
        device: traits
        for node in found
        if node.state in _USABLE
        for device, traits in zip(node.devices, node.traits, strict=False)
    })  # fmt: skip
    if unlike:
        text = (
            "devices come to different bits, so jobs that train on both are not compared: "
            f"{'; '.join(map(str, unlike))}"
        )
        hint = (
            "make them alike (drain the odd ones, or `oobleckctl describe node` and install the same): "
            "results then repeat bit for bit whatever fails"
        )
        odd = tuple(device for difference in unlike for device in difference.devices)
        return [CheckupItem("exactness", "warn", text, hint, "unlike-devices", odd)]
    kinds = sorted({kind for node in found if node.state in _USABLE for kind in node.bits or node.kinds})
    if len(kinds) > 1:
        text = f"devices come to different bits, so nothing is compared: {'; '.join(kinds)}"
        hint = (
            "train on one kind, with the same torch and OMP_NUM_THREADS: results then repeat bit for bit "
            "whatever fails"
        )
        return [CheckupItem("exactness", "warn", text, hint, "unlike-kinds", tuple(kinds))]
    return [CheckupItem("exactness", "ok", f"one kind of device: {kinds[0]}" if kinds else "no devices yet")]
