"""Pipeline templates: for each number of nodes the split with the least modelled time that fits.

Owns the search over contiguous splits with one device a stage (the engine does not shard stages).
Does not choose which templates run (``instantiate``) nor on which nodes (``transfer``).

A template for n nodes of d devices has min(n*d, L) stages; node k runs ``node_stages[k]`` consecutive
ones, so no stage straddles two nodes. Its objective is the time of the micro-batches that it would
get among ``max_nodes`` nodes, ``T(m) = fill + (m-1)*period`` (Oobleck section 4.1, with transfers and
memory). Memory is checked for all micro-batches of the step, so that any share fits later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from planner.costs import Floats, StageCosts, stage_costs
from planner.guarantee import n_max
from planner.plan import Range, Stage, Template
from planner.policy import PlanError, Setup


def templates(setup: Setup) -> tuple[Template, ...]:
    """Templates for n0, n0+1, .. n_max nodes, n0 being the fewest whose memory holds the model.

    Sizes are consecutive. Raises PlanError when no number of nodes fits.
    """
    if not setup.profile.layers or setup.num_micro_batches < 1 or setup.devices_per_node < 1:
        raise PlanError("a plan needs at least one layer, one micro-batch and one device a node")
    search = _Search(stage_costs(setup.profile), setup.num_micro_batches, setup.device_memory_bytes)
    num_layers = len(setup.profile.layers)
    nodes = setup.max_nodes or num_layers
    need = search.least_memory()
    fitting = [n for n in range(1, num_layers + 1) if need[num_stages(setup, n)] <= search.limit]
    if not fitting:
        raise _nothing_fits(setup, search, need)
    sizes = range(fitting[0], n_max(fitting[0], setup.f, nodes, num_layers) + 1)
    # A deeper pipeline holds more activations; where that stops fitting, larger sizes are left out.
    last = next((n for n in sizes if n not in fitting), sizes.stop)
    return tuple(_template(setup, search, n) for n in range(sizes.start, last))


def num_stages(setup: Setup, num_nodes: int) -> int:
    """Stages of a template for ``num_nodes`` nodes: one a device, as far as there are layers."""
    return min(num_nodes * setup.devices_per_node, len(setup.profile.layers))


def node_stages(template: Template) -> tuple[int, ...]:
    """How many consecutive stages each node of ``template`` runs, as even as possible."""
    each, more = divmod(len(template.stages), template.num_nodes)
    return tuple(each + (node < more) for node in range(template.num_nodes))


def expected_share(setup: Setup, num_nodes: int) -> int:
    """Micro-batches that a pipeline of ``num_nodes`` nodes expects when all nodes run such ones."""
    nodes = setup.max_nodes or len(setup.profile.layers)
    return -(-setup.num_micro_batches // max(setup.f + 1, nodes // num_nodes))


@dataclass(slots=True)
class _Search:
    """Splits of one model under one memory limit; remembers what it has computed.

    ``cheapest[k]``: for every number of stages the least sum of cut times with no stage slower than
    the k-th smallest period (inf: none). The sum of layer times is the same for every split.
    """

    costs: StageCosts
    num_micro_batches: int
    limit: float
    periods: Floats = field(init=False)
    cheapest: dict[int, Floats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.limit = self.limit or np.finfo(np.float64).max
        upper = np.triu_indices(self.costs.num_layers + 1, 1)
        self.periods = np.unique(self.costs.period_s[upper])

    def least_memory(self) -> Floats:
        """Entry s: the smallest device memory that some split into s stages fits, in bytes."""
        reach = self._last_stage()
        need = [np.inf]
        for from_end in range(1, self.costs.num_layers + 1):
            reach = np.maximum(self._memory(from_end), reach[None, :]).min(axis=1)
            need.append(reach[0])
        return np.array(need)

    def smallest_memory_split(self, stages: int) -> list[int]:
        """Stage boundaries of the split into ``stages`` stages whose largest stage is smallest."""
        return self._split([self._memory(s) for s in range(1, stages + 1)], np.maximum)

    def fastest_split(self, stages: int, share: int) -> list[int]:
        """Stage boundaries of the split that fits and has the least time for ``share`` micro-batches.

        Branch and bound over the sorted periods: within (low, high] the cuts cost at least what they
        cost at high, the period at least the one after low.
        """
        best_s, best = np.inf, -1
        low, high = self._first_feasible(stages), len(self.periods) - 1
        open_intervals = [(low, high)]
        for k in (low, high):
            best_s, best = min((best_s, best), (self._time_s(stages, share, k), k))
        while open_intervals:
            low, high = open_intervals.pop()
            bound = self._cuts_s(stages, high) + (share - 1) * self.periods[min(low + 1, high)]
            if high - low < 2 or bound >= best_s or self._cuts_s(stages, low) == self._cuts_s(stages, high):
                continue
            middle = (low + high) // 2
            best_s, best = min((best_s, best), (self._time_s(stages, share, middle), middle))
            open_intervals += [(middle, high), (low, middle)]
        return self._split([self._edges(s, best) for s in range(1, stages + 1)], np.add)

    def _time_s(self, stages: int, share: int, k: int) -> float:
        """Time of ``share`` micro-batches less the sum of layer times, with the k-th period."""
        return float(self._cuts_s(stages, k) + (share - 1) * self.periods[k])

    def _cuts_s(self, stages: int, k: int) -> float:
        if k not in self.cheapest:
            reach = self._last_stage()
            sums = [np.inf]
            for from_end in range(1, self.costs.num_layers + 1):
                reach = (self._edges(from_end, k) + reach[None, :]).min(axis=1)
                sums.append(reach[0])
            self.cheapest[k] = np.array(sums)
        return float(self.cheapest[k][stages])

    def _first_feasible(self, stages: int) -> int:
        low, high = 0, len(self.periods) - 1
        while low < high:
            middle = (low + high) // 2
            if self._cuts_s(stages, middle) < np.inf:
                high = middle
            else:
                low = middle + 1
        return low

    def _edges(self, from_end: int, k: int) -> Floats:
        """Cost of the cut before every stage that fits and is no slower than the k-th period."""
        allowed = (self.costs.period_s <= self.periods[k]) & (self._memory(from_end) <= self.limit)
        return np.where(allowed, 2 * self.costs.cut_s[:, None], np.inf)

    def _memory(self, from_end: int) -> Floats:
        """Memory of every stage there, inf where there is no stage."""
        memory = self.costs.memory_bytes(from_end, self.num_micro_batches)
        return np.where(np.triu(np.ones_like(memory, dtype=bool), 1), memory, np.inf)

    def _last_stage(self) -> Floats:
        """Cost of what follows layer i when nothing may: 0 after the last layer, inf before."""
        reach = np.full(self.costs.num_layers + 1, np.inf)
        reach[-1] = 0.0
        return reach

    def _split(self, edges: list[Floats], combine: np.ufunc) -> list[int]:
        """Boundaries of the best path over ``edges`` (last stage first); fewest layers first on ties."""
        reach = [self._last_stage()]
        for edge in edges:
            reach.append(combine(edge, reach[-1][None, :]).min(axis=1))
        bounds = [0]
        for edge, beyond in zip(reversed(edges), reversed(reach[:-1]), strict=True):
            bounds.append(int(combine(edge[bounds[-1]], beyond).argmin()))
        return bounds


def _template(setup: Setup, search: _Search, num_nodes: int) -> Template:
    stages = num_stages(setup, num_nodes)
    bounds = search.fastest_split(stages, expected_share(setup, num_nodes))
    costs = search.costs
    cuts = list(pairwise(bounds))
    memory = [costs.memory_bytes(stages - s, setup.num_micro_batches) for s in range(stages)]
    return Template(
        num_nodes=num_nodes,
        devices_per_node=setup.devices_per_node,
        stages=tuple(
            Stage(Range(i, j), 1, float(costs.time_s[i, j]), int(memory[s][i, j]))
            for s, (i, j) in enumerate(cuts)
        ),
        fill_s=float(costs.time_s[0, -1] + 2 * sum(costs.cut_s[i] for i, _ in cuts)),
        period_s=max(float(costs.period_s[i, j]) for i, j in cuts),
    )


def _nothing_fits(setup: Setup, search: _Search, need: Floats) -> PlanError:
    """The error for a model that no number of nodes holds: the stage that is too large even in the
    split that comes closest.
    """
    stages = min(range(1, len(need)), key=lambda s: (need[s], s))
    bounds = search.smallest_memory_split(stages)
    memory = [search.costs.memory_bytes(stages - s, setup.num_micro_batches) for s in range(stages)]
    sizes = [memory[s][bounds[s], bounds[s + 1]] for s in range(stages)]
    worst = int(np.argmax(sizes))
    first, last = bounds[worst], bounds[worst + 1] - 1
    names = [layer.name for layer in setup.profile.layers]
    where = f"layer {first} ({names[first]})" if first == last else f"layers {first} to {last}"
    return PlanError(
        f"the model fits no number of nodes: with {stages} stages, the split that needs least, {where} "
        f"needs {int(sizes[worst]):,} bytes of a device and the limit is {setup.device_memory_bytes:,}",
        f"raise resources.device_memory to at least {int(sizes[worst]):,} bytes, or lower "
        "train.micro_batch or train.sequence",
    )
