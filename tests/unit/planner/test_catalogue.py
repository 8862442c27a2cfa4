"""The catalogue: what instantiate finds, for every number of nodes, and what is missing first."""

import pickle

from oobleckd.planner.sizing.catalogue import Catalogue, CatalogueEntry, entries
from oobleckd.planner.sizing.instantiate import instantiate
from tests.unit.planner.build import bare_template

MADE = [bare_template(size, 1.0 + size / 7, 1.3 / size) for size in (5, 6, 7)]


def test_every_entry_is_what_instantiate_finds_idle_nodes_included():
    catalogue = Catalogue(5)
    catalogue.add(entries(MADE, range(5, 41), 1, 24))
    for num_nodes in range(5, 41):
        assert catalogue.look_up(num_nodes) == instantiate(MADE, num_nodes, 1, 24)
    assert catalogue.look_up(9).idle == 2


def test_the_all_reduce_is_passed_on():
    reduce_s = [0.0, 0.0, 5.0, 6.0]
    (entry,) = entries(MADE, [15], 0, 24, reduce_s)
    assert entry.expand() == instantiate(MADE, 15, 0, 24, reduce_s)


def test_what_is_missing_comes_from_the_top_down_and_only_once():
    catalogue = Catalogue(5)
    assert catalogue.missing(8) == [8, 7, 6, 5]
    catalogue.add(entries(MADE, [7, 5], 1, 24))
    assert catalogue.missing(9) == [9, 8, 6]
    assert catalogue.missing(4) == []
    assert catalogue.look_up(6) is None


def test_entries_are_small_and_cross_process_boundaries():
    (entry,) = entries(MADE, [10_000], 1, 30_000)
    assert len(entry.runs) <= 6
    assert sum(size * count for size, _, count in entry.runs) == 10_000
    assert sum(share * count for _, share, count in entry.runs) == 30_000
    copied = pickle.loads(pickle.dumps(entry))
    assert isinstance(copied, CatalogueEntry)
    assert copied == entry
