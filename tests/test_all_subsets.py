"""Every subset of the four flatteners is the plain program: real models, several ranks, groups and types."""

from __future__ import annotations

import pytest
import torch

import steppe
from steppe.compose import flatten_peaks
from steppe.core.errors import ConfigError, ConflictError
from steppe.core.policy import OFF
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from tests.composition.covering import SUBSETS, Row, covering, every_row, mixed_rows
from tests.composition.programs import judge, policies
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

STACK = [Row(NAMES[:n], "qwen3_moe", 2, 2, 2, 2, "float32") for n in range(1, len(NAMES) + 1)]
SELECTED = covering(every_row(), STACK)


def _titles(rows: list[Row]) -> list[str]:
    return [row.title for row in rows]


def test_every_pair_of_choices_occurs_in_the_selection_and_every_subset() -> None:
    pairs = {pair for row in every_row() for pair in row.pairs()}
    assert {pair for row in SELECTED for pair in row.pairs()} == pairs
    assert {row.names for row in SELECTED} == set(SUBSETS)
    assert 10 * len(SELECTED) < len(mixed_rows()), "a selection, not the grid"


@pytest.mark.parametrize("row", SELECTED, ids=_titles(SELECTED))
def test_a_subset_trains_as_the_plain_program(row: Row) -> None:
    judge(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", mixed_rows(), ids=_titles(mixed_rows()))
def test_the_full_grid(row: Row) -> None:
    judge(row)


def _refusals(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ConfigError, match="these names"):
        flatten_peaks(toy_model("mixtral"), {"vocabulary": OFF})
    model = toy_model("mixtral")
    with pytest.raises(ConfigError, match="these names"):
        flatten_peaks(model, {"vocabulary": OFF}, mesh=MeshShape(world=2, sequence=2))
    assert model.config._attn_implementation == "eager", "nothing stays attached after an error"
    with pytest.raises(ConfigError, match="shape of 3 ranks"):
        flatten_peaks(toy_model("mixtral"), {}, mesh=MeshShape(world=3))
    model = toy_model("mixtral")
    fully_shard(model.model.layers[0])
    with pytest.raises(ConflictError, match="let flatten_peaks shard it"):
        flatten_peaks(model, policies(NAMES))
    with pytest.raises(ConfigError, match=r"model\.layers"):
        flatten_peaks(torch.nn.Linear(2, 2), {})


def test_what_cannot_be_composed_is_refused() -> None:
    run_ranks(_refusals, 2)


def test_the_public_names_are_there() -> None:
    assert steppe.flatten_peaks is flatten_peaks
