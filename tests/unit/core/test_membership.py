"""Lives, leases and evidence."""

from oobleckd.core.membership import Membership
from oobleckd.protocol.messages import DeviceInfo, Hello, LinkDown


def hello(name, life="1", *, ready=True):
    info = DeviceInfo(f"{name}/0", "cpu", "cpu", 0, "", "", 1)
    return Hello(1, name, life, "host", ready, (info,))


def members(*names):
    found = Membership(lease_s=5.0, link_grace_s=2.0)
    for name in names:
        assert found.hello(hello(name), 0.0) == "new"
    return found


def test_hellos_tell_lives_apart():
    found = members("a")
    assert found.hello(hello("a"), 1.0) == "same"
    found.link_lost("a", 2.0)
    assert not found.nodes["a"].present
    assert found.hello(hello("a"), 3.0) == "back"
    assert found.hello(hello("a", "2"), 4.0) == "new"
    assert found.living("a", "2")
    assert not found.living("a", "1")
    assert found.device("a/0").pid == 1
    assert found.device("b/0") is None


def test_a_closed_link_alone_is_no_death_and_a_lease_ends():
    found = members("a")
    found.link_lost("a", 1.0)
    found.link_lost("nobody", 1.0)
    found.expire(4.9)
    assert found.living("a", "1")
    assert found.deadline(4.9) == 5.0
    found.expire(5.0)
    assert not found.living("a", "1")
    assert found.nodes["a"].cause == "no sign of life for 5 s"
    assert found.nodes["a"].suspect_at == 1.0
    assert found.obituaries == ["a"]
    assert found.deadline(5.0) is None


def test_beats_and_messages_renew_the_lease():
    found = members("a")
    assert not found.beat("a", "1", 4.0)
    found.heard("a", 8.0)
    found.heard("nobody", 8.0)
    found.expire(12.0)
    assert found.living("a", "1")
    assert not found.beat("a", "of another life", 12.9)
    assert not found.beat("nobody", "1", 12.9)
    found.expire(13.0)
    assert not found.living("a", "1")


def test_a_life_that_was_declared_over_returns_as_a_fresh_one():
    found = members("a")
    found.expire(5.0)
    assert found.beat("a", "1", 6.0)
    assert found.nodes["a"].present
    assert not found.beat("a", "1", 6.5)


def test_link_closed_and_a_peer_that_lost_it_too_in_either_order():
    for first_peer in (True, False):
        found = members("a", "b")
        down = LinkDown("b/0", "a/0", "reset")
        if first_peer:
            found.link_down(down, 1.0)
            assert found.living("a", "1")
            found.link_lost("a", 1.1)
        else:
            found.link_lost("a", 1.0)
            found.link_down(down, 1.1)
        assert not found.living("a", "1")
        assert found.nodes["a"].suspect_at == 1.0
        assert "b/0 lost it too" in found.nodes["a"].cause
        found.link_down(down, 1.2)  # of a life that is over: no news
        found.link_lost("a", 1.2)


def test_device_lost_counts_for_its_own_life_only():
    found = members("a")
    found.device_lost("a", "0", "signal 9", 1.0)
    assert found.living("a", "1")
    found.device_lost("a", "1", "a/0: signal 9", 1.0)
    assert found.nodes["a"].cause == "a/0: signal 9"


def test_goodbye():
    found = members("a")
    found.goodbye("a", "0", "SIGTERM", 1.0)
    assert found.living("a", "1")
    found.goodbye("a", "1", "SIGTERM", 1.0)
    assert found.nodes["a"].left
    assert not found.beat("a", "1", 2.0)


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
    found.evict("a", "its links stay down", 3.0)
    assert not found.living("a", "1")


def test_silence_while_the_daemon_slept_is_no_evidence():
    found = members("a")
    found.forgive(100.0)
    found.expire(104.0)
    assert found.living("a", "1")
