"""Plans round-trip through TOML, in words that a run.toml knows."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MeshShape
from steppe.flatteners import NAMES
from steppe.planner.models import SHIPPED, load_model, portable_path, shape_from_config
from steppe.planner.plan import Plan, policy_class, policy_from, policy_table, read_plan, write_plan
from steppe.planner.predict import subsets
from steppe.planner.search import policies_of
from steppe.training.config import load as config_of_run

ALL_ON = {name: policies_of(name)[0] for name in NAMES}
MESH = MeshShape(16, sequence=8, expert=16, vocab=8)


@pytest.mark.parametrize("policies", list(subsets(ALL_ON)), ids=lambda p: "".join("01"[x != OFF] for x in p.values()))
def test_every_subset_round_trips(policies: dict[str, object], tmp_path: Path) -> None:
    plan = Plan("qwen3-30b-a3b", BatchShape(2**20, 1, 2), MESH, Dtypes(), policies)
    write_plan(plan, tmp_path / "plan.toml", comments=("a remark",))
    assert read_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_of_a_policy_round_trips(name: str) -> None:
    for policy in policies_of(name):
        assert policy_from(name, tomllib.loads(_dumps({"p": policy_table(policy)}))["p"]) == policy


def _dumps(table: dict[str, object]) -> str:
    import tomli_w

    return tomli_w.dumps(table)


@pytest.mark.parametrize("name", NAMES)
def test_on_means_the_defaults_and_off_is_a_value(name: str) -> None:
    assert policy_from(name, "on") == policy_class(name)()
    assert policy_from(name, "off") is OFF


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_field_of_a_policy_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[flatten.{name}\].*speed"):
        policy_from(name, {"speed": 3})


def test_a_model_is_written_so_that_it_is_found_from_the_plans_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    config = Path("models/config.json")
    config.write_text((SHIPPED / "qwen3-0.6b.json").read_text())
    for asked, written in (
        ("models", "../models/config.json"), (str(config.resolve()), str(config.resolve())), ("qwen3-4b", "qwen3-4b"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
    ):  # fmt: skip
        assert portable_path(asked, Path("plans")) == written
        Path("plans/plan.toml").write_text(f'[model]\nconfig = "{written}"\n[data]\nseq_len = 1024\n')
        found = config_of_run("plans/plan.toml").model.config
        assert shape_from_config(json.loads(Path(found).read_text())) == load_model(asked)


def test_a_name_that_toml_cannot_write_leaves_the_file_and_the_comments_sound(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    write_plan(Plan("a\nb", BatchShape(1024), MESH), out, comments=("a\nb = 1",))
    assert read_plan(out).model == "a\nb"
    before = out.read_text()
    with pytest.raises(ConfigError, match="a path in UTF-8"):
        write_plan(Plan("\udcff.json", BatchShape(1024), MESH), out)
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"data": {"seq_len": "1M"}}, "data.seq_len"), ({"data": {"seq_len": -4}}, "data.seq_len"),
        ({"data": [1]}, "[data]"), ({"launch": 5}, "[launch]"), ({"launch": {"ranks": 2.5}}, "launch.ranks"),
        ({"launch": {"rank": 8}}, "[launch]"), ({"flaten": {}}, "[flaten]"),
        ({"train": {"batch": True}}, "train.batch"),
        ({"model": {"config": "x", "dtype": "int8"}}, "model.dtype"), ({"model": {"config": 5}}, "[model]"),
        ({"model": {"config": "x", "shape": [1]}}, "[model]"), ({"flatten": "on"}, "[flatten]"),
        ({"flatten": {"dispatch": {"chunk_tokens": "8K"}}}, "[flatten.dispatch]"),
    ],
)  # fmt: skip
def test_a_plan_with_a_slip_in_it_is_refused_by_name(table: dict[str, Any], words: str) -> None:
    sound = {"model": {"config": "x"}, "data": {"seq_len": 1024}}
    assert Plan.from_tables(sound).batch.seq_len == 1024
    with pytest.raises(ConfigError, match=re.escape(words)):
        Plan.from_tables({**sound, **table})


def test_a_plan_knows_the_tables_and_the_launch_of_a_run() -> None:
    from steppe.planner import plan
    from steppe.training import config

    assert set(plan._TABLES) == {*config.SECTIONS, "flatten"}
    assert set(plan._LAUNCH) == {f.name for f in dataclasses.fields(config.LaunchConfig)}


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("x = ")
    with pytest.raises(ConfigError, match="plan file"):
        read_plan(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match=r"model.config and data.seq_len"):
        read_plan(tmp_path / "empty.toml")


def test_without_tomli_w_a_plan_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(ConfigError, match="pip install tomli-w"):
        write_plan(Plan("qwen3-4b", BatchShape(1024), MESH), tmp_path / "plan.toml")
