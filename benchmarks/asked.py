"""Programs that train when they are asked to (``peers/serving.py``), from the side of who asks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.launch import ROOT, PeerFailed

_GRACE_S = 10.0


class AskedProgram:
    """``python -m module args``; what it complains of goes to a file in ``folder``. ``about``: what it says
    of itself. Raises PeerFailed where it ends by itself, or does not answer in ``timeout_s``.
    """

    def __init__(self, folder: Path, module: str, *args: str, timeout_s: float) -> None:
        self._name, self._timeout_s = module.rpartition(".")[2], timeout_s
        self._said = folder / f"{self._name}.{time.monotonic_ns()}.out"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }  # fmt: skip
        with self._said.open("wb") as said:
            self._program = subprocess.Popen(
                [sys.executable, "-m", module, *args],
                cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=said,
            )  # fmt: skip
        self.about: Mapping[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.about = self._heard()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, loop: str, *, steps: int = 1, warm_up: int = 0, profile: bool = False) -> Mapping[str, Any]:
        """Have it run so many steps of ``loop``; its answer."""
        asked = {"loop": loop, "steps": steps, "warm_up": warm_up, "profile": profile}
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is found below
            self._program.stdin.write(json.dumps(asked) + "\n")
            self._program.stdin.flush()
        return self._heard()

    def end(self) -> None:
        """End it: what it had on the device is free."""
        for pipe in (self._program.stdin, self._program.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._program.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()

    def _heard(self) -> Mapping[str, Any]:
        assert self._program.stdout is not None
        limit = threading.Timer(self._timeout_s, self._program.kill)
        limit.start()
        try:
            # What a library prints while it is imported is no answer.
            line = next((line for line in self._program.stdout if line.startswith("{")), "")
        finally:
            limit.cancel()
        if not line:
            raise PeerFailed(f"{self._name} ended, or took more than {self._timeout_s:g} s: {self._last()}")
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _last(self) -> str:
        lines = self._said.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or ["it said nothing"])[-1][:300]
