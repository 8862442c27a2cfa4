"""The agent as a real process with real sockets; its devices are stand-ins without torch."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from zmq.auth import create_certificates, load_certificate

from oobleckd.host import urgency
from oobleckd.host.starts import FailedStart, failed_starts, note_failed, repeated
from oobleckd.protocol.agentmessages import (
    Ack,
    DeviceAwake,
    DeviceLost,
    DeviceStopped,
    Dismiss,
    EndStopped,
    Goodbye,
    Heartbeat,
    Hello,
    Inject,
    Refused,
    Wake,
)
from oobleckd.protocol.deaths import TO_MEND
from oobleckd.protocol.messages import Progress, Report, Resume, StepDone
from oobleckd.protocol.parts import Counters
from oobleckd.worker.processes.children import EXITING
from tests.helpers.standin_device import HUNGRY
from tests.helpers.stub_daemon import TIMEOUT_S, StubDaemon

Launch = Callable[..., subprocess.Popen[str]]


class Pids:
    """Processes that must end; pidfds, so that no other process can be taken for one of them."""

    def __init__(self, *pids: int) -> None:
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def assert_end(self) -> None:
        for fd in self._fds:
            assert select.select([fd], [], [], TIMEOUT_S)[0], "a process is still there"
            os.close(fd)


@pytest.fixture
def daemon() -> Iterator[StubDaemon]:
    stub = StubDaemon()
    yield stub
    stub.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def start(
        endpoint: str, *options: str, devices: int = 2, spare: bool = False, **environment: str
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "tests.helpers.standin_agent", "--node=n1", f"--daemon={endpoint}",
            f"--devices={devices}", "--spare" if spare else "--no-spare", f"--run-dir={tmp_path}", *options,
        ]  # fmt: skip
        started.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def device_pids(hello: Hello) -> list[int]:
    return [info.pid for info in hello.devices]


def test_hello_relay_and_heartbeats(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint)
    hello = daemon.ready()
    assert hello.node == "n1"
    assert [info.device for info in hello.devices] == ["n1/0", "n1/1"]
    assert hello.host
    for device in ("n1/1", "n1/0"):
        daemon.tell(Report(device, 4, 1, ()))
        assert daemon.expect(Progress) == Progress(device, 4, Counters(), {0: (1, 2)}, {})
    assert daemon.expect(Heartbeat).incarnation == daemon.expect(Heartbeat).incarnation == hello.incarnation
    assert "torch" not in Path(f"/proc/{agent.pid}/maps").read_text(encoding="utf-8")


def test_a_device_that_is_asked_how_far_it_is_is_lent_haste(daemon: StubDaemon, launch: Launch) -> None:
    """Else its loop, which holds what the answer needs, would wait for a core. (The real one gives it back:
    test_device.)
    """
    agent = launch(daemon.endpoint)
    asked, other = device_pids(daemon.ready())
    daemon.tell(Report("n1/0", 4, 1, ()))
    assert daemon.expect(Progress).epoch == 4
    own = os.sched_getparam(agent.pid).sched_priority
    assert os.sched_getparam(asked).sched_priority == (urgency.LENT if own > urgency.LENT else 0)
    assert os.sched_getparam(other).sched_priority == 0


def test_a_killed_device_takes_the_node_s_incarnation_with_it(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint)
    old = daemon.ready()
    ends = Pids(*device_pids(old))
    os.kill(device_pids(old)[1], signal.SIGKILL)
    lost = daemon.expect(DeviceLost)
    assert (lost.device, lost.incarnation) == ("n1/1", old.incarnation)
    assert lost.evidence in {EXITING, "signal 9"}
    ends.assert_end()
    between = daemon.expect(Hello)
    assert (between.ready, between.devices) == (False, ())
    new = daemon.ready()
    assert new.incarnation == between.incarnation != old.incarnation
    assert not set(device_pids(new)) & set(device_pids(old))
    daemon.tell(Report("n1/1", 9, 1, ()))
    assert daemon.expect(Progress).epoch == 9


def with_spare(daemon: StubDaemon) -> Hello:
    """The next Hello of a node that is complete, spare and all."""
    while (hello := daemon.ready()).spare is None or not hello.spare.ready:
        pass
    return hello


def test_the_spare_takes_a_killed_device_s_place(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint, spare=True)
    old = with_spare(daemon)
    assert old.spare is not None
    assert old.spare.memory_bytes > 2**20
    os.kill(old.devices[1].pid, signal.SIGKILL)
    lost = daemon.expect(DeviceLost)
    assert (lost.device, lost.incarnation, lost.spare) == ("n1/1", old.incarnation, True)
    daemon.tell(
        Report("n1/1", 7, 1, ())
    )  # meant for the dead: the daemon has not heard of the new incarnation
    new = daemon.ready()
    assert new.incarnation == old.incarnation
    assert new.devices[0] == old.devices[0]
    assert (new.devices[1].device, new.devices[1].pid) == ("n1/1", old.spare.pid)
    assert new.devices[1].incarnation != old.devices[1].incarnation
    daemon.tell(Report("n1/1", 9, 1, ()))
    again = new
    while not isinstance(said := daemon.hear(), Progress):
        assert isinstance(said, Heartbeat | Hello)
        again = said if isinstance(said, Hello) else again
    assert said.epoch == 9
    if again.spare is None or not again.spare.ready:  # else the next spare was quicker than the answer
        again = with_spare(daemon)
    assert again.spare is not None
    assert again.spare.pid != old.spare.pid


def test_a_spare_is_at_hand_again_when_its_heir_dies_at_once(daemon: StubDaemon, launch: Launch) -> None:
    """A forked one; see the next test for what takes its time."""
    launch(daemon.endpoint, devices=1, spare=True)
    first = with_spare(daemon)
    victim = first.devices[0].pid
    for _ in range(3):
        os.kill(victim, signal.SIGKILL)
        assert daemon.expect(DeviceLost).spare
        while (hello := daemon.ready()).spare is None:  # ready or not
            pass
        assert hello.incarnation == first.incarnation
        assert hello.devices[0].traits == first.devices[0].traits  # each is told what the one before was
        victim = hello.devices[0].pid


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("spare", ["lives", "dies, too", "dies with the forker"])
def test_forked_spares_are_never_used_up(
    daemon: StubDaemon, launch: Launch, devices: int, spare: str
) -> None:
    """All devices at once, and the spare: each place has an heir within the same incarnation of the node."""
    agent = launch(daemon.endpoint, devices=devices, spare=True)
    old = with_spare(daemon)
    assert old.spare is not None
    victims = [*device_pids(old), *([] if spare == "lives" else [old.spare.pid])]
    victims += [forker_of(agent.pid)] if spare == "dies with the forker" else []
    ends = Pids(*victims)
    agent.send_signal(signal.SIGSTOP)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    ends.assert_end()
    agent.send_signal(signal.SIGCONT)
    for _ in old.devices:
        while not isinstance(lost := daemon.hear(), DeviceLost):
            assert isinstance(lost, Hello | Heartbeat)  # of the spare
        assert lost.spare
    new = with_spare(daemon)
    assert new.incarnation == old.incarnation
    assert not {info.incarnation for info in new.devices} & {info.incarnation for info in old.devices}


def test_two_deaths_in_quick_succession_have_one_spare(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, spare=True, OOBLECK_FORK="0")
    old = with_spare(daemon)
    ends = Pids(*device_pids(old))
    # Both deaths are there when the agent looks: else the spare may be in its place before the second one.
    agent.send_signal(signal.SIGSTOP)
    for info in old.devices:
        os.kill(info.pid, signal.SIGKILL)
    ends.assert_end()
    agent.send_signal(signal.SIGCONT)
    assert daemon.expect(DeviceLost).spare
    assert not daemon.expect(DeviceLost).spare
    new = with_spare(daemon)
    assert new.incarnation != old.incarnation
    assert not {*device_pids(new)} & {*device_pids(old)}


def test_a_spare_that_does_not_come_up_in_its_place_ends_the_node_s_incarnation(
    daemon: StubDaemon, launch: Launch, tmp_path: Path
) -> None:
    launch(daemon.endpoint, spare=True, STANDIN_STUCK=str(tmp_path / "stuck"))
    old = with_spare(daemon)
    assert old.spare is not None
    os.kill(old.devices[1].pid, signal.SIGKILL)
    assert daemon.expect(DeviceLost).spare
    while (hello := daemon.ready()).incarnation == old.incarnation:  # for ten seconds
        pass
    assert not {*device_pids(hello)} & {*device_pids(old), old.spare.pid}


def test_a_spare_that_ends_is_replaced_and_no_device_notices(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint, spare=True)
    old = with_spare(daemon)
    assert old.spare is not None
    os.kill(old.spare.pid, signal.SIGKILL)
    assert daemon.expect(Hello).spare is None
    new = with_spare(daemon)
    assert (new.incarnation, new.devices) == (old.incarnation, old.devices)


def forker_of(agent: int) -> int:
    """The child of ``agent`` that forks its devices."""
    found = Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="ascii").split()
    return next(
        int(pid) for pid in found if Path(f"/proc/{pid}/comm").read_text().startswith("oobleck-forker")
    )


def test_a_forker_that_ends_is_replaced_and_no_device_notices(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, spare=True)
    old = with_spare(daemon)
    forker = forker_of(agent.pid)
    ends = Pids(forker)
    os.kill(forker, signal.SIGKILL)
    ends.assert_end()
    os.kill(old.devices[0].pid, signal.SIGKILL)
    assert daemon.expect(DeviceLost).spare
    new = with_spare(daemon)  # another one, of another forker
    assert new.incarnation == old.incarnation
    assert new.devices[1] == old.devices[1]
    assert forker_of(agent.pid) != forker


def test_an_agent_that_is_killed_takes_its_forker_along(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, spare=True)
    hello = with_spare(daemon)
    assert hello.spare is not None
    ends = Pids(*device_pids(hello), hello.spare.pid, forker_of(agent.pid))
    agent.kill()
    ends.assert_end()


def test_devices_start_without_a_forker(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, OOBLECK_FORK="0")
    old = daemon.ready()
    with pytest.raises(StopIteration):
        forker_of(agent.pid)
    os.kill(device_pids(old)[0], signal.SIGKILL)
    assert daemon.expect(DeviceLost).evidence in {EXITING, "signal 9"}
    assert not {*device_pids(daemon.ready())} & {*device_pids(old)}
    agent.terminate()
    _, stderr = agent.communicate(timeout=TIMEOUT_S)
    assert f"n1/0 (pid {device_pids(old)[0]}): signal 9" in stderr, "somebody else reaped it"


def test_what_the_daemon_did_not_acknowledge_is_said_again(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint, devices=1)
    daemon.ready()
    for round_ in (1, 2, 3):
        daemon.tell(Resume("n1/0", round_, 1))
        assert daemon.expect(StepDone).counters.round == round_
    daemon.tell(Ack("job-1", 1))
    daemon.tell(Ack("another", 9))
    daemon.tell(Report("n1/0", 5, 1, ()))
    daemon.expect(Progress)
    daemon.close()
    restarted = StubDaemon(daemon.endpoint, name="daemon-2")
    try:
        assert restarted.expect(Hello).ready
        assert [restarted.expect(StepDone).counters.round for _ in range(2)] == [2, 3]
        assert restarted.expect(Progress).epoch == 5
        restarted.tell(Report("n1/0", 6, 1, ()))
        assert restarted.expect(Progress).epoch == 6
    finally:
        restarted.close()


def test_hello_is_repeated_until_it_is_answered(launch: Launch) -> None:
    deaf = StubDaemon(welcome=False)
    try:
        launch(deaf.endpoint, devices=1)
        ready = deaf.ready()
        assert deaf.expect(Hello) == ready
    finally:
        deaf.close()


def test_refused_is_printed_and_ends_the_agent(launch: Launch) -> None:
    daemon = StubDaemon(welcome=False)
    try:
        agent = launch(daemon.endpoint)
        ends = Pids(*device_pids(daemon.ready()))
        daemon.tell(Refused("its key is n2's", "start it with n1's key"))
        _, stderr = agent.communicate(timeout=TIMEOUT_S)
        ends.assert_end()
    finally:
        daemon.close()
    assert agent.returncode == 5
    assert "error: the daemon refused n1: its key is n2's\nhint: start it with n1's key\n" in stderr


@pytest.mark.parametrize("injected", [False, True])
def test_sigterm_is_an_orderly_leave(daemon: StubDaemon, launch: Launch, injected: bool) -> None:
    agent = launch(daemon.endpoint, spare=True)
    hello = with_spare(daemon)
    assert hello.spare is not None
    ends = Pids(*device_pids(hello), hello.spare.pid)
    if injected:
        daemon.tell(Inject("sigterm"))
    else:
        agent.send_signal(signal.SIGTERM)
    assert daemon.expect(Goodbye).incarnation == hello.incarnation
    ends.assert_end()
    assert agent.wait(TIMEOUT_S) == 0


def test_a_sigterm_with_a_deadline_asks_to_be_let_go(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, "--notice-s=600")
    hello = daemon.ready()
    daemon.expect(Heartbeat)  # it has heard the Welcome
    ends = Pids(*device_pids(hello))
    agent.send_signal(signal.SIGTERM)
    noticed = daemon.expect(Hello)
    assert noticed.notice is not None
    assert noticed.notice.reason == "SIGTERM"
    assert 500 < noticed.notice.left_s <= 600
    daemon.tell(Report("n1/0", 4, 1, ()))
    assert daemon.expect(Progress).epoch == 4, "it works on until it is dismissed"
    daemon.tell(Dismiss())
    assert daemon.expect(Goodbye).reason == "SIGTERM"
    ends.assert_end()
    assert agent.wait(TIMEOUT_S) == 0


def test_systemd_hears_of_an_agent(daemon: StubDaemon, launch: Launch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(TIMEOUT_S)
        agent = launch(daemon.endpoint, NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="300000")
        assert notified.recv(1000) == b"READY=1"
        daemon.ready()
        wanted = f"STATUS=2 of 2 devices up, no job, daemon {daemon.endpoint}\nWATCHDOG=1".encode()
        while notified.recv(1000) != wanted:
            pass
        agent.send_signal(signal.SIGTERM)
        while not notified.recv(1000).startswith(b"STOPPING=1"):
            pass


def test_a_second_sigterm_means_now_where_it_is_not_the_first_once_more(
    daemon: StubDaemon, launch: Launch
) -> None:
    """Slurm tells a process of its end twice within a tenth of a second."""
    agent = launch(daemon.endpoint, "--notice-s=600")
    daemon.ready()
    daemon.expect(Heartbeat)
    agent.send_signal(signal.SIGTERM)
    daemon.expect(Hello)
    agent.send_signal(signal.SIGTERM)
    daemon.expect(Heartbeat)
    assert agent.poll() is None
    again = threading.Event()
    asker = threading.Thread(
        target=lambda: [agent.send_signal(signal.SIGTERM) for _ in iter(lambda: again.wait(0.5), True)]
    )
    asker.start()
    try:
        assert daemon.expect(Goodbye).reason == "SIGTERM"
    finally:
        again.set()
        asker.join()
    assert agent.wait(TIMEOUT_S) == 0


def test_ctrl_c_means_now(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, "--notice-s=600")
    daemon.ready()
    daemon.expect(Heartbeat)
    agent.send_signal(signal.SIGTERM)
    daemon.expect(Hello)
    agent.send_signal(signal.SIGINT)
    assert daemon.expect(Goodbye).reason == "SIGINT"
    assert agent.wait(TIMEOUT_S) == 0


def test_a_deadline_is_kept_whether_the_daemon_answers_or_not(daemon: StubDaemon, launch: Launch) -> None:
    agent = launch(daemon.endpoint, "--notice-s=0.5")
    daemon.ready()
    daemon.expect(Heartbeat)
    agent.send_signal(signal.SIGTERM)
    assert daemon.expect(Hello).notice is not None
    goodbye = daemon.expect(Goodbye)
    assert (goodbye.reason, goodbye.overdue) == ("SIGTERM", True)
    assert agent.wait(TIMEOUT_S) == 0


def test_where_there_is_no_daemon_and_no_job_a_sigterm_means_now(launch: Launch) -> None:
    deaf = StubDaemon(welcome=False)
    try:
        agent = launch(deaf.endpoint, "--notice-s=600", devices=1)
        deaf.ready()
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(TIMEOUT_S) == 0
    finally:
        deaf.close()


@pytest.mark.parametrize("how", ["kill -9", "sigkill", "agent-only"])
def test_nothing_outlives_a_killed_agent(daemon: StubDaemon, launch: Launch, how: str) -> None:
    agent = launch(daemon.endpoint, spare=True)
    hello = with_spare(daemon)
    assert hello.spare is not None
    ends = Pids(*device_pids(hello), hello.spare.pid)
    if how == "kill -9":
        agent.kill()
    else:
        daemon.tell(Inject(how))
    assert agent.wait(TIMEOUT_S) == -signal.SIGKILL
    ends.assert_end()


@pytest.mark.parametrize(
    ("inject", "evidence"),
    [
        (Inject("device", device="n1/1"), {EXITING, "signal 9"}),
        (Inject("sigkill", device="n1/1", at="exit"), {EXITING, "exit code 7"}),
    ],
)
def test_injection_into_one_device(
    daemon: StubDaemon, launch: Launch, inject: Inject, evidence: set[str]
) -> None:
    launch(daemon.endpoint)
    daemon.ready()
    daemon.tell(inject)
    lost = daemon.expect(DeviceLost)
    assert lost.device == "n1/1"
    assert lost.evidence in evidence
    daemon.ready()


@pytest.mark.parametrize("how", ["hang", "stop"])
def test_a_device_that_hangs_is_ended_and_said_to_have_hung(
    daemon: StubDaemon, launch: Launch, how: str
) -> None:
    launch(daemon.endpoint)
    hello = daemon.ready()
    ends = Pids(*device_pids(hello))
    if how == "hang":
        daemon.tell(Inject("hang", device="n1/1"))
    else:
        os.kill(device_pids(hello)[1], signal.SIGSTOP)
        stopped = daemon.expect(DeviceStopped)
        assert (stopped.device, stopped.device_incarnation) == ("n1/1", hello.devices[1].incarnation)
        assert stopped.stopped_s >= 1.0
        assert daemon.expect(DeviceStopped).stopped_s >= 2.0, "said again until the daemon says what follows"
        daemon.tell(EndStopped("n1/1", "another incarnation"))
        daemon.tell(EndStopped("n1/1", stopped.device_incarnation))
    lost = daemon.expect(DeviceLost)
    assert lost.device == "n1/1"
    assert lost.evidence.startswith("hung: " + ("gave no sign" if how == "hang" else "stopped by a signal"))
    ends.assert_end()
    daemon.ready()


def test_a_stopped_device_is_woken_where_the_daemon_wants_it(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint)
    hello = daemon.ready()
    os.kill(device_pids(hello)[1], signal.SIGSTOP)
    stopped = daemon.expect(DeviceStopped)
    daemon.tell(Wake("n1/1", stopped.device_incarnation))
    awake = daemon.expect(DeviceAwake)
    assert (awake.device, awake.device_incarnation) == ("n1/1", stopped.device_incarnation)
    daemon.tell(EndStopped("n1/1", stopped.device_incarnation))  # too late: it goes on
    daemon.tell(Report("n1/1", 4, 1, ()))
    assert daemon.expect(Progress).epoch == 4


def test_a_stopped_node_says_nothing_and_goes_on_after_the_time_asked_for(
    daemon: StubDaemon, launch: Launch
) -> None:
    agent = launch(daemon.endpoint)
    daemon.ready()
    daemon.tell(Inject("sigstop", seconds=1.0))
    _, status = os.waitpid(agent.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    _, status = os.waitpid(agent.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status)
    daemon.tell(Report("n1/0", 4, 1, ()))
    assert daemon.expect(Progress).epoch == 4


def test_a_node_without_a_network_says_hello_when_it_is_back(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint, devices=1)
    before = daemon.ready()
    daemon.tell(Inject("net-drop", seconds=1.0))
    daemon.tell(Report("n1/0", 4, 1, ()))  # never arrives
    assert daemon.expect(Hello) == before
    daemon.tell(Report("n1/0", 5, 1, ()))
    assert daemon.expect(Progress).epoch == 5


def test_devices_that_never_come_up_are_tried_again(
    daemon: StubDaemon, launch: Launch, tmp_path: Path
) -> None:
    note_failed(tmp_path, FailedStart("n1/0", "of a life before"))
    agent = launch(daemon.endpoint, STANDIN_CRASH="1")
    incarnations = set()
    while len(incarnations) < 3:
        hello = daemon.expect(Hello)
        assert not hello.ready
        incarnations.add(hello.incarnation)
    agent.send_signal(signal.SIGTERM)
    _, stderr = agent.communicate(timeout=TIMEOUT_S)
    assert agent.returncode == 0
    assert "ended before it was up" in stderr
    starts = failed_starts(tmp_path)  # for whoever waits for this node
    assert len(starts) >= 2
    assert {(start.words, start.said) for start in starts} == {("exit code 9", False)}
    assert repeated(starts) is not None


@pytest.mark.parametrize(
    ("says", "tries"), [(f"{TO_MEND}: no CUDA device", 1), ("ImportError: ImportError: no module named x", 2)]
)
def test_a_device_that_would_die_at_every_start_ends_the_agent(
    daemon: StubDaemon, launch: Launch, says: str, tries: int
) -> None:
    agent = launch(daemon.endpoint, devices=1, STANDIN_SAYS=says)
    _, stderr = agent.communicate(timeout=TIMEOUT_S)
    assert agent.returncode == 1
    assert f"error: n1/0 cannot start: {says.partition(': ')[2]}" in stderr
    assert stderr.count(") ended: ") == tries
    assert "hint: " in stderr


@pytest.mark.parametrize("spare", [False, True])
def test_what_a_device_dies_of_is_passed_on(daemon: StubDaemon, launch: Launch, spare: bool) -> None:
    launch(daemon.endpoint, spare=spare)
    if spare:
        with_spare(daemon)
    else:
        daemon.ready()
    daemon.tell(Inject("sigkill", device="n1/1", at="hunger"))
    lost = daemon.expect(DeviceLost)
    assert (lost.device, lost.death, lost.spare) == ("n1/1", HUNGRY, spare)
    assert lost.evidence == "out of memory in backward: used 1 GiB of 1 GiB"
    daemon.ready()


def test_curve(launch: Launch, tmp_path: Path) -> None:
    for name in ("server", "n1", "impostor"):
        create_certificates(tmp_path, name)
    public, secret = load_certificate(tmp_path / "server.key_secret")
    assert secret is not None
    daemon = StubDaemon(keys=(public, secret))
    key = f"--key={tmp_path / 'n1.key_secret'}"
    try:
        stranger = launch(daemon.endpoint, key, f"--server-key={tmp_path / 'impostor.key'}", devices=1)
        assert stranger.stderr is not None
        while "does not accept our key" not in stranger.stderr.readline():
            assert stranger.poll() is None
        stranger.send_signal(signal.SIGTERM)
        stranger.communicate(timeout=TIMEOUT_S)
        launch(daemon.endpoint, key, f"--server-key={tmp_path / 'server.key'}", devices=1)
        daemon.ready()
    finally:
        daemon.close()


def test_a_node_runs_once(daemon: StubDaemon, launch: Launch) -> None:
    launch(daemon.endpoint)
    daemon.ready()
    second = launch(daemon.endpoint)
    _, stderr = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 1
    assert "error: an agent of n1 is running" in stderr
    assert "hint: " in stderr


def test_an_endpoint_that_is_none(launch: Launch) -> None:
    agent = launch("here:1")
    _, stderr = agent.communicate(timeout=TIMEOUT_S)
    assert agent.returncode == 2
    assert "'here:1' is no endpoint" in stderr
