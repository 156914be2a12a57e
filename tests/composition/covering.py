"""The grid of the subsets in integers: its rows, and a small selection in which every pair of choices occurs.

A row is one way to train: which flatteners, which family, how many ranks in which groups, in which type. What goes
wrong in composition goes wrong between two choices, seldom more, so a selection that has every pair of them at least
once finds what the grid of thousands would.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from tests.support.float64 import FAMILIES

SUBSETS = [s for n in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]
WORLDS = (1, 2, 4)
DTYPES = ("float32", "bfloat16")
Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclass(frozen=True)
class Row:
    names: tuple[str, ...]
    family: str
    world: int
    sequence: int
    expert: int
    vocab: int
    dtype: str

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.world, self.sequence, self.expert, self.vocab)

    @property
    def title(self) -> str:
        groups = f"W{self.world}D{self.sequence}E{self.expert}P{self.vocab}"
        return f"{'+'.join(self.names) or 'none'}-{self.family}-{groups}-{self.dtype}"

    def pairs(self) -> set[Pair]:
        """Every two choices of this row."""
        choices: dict[str, object] = {name: name in self.names for name in NAMES}
        choices |= {"family": self.family, "W": self.world, "D": self.sequence, "E_p": self.expert, "P": self.vocab}
        return set(itertools.combinations({**choices, "dtype": self.dtype}.items(), 2))


def groups_of(world: int) -> list[tuple[int, int, int]]:
    """All (D, E_p, P) of a number of ranks."""
    sizes = [size for size in WORLDS if world % size == 0]
    return list(itertools.product(sizes, repeat=3))


def every_row() -> list[Row]:
    """The whole grid, cheap rows first."""
    return [
        Row(names, family, world, *groups, dtype)
        for world in WORLDS
        for groups in groups_of(world)
        for dtype in DTYPES
        for family in FAMILIES
        for names in SUBSETS
    ]


def mixed_rows() -> list[Row]:
    """Every subset x family x number of ranks x type, each with the next of that number's (D, E_p, P) in turn."""
    turns = {world: itertools.cycle(groups_of(world)) for world in WORLDS}
    return [
        Row(names, family, world, *next(turns[world]), dtype)
        for world, family, dtype, names in itertools.product(WORLDS, FAMILIES, DTYPES, SUBSETS)
    ]


def _worth(row: Row, news: int, unseen: set[tuple[str, ...]], place: int) -> tuple[int, bool, int, int]:
    return news.bit_count(), row.names in unseen, len(row.names), -place


def covering(rows: Sequence[Row], first: Iterable[Row] = ()) -> list[Row]:
    """`first`, then greedily the row with most pairs that nobody has had; equals are decided for a new subset, then for
    more flatteners, then for the row that comes first. In the end every pair and subset of `rows` has occurred."""
    numbers: dict[Pair, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in row.pairs()) for row in rows]
    chosen = list(first)
    missing = (1 << len(numbers)) - 1
    for row in chosen:
        missing &= ~masks[rows.index(row)]
    unseen = {row.names for row in rows} - {row.names for row in chosen}
    while missing or unseen:
        best = max(range(len(rows)), key=lambda i: _worth(rows[i], masks[i] & missing, unseen, i))
        chosen.append(rows[best])
        missing &= ~masks[best]
        unseen.discard(rows[best].names)
    return chosen
