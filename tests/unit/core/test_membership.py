"""Incarnations, leases and evidence."""

import random

import pytest

from oobleckd.core.membership import Membership
from oobleckd.protocol.agentmessages import DeviceLost, Goodbye, Hello
from oobleckd.protocol.messages import LinkDown
from oobleckd.protocol.parts import DeviceInfo


def hello(name, incarnation="1", *, incarnations=None, ready=True):
    """One device of the node's ``incarnation``, or of ``incarnations`` by index (None: not up)."""
    incarnations = [incarnation] if incarnations is None else incarnations
    infos = [
        DeviceInfo(f"{name}/{i}", "cpu", "cpu", 0, "", "", 1, incarnation=x)
        for i, x in enumerate(incarnations)
        if x
    ]
    return Hello(1, name, incarnation, "host", ready, tuple(infos))


def members(*names):
    found = Membership(lease_s=5.0, link_grace_s=2.0)
    for name in names:
        assert found.hello(hello(name), 0.0) == "new"
    return found


def test_hellos_tell_incarnations_apart():
    found = members("a")
    assert found.hello(hello("a"), 1.0) == "same"
    found.link_lost("a", 2.0)
    assert not found.nodes["a"].present
    assert found.hello(hello("a"), 3.0) == "back"
    assert found.hello(hello("a", "2"), 4.0) == "new"
    assert found.living("a/0", "2")
    assert not found.living("a/0", "1")
    assert found.device("a/0").pid == 1
    assert found.device("b/0") is None


def test_a_closed_link_alone_is_no_death_and_a_lease_ends():
    found = members("a")
    found.link_lost("a", 1.0)
    found.link_lost("nobody", 1.0)
    found.expire(4.9)
    assert found.living("a/0", "1")
    assert found.deadline(4.9) == 5.0
    found.expire(5.0)
    assert not found.living("a/0", "1")
    assert found.nodes["a"].code == "silent"
    assert found.nodes["a"].suspect_at == 1.0
    assert found.obituaries == ["a"]
    assert found.deadline(5.0) is None


def test_heartbeats_and_messages_renew_the_lease():
    found = members("a")
    assert not found.heartbeat("a", "1", 4.0)
    found.heard("a", 8.0)
    found.heard("nobody", 8.0)
    found.expire(12.0)
    assert found.living("a/0", "1")
    assert not found.heartbeat("a", "of another incarnation", 12.9)
    assert not found.heartbeat("nobody", "1", 12.9)
    found.expire(13.0)
    assert not found.living("a/0", "1")


def test_an_incarnation_that_was_declared_over_returns_as_a_fresh_one():
    found = members("a")
    found.expire(5.0)
    assert found.heartbeat("a", "1", 6.0)
    assert found.nodes["a"].present
    assert not found.heartbeat("a", "1", 6.5)


def test_link_closed_and_a_peer_that_lost_it_too_in_either_order():
    for first_peer in (True, False):
        found = members("a", "b")
        down = LinkDown("b/0", "a/0", "reset")
        if first_peer:
            found.link_down(down, 1.0)
            assert found.living("a/0", "1")
            found.link_lost("a", 1.1)
        else:
            found.link_lost("a", 1.0)
            found.link_down(down, 1.1)
        assert not found.living("a/0", "1")
        assert found.nodes["a"].suspect_at == 1.0
        assert found.nodes["a"].code == "link-closed"
        found.link_down(down, 1.2)  # of an incarnation that is over: no news
        found.link_lost("a", 1.2)


def test_device_lost_counts_for_its_own_incarnation_only():
    found = members("a")
    assert not found.device_lost("a", DeviceLost("0", "a/0", "signal 9"), 1.0)
    assert found.living("a/0", "1")
    assert not found.device_lost("a", DeviceLost("1", "a/0", "signal 9"), 1.0)
    assert found.nodes["a"].code == "device-lost"
    assert not found.living("a/0", "1")


def test_a_spare_ends_one_device_s_incarnation_and_not_the_node_s():
    found = members("b")
    found.hello(hello("a", incarnations=["1", "2"]), 0.0)
    found.link_down(LinkDown("b/0", "a/1", "reset"), 0.9)
    assert found.device_lost("a", DeviceLost("1", "a/1", "signal 9", spare=True), 1.0)
    node = found.nodes["a"]
    assert (found.living("a/0", "1"), found.living("a/1", "2")) == (True, False)
    assert node.alive
    assert node.mending
    assert node.present  # a plan may count on it
    assert not node.ready
    assert node.fallen["a/1"].at == 0.9
    assert not node.accused  # who is dead is not accused for it
    assert not found.obituaries
    found.hello(hello("a", incarnations=["1", None], ready=False), 1.1)  # on a new connection, say
    assert node.mending
    assert [info.device for info in node.devices] == ["a/0", "a/1"]
    assert found.hello(hello("a", incarnations=["1", "3"]), 1.2) == "same"
    assert not node.mending
    assert found.living("a/1", "3")
    assert not found.living("a/1", "2")


@pytest.mark.parametrize(
    "ends",
    [
        lambda found: found.expire(6.0),
        lambda found: found.goodbye("a", Goodbye("1", "drained"), 1.0),
        lambda found: found.evict("a", "a link stays down", 1.0, "links-down"),
        lambda found: found.device_lost("a", DeviceLost("1", "a/0", "signal 9"), 1.0),
        lambda found: found.device_lost("a", DeviceLost("1", "a/0", "signal 9", spare=True), 1.0),
        lambda found: found.hello(hello("a", incarnations=[None], ready=False), 1.0),
        lambda found: found.hello(hello("a", incarnations=["2"]), 1.0),
        lambda found: found.hello(hello("a", "2"), 1.0),
    ],
)
def test_no_incarnation_ends_or_begins_without_a_turn(ends):
    found = members("a")
    before = found.turns
    found.heard("a", 0.5)
    assert (found.turns, found.living("a/0", "1")) == (before, True)
    ends(found)
    assert not found.living("a/0", "1")
    assert found.turns > before
    before = found.turns
    if found.heartbeat("a", "1", 6.5):
        assert found.living("a/0", "1")
        assert found.turns > before


def test_a_fall_that_was_not_heard_of_shows_in_the_next_hello():
    found = members()
    found.hello(hello("a", incarnations=["1", "2"]), 0.0)
    found.link_lost("a", 1.0)
    assert found.hello(hello("a", incarnations=["1", None], ready=False), 2.0) == "back"
    assert list(found.nodes["a"].fallen) == ["a/1"]
    assert not found.living("a/1", "2")
    found.expire(9.0)
    assert not found.nodes["a"].mending  # the node's end is the end of it all


def test_the_grace_of_a_link_is_no_time_in_which_the_daemon_slept():
    """What tells why it broke may have come meanwhile."""
    found = members("a", "b")
    found.link_down(LinkDown("a/0", "b/0", "reset"), 1.0)
    found.attend(61.0, 1.2)
    assert found.quarrel({"a", "b"}, 61.0) == ""
    due = found.deadline(61.0)
    assert due == pytest.approx(62.8)
    assert found.quarrel({"a", "b"}, due) == "b"
    assert found.deadline(due) != pytest.approx(due)


def test_who_is_linked_anew_accuses_nobody():
    found = members("a", "b", "c")
    for device, peer in (("a/0", "b/0"), ("b/0", "a/0"), ("c/0", "a/0")):
        found.link_down(LinkDown(device, peer, "reset"), 1.0)
    found.linked_anew("b/0")
    assert list(found.nodes["a"].accused) == [("c/0", "a/0")]
    assert list(found.nodes["b"].accused) == [("a/0", "b/0")]
    found.linked_anew("a/0")
    assert found.quarrel({"a", "b"}, 9.0) == ""
    assert found.quarrel({"a", "b", "c"}, 9.0) == "a"


def test_an_incarnation_that_a_hello_shows_to_be_over_is_accused_of_nothing_and_accuses_nobody():
    for fresh in (hello("b", incarnations=["2"]), hello("b", "2")):
        found = members("a", "b", "c")
        found.link_down(LinkDown("a/0", "b/0", "closed"), 1.0)  # it fell, and nobody had heard of it yet
        found.link_down(LinkDown("b/0", "c/0", "closed"), 1.0)
        found.link_down(LinkDown("a/0", "c/0", "closed"), 1.0)
        found.hello(fresh, 1.1)
        assert not found.nodes["b"].accused
        assert list(found.nodes["c"].accused) == [("a/0", "c/0")]


def test_goodbye():
    found = members("a")
    found.goodbye("a", Goodbye("0", "SIGTERM"), 1.0)
    assert found.living("a/0", "1")
    found.goodbye("a", Goodbye("1", "SIGTERM"), 1.0)
    assert found.nodes["a"].left
    assert found.nodes["a"].code == "left"
    assert not found.heartbeat("a", "1", 2.0)


def test_a_link_that_stays_down_evicts_by_a_fixed_rule():
    found = members("a", "b", "c")
    found.link_down(LinkDown("a/0", "b/0", "reset"), 1.0)
    found.link_down(LinkDown("b/0", "a/0", "reset"), 1.0)
    assert found.deadline(1.0) == 3.0
    assert not found.quarrel({"a", "b", "c"}, 2.9)
    assert found.quarrel({"a", "b", "c"}, 3.0) == "b"
    found.link_down(LinkDown("c/0", "a/0", "reset"), 3.0)
    assert found.quarrel({"a", "b", "c"}, 3.0) == "a"
    assert not found.quarrel({"a"}, 9.0)
    found.evict("a", "its links stay down", 3.0, "links-down")
    assert not found.living("a/0", "1")


def heartbeating(*names, seconds=10.0, heartbeat_s=0.25):
    """Members whose heartbeats have come on time for ``seconds``; the time after them."""
    found, now = members(*names), 0.0
    while now < seconds:
        now += heartbeat_s
        for name in names:
            assert not found.heartbeat(name, "1", now)
        found.expire(now)
    return found, now


def silence(found, now, *, but=(), until=10.0, tick_s=0.01):
    """Only the nodes ``but`` send heartbeats from ``now`` on; after how many seconds ``a`` is
    declared lost.
    """
    last, due = now, now + 0.25
    while found.nodes["a"].alive:
        now += tick_s
        assert now < last + until, "never declared lost"
        if now >= due:
            due += 0.25
            for name in but:
                found.heartbeat(name, "1", now)
        found.expire(now)
    return now - last


def test_a_steady_node_that_falls_silent_is_lost_after_a_few_heartbeats():
    found, now = heartbeating("a", "b")
    assert found.deadline(now) < now + 1.2
    assert 0.9 < silence(found, now, but="b") < 1.2
    assert found.nodes["a"].code == "silent"


def test_the_suspect_is_named_before_it_is_declared_lost():
    found, now = heartbeating("a", "b")
    assert found.silent_s(found.nodes["a"], now + 0.3) == 0.0
    assert found.silent_s(found.nodes["a"], now + 0.7) > 0.6
    assert found.living("a/0", "1")


def test_silence_of_everybody_is_ours_until_the_longest_lease():
    found, now = heartbeating("a", "b", "c")
    assert silence(found, now) >= 5.0


def test_a_round_that_needs_its_vote_is_a_sign_of_life():
    found, now = heartbeating("a", "b")
    found.witness({"a", "gone"}, now + 0.8)
    found.heartbeat("b", "1", now + 1.5)
    found.expire(now + 1.5)
    assert found.living("a/0", "1")
    found.heartbeat("b", "1", now + 2.0)
    found.expire(now + 2.0)
    assert not found.living("a/0", "1")


def test_rounds_do_not_excuse_a_dead_agent_for_ever():
    found, now = heartbeating("a", "b")
    for tenth in range(1, 50):
        found.witness({"a"}, now + tenth / 10)
        found.heartbeat("b", "1", now + tenth / 10)
        found.expire(now + tenth / 10)
        assert found.living("a/0", "1")
    found.expire(now + 5.0)
    assert not found.living("a/0", "1")


def test_a_closed_link_is_waited_for_as_long_as_can_be():
    found, now = heartbeating("a", "b")
    found.link_lost("a", now)
    assert silence(found, now, but="b") >= 5.0 - 1e-3


def test_time_in_which_the_daemon_slept_is_no_silence():
    found, now = heartbeating("a", "b")
    found.attend(now + 60.0, now + 0.2)
    found.heartbeat("b", "1", now + 60.0)
    found.expire(now + 60.0)
    assert found.living("a/0", "1")
    assert found.deadline(now + 60.0) > now + 60.0
    found.heartbeat("b", "1", now + 60.9)
    found.expire(now + 60.9)
    assert not found.living("a/0", "1")


def test_a_lease_is_over_at_its_deadline_whatever_rounding_does():
    """Else the deadline would be met again and again, while the waking clock stands still."""
    dice = random.Random(0)
    for _ in range(2000):
        found, now = Membership(dice.uniform(1.0, 5.0), 2.0), dice.uniform(0.0, 10.0)
        found.asleep_s = dice.uniform(0.0, 3.0)
        found.hello(hello("n1"), now)
        found.expire(found.deadline(now))
        assert not found.nodes["n1"].alive
