"""Programs of ours import what is installed, and nothing that lies in the current directory."""

from __future__ import annotations

import subprocess
from pathlib import Path

from oobleckd.host.interpreter import command


def test_a_folder_of_the_same_name_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("oobleckd", "worker", "msgspec"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a stranger')\n")
    done = subprocess.run(
        command("oobleckd.worker.tools.docs"), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[[")
