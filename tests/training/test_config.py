"""run.toml: what is wrong is named, with what is allowed and what to do, before anything starts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF
from steppe.flatteners import NAMES
from steppe.integrations.transformers import load_config
from steppe.training import config as configs
from steppe.training.config import RunConfig, TrainConfig, parse, policy_class
from steppe.training.schedule import dropout_seed, learning_rate, positions, row_at
from tests.training.toys import toy_shape

MODEL = {"shape": {"model_type": "qwen3_moe"}}
DATA = {"seq_len": 64}


def _refusal(**tables: object) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        parse({"model": MODEL, "data": DATA, **tables})
    return refused.value


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    refused = _refusal(train={"step": 3})
    assert refused.what == "unknown key in [train]"
    assert refused.remedy == "did you mean 'steps'?"
    assert "'micro_batches'" in _refusal(train={"micro_batch": 3}).remedy
    assert "did you mean 'train'?" in str(_refusal(trian={}))
    assert "did you mean 'boundary'?" in str(_refusal(flatten={"boundry": "on"}))
    assert "remove it" in _refusal(train={"zzz": 1}).remedy


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("train", "steps", "ten", "a whole number"),
        ("train", "steps", 1.5, "a whole number"),
        ("train", "steps", True, "a whole number"),
        ("train", "checkpointing", 1, "true or false"),
        ("train", "lr", "fast", "a number"),
        ("train", "schedule", "cosin", "'cosine', 'constant'"),
        ("train", "betas", [0.9], "2 values"),
        ("train", "betas", [0.9, 1.0], "0 <= beta < 1"),
        ("train", "betas", "ab", "a list"),
        ("train", "lr", float("nan"), "a finite number"),
        ("train", "clip", float("inf"), "a finite number"),
        ("launch", "timeout_s", float("nan"), "a finite number"),
        ("train", "seed", 2**64, "64-bit whole numbers"),
        ("data", "path", "a\0b", "text without NUL"),
        ("data", "path", "", "a path"),
        ("data", "tokenizer_vocab", 0, "more than 0"),
        ("train", "steps", 0, "more than 0"),
        ("train", "warmup", -1, "0 or more"),
        ("output", "keep", 0, "more than 0"),
        ("data", "kind", "csv", "'text', 'jsonl', 'parquet', 'tokens'"),
        ("launch", "sequence", 3, "a divisor of the 1 ranks"),
    ],
)
def test_a_wrong_value_is_refused_by_section_and_key(section: str, key: str, value: object, allowed: str) -> None:
    base = {"seq_len": 64} if section == "data" else {}
    refused = _refusal(**{section: {**base, key: value}})
    assert allowed in str(refused.allowed)
    assert key in refused.what or "group size" in refused.what
    assert refused.remedy


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("offload_extra", 3, "a list or 'auto'"),
        ("host_bytes", "1GB", "a whole number or no such key"),
        ("host_bytes", -1, "0 or more"),
        ("min_bytes", -1, "0 or more"),
        ("extra_limit", -1, "0 or more"),
        ("per_boundary", {"x": "keep"}, "boundary and choice"),
        ("per_boundary", {"-1": "keep"}, "counted from 0"),
        ("per_boundary", [[0, "keep"], [0, "offload"]], "each boundary once"),
        ("per_boundary", "keep", "choices, or pairs"),
    ],
)
def test_a_policy_that_means_nothing_is_refused_in_words_of_the_file(field: str, value: object, words: str) -> None:
    assert words in str(_refusal(flatten={"boundary": {field: value}}).allowed)


def test_boundaries_are_named_by_the_text_keys_of_a_table() -> None:
    tables = {"model": MODEL, "data": DATA, "flatten": {"boundary": {"per_boundary": {"10": "keep", "2": "keep"}}}}
    policy = parse(tables).flatten["boundary"]
    assert policy.named == ((2, "keep"), (10, "keep"))
    assert policy.choice(10) == "keep"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layer": 3}, "did you mean 'num_hidden_layers'?"),
        ({"zzz": 3}, "unknown key in [model.shape]"),
        ({"hidden_size": -1}, "model.shape.hidden_size: got -1"),
        ({"num_hidden_layers": 0}, "model.shape.num_hidden_layers: got 0"),
        ({"num_experts_per_tok": 99}, "99 of 8 experts"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "2 for 3 attention heads"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_it_is_built(changes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("", {**toy_shape(), **changes})
    assert words in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_every_field_that_a_family_reads_is_known(family: str) -> None:
    assert load_config("", toy_shape(family)).vocab_size == 320
    load_config("", {**toy_shape(family), "rope_theta": 1e6, "output_router_logits": True})


def test_a_sequence_that_its_ranks_do_not_divide_is_refused_with_a_length_that_they_do() -> None:
    refused = _refusal(data={"seq_len": 66}, launch={"ranks": 4, "sequence": 4})
    assert refused.what == "data.seq_len"
    assert refused.remedy == "set seq_len = 64"


def test_missing_sections_and_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no \[data\]"):
        parse({"model": MODEL})
    with pytest.raises(ConfigError, match="set seq_len"):
        parse({"model": MODEL, "data": {}})


def test_a_file_that_is_no_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the path"):
        configs.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[train\nsteps = 3")
    with pytest.raises(ConfigError, match="line 1"):
        configs.load(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="a readable TOML file"):
        configs.load(tmp_path / "bytes.toml")


def test_paths_in_a_run_file_start_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nconfig = "m/config.json"\n[data]\npath = "/abs/text"\nseq_len = 8\n[output]\ndir = "o"\n'
    )
    config = configs.load(tmp_path / "run.toml")
    assert config.model.config == str(tmp_path / "m" / "config.json")
    assert (config.model.weights, config.data.path) == ("random", "/abs/text")
    assert config.output.dir == str(tmp_path / "o")


def test_builtin_text_is_no_path(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nshape = { model_type = "mixtral" }\n[data]\nseq_len = 8\n')
    assert configs.load(tmp_path / "run.toml").data.path == "pydoc_topics"


@pytest.mark.parametrize("name", NAMES)
def test_every_flattener_is_off_on_or_a_table_of_its_own_policy(name: str) -> None:
    def flatten(value: object) -> object:
        return parse({"model": MODEL, "data": DATA, "flatten": {name: value}}).flatten[name]

    assert flatten("off") == OFF
    assert flatten("on") == policy_class(name)() == flatten({})
    refused = _refusal(flatten={name: {"no_such_field": 1}})
    assert refused.what == f"unknown key in [flatten.{name}]"
    assert '"off", "on"' in str(_refusal(flatten={name: "yes"}).allowed)


def test_a_run_without_a_flatten_table_is_the_plain_program() -> None:
    config = parse({"model": MODEL, "data": DATA})
    assert all(policy == OFF for policy in config.flatten.values())
    on = config.with_flatten(boundary=policy_class("boundary")())
    assert on != config
    assert on.plain() == config


def test_n_is_batch_times_sequence_over_its_ranks() -> None:
    tables = {"model": MODEL, "data": DATA, "train": {"batch": 3}, "launch": {"ranks": 2, "sequence": 2}}
    assert parse(tables).tokens_per_rank == 3 * 64 // 2


def test_the_rate_warms_up_then_falls_to_its_floor_or_stays() -> None:
    cosine = TrainConfig(steps=110, warmup=10, lr=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(step, cosine) for step in range(111)]
    assert rates[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert rates[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[110] == pytest.approx(0.1)
    constant = TrainConfig(steps=10, lr=0.5, schedule="constant")
    assert {learning_rate(step, constant) for step in range(20)} == {0.5}


def test_each_pass_visits_every_row_once_in_an_order_of_its_own() -> None:
    rows, seed = 17, 5
    passes = [[row_at(place, rows, seed) for place in range(n * rows, (n + 1) * rows)] for n in range(3)]
    assert all(sorted(order) == list(range(rows)) for order in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes[0] != [row_at(place, rows, seed + 1) for place in range(rows)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_and_micro_batches_share_the_stream_without_gap_or_overlap(world: int) -> None:
    seen: list[int] = []
    for step in range(4):
        for micro in range(2):
            for rank in range(world):
                seen += positions(step, micro, rank, batch=3, micro_batches=2, world=world)
    assert seen == list(range(4 * 2 * world * 3))


def test_dropout_differs_by_seed_step_micro_batch_and_rank_and_by_nothing_else() -> None:
    seeds = {dropout_seed(*place) for place in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert dropout_seed(7, 8, 9, 10) == dropout_seed(7, 8, 9, 10)


def test_config_is_a_value() -> None:
    config = parse({"model": MODEL, "data": DATA})
    assert config.replace("train", steps=5).train.steps == 5
    assert config.train.steps == RunConfig(config.model, config.data).train.steps
    with pytest.raises(AttributeError):
        config.train = None  # type: ignore[misc]
