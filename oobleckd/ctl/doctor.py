"""The verb ``doctor``: looks at what makes runs fail, before they do.

Owns which checks are made, in which order, and how they are shown. The checks are ``checkup``, ``limitcheck``
and ``gpucheck`` (this machine), and ``clustercheck`` (settings, daemon, nodes).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from oobleckd.client import Client, socket_of, state_dir
from oobleckd.ctl import checkup, clustercheck, clustersize, gpucheck, limitcheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.ctl.connect import client
from oobleckd.ctl.local import Home
from oobleckd.ctl.options import output_option, settings, socket_option, wants_json
from oobleckd.ctl.output import FAILED, emit_json, emit_line, emit_page, note
from oobleckd.daemon.config import Config
from oobleckd.host import gpus
from oobleckd.host.settings import config_files
from oobleckd.protocol.api import Status
from oobleckd.protocol.text import visible
from oobleckd.unixhttp import ClientError

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option(
    "--kind",
    type=click.Choice(["cpu", "cuda"]),
    help="What devices are to compute on; GPUs are looked at as `oobleck-worker --kind cuda` does. Default: "
    "GPUs where there are any.",
)
@click.option(
    "--devices",
    type=click.IntRange(1, 64),
    help="How many devices a node is to have. Default: all GPUs, or 1.",
)
@socket_option
@output_option
@click.pass_context
def doctor(ctx: click.Context, kind: str | None, devices: int | None) -> None:
    """Check this machine and its cluster: versions, limits, GPUs, keys, daemon, nodes, disks. Exit 1 if
    one fails.
    """
    named = bool(settings().config.socket or os.environ.get("OOBLECK_SOCKET"))
    made = checks(client(), kind or "", devices or gpus.ALL, named=named)
    failed = sum(check.level == "fail" for check in made)
    warned = sum(check.level == "warn" for check in made)
    if wants_json():
        emit_json("Checkup", {"failed": failed, "warned": warned, "checks": made})
    else:
        _show(made)
        note(f"{len(made)} checks: {failed} failed, {warned} warnings")
    if failed:
        ctx.exit(FAILED)


def checks(
    asked: Client, kind: str = "", devices: int = gpus.ALL, *, named: bool = True
) -> list[CheckupItem]:
    """All of them, in the order in which they are shown. ``named``: whether the user named the daemon."""
    config, read = clustercheck.settings(os.environ, config_files(Path.home(), Path.cwd()))
    status, daemon = clustercheck.daemon(asked, named=named)
    # Beginning on a GPU takes 0.5 GB of its memory, which may be what a job is about to allocate there.
    num_begun = gpus.ALL if status is None else 0
    count, of_gpus = gpucheck.check(kind, devices, partial(gpus.look, num_begun))
    kind = kind or ("cuda" if count else "cpu")
    here = max(1, count) if devices == gpus.ALL else devices
    running, keys = asked if status is not None else None, _key_folders(asked, config)
    cluster, is_up = clustersize.measure(running, keys, kind, here)
    return [
        checkup.python(),
        *checkup.packages(),
        checkup.compiler(),
        limitcheck.open_files(cluster),
        limitcheck.tasks(cluster, running=is_up),
        limitcheck.shared_memory(cluster),
        *limitcheck.locked_memory(cluster),
        checkup.clock(),
        *of_gpus,
        read,
        checkup.socket_folder(asked.socket_path),
        checkup.state_folder(_state_folder(asked, config, status)),
        *daemon,
        *(clustercheck.key_folder(folder) for folder in keys),
        *(() if status is None else _running(asked, status)),
    ]


def _state_folder(asked: Client, config: Config | None, status: Status | None) -> Path:
    """The daemon's, as it says itself, or where it would be."""
    if status is not None:
        return Path(status.state_dir)
    if asked.socket_path == socket_of(state_dir()) or config is None:
        return state_dir() / "daemon"
    return config.state_path


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
