"""The length of a lease as it is learned from heartbeats: quiet, jittering, lost packets, a slow start."""

import random

import pytest

from oobleckd.core.config import CoreConfig
from oobleckd.core.lease import Lease
from oobleckd.protocol.datagrams import Receiver, Sender

HEARTBEAT_S = 0.25


def taught(gaps, max_s=5.0):
    lease, now = Lease(max_s, 0.0, HEARTBEAT_S), 0.0
    for gap in gaps:
        now += gap
        lease.heartbeats(now)
    return lease


def test_nothing_is_known_at_first():
    assert taught([HEARTBEAT_S] * 8).length_s == 5.0  # the first heartbeat ends no gap
    assert taught([HEARTBEAT_S] * 9).length_s < 1.5


def test_a_quiet_node_has_a_lease_of_four_heartbeats():
    lease = taught([HEARTBEAT_S] * 100)
    assert lease.length_s == pytest.approx(4 * HEARTBEAT_S, rel=0.01)
    assert lease.ends() == lease.heard + lease.length_s


def test_heartbeats_that_waited_together_teach_nothing():
    """A daemon that slept hears them all at once, and its clock stood still meanwhile."""
    assert taught([HEARTBEAT_S] * 3 + [1e-5] * 20).length_s == 5.0
    assert taught([HEARTBEAT_S] * 20 + [1e-5] * 40).length_s >= 4 * HEARTBEAT_S


def test_one_long_gap_is_remembered_for_minutes_and_not_for_ever():
    lease = taught([HEARTBEAT_S] * 50 + [1.4] + [HEARTBEAT_S] * 20)
    assert lease.length_s == 5.0
    for _ in range(4 * 1200):
        lease.heartbeats(lease.heard + HEARTBEAT_S)
    assert lease.length_s == pytest.approx(1.0, rel=0.1)


def test_never_longer_than_it_may_be():
    assert taught([HEARTBEAT_S] * 20 + [4.0]).length_s == 5.0
    assert taught([2.0] * 20).length_s == 5.0


def test_a_reconnect_teaches_nothing():
    lease = taught([HEARTBEAT_S] * 50)
    lease.reconnected(lease.heard + 3.0)
    lease.heartbeats(lease.heard + 0.01)
    assert lease.worst_s == pytest.approx(HEARTBEAT_S)


@pytest.mark.parametrize("seed", range(20))
def test_thirty_minutes_of_jitter_are_no_death(seed):
    """Heartbeats as a busy machine sends them: late by an exponential time, now and then by much more."""
    dice = random.Random(seed)
    lease, now = Lease(5.0, 0.0), 0.0
    for _ in range(int(1800 / HEARTBEAT_S)):
        now += (
            HEARTBEAT_S
            + dice.expovariate(1 / 0.02)
            + (dice.uniform(0.0, 0.7) if dice.random() < 0.01 else 0.0)
        )
        assert now < lease.ends(), f"seed {seed}: lost at {now:.1f} s"
        lease.heartbeats(now)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_of_lost_packets_are_no_death(seed):
    """One in ten packets is lost, also when sent again: after 0.1, 0.3, 0.6 s, and so on. Heartbeats arrive
    in order.
    """
    dice = random.Random(seed)
    lease, arrived = Lease(CoreConfig().lease_s, 0.0), 0.0
    for number in range(int(600 / HEARTBEAT_S)):
        delay, again = 0.02, 0.1
        while dice.random() < 0.1:
            delay, again = delay + again, max(0.3, 2 * again)
        arrived = max(arrived, number * HEARTBEAT_S + delay)
        assert arrived < lease.ends(), f"seed {seed}: lost at {arrived:.1f} s"
        lease.heartbeats(arrived)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_of_lost_datagrams_are_no_death(seed):
    """The same of an idle node: one datagram in ten is lost, there or back, and what ZeroMQ then says is
    delayed as above.
    """
    dice = random.Random(seed)
    sender, receiver = Sender(b"session1", bytes(32)), Receiver(b"session1", bytes(32))
    heard, arrived = [], 0.0
    for number in range(int(600 / HEARTBEAT_S)):
        data, stands = sender.heartbeat()
        if dice.random() >= 0.1:
            if receiver.take(data) == "heartbeat":
                heard.append(number * HEARTBEAT_S + 0.02)
            if dice.random() >= 0.1:
                sender.heard(receiver.ack())
        if not stands:
            delay, again = 0.02, 0.1
            while dice.random() < 0.1:
                delay, again = delay + again, max(0.3, 2 * again)
            arrived = max(arrived, number * HEARTBEAT_S + delay)
            heard.append(arrived)
    lease = Lease(CoreConfig().lease_s, 0.0, HEARTBEAT_S)
    for now in sorted(heard):
        assert now < lease.ends(), f"seed {seed}: lost at {now:.1f} s"
        lease.heartbeats(now)


def test_a_lost_datagram_is_one_heartbeat_that_is_missing():
    """The quietest of leases forgives twice as much."""
    lease = taught([HEARTBEAT_S] * 100)
    assert lease.heard + 2 * HEARTBEAT_S < lease.ends() - 1.9 * HEARTBEAT_S
