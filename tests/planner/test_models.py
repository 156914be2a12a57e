"""config.json files as people have them: nested, incomplete, wrong. A shape or a refusal, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.errors import ConfigError
from steppe.core.parameters import total_parameters
from steppe.core.shapes import BatchShape, MeshShape, RunShape
from steppe.planner.models import SHIPPED, load_model, shape_from_config, shipped_models
from steppe.planner.predict import predict


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    fields = json.loads((SHIPPED / f"{name}.json").read_text())
    return {key: value for key, value in {**fields, **changes}.items() if value != "missing"}


def test_a_shipped_model_is_found_by_its_name_on_the_hub() -> None:
    assert load_model("Qwen/Qwen3-0.6B") == load_model("qwen3-0.6b")


@pytest.mark.parametrize(
    "name", ["{}/qwen3-0.6b", "{}/moved/qwen3-0.6b", "./qwen3-0.6b", "../qwen3-0.6b", "a/b/qwen3-4b"]
)
def test_a_folder_without_a_config_is_not_taken_for_a_shipped_model_of_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    with pytest.raises(ConfigError, match="a folder that holds one"):
        load_model(name.format(tmp_path))


def test_a_multi_modal_config_is_its_language_model() -> None:
    inner = config_of("qwen3-30b-a3b", model_type="qwen3_vl_moe_text")
    inner.pop("tie_word_embeddings", None)
    outer = {"model_type": "qwen3_vl_moe", "tie_word_embeddings": True, "text_config": inner, "vision_config": {}}
    assert shape_from_config(outer).hidden == load_model("qwen3-30b-a3b").hidden
    assert shape_from_config(outer).tied
    # Some repeat a width of the language model outside.
    assert shape_from_config({**outer, "hidden_size": 2048}) == shape_from_config(outer)


def test_a_null_is_as_good_as_a_missing_key() -> None:
    for key in ("head_dim", "num_key_value_heads", "sliding_window"):
        null, missing = (shape_from_config(config_of("mixtral-8x7b", **{key: value})) for value in (None, "missing"))
        assert null == missing
    assert shape_from_config(config_of("mixtral-8x7b", head_dim=None)).head_dim == 128
    renamed = config_of("qwen3-30b-a3b", num_experts=None, num_local_experts=128)
    assert shape_from_config(renamed) == load_model("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("qwen2.5-32b", {"sliding_window": 131072, "use_sliding_window": False}, 0),  # as its config.json says it
        ("qwen2.5-32b", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("qwen3-30b-a3b", {"sliding_window": 4096}, 0),
        ("mixtral-8x7b", {"sliding_window": 4096}, 4096),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 24}, 0),
        ("gpt-oss-20b", {"sliding_window": "missing"}, 128),
    ],
)
def test_a_sliding_window_counts_where_some_block_looks_through_it(
    name: str, changes: dict[str, Any], window: int
) -> None:
    assert shape_from_config(config_of(name, **changes)).sliding_window == window


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-0.6b", "head_dim"), ("gpt-oss-20b", "head_dim"), ("deepseek-v3", "n_shared_experts"),
        ("deepseek-v3", "first_k_dense_replace"), ("glm-4.5", "n_shared_experts"),
    ],
)  # fmt: skip
def test_a_missing_key_means_what_transformers_takes_for_it(name: str, key: str) -> None:
    assert shape_from_config(config_of(name, **{key: "missing"})) == load_model(name)


def test_a_query_without_a_latent_is_projected_whole() -> None:
    """DeepSeek-V2-Lite's way of latent attention: keys and values have one, queries don't."""
    model = shape_from_config(config_of("deepseek-v3", q_lora_rank=None))
    assert (model.q_lora_rank, model.kv_lora_rank) == (0, 512)
    assert predict(RunShape(model, BatchShape(4096), MeshShape(64))).device_peak_bytes > 0


def test_a_tied_head_is_counted_once() -> None:
    tied, free = (shape_from_config(config_of("qwen3-4b", tie_word_embeddings=tied)) for tied in (True, False))
    assert total_parameters(free) - total_parameters(tied) == tied.vocab * tied.hidden


@pytest.mark.parametrize(
    ("changes", "dense"), [({"mlp_only_layers": [0, 5]}, 2), ({"decoder_sparse_step": 2}, 24), ({}, 0)]
)
def test_blocks_that_qwen_leaves_without_experts_are_dense(changes: dict[str, Any], dense: int) -> None:
    assert shape_from_config(config_of("qwen3-30b-a3b", **changes)).num_dense_layers == dense


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-4b", {"hidden_size": "missing"}, "hidden_size"),
        ("qwen3-4b", {"hidden_size": "2560"}, "a positive integer"),
        ("qwen3-4b", {"num_attention_heads": 0}, "num_attention_heads"),
        ("qwen3-4b", {"num_key_value_heads": 7}, "a divisor of the 32 attention heads"),
        ("qwen3-4b", {"vocab_size": 10**12}, "a positive integer"),
        ("qwen3-4b", {"num_hidden_layers": 10**9}, "at most 1024"),
        ("qwen3-30b-a3b", {"num_hidden_layers": 10**9}, "at most 1024"),
        ("qwen3-4b", {"model_type": None}, "qwen3_moe"),
        ("qwen3-30b-a3b", {"num_experts": 0}, "num_experts"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "at most the 128 experts"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": "missing"}, "num_experts_per_tok"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "0"}, "mlp_only_layers"),
        ("deepseek-v3", {"first_k_dense_replace": 99}, "at most the 61 layers"),
        ("deepseek-v3", {"v_head_dim": "missing"}, "v_head_dim"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": "missing"}, "moe_intermediate_size"),  # not the dense width
        ("qwen3-4b", {"tie_word_embeddings": "false"}, "true or false"),
        ("qwen3-4b", {"attention_bias": "no"}, "true or false"),
        ("mixtral-8x7b", {"output_router_logits": 1}, "true or false"),
    ],
)
def test_what_no_model_has_is_refused_with_its_key(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shape_from_config(config_of(name, **changes))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"qwen3"', "\x00", '{"model_type": "qwen3"}'])
def test_a_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="Remedy"):
        load_model(tmp_path)


_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(2**40, 2**70), st.floats(), st.text(max_size=3),
    st.lists(st.integers(), max_size=2), st.just({}),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(shipped_models()), st.data())
def test_any_value_at_any_key_gives_a_ledger_or_a_refusal(name: str, data: st.DataObject) -> None:
    config = config_of(name)
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(_ODD)
    try:
        model = shape_from_config(config)
    except ConfigError:
        return
    assert predict(RunShape(model, BatchShape(1024), MeshShape(8))).device_peak_bytes > 0
