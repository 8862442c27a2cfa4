"""The verb ``doctor``: looks at what makes runs fail, before they do.

Owns which checks are made, in which order, and how they are shown. The checks are ``checkup`` (this machine)
and ``clustercheck`` (settings, daemon, nodes).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from oobleckd.client import Client, socket_of, state_dir
from oobleckd.ctl import checkup, clustercheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.ctl.connect import client, output_option, socket_option, wants_json
from oobleckd.ctl.local import Home
from oobleckd.ctl.output import FAILED, emit_json, emit_line, emit_page, note
from oobleckd.daemon.config import Config
from oobleckd.host.settings import config_files
from oobleckd.protocol.api import Status
from oobleckd.protocol.text import visible
from oobleckd.unixhttp import ClientError

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@socket_option
@output_option
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Check this machine and its cluster: versions, limits, keys, daemon, nodes, disks. Exit 1 if
    one fails.
    """
    made = checks(client())
    failed = sum(check.level == "fail" for check in made)
    warned = sum(check.level == "warn" for check in made)
    if wants_json():
        emit_json("Checkup", {"failed": failed, "warned": warned, "checks": made})
    else:
        _show(made)
        note(f"{len(made)} checks: {failed} failed, {warned} warnings")
    if failed:
        ctx.exit(FAILED)


def checks(asked: Client) -> list[CheckupItem]:
    """All of them, in the order in which they are shown."""
    return [*_machine(), *_cluster(asked)]


def _machine() -> list[CheckupItem]:
    return [
        checkup.python(),
        *checkup.packages(),
        checkup.open_files(),
        checkup.clock(),
        checkup.shared_memory(),
        checkup.gpus(),
    ]


def _cluster(asked: Client) -> list[CheckupItem]:
    config, settings = clustercheck.settings(os.environ, config_files(Path.home(), Path.cwd()))
    status, daemon = clustercheck.daemon(asked)
    checks = [settings, checkup.socket_folder(asked.socket_path), *daemon]
    checks += [clustercheck.key_folder(folder) for folder in _key_folders(asked, config)]
    return checks if status is None else [*checks, *_running(asked, status)]


def _key_folders(asked: Client, config: Config | None) -> list[Path]:
    """The local cluster has its own; otherwise they are where the settings say."""
    if asked.socket_path == socket_of(state_dir()):
        return [Home(state_dir()).keys]
    return [config.keys_path] if config is not None and config.curve else []


def _running(asked: Client, status: Status) -> list[CheckupItem]:
    try:
        nodes, jobs = asked.nodes(), asked.jobs()
    except ClientError as error:
        return [CheckupItem("daemon", "fail", error.problem, error.hint, "no-answer")]
    state = Path(status.state_dir)
    chosen = {Path(job.spec.checkpoint.dir) for job in jobs if job.spec.checkpoint.dir}
    return [
        *clustercheck.nodes(nodes),
        *clustercheck.exactness(nodes),
        checkup.disk(state, "journal and checkpoints"),
        *(checkup.disk(folder, "checkpoints") for folder in sorted(chosen)),
    ]


def _show(checks: Sequence[CheckupItem]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        level = click.style(f"{check.level:<4}", fg=_COLOURS[check.level])
        emit_page(f"{level}  {check.name:<{width}}  {visible(check.text)}")
        if check.hint and check.level != "ok":
            emit_line(f"{'':<{width + 6}}  -> {check.hint}")
