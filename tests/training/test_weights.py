"""Weights come to a rank shard by shard: the values of one process on any ranks, and never a whole model on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.compose import flatten_peaks
from steppe.core.errors import ConfigError
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations import checkpoint_files as files
from steppe.integrations.skeleton import PIECE_ELEMENTS, Skeleton, fill_random, materialize, skeleton
from steppe.planner.plan import policy_class
from steppe.runtime import collectives
from steppe.runtime.sharded import local
from steppe.training.export import export
from tests.support.exactness import assert_bitwise
from tests.support.float64 import FAMILIES, toy_config, toy_model
from tests.support.peaks import assert_peak, measured_peak
from tests.support.ranks import run_ranks

LAYOUTS = {1: {}, 2: {"expert": 2, "vocab": 2}, 4: {"expert": 2, "vocab": 2}}
LARGE = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "vocab_size": 2048}  # some MiB a rank
PIECE_BYTES = 1 << 16
SEED = 5


def _flattened(config: Any, world: int, sizes: dict[str, int]) -> Skeleton:
    """A model without weights, flattened and sharded over all ranks."""
    made = skeleton(config, dtype=torch.float32)
    flatten_peaks(made.model, {name: policy_class(name)() for name in NAMES}, mesh=MeshShape(world=world, **sizes))
    return made


def _whole(config: Any) -> dict[str, torch.Tensor]:
    made = skeleton(config, dtype=torch.float32)
    materialize(made.model, torch.device("cpu"))
    fill_random(made.model, made.recipes, SEED)
    return dict(made.model.state_dict())


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _in_and_out(rank: int, world: int, families: list[str], folder: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    for family in families:
        config = toy_config(family, **changes)
        made, expected, place = _flattened(config, world, LAYOUTS[world]), _whole(config), Path(folder) / family
        materialize(made.model, torch.device("cpu"))
        fill_random(made.model, made.recipes, SEED)
        for name, tensor in files.tensors_of(made.model).items():
            assert_bitwise(_full(tensor), expected[name], f"{name} of {family} from the seed on {world} ranks")
        for name, buffer in made.model.named_buffers():
            assert_bitwise(buffer, toy_model(family, **changes).get_buffer(name), f"buffer {name} of {family}")
        export(made.model, place / "out", collectives.world(), shard_bytes=40_000, piece_bytes=999 * 4)
        loaded = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float32)
        for name, tensor in loaded.state_dict().items():
            assert_bitwise(tensor, expected[name], f"{name} of {family} written by {world} ranks")
        if rank == 0:
            loaded.save_pretrained(place / "theirs")
            assert _names(place / "theirs") == _names(place / "out"), "the names of save_pretrained"
        collectives.barrier(collectives.world())
        for source in ("out", "theirs"):
            for tensor in files.tensors_of(made.model).values():
                local(tensor).fill_(float("nan"))
            assert files.read(made.model, place / source, piece_bytes=1000) == ()
            for name, tensor in files.tensors_of(made.model).items():
                assert_bitwise(_full(tensor), expected[name], f"{name} of {family} from {source} on {world} ranks")


def _names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for file in files.stored_files(folder):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


@pytest.mark.parametrize(
    ("world", "families", "changes"),
    [
        (1, ["qwen3_moe"], {"tie_word_embeddings": True}),
        (2, ["gpt_oss", "deepseek_v3", "mixtral"], {}),
        (2, ["qwen3_moe"], {"tie_word_embeddings": True, "vocab_size": 251}),
        (4, ["qwen3_moe"], {"num_experts": 6, "vocab_size": 255, "num_hidden_layers": 1}),  # shards of 2 and 1 expert
        pytest.param(4, list(FAMILIES), {}, marks=pytest.mark.slow),
        pytest.param(2, list(FAMILIES), {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)
def test_shards_from_the_seed_and_from_files_are_those_of_one_process_and_go_out_as_they_came(
    world: int, families: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(_in_and_out, world, families, str(tmp_path), changes)


def _peaks(rank: int, world: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """Of a load from the seed, one from files and an export: (measured, this rank's shards, the whole model)."""
    config, found, kept = toy_config("qwen3_moe", **LARGE), {}, {}

    def load(source: str) -> None:
        kept[source] = made = _flattened(config, world, LAYOUTS[world])
        materialize(made.model, torch.device("cpu"))
        if source == "seed":
            fill_random(made.model, made.recipes, SEED)
        else:
            files.read(made.model, source, piece_bytes=PIECE_BYTES)

    load("seed")  # warms up whatever is allocated once
    for source in ("seed", folder):
        measured = measured_peak(lambda source=source: load(source))  # type: ignore[misc]
        tensors = [*kept[source].model.parameters(), *kept[source].model.buffers()]
        shards = sum(local(t).numel() * t.element_size() for t in tensors)
        found["seed" if source == "seed" else "files"] = (measured, shards, sum(t.numel() * 4 for t in tensors))
        if source == "seed":
            out = measured_peak(lambda: export(kept["seed"].model, Path(folder), collectives.world()))
            found["export"] = (out, 0, found["seed"][2])
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_holds_its_shards_and_one_piece_while_it_loads_and_nothing_more_while_it_exports(
    world: int, tmp_path: Path
) -> None:
    pieces = {"seed": 4 * PIECE_ELEMENTS, "files": PIECE_BYTES, "export": PIECE_BYTES}
    probes = 3 * 2 * 8 * 16 * 2 * 128  # two int64 a row of one stacked gate_up, and both its halves made contiguous
    why = "one piece, and the probes that say where rows stand in files"
    for found in run_ranks(_peaks, world, str(tmp_path / "hf")):
        for source, (measured, shards, whole) in found.items():
            assert_peak(measured, shards, pieces[source] + probes, f"{source}: {why}")
            assert world == 1 or measured < 0.75 * whole


def _refusals(rank: int, world: int, folder: str) -> None:
    place = Path(folder)
    made = _flattened(toy_config("qwen3_moe"), world, LAYOUTS[world])
    materialize(made.model, torch.device("cpu"))
    fill_random(made.model, made.recipes, SEED)
    before = [local(p).clone() for p in made.model.parameters()]
    export(made.model, place, collectives.world(), shard_bytes=40_000)
    with pytest.raises(ConfigError, match="no directory"):
        files.read(made.model, place / "elsewhere")
    deeper = _flattened(toy_config("qwen3_moe", num_hidden_layers=3), world, LAYOUTS[world]).model
    with pytest.raises(ConfigError, match=r"without 11 of the model's tensors \(model\.layers\.2"):
        files.read(deeper, place)
    wider = _flattened(toy_config("qwen3_moe", vocab_size=264), world, LAYOUTS[world]).model
    with pytest.raises(ConfigError, match=r"lm_head.*shape \[256, 32\]; allowed: \[264, 32\]|embed_tokens"):
        files.read(wider, place)
    shallow = _flattened(toy_config("qwen3_moe", num_hidden_layers=1), world, LAYOUTS[world]).model
    materialize(shallow, torch.device("cpu"))
    assert all("layers.1." in name for name in files.read(shallow, place)), "what nobody wants is named"
    collectives.barrier(collectives.world())
    if rank == 0:
        lost = sorted(place.glob("*.safetensors"))[0]
        lost.unlink()
    collectives.barrier(collectives.world())
    with pytest.raises(ConfigError, match="without model-00001"):
        files.read(made.model, place)
    for own, old in zip(made.model.parameters(), before, strict=True):
        assert_bitwise(local(own), old, "a weight after a refusal")


def test_files_that_do_not_fit_are_refused_before_a_weight_changes(tmp_path: Path) -> None:
    run_ranks(_refusals, 2, str(tmp_path / "hf"))


def test_random_weights_follow_the_familys_own_distribution() -> None:
    for family in FAMILIES:
        config = toy_config(family, pad_token_id=3)
        ours, theirs = _whole(config), toy_model(family, pad_token_id=3).state_dict()
        for name, value in theirs.items():
            deviation, count = value.double().std().item(), value.numel()
            assert ours[name].dtype == value.dtype
            if not deviation:
                assert_bitwise(ours[name], value, name)
                continue
            # Five standard errors of a deviation and of a mean: a thousand parameters stay well inside.
            assert abs(ours[name].double().std().item() - deviation) <= 2 * 5 * deviation / (2 * count) ** 0.5, name
            assert abs(ours[name].double().mean().item()) <= 5 * deviation / count**0.5, name
        assert not ours["model.embed_tokens.weight"][3].any(), "the padding row is zero, as the family wants it"


def test_an_index_names_every_tensor_once(tmp_path: Path) -> None:
    made = skeleton(toy_config("olmoe"), dtype=torch.bfloat16)
    materialize(made.model, torch.device("cpu"))
    fill_random(made.model, made.recipes, SEED)
    export(made.model, tmp_path / "hf", None, shard_bytes=30_000)
    index = json.loads((tmp_path / "hf" / files.INDEX).read_text())
    assert set(index["weight_map"]) == _names(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(p.numel() * 2 for p in made.model.parameters())
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in index["weight_map"]


@pytest.mark.parametrize("foreign", ["notes.txt", "checkpoints/step-1"])
def test_an_export_takes_the_place_of_an_earlier_one_and_of_nothing_else(foreign: str, tmp_path: Path) -> None:
    made = skeleton(toy_config("mixtral"), dtype=torch.float32)
    materialize(made.model, torch.device("cpu"))
    target = tmp_path / "hf"
    for _ in range(2):
        export(made.model, target, None)
    found = sorted(path.name for path in target.iterdir())
    (target / foreign).parent.mkdir(exist_ok=True)
    (target / foreign).write_text("kept")
    with pytest.raises(ConfigError, match=foreign.split("/")[0]):
        export(made.model, target, None)
    assert (target / foreign).read_text() == "kept"
    assert set(found) < {path.name for path in target.iterdir()}
