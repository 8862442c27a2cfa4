"""Installing services as far as it goes without systemd: what is written where, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl import systemd, units
from oobleckd.ctl.main import main
from oobleckd.ctl.units import DAEMON_UNIT, SOCKET_UNIT, TARGET, WORKER_UNIT

PREFIX = "/opt/oobleck"


def install(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["install-systemd", *map(str, words)], catch_exceptions=False)


def unit(root: Path, name: str) -> list[str]:
    return (root / "etc/systemd/system" / name).read_text(encoding="utf-8").splitlines()


def test_files_below_a_root(tmp_path: Path) -> None:
    result = install("--root", tmp_path, "--prefix", PREFIX)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert "ExecStart=/opt/oobleck/bin/oobleckd" in unit(tmp_path, DAEMON_UNIT)
    assert "ExecStart=/opt/oobleck/bin/oobleck-worker --node %i" in unit(tmp_path, WORKER_UNIT)
    assert "User=oobleck" in unit(tmp_path, DAEMON_UNIT)
    assert (tmp_path / units.SYSUSERS).read_text(encoding="utf-8").splitlines()[1].startswith("u oobleck ")
    assert "d /var/lib/oobleck/keys 0700 oobleck oobleck -" in (tmp_path / units.TMPFILES).read_text()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "@BIN@" in path.read_text()]


def test_workers_do_not_hang_on_the_daemon(tmp_path: Path) -> None:
    install("--root", tmp_path, "--prefix", PREFIX)
    for line in unit(tmp_path, WORKER_UNIT):
        name, _, value = line.partition("=")
        if name in {"Requires", "Requisite", "BindsTo", "PartOf", "Upholds"}:
            assert DAEMON_UNIT not in value
    assert f"PartOf={TARGET}" in unit(tmp_path, WORKER_UNIT)


def test_the_socket_outlives_the_daemon(tmp_path: Path) -> None:
    install("--root", tmp_path, "--prefix", PREFIX)
    assert "ListenStream=/run/oobleck/oobleckd.sock" in unit(tmp_path, SOCKET_UNIT)
    assert not [line for line in unit(tmp_path, SOCKET_UNIT) if line.startswith(("PartOf=", "BindsTo="))]
    assert "RuntimeDirectoryPreserve=yes" in unit(tmp_path, DAEMON_UNIT)
    assert "Also=oobleckd.socket" in unit(tmp_path, DAEMON_UNIT)


def test_a_stop_leaves_time_for_what_a_worker_holds(tmp_path: Path) -> None:
    install("--root", tmp_path, "--prefix", PREFIX)
    found = dict(
        line.split("=", 1) for line in unit(tmp_path, WORKER_UNIT) if line.startswith("TimeoutStopSec=")
    )
    (notice,) = [line for line in unit(tmp_path, WORKER_UNIT) if "OOBLECK_NOTICE_S" in line]
    assert int(notice.rpartition("=")[2]) < int(found["TimeoutStopSec"])


def test_installing_twice_and_after_a_change(tmp_path: Path) -> None:
    def states(*words: str) -> set[str]:
        result = install("--root", tmp_path, "--prefix", PREFIX, "-o", "json", *words)
        return {file["state"] for file in json.loads(result.stdout)["files"]}

    assert states("--dry-run") == {"new"}
    assert not list(tmp_path.iterdir())
    assert states() == {"new"}
    assert states() == {"same"}
    (tmp_path / "etc/systemd/system" / TARGET).write_text("mine\n")
    assert states() == {"same", "changed"}
    assert "mine" not in unit(tmp_path, TARGET)


def test_another_user_is_not_made(tmp_path: Path) -> None:
    assert install("--root", tmp_path, "--prefix", PREFIX, "--user", "trainer").exit_code == 0
    assert "User=trainer" in unit(tmp_path, DAEMON_UNIT)
    assert not (tmp_path / units.SYSUSERS).exists()


def test_uninstall(tmp_path: Path) -> None:
    install("--root", tmp_path, "--prefix", PREFIX)
    kept = tmp_path / "etc/systemd/system/other.service"
    kept.touch()
    result = install("--root", tmp_path, "--uninstall")
    assert result.exit_code == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]
    assert install("--root", tmp_path, "--uninstall").stderr == "nothing is installed\n"


def test_dry_run_shows_what_would_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "_check_programs", lambda *_: None)
    result = install("--prefix", PREFIX, "--dry-run", "--now")
    assert result.exit_code == 0
    assert "would run: systemctl daemon-reload" in result.stderr
    assert f"would run: systemctl enable --now {SOCKET_UNIT} {DAEMON_UNIT} {TARGET}" in result.stderr
    assert "next:" not in result.stderr


def test_refusals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = install("--prefix", PREFIX)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith("error: only root may install services\nhint: run it with sudo")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(systemd, "_RUNS_SYSTEMD", tmp_path / "none")
    assert "was not booted by systemd" in install("--prefix", PREFIX).stderr
    monkeypatch.setattr(systemd, "_RUNS_SYSTEMD", tmp_path)
    missing = install("--prefix", tmp_path)
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert f"there is no command {tmp_path / 'bin/oobleckd'}" in missing.stderr
    assert install("--user", "nobody-knows").exit_code == 2
    assert install("--now", "--uninstall").exit_code == 2


def test_an_installation_that_services_cannot_reach(tmp_path: Path) -> None:
    assert "is private to each service" in units.unreachable(Path("/tmp"))
    assert units.unreachable(Path("/usr/bin/env")) == ""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "program").touch(mode=0o755)
    why = units.unreachable(closed / "program")
    assert "is closed to other users" in why or "is private to each service" in why
