"""Forks that tell what they find themselves to be; and an agent that has some forked, as a program.

``python -m tests.helpers.probed agent NUMBER`` is an agent without a daemon: it prints one JSON object for
itself and its forker, then one for each of NUMBER forks. ``exec`` in place of ``agent`` starts them by exec.
``forker`` is the program of its forker, without an argument it is a fork.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from oobleckd.host.orphans import die_with_parent
from oobleckd.worker.fork import forker
from oobleckd.worker.fork.forking import Forker, begin
from oobleckd.worker.fork.orders import num_threads
from oobleckd.worker.processes.children import Child, ChildSetting
from oobleckd.worker.processes.orphans import Orphans
from oobleckd.worker.runtime.lifeline import hold

PROGRAM = (sys.executable, "-m", "tests.helpers.probed")
FILES = 512  # limit of the agent, set after its forker was started


def fds() -> list[str]:
    """What is open, but for what lists it."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except FileNotFoundError:
            continue
    return sorted(found)


def signals() -> str:
    """Blocked and caught ones, as the kernel shows them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return " ".join(line for line in lines if line.startswith(("SigBlk", "SigCgt")))


def digest() -> str:
    """Of a backward pass of a layer as large as is computed by several threads, where there are some."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    made = torch.Generator().manual_seed(7)
    x, w = (torch.randn(512, 512, generator=made, requires_grad=True) for _ in range(2))
    torch.nn.functional.gelu(x @ w).softmax(-1).square().sum().backward()
    data = b"".join(tensor.grad.numpy().tobytes() for tensor in (x, w) if tensor.grad is not None)
    return hashlib.sha256(data).hexdigest()


def fork() -> None:
    """The program of a fork: ties first, as of a device; then its facts, and the digest; then it waits for
    its agent's end.
    """
    words = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
    at = sys.argv.index("--lifeline")
    die_with_parent(int(words["parent"]))
    hold(int(sys.argv[at + 1]), int(sys.argv[at + 2]))
    used_s = time.process_time()
    opened, threads = fds(), num_threads()
    import numpy as np
    import torch

    facts: dict[str, Any] = {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "threads": threads,
        "fds": opened, "signals": signals(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "omp": os.environ.get("OMP_NUM_THREADS"),
        "words": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "chance": [random.random(), float(np.random.random()), float(torch.rand(()))],  # noqa: NPY002
        "bad_fork": torch.cuda._is_in_bad_fork(), "used_s": used_s, "digest": digest(),
        "threads_after": torch.get_num_threads(),
    }  # fmt: skip
    with socket.socket(fileno=int(words["fd"])) as link:
        link.sendall(json.dumps(facts).encode() + b"\n")
        link.recv(1)


async def agent(number: int, program: tuple[str, ...] | None) -> None:
    """The program of the agent."""
    orphans = Orphans()
    orphans.adopt()
    parent = Forker("n", orphans, program) if program is not None else None
    if parent is not None:
        parent.attach(asyncio.get_running_loop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    setting = ChildSetting("cpu", Path("/tmp/{0}"), "127.0.0.1", "h", PROGRAM)
    children = [await begin(f"n/{index}", setting, parent, orphans) for index in range(number)]
    pids = {"agent": os.getpid(), "forker": parent.pid if parent is not None else 0}
    told = [json.loads(child.link.makefile("rb").readline()) for child in children]
    print(json.dumps(pids | {"sockets": _sockets(pids["forker"])}))
    for child, facts in zip(children, told, strict=True):
        print(json.dumps(facts | {"own_bytes": child.own_bytes(), "ending": await _end(child)}))
    if parent is not None:
        parent.close()


def _sockets(pid: int) -> int:
    links = [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()] if pid else []
    return sum(str(link).startswith("socket:") for link in links)


async def _end(child: Child) -> str:
    """kill -9, as its life line and its pidfd tell of it."""
    child.signal(signal.SIGKILL)
    await asyncio.to_thread(child.lifeline.wait)
    child.process.wait()
    ending = child.ending()
    child.close()
    return ending


def main(how: str = "", number: str = "1") -> None:
    """The programs."""
    if how == "forker":
        forker.main(run=fork, program=PROGRAM)
    elif how == "agent":
        asyncio.run(agent(int(number), (*PROGRAM, "forker")))
    elif how == "exec":
        asyncio.run(agent(int(number), None))
    else:
        fork()


if __name__ == "__main__":
    if sys.argv[1] == "forker":
        del sys.argv[1]
        main("forker")
    else:
        main(*(sys.argv[1:] if not sys.argv[1].startswith("-") else ()))
