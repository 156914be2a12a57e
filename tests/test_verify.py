"""The certificate says what differs and what doesn't; the comparison measures what it says."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.compare import compare
from steppe.core.errors import ConfigError
from steppe.core.ledger import PEAKS
from steppe.flatteners import NAMES
from steppe.flatteners.boundary.budget import BoundaryPolicy
from steppe.runtime import collectives
from steppe.sides import Side
from steppe.subsets import all_subsets, stacked
from steppe.training.config import RunConfig, policy_class
from steppe.truth import distance, first_step
from steppe.verify import certify, emit, side_by_side, strict, table
from tests.support.exactness import rounding_band
from tests.support.ranks import run_ranks
from tests.training.toys import toy_run, toy_shape


def _config(folder: str, family: str = "qwen3_moe") -> RunConfig:
    deep = {"shape": toy_shape(family, num_hidden_layers=6)}
    return toy_run(Path(folder), family, model=deep).with_flatten(boundary=BoundaryPolicy())


def _pair(rank: int, world_size: int, folder: str, family: str) -> dict[str, Any]:
    pair = side_by_side(_config(folder, family), steps=3, say=lambda line: None)
    return {"certificate": pair.certificate.to_json(), "table": table(pair.certificate)}


@pytest.mark.parametrize(("world_size", "family"), [(1, "gpt_oss"), (2, "qwen3_moe")])
def test_boundaries_on_the_host_change_no_bit_and_both_sides_are_as_near_to_float64(
    world_size: int, family: str, tmp_path: Path
) -> None:
    found = run_ranks(_pair, world_size, str(tmp_path), family)[0]["certificate"]
    assert found["steps"] == 3
    assert found["max_abs_loss_diff"] == found["per_token_mse"] == 0.0
    assert found["max_grad_rel_err"] == found["grad_norm_rel_diff"] == 0.0
    truth = found["against_float64"]
    assert truth["plain"] == truth["flattened"]
    half_the_digits = torch.finfo(torch.float32).eps ** 0.5
    assert 0 < truth["plain"]["max_grad_rel_err"] < half_the_digits  # float32 noise: neither zero nor another program
    for side in ("plain", "flattened"):
        assert found[side]["device_peak_bytes"] > 0
        assert found[side]["step_ms"] > 0
        assert set(PEAKS) <= set(found[side]["peaks"])
    assert found["flattened"]["peaks"]["boundary"] < found["plain"]["peaks"]["boundary"]
    assert found["plain"]["host_bytes"] == 0 < found["flattened"]["host_bytes"]


def _all_four(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    shape = {"shape": toy_shape("qwen3_moe", num_hidden_layers=3)}
    groups = {"ranks": world_size, "expert": world_size, "vocab": world_size}
    config = toy_run(Path(folder), model=shape, launch=groups)
    small = {"dispatch": {"chunk_tokens": 8}, "optimizer": {"bucket_bytes": 4096}, "boundary": {"min_bytes": 0}}
    config = config.with_flatten(**{name: policy_class(name)(**small.get(name, {})) for name in NAMES})
    return side_by_side(config, steps=2, say=lambda line: None).certificate.to_json()


def _dense(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    shape = {
        "model_type": "qwen3", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    groups = {"ranks": world_size, "vocab": world_size}
    config = toy_run(Path(folder), model={"shape": shape}, launch=groups)
    on = config.with_flatten(**{name: policy_class(name)() for name in NAMES if name != "dispatch"})
    return side_by_side(on, steps=2, say=lambda line: None).certificate.to_json()


def test_a_dense_model_is_trained_and_as_near_to_float64_as_the_plain_program(tmp_path: Path) -> None:
    """`steppe plan` writes plans of dense models, which say that `steppe train` takes them."""
    found = run_ranks(_dense, 2, str(tmp_path))[0]
    truth = found["against_float64"]
    band = rounding_band(torch.float32, 32 * 2)
    assert truth["flattened"]["max_grad_rel_err"] <= truth["plain"]["max_grad_rel_err"] + band
    assert found["flattened"]["peaks"]["dispatch"] == 0 < found["flattened"]["peaks"]["boundary"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_four_are_as_near_to_float64_as_the_plain_program(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(_all_four, world_size, str(tmp_path))[0]
    truth = found["against_float64"]
    band = rounding_band(torch.float32, 32 * world_size)
    assert truth["flattened"]["max_grad_rel_err"] <= truth["plain"]["max_grad_rel_err"] + band
    assert found["max_grad_rel_err"] <= 2 * truth["plain"]["max_grad_rel_err"] + band
    assert found["max_abs_loss_diff"] > 0.0, "reordered sums leave a trace: without one the two sides were one program"
    assert not [signal for signal in found["signals"] if "pinned" in signal], "SCO pins the router's ties"
    assert found["flattened"]["peaks"]["optimizer"] < found["plain"]["peaks"]["optimizer"]


def _tampered(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    config = _config(folder)
    sides = side_by_side(config, steps=1, say=lambda line: None).sides
    wrong: Side = copy.copy(sides["flattened"])
    name = sorted(wrong.gradients)[0]
    wrong.gradients = {**wrong.gradients, name: wrong.gradients[name] * 1.5}
    result = wrong.results[0]
    if rank == world_size - 1:  # a fault on one rank must show on all
        shifted = (result.token_losses[0].clone(),)
        shifted[0].view(-1)[0] += 0.25
        wrong.results = [dataclasses.replace(result, token_losses=shifted)]
    group = collectives.world()
    return certify(sides["plain"], wrong, config, group).to_json(), _counts(sides["plain"], group), name


def _not_a_number(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], str, dict[str, float]]:
    config = _config(folder)
    sides = side_by_side(config, steps=1, say=lambda line: None).sides
    wrong: Side = copy.copy(sides["flattened"])
    name = sorted(wrong.gradients)[1]
    result = wrong.results[0]
    if rank == 0:
        wrong.gradients = {**wrong.gradients, name: wrong.gradients[name] * float("nan")}
        wrong.results = [dataclasses.replace(result, token_losses=(result.token_losses[0] * float("nan"),))]
    wrong.results = [dataclasses.replace(wrong.results[0], grad_norm=float("nan"))]
    found = certify(sides["plain"], wrong, config, collectives.world()).to_json()
    truth = first_step(config)
    assert truth is not None
    return found, name, distance(wrong, truth)


def test_a_gradient_that_is_not_a_number_is_the_worst_of_all(tmp_path: Path) -> None:
    for found, name, against_float64 in run_ranks(_not_a_number, 2, str(tmp_path)):
        assert found["worst_parameter"] == name
        wrong = [found[key] for key in ("max_abs_loss_diff", "max_grad_rel_err", "grad_norm_rel_diff")]
        assert all(math.isnan(value) for value in [*wrong, against_float64["max_grad_rel_err"]])


def _over_sequences(rank: int, world_size: int, folder: str, packing: str) -> dict[str, Any]:
    config = toy_run(Path(folder), launch={"ranks": world_size, "sequence": world_size}, data={"packing": packing})
    config = config.with_flatten(boundary=BoundaryPolicy(min_bytes=0))
    return side_by_side(config, steps=1, say=lambda line: None).certificate.to_json()


@pytest.mark.parametrize("packing", ["cut", "stream"])
def test_the_truth_of_ranks_that_share_a_sequence_is_that_of_the_whole_sequence(packing: str, tmp_path: Path) -> None:
    found = run_ranks(_over_sequences, 2, str(tmp_path), packing)[0]["against_float64"]
    half_the_digits = torch.finfo(torch.float32).eps ** 0.5
    for side in ("plain", "flattened"):
        assert found[side]["loss_abs_err"] < half_the_digits
        assert 0 < found[side]["max_grad_rel_err"] < half_the_digits


def _counts(side: Side, group: Any) -> dict[str, Any]:
    own = torch.tensor(sum(len(t.view(-1)) for r in side.results for t in r.token_losses))
    return {"tokens": int(collectives.all_reduce(own, group))}


def test_a_wrong_gradient_and_a_wrong_loss_are_measured_and_named(tmp_path: Path) -> None:
    for found, counts, name in run_ranks(_tampered, 2, str(tmp_path)):
        assert found["max_abs_loss_diff"] == pytest.approx(0.25, rel=1e-5)
        assert found["per_token_mse"] == pytest.approx(0.25**2 / counts["tokens"], rel=1e-4)
        assert found["max_grad_rel_err"] == pytest.approx(0.5, rel=1e-5)
        assert found["worst_parameter"] == name


def _mismatched(rank: int, world_size: int, folder: str) -> None:
    config = _config(folder)
    one = side_by_side(config, steps=1, say=lambda line: None).sides["plain"]
    with pytest.raises(ConfigError, match="same run twice"):
        certify(one, Side(), config, collectives.world())


def test_sides_of_different_lengths_are_refused(tmp_path: Path) -> None:
    run_ranks(_mismatched, 1, str(tmp_path))


def _printed(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    import contextlib
    import io

    found = side_by_side(_config(folder), steps=1, say=lambda line: None).certificate
    texts = []
    for as_json in (True, False):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            emit(found, argparse.Namespace(json=as_json))
        texts.append(out.getvalue())
    return texts[0], texts[1]


def test_the_certificate_prints_stable_json_and_a_table_of_all_peaks(tmp_path: Path) -> None:
    as_json, as_text = run_ranks(_printed, 1, str(tmp_path))[0]
    found = json.loads(as_json)
    for key in ("max_abs_loss_diff", "per_token_mse", "max_grad_rel_err", "grad_norm_rel_diff", "plain", "flattened"):
        assert key in found
    for word in (*PEAKS, "device peak", "step time", "weights", "gradients", "largest loss difference"):
        assert word in as_text


def test_a_certificate_of_nan_is_json_that_every_reader_takes() -> None:
    told = json.dumps(strict({"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}, "d": 3}), allow_nan=False)
    assert json.loads(told) == {"a": [None, [1.5, None]], "b": {"c": None}, "d": 3}


def _several(rank: int, world_size: int, folder: str, chosen: list[tuple[str, ...]]) -> dict[str, Any]:
    import contextlib
    import io

    from steppe import commands

    groups = {"ranks": world_size, "expert": world_size, "vocab": world_size}
    config = toy_run(Path(folder), launch=groups).with_flatten(boundary=BoundaryPolicy(min_bytes=0))
    args = argparse.Namespace(
        command="verify", steps=1, json=True, picture=None, stack=chosen == stacked(), all_subsets=len(chosen) == 16,
        markdown=Path(folder) / "numerics.md",
    )  # fmt: skip
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        commands.verify(config, args, None)
    return json.loads(out.getvalue()) if rank == 0 else {}


@pytest.mark.parametrize(
    ("world_size", "chosen"), [(2, stacked()), pytest.param(2, all_subsets(), marks=pytest.mark.slow)]
)
def test_the_four_one_by_one_and_all_subsets_are_judged_against_one_plain_run(
    world_size: int, chosen: list[tuple[str, ...]], tmp_path: Path
) -> None:
    found = run_ranks(_several, world_size, str(tmp_path), chosen)[0]
    text = (tmp_path / "numerics.md").read_text()
    assert list(found) == ["+".join(names) or "none" for names in chosen]
    band = rounding_band(torch.float32, 32 * world_size)
    for name, certificate in found.items():
        on = {key for key, policy in certificate["flatteners"].items() if policy != "off"}
        assert on == set(name.split("+")) - {"none"}
        truth = certificate["against_float64"]
        assert truth["flattened"]["max_grad_rel_err"] <= truth["plain"]["max_grad_rel_err"] + band, name
        assert f"| {name} | " in text
    assert found["none"]["max_grad_rel_err"] == found["none"]["max_abs_loss_diff"] == 0.0, "a plain run is itself"
    assert "loss to float64" in text
    assert all(peak in text for peak in PEAKS)
    assert "min_bytes=0" in found["+".join(NAMES)]["flatteners"]["boundary"], "the run's own policy is kept"


def _profiled(rank: int, world_size: int, folder: str) -> str:
    import contextlib
    import io

    from steppe import commands

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        args = argparse.Namespace(picture=Path(folder) / "memory.png", json=True)
        commands.profile(toy_run(Path(folder), launch={"ranks": world_size}), args, None)
    return out.getvalue()


def test_profile_shows_the_rank_that_holds_most_once(tmp_path: Path) -> None:
    first, second = run_ranks(_profiled, 2, str(tmp_path))
    assert second == ""
    found = json.loads(first)
    assert found["worst_rank"] in (0, 1)
    assert found["steady"]["device_peak_bytes"] > 0 < found["first"]["device_peak_bytes"]
    assert found["advice"]
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def _compared(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    config = _config(folder)
    with pytest.raises(ConfigError, match=r"dispatch.*vocab.*boundary.*optimizer"):
        compare(config, "boundaries", rounds=1)
    with pytest.raises(ConfigError, match="1 or more"):
        compare(config, "boundary", rounds=0)
    # whichever side the run itself is on, both are measured
    return compare(config.plain(), "boundary", rounds=3).to_json()


def test_comparing_alternates_one_flattener_and_reports_the_spread(tmp_path: Path) -> None:
    results = run_ranks(_compared, 2, str(tmp_path))
    assert results[0] == results[1], "the slowest rank counts, on all ranks"
    found = results[0]
    assert found["rounds"] == 3
    assert 0 < found["lowest"] <= found["ratio"] <= found["highest"]
