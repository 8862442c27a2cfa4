"""Models copies that are made while training goes on, for a plan that is to come: how long they take, where
they pay, and who has room for them.

The state is sent once, and from then on what every update is made from, so that the target keeps up: a
gradient for the weights, and the moments, that a copy has. (Live migration of virtual machines pre-copies in
the same way: Clark et al., NSDI 2005; what is written again while it is copied is there sent again, page by
page, here as the gradient that it follows from.) Owns the model; nothing of it is needed for a plan to be
right, only for the choice.

That training and copies share a link is left out: what a device exchanges of its gradients anyway is more
than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from oobleckd.planner.placement.transfer import copy_s
from oobleckd.planner.plan import Layers, Transfer
from oobleckd.planner.policy import Setup, Situation
from oobleckd.planner.profile import STATE_COPIES, Profile
from oobleckd.planner.schedules.jobshop import base_bytes

# With two moments, gradients that follow take c/3 of every step's link: at three steps no target ever
# catches up, at two it takes three times as long. (D-precopy-006)
MAX_STEPS = 2.0
"""Copies of weights and two moments that take more steps are made in the stop. With three the gradients alone
would fill the link, and no target would ever catch up; with two it takes three times as long as the copies
alone. Of fewer moments it is as many steps fewer.
"""
MIN_STEPS, MIN_S = 0.5, 0.1
"""Copies that take less than so many steps, and less than so many seconds, are made in the stop as well: it
takes about as long without them, and the old plan would be in force for longer.
"""


def last_update(profile: Profile) -> float:
    """Of what was sent before a commit so much follows after it: what that update was made from."""
    return 1 / profile.state_copies


def caught_up_s(copies_s: float, step_s: float, state_copies: float = STATE_COPIES) -> float:
    """Seconds until copies that take ``copies_s`` on an idle link are current, with steps of ``step_s``; inf:
    they never are. ``state_copies``: as ``Profile`` has it.

    They begin at once, and whoever does without them waits for the boundary as well. Where in a step they
    begin is anybody's guess, so that is also by how much the stop comes later on average: by a step, with the
    probability that the boundary is there before they are.
    """
    share = copies_s / state_copies / step_s if step_s > 0 else inf
    return copies_s / (1 - share) if share < 1 else inf


def still_share(profile: Profile, *, updated: bool = True) -> float:
    """What a stop still takes of the time to copy what was sent before it: the last update comes
    (``updated``: there was one since) while all of it goes from the host's memory to the device's.
    """
    # The last update is sent after the commit at which all hold, a third of what was sent; without it
    # simulated joins looked cheaper. (D-precopy-013)
    update = last_update(profile) if updated else 0.0
    # The way up into the device is paid in the stop where pre-copies lie in the host's memory: 0.39 of the
    # copies on an A40. (D-precopy-012)
    up = profile.link_bytes_per_s / profile.host_bytes_per_s if profile.host_bytes_per_s else 0.0
    return min(1.0, max(update, up))


def hidden_s(profile: Profile, copies_s: float, step_s: float) -> float:
    """Seconds by which the stop is shorter where copies of ``copies_s`` begin in the step under way and
    nobody waits for them: at its end what was sent is there but for ``still_share``, the rest is copied as
    without them. On average, since a change comes anywhere in a step.
    """
    if step_s <= 0:
        return 0.0
    sent_s = copies_s - copies_s**2 / (2 * step_s) if copies_s < step_s else step_s / 2
    return (1 - still_share(profile)) * sent_s


def lost_s(wait_s: float, now_s: float, new_s: float) -> float:
    """What is lost in ``wait_s`` by steps of ``now_s`` where the new plan has steps of ``new_s``."""
    return wait_s * max(0.0, 1 - new_s / now_s) if now_s > 0 else 0.0


def counts(copies_s: float, step_s: float) -> bool:
    """Whether copies of that length are worth to be begun before the stop, with steps of ``step_s``."""
    return copies_s >= min(MIN_S, MIN_STEPS * step_s)


def pays(copies_s: float, step_s: float, state_copies: float = STATE_COPIES) -> bool:
    """Whether they are waited for."""
    return counts(copies_s, step_s) and copies_s <= MAX_STEPS * state_copies / STATE_COPIES * step_s


def has_room(
    setup: Setup, needed: Mapping[str, int], situation: Situation, copies: Sequence[Transfer]
) -> bool:
    """Whether everybody has the memory for it where that of devices is their host's: targets for the state
    and a step's gradients beside what they hold and compute, sources for the snapshot. Of an accelerator it
    takes none: both lie in the host's memory. ``needed``: bytes of those of whom it is known; of others it is
    the most that they may need.

    A target that holds nothing yet has the room that the plan gives it.
    """
    limit = setup.device_memory_bytes
    if not limit or not setup.profile.device.startswith("cpu"):
        return True
    more: dict[str, float] = {}
    for copy in copies:
        more[copy.target] = more.get(copy.target, 0.0) + copy.num_bytes * (1 + last_update(setup.profile))
        more[copy.source] = more.get(copy.source, 0.0) + copy.num_bytes
    return all(
        extra + needed.get(device, _max_bytes(setup, situation.holdings[device])) <= limit
        for device, extra in more.items()
        if device in situation.holdings
    )


def _max_bytes(setup: Setup, held: Layers) -> int:
    """What a device that holds ``held`` needs at most: all micro-batches in flight."""
    activations = setup.profile.activation_bytes(held.layers())
    flying = setup.num_micro_batches * activations + setup.held.redundant_bytes
    return base_bytes(setup, held) + flying


def precopy_s(
    setup: Setup,
    needed: Callable[[], Mapping[str, int]],
    situation: Situation,
    copies: Sequence[Transfer],
    step_s: float,
) -> float:
    """Seconds until ``copies`` are pre-copied, with steps of ``step_s`` until then; 0 where they are better
    made in the stop.

    ``needed``: as in ``has_room``, asked for where that decides.
    """
    copies_s, state_copies = copy_s(copies, setup.profile), setup.profile.state_copies
    if not copies or not pays(copies_s, step_s, state_copies):
        return 0.0
    if not has_room(setup, needed(), situation, copies):
        return 0.0
    return caught_up_s(copies_s, step_s, state_copies)
