"""Debian's Slurm runs the example: a job that is preempted, goes back into the queue, and goes on where it
was.

One machine with as many slots as the job has workers. Two partitions, of which the better one takes the
machine from the other, as a cluster is set up that preempts with grace. A job that went back into the queue
waits there until its credentials have expired.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from oobleckd.protocol.job import Job
from tests.helpers import debs
from tests.helpers.bootbox import BootBox
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.switch import Switch
from tests.helpers.unitcluster import CHECKOUT, HOME, installation

WORKERS = 2
STEPS = 60
ASLEEP_S, AWAKE_S = (0.0, 0.02, 0.0), (0.0, 0.0, 0.0)
"""Of a pass of embedding, block and head: until it is preempted the job lasts without work."""
ASK_EVERY_S = 0.4
"""By a program, which needs a third of a second."""
PEOPLE = "/home/kim"
STATE = f"{PEOPLE}/state"
ASLEEP = f"{PEOPLE}/asleep.json"
SETTINGS = f"""\
ClusterName=test
SlurmctldHost=box
AuthType=auth/munge
AuthInfo=cred_expire=15
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=100000
MinJobAge=3600
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=box CPUs={WORKERS} RealMemory=8000 State=UNKNOWN
PartitionName=batch Nodes=box Default=YES PriorityTier=1 GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=box PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Slurm(Cluster):
    """The example as a Slurm job of the user kim. What is waited for is asked of oobleckctl in the box, as
    the daemon comes and goes.
    """

    def __init__(self, box: BootBox) -> None:
        super().__init__(box.path(STATE), WORKERS)
        self.box, self.ask_every_s = box, ASK_EVERY_S

    def as_kim(self, command: str, *, check: bool = True) -> str:
        """Run a shell command as that user; what it printed."""
        run = [
            "runuser",
            "--user",
            "kim",
            "--",
            "env",
            f"HOME={PEOPLE}",
            f"PATH={HOME}/bin:/usr/bin:/bin",
            "OMP_NUM_THREADS=1",
        ]
        return self.box.run(*run, "sh", "-c", f"cd {PEOPLE} && {{ {command}; }}", check=check).stdout.strip()

    def submit(self, job: Job) -> str:
        """The Slurm job's number."""
        self.box.path(f"{PEOPLE}/job.toml").write_text(toml_of(job))
        self.sleep(ASLEEP_S)
        options = f"--nodes=1 --ntasks-per-node={WORKERS} --cpus-per-task=1 --partition=batch --time=60"
        return self.as_kim(
            f"sbatch --parsable {options} --export=ALL,OOBLECK_STATE={STATE},OOBLECK_NOTICE_S=60,"
            f"OOBLECK_BENCH_ASLEEP={ASLEEP},PYTHONPATH=/opt/checkout/benchmarks/asleep "
            "/opt/checkout/examples/slurm/oobleck.sbatch job.toml"
        )

    def sleep(self, seconds: Sequence[float]) -> None:
        """From now on."""
        self.box.path(ASLEEP).write_text(json.dumps(seconds))

    def seen(self, number: str, what: str) -> Any:
        """``oobleckctl get WHAT`` at the job's daemon; None where it does not answer."""
        socket = f"/tmp/oobleck-{number}/oobleckd.sock"
        said = self.as_kim(f"oobleckctl --socket {socket} get {what} -o json", check=False)
        return json.loads(said)["items"] if said else None

    def slurm_state(self, number: str) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        said = self.box.run("scontrol", "show", "job", number, "--oneliner").stdout
        return said.partition("JobState=")[2].partition(" ")[0]

    def describe(self) -> str:
        """What Slurm and the job said, for a message."""
        return self.box.run(
            "sh", "-c", f"squeue; grep -hv 'step: ' {PEOPLE}/slurm-*.out | tail -n 120", check=False
        ).stdout


def toml_of(job: Job) -> str:
    """A job.toml of what ``tiny_job`` sets."""
    lines = [f'name = "{job.name}"']
    raw: dict[str, Any] = {
        "model": {"family": "gpt2", "config": job.model.config},
        "train": {
            "steps": job.train.steps, "global_batch": job.train.global_batch,
            "micro_batch": job.train.micro_batch,
            "sequence": job.train.sequence,
        },
        "optimizer": {"lr": 0.003, "warmup_steps": 4},
        "fault_tolerance": {"f": 1},
        "resources": {"device_memory": "64MiB"},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    for table, values in raw.items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            if isinstance(value, dict):
                inside = ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items())
                lines.append(f"{key} = {{ {inside} }}")
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        packages = debs.fetch("slurmctld", "slurmd", "slurm-client", "munge")
    except debs.NoPackages as error:
        pytest.fail(f"{error}; OOBLECK_NO_HOST_TESTS=1 leaves the host tests out")
    with installation(tmp_path_factory.mktemp("slurm"), binds={debs.INSIDE: packages}) as box:
        debs.install(box)
        box.run("useradd", "--create-home", "--shell", "/bin/bash", "kim")
        box.run("mkdir", "-p", "/etc/slurm", "/var/spool/slurmctld", "/var/spool/slurmd")
        box.path("/etc/slurm/slurm.conf").write_text(SETTINGS)
        # It uses no cgroup as it is set up here, but looks for them, and ends where both versions are
        # mounted.
        box.path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Slurm resolves no name on a machine that has no address but that of its loopback.
        switch = Switch()
        switch.plug(1, box.pid)
        switch.start()
        try:
            box.path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{switch.address(1)} box\n")
            box.run("systemctl", "restart", "munge", "slurmctld", "slurmd")
            cluster = Slurm(box)
            cluster.until(lambda: ready(box), "the machine is idle")
            yield cluster
        finally:
            switch.close()


def ready(box: BootBox) -> bool | None:
    return "idle" in box.run("sinfo", "--noheader", "--format=%T", check=False).stdout or None


def test_a_job_that_is_preempted_goes_on_where_it_was(slurm: Slurm) -> None:
    number = slurm.submit(tiny_job("batch", train={"steps": STEPS, "global_batch": 4}))

    def trained() -> int | None:
        found = slurm.seen(number, "jobs")
        return found[0]["step"] if found and found[0]["step"] >= 5 else None

    slurm.until(trained, "the job is under way", timeout_s=300.0)
    nodes = slurm.seen(number, "nodes")
    assert [node["name"] for node in nodes] == [f"box-{task}" for task in range(WORKERS)]

    urgent = slurm.as_kim(f"sbatch --parsable --partition=urgent --ntasks={WORKERS} --wrap 'true'")
    slurm.until(
        lambda: slurm.slurm_state(urgent) == "COMPLETED" or None, "the urgent job ran", timeout_s=300.0
    )
    log = slurm.box.path(f"{PEOPLE}/slurm-{number}.out")
    assert "told to make room: the workers leave" in log.read_text()
    slurm.sleep(AWAKE_S)

    slurm.until(lambda: slurm.slurm_state(number) == "COMPLETED" or None, "the job is done", timeout_s=600.0)
    end = [line for line in log.read_text().splitlines() if '"items"' in line][-1]
    (job,) = json.loads(end[end.index("{") :])["items"]
    assert (job["state"], job["step"], job["steps_lost"], job["incidents"]) == ("done", STEPS, 0, 0), (
        slurm.describe()
    )


def test_the_result_is_that_of_an_undisturbed_run(slurm: Slurm) -> None:
    """The daemon is gone with the Slurm job: it is started once more upon its journal."""
    slurm.as_kim(
        f"oobleckd --state-dir {STATE} --socket /tmp/again.sock --keys-dir {STATE}/keys --endpoint "
        "tcp://127.0.0.1:0 "
        ">again.log 2>&1 & echo $! >again.pid"
    )
    try:
        slurm.until(
            lambda: slurm.as_kim("oobleckctl --socket /tmp/again.sock status", check=False) or None,
            "the daemon",
        )
        assert "bit-identical" in slurm.as_kim("oobleckctl --socket /tmp/again.sock verify batch --single")
    finally:
        slurm.as_kim("kill $(cat again.pid)")


def test_the_example_is_the_one_of_the_checkout() -> None:
    assert (CHECKOUT / "examples" / "slurm" / "worker.sh").stat().st_mode & 0o111
