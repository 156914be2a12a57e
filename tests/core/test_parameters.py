"""Parameter counts against the totals that the models' authors publish."""

from __future__ import annotations

import pytest

from steppe.core.parameters import parameters_per_rank, total_parameters
from steppe.planner.models import load_model, shipped_models

PUBLISHED = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-32b": 32_763_876_352,
    "llama-3.1-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # 671,026,419,200 less the 58 x 256 entries of the router's correction bias, a buffer that no gradient reaches
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_total_equals_the_published_count(name: str) -> None:
    assert total_parameters(load_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "billions"), [("paper-120b", 122), ("paper-241b", 241), ("paper-667b", 667)])
def test_the_papers_shapes_have_the_papers_sizes(name: str, billions: int) -> None:
    assert round(total_parameters(load_model(name)) / 1e9) == billions


@pytest.mark.parametrize("name", shipped_models())
def test_shards_of_all_ranks_hold_the_whole_model(name: str) -> None:
    model = load_model(name)
    for world in (1, 3, 8, 512):
        assert 0 <= parameters_per_rank(model, world) * world - total_parameters(model) < world
