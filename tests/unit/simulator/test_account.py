"""The book: it adds up, whatever happens in whichever order."""

from __future__ import annotations

from random import Random

import pytest

from oobleckd.simulator.account import NS, Account


def adds_up(account: Account) -> bool:
    open_ns = sum(tally.devices_ns for tally in account.open.values())
    return account.useful_ns + sum(account.lost_ns.values()) + open_ns == account.total_ns


def test_undisturbed_steps_are_useful() -> None:
    account = Account()
    account.alive(0.0, 4)
    account.spend(1.0, "round")
    account.commit(3.0, 2, normal_s=2.0, best_s=2.0)
    account.close(3.0)
    assert account.useful_ns == 8 * NS
    assert account.lost_s["waiting"] == 4.0


def test_a_slower_plan_is_degraded_by_the_difference() -> None:
    account = Account()
    account.alive(0.0, 3)
    account.spend(0.0, "round")
    account.commit(4.0, 1, normal_s=4.0, best_s=3.0)
    assert account.useful_ns == 9 * NS
    assert account.lost_s["degraded"] == 3.0


def test_a_disturbed_step_loses_what_it_took_longer() -> None:
    account = Account()
    account.alive(0.0, 2)
    account.spend(0.0, "round")
    account.spend(1.0, "detect")
    account.spend(1.5, "plan")
    account.spend(2.0, "round")
    account.commit(4.0, 1, normal_s=2.0, best_s=2.0)
    assert account.useful_ns == 4 * NS
    assert dict(account.lost_s) | {"redone": 2.0, "detect": 1.0, "plan": 1.0} == dict(account.lost_s)


def test_what_hid_behind_others_work_is_not_lost() -> None:
    """Detection and decision took a second, but pipelines that were not hit ran on meanwhile."""
    account = Account()
    account.alive(0.0, 2)
    account.spend(0.0, "round")
    account.spend(1.0, "detect")
    account.spend(2.0, "round")
    account.commit(2.0, 1, normal_s=2.0, best_s=2.0)
    assert account.useful_ns == account.total_ns


def test_a_rollback_takes_what_was_useful() -> None:
    account = Account()
    account.alive(0.0, 1)
    account.spend(0.0, "round")
    for step in range(1, 5):
        account.commit(float(step), step, normal_s=1.0, best_s=0.5)
    account.safe(2)
    account.roll_back(4.5, 2)
    account.spend(4.5, "plan")
    account.close(5.0)
    assert account.useful_ns == NS  # two steps, half of each
    assert account.lost_s["degraded"] == 1.0
    assert account.lost_s["redone"] == 2.5
    assert account.lost_s["plan"] == 0.5


@pytest.mark.parametrize("seed", range(50))
def test_it_adds_up(seed: int) -> None:
    chance, account, now, step = Random(seed), Account(), 0.0, 0
    account.alive(0.0, 7)
    for _ in range(200):
        now += chance.expovariate(3.0)
        match chance.randrange(6):
            case 0:
                account.alive(now, chance.randrange(1, 40))
            case 1:
                account.spend(
                    now, chance.choice(["round", "detect", "plan", "copy", "waiting", "reconfigure"])
                )
            case 2:
                account.spend(now, "round")
            case 3 | 4 if account.open:
                step += chance.randrange(1, 5)
                account.commit(now, step, chance.random(), chance.random(), chance.random() / 10)
            case 5:
                step = max(0, step - chance.randrange(8))
                account.roll_back(now, step)
            case _:
                account.safe(step - 3)
        assert adds_up(account)
        assert account.useful_ns >= 0
        assert min(account.lost_ns.values()) >= 0
    account.close(now + 1.0)
