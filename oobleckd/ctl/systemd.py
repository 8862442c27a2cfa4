"""The verb ``install-systemd``: daemon and workers as services of this machine.

Owns what is checked before, which of systemd's programs are run, and what is said. The files are ``units``'.
"""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import click

from oobleckd.client import SERVICE_STATE
from oobleckd.ctl import units
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import FAILED, REFUSED, USAGE, emit_json, emit_table, fail, note
from oobleckd.ctl.units import DAEMON_UNIT, SOCKET_UNIT, TARGET, WORKER_UNIT, UnitAccount

_PATH = click.Path(path_type=Path)
_PROGRAMS = ("oobleckd", "oobleck-worker")
_RUNS_SYSTEMD = Path("/run/systemd/system")
_INSTALL_HINT = "install into a folder for all: `python3 -m venv /opt/oobleck`, pip, then its bin/oobleckctl"


@click.command("install-systemd")
@click.option("--root", type=_PATH, help="Write below this folder and run nothing: for images and packages.")
@click.option(
    "--prefix",
    type=_PATH,
    help="Where oobleckd is installed: its commands are in PREFIX/bin. If not given, this installation.",
)
@click.option("--user", default=units.USER, show_default=True, help="Whom the services run as.")
@click.option("--now", is_flag=True, help="Start the daemon, and at every boot.")
@click.option("--uninstall", is_flag=True, help="Stop the services and remove what was installed.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@output_option
def install_systemd(
    root: Path | None, prefix: Path | None, user: str, now: bool, uninstall: bool, dry_run: bool
) -> None:
    """Install oobleckd.service and .socket, oobleck-worker@.service and oobleck-workers.target.

    May be run again at any time: only what differs is written.
    """
    if now and (uninstall or root):
        raise click.UsageError(f"--now does not go with {'--uninstall' if uninstall else '--root'}")
    if not dry_run and root is None:
        _check_machine()
    if uninstall:
        _uninstall(root, dry_run)
        return
    programs = (prefix / "bin" if prefix else Path(sysconfig.get_path("scripts"))).absolute()
    account = _account(user, root)
    if root is None:
        _check_programs(programs, account)
    _install(root, programs, account, now, dry_run)


# --------------------------------------------------------------------------- before


def _check_machine() -> None:
    hint = "; --root DIR writes the files below DIR, --dry-run shows them"
    if os.geteuid() != 0:
        fail("only root may install services", f"run it with sudo{hint}", REFUSED)
    if not _RUNS_SYSTEMD.is_dir():
        fail("this machine was not booted by systemd", f"`oobleckctl up` needs none{hint}", REFUSED)


def _account(user: str, root: Path | None) -> UnitAccount:
    if user == units.USER:
        return UnitAccount()
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        if root is not None:
            return UnitAccount(user, user)
        fail(
            f"there is no user {user!r}",
            f"make it first, or leave --user out: then {units.USER} is made",
            USAGE,
        )
    return UnitAccount(user, _group_name(found))


def _group_name(user: pwd.struct_passwd) -> str:
    import grp

    return grp.getgrgid(user.pw_gid).gr_name


def _check_programs(programs: Path, account: UnitAccount) -> None:
    for name in _PROGRAMS:
        if not os.access(programs / name, os.X_OK):
            fail(
                f"there is no command {programs / name}",
                "name with --prefix where oobleckd is installed",
                USAGE,
            )
    if account.user == "root":
        return
    for program in (*(programs / name for name in _PROGRAMS), programs / "python3"):
        if program.exists() and (why := units.unreachable(program)):
            fail(f"a service cannot run this installation: {why}", _INSTALL_HINT, FAILED)


# --------------------------------------------------------------------------- doing


def _install(root: Path | None, programs: Path, account: UnitAccount, now: bool, dry_run: bool) -> None:
    files = units.rendered(root or Path("/"), programs, account)
    commands = _install_commands(account, now) if root is None else []
    try:
        done = [(file, file.state) for file in files] if dry_run else units.write_all(files)
    except OSError as error:
        fail(f"{error.filename}: cannot be written: {error.strerror}", "choose another --root, or use sudo")
    _perform(commands, dry_run)
    _show([(file.path, state) for file, state in done], commands, dry_run)
    if dry_run or root is not None or wants_json():
        return
    if any(state == "changed" for _, state in done):
        note("next: `systemctl restart oobleckd` (training goes on); workers take theirs at their next start")
    if not now:
        note("next: `systemctl enable --now oobleckd`")
    note(
        "next: `oobleckctl keygen NODE`, then `systemctl enable --now oobleck-worker@NODE`; docs/service.md "
        "has more"
    )


def _install_commands(account: UnitAccount, now: bool) -> list[list[str]]:
    sysusers = [["systemd-sysusers", f"/{units.SYSUSERS}"]] if account.user == units.USER else []
    start = [["systemctl", "enable", "--now", SOCKET_UNIT, DAEMON_UNIT, TARGET]] if now else []
    return [
        *sysusers,
        ["systemd-tmpfiles", "--create", f"/{units.TMPFILES}"],
        ["systemctl", "daemon-reload"],
        *start,
    ]


def _uninstall(root: Path | None, dry_run: bool) -> None:
    paths = units.installed(root or Path("/"))
    if not paths:
        note("nothing is installed")
    before, after = _uninstall_commands(paths) if root is None and paths else ([], [])
    _perform(before, dry_run)
    if not dry_run:
        for path in paths:
            path.unlink()
    _perform(after, dry_run)
    _show([(path, "installed" if dry_run else "removed") for path in paths], [*before, *after], dry_run)
    if paths and root is None and not wants_json():
        note(f"left as it is: {SERVICE_STATE} (journal, keys, checkpoints), /etc/oobleck, and the user")


def _uninstall_commands(paths: Sequence[Path]) -> tuple[list[list[str]], list[list[str]]]:
    """What comes before the files go, and after. Workers end first, so that they take leave of
    their daemon.
    """
    names = {path.name for path in paths}
    before = [["systemctl", "stop", WORKER_UNIT.replace("@.", "@*.")]]
    if kept := [unit for unit in (TARGET, SOCKET_UNIT, DAEMON_UNIT) if unit in names]:
        before.append(["systemctl", "disable", "--now", *kept])
    if WORKER_UNIT in names:
        before.append(["systemctl", "disable", WORKER_UNIT])
    return before, [["systemctl", "daemon-reload"]]


def _perform(commands: Sequence[Sequence[str]], dry_run: bool) -> None:
    for command in commands if not dry_run else ():
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            fail(f"{command[0]} is missing on this machine", "install the package systemd")
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            fail(
                f"`{shlex.join(command)}` failed: {said}",
                "mend that, and run this again: it goes on from there",
            )


def _show(files: Sequence[tuple[Path, str]], commands: Sequence[Sequence[str]], dry_run: bool) -> None:
    if wants_json():
        items = [{"path": str(path), "state": state} for path, state in files]
        emit_json("Installation", {"dry_run": dry_run, "files": items, "commands": commands})
        return
    if files:
        emit_table(("FILE", "STATE"), [(str(path), state) for path, state in files])
    for command in commands:
        note(f"{'would run' if dry_run else 'ran'}: {shlex.join(command)}")
