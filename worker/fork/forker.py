"""The forker: a process that has torch loaded and forks an agent's devices, each within milliseconds.

Owns its loading, its order of things and what a fork sets right for itself. It computes nothing, ever: it has
one thread, no pool of threads, no context of CUDA and no socket but the agent's, so that its forks are what a
process is that has just imported the same. The agent's side is in ``forking``; what the fork does then is
``process``'s. Not meant to be started by hand.

It forks twice. The one in the middle ends at once, so that the device falls to the agent (``orphans``): the
agent is then its parent as if it had started it, whatever becomes of the forker. Not with clone(2) and its
CLONE_PARENT: a life line needs what fork(3) tells the C library.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from oobleckd.host.interpreter import command
from oobleckd.host.orphans import die_with_parent
from oobleckd.host.standing import ENVIRONMENT
from oobleckd.worker.device import process
from oobleckd.worker.fork.orders import ORDER_BYTES, READY, Answer, Order, num_threads
from oobleckd.worker.processes.children import NUM_TIES, words_of_ties
from oobleckd.worker.processes.title import set_title

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PID_BYTES = 32
_PATIENCE = 1000  # ms
PROGRAM = command("oobleckd.worker.device.process")
Run = Callable[[], object]


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, libraries that are loaded make no threads of their own, whatever the environment says for
    later.
    """
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load() -> None:
    """Import what a device needs. What runs on more threads later is told so by the device
    (``torch.set_num_threads``).
    """
    # A fork of a process that has computed nothing and has one thread has the same bits as one that was
    # started; an import took 1.2 to 1.5 s of a core and 180 MB each time. (D-devices-016)
    with one_thread():
        process.import_for_good(process.HEAVY)
    for _ in range(_PATIENCE):
        if num_threads() == 1:
            break
        time.sleep(0.001)  # the thread that imported has ended for Python, and soon for the kernel


def serve(agent: socket.socket) -> tuple[tuple[str, ...], list[int]] | None:
    """Fork what ``agent`` asks for, until it is gone: None then. In a fork: its command line, and the
    descriptors in it.
    """
    agent.send(READY)
    while True:
        data, fds, _, _ = socket.recv_fds(agent, ORDER_BYTES, NUM_TIES)
        if not data:
            return None
        order = msgspec.msgpack.decode(data, type=Order)
        answer = _fork(order)
        if answer is None:
            agent.close()
            return (*order.words, *words_of_ties(fds)), fds
        for fd in fds:
            os.close(fd)
        agent.send(msgspec.msgpack.encode(answer))


def _fork(order: Order) -> Answer | None:
    """None in the fork."""
    if (threads := num_threads()) != 1:
        return Answer(
            problem=f"the forker has {threads} threads: what they hold at a fork is held for ever in it"
        )
    told, tell = os.pipe()
    with os.fdopen(told, "rb", buffering=0) as pipe, os.fdopen(tell, "wb", buffering=0) as say:
        try:
            # clone(2) with CLONE_PARENT would save the second fork, but the C library then believes in the
            # parent's thread number, and so does its robust mutex. (D-devices-016)
            middle = os.fork()
        except OSError as error:
            return Answer(problem=str(error))
        if middle == 0:
            middle = os.getpid()
            if _is_device(say):
                _become(middle, order)
                return None
        os.waitpid(middle, 0)  # from here on the device is the agent's
        say.close()
        pid = pipe.read(_PID_BYTES)
    return Answer(int(pid)) if pid else Answer(problem="there was no second fork")


def _is_device(say: BinaryIO) -> bool:
    """In the middle: fork once more, say who that is, and end. Returns, with True, in the device alone."""
    try:
        device = os.fork()
        if device == 0:
            return True
        say.write(str(device).encode())
    except OSError:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _become(middle: int, order: Order) -> None:
    """Be what exec would have made of it: an adopted child in a session of its own."""
    await_adoption(middle, order.agent)
    os.setsid()
    obey(order.limits)
    sow()


def await_adoption(middle: int, agent: int) -> None:
    """Wait until ``middle`` has ended and ``agent`` is the parent: only then does the agent's end reach us
    (PR_SET_PDEATHSIG is of the present parent).
    """
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(middle)
        while os.getppid() == middle:  # so this is it, and no later process of its number
            select.select([pidfd], [], [])
        os.close(pidfd)
    if os.getppid() != agent:
        os._exit(1)  # the agent has ended, and somebody else adopted us


def _is_in_bad_fork() -> bool:
    """Whether what was loaded made a context of CUDA, which a fork cannot use."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()  # noqa: SLF001 - torch's own workers ask it


def _exec(program: Sequence[str], words: Sequence[str], fds: Sequence[int]) -> NoReturn:
    """The way without a fork, in the same process."""
    print("warning: CUDA was initialised at the import; devices load torch anew", file=sys.stderr, flush=True)
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execve(program[0], [*program, *words], {**ENVIRONMENT, **os.environ})  # noqa: S606


def obey(wanted: Mapping[str, tuple[int, int]]) -> None:
    """Take on the limits of another process, as far as this one is allowed to."""
    for name, limit in wanted.items():
        number = getattr(resource, name, None)
        if number is not None and resource.getrlimit(number) != limit:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(number, limit)


def sow() -> None:
    """Seed the generators of chance anew, each of which would go on as those of all other forks do. No result
    depends on them.
    """
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def main(load: Callable[[], None] = load, run: Run = process.main, program: Sequence[str] = PROGRAM) -> None:
    """The program: ``python -P -m oobleckd.worker.fork.forker FD PARENT NODE ROOM``."""
    fd, parent, node, *_ = sys.argv[1:]
    _leave_sigterm_to_the_agent()
    die_with_parent(int(parent))
    load()
    live(socket.socket(fileno=int(fd)), node, run, program)


def _leave_sigterm_to_the_agent() -> None:
    """A batch system tells all processes of a node."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def live(
    agent: socket.socket, node: str, run: Run = process.main, program: Sequence[str] = PROGRAM
) -> NoReturn:
    """Be the forker of ``node``, or a fork of it, to the end of the process."""

    def be() -> None:
        _leave_sigterm_to_the_agent()
        set_title(command("oobleckd.worker.fork.forker", f"--node={node}"), "oobleck-forker")
        forked = serve(agent)
        if forked is not None:
            words, fds = forked
            set_title([*program, *words], Path(program[0]).name)
            sys.argv = [program[-1], *words]
            if _is_in_bad_fork():
                _exec(program, words, fds)
            run()

    end_after(be)


def end_after(run: Run) -> NoReturn:
    """Run it, and end the process of a fork with its exit code."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, what called us is another process's
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
