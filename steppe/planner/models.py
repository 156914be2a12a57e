"""Model shapes: from a Hugging Face `config.json`, from a folder that holds one, or shipped by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steppe.core.errors import ConfigError
from steppe.core.shapes import ModelShape

SHIPPED: Final = Path(__file__).parent / "models"

DENSE: Final = ("llama", "mistral", "qwen2", "qwen3")
MOE: Final = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "deepseek_v3")
KNOWN: Final = (*DENSE, *MOE)

# Differences that a config.json leaves to the modelling code of its type.
_TRAITS: Final[dict[str, dict[str, bool]]] = {
    "qwen2": {"has_attention_bias": True},
    "qwen3": {"has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "olmoe": {"has_qk_norm": True, "qk_norm_over_heads": True},
    "gpt_oss": {"has_attention_bias": True, "has_attention_sinks": True, "has_expert_bias": True},
}


def shipped_models() -> tuple[str, ...]:
    """Names of the shapes that come with steppe."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def load_model(name: str | Path) -> ModelShape:
    """A shape from a shipped name, a config.json or the folder of a model.

    Raises: ConfigError for a name that is none of them, or a model type that isn't known.
    """
    return shape_from_config(_read(model_path(name)))


def model_path(name: str | Path) -> Path:
    """The config.json that a name means. Raises: ConfigError when there is none."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        path = SHIPPED / f"{str(name).lower().rsplit('/', 1)[-1]}.json"
    if not path.is_file():
        raise ConfigError(
            "model",
            got=repr(str(name)),
            allowed="a config.json, a folder that holds one, or one of " + ", ".join(shipped_models()),
            remedy="download the model's config.json and give its path",
        )
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("model config", got=f"{path}: {error}", allowed="a JSON object", remedy="fix it") from error
    if not isinstance(config, dict):
        raise ConfigError(
            "model config", got=f"{path}: {type(config).__name__}", allowed="a JSON object", remedy="fix it"
        )
    return config


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """A ModelShape from the keys of a Hugging Face config.

    Raises: ConfigError for an unknown model type or a missing width.
    """
    if "text_config" in config and "hidden_size" not in config:  # multi-modal configs nest the language model
        config = {**config["text_config"]}
    kind = str(config.get("model_type", ""))
    kind = {"qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3"}.get(kind, kind)
    if kind not in KNOWN:
        raise ConfigError(
            "model type", got=repr(kind or None), allowed=", ".join(KNOWN),
            remedy="write a config.json with the widths and the model_type of the nearest known family, "
            "or add the type to KNOWN and its traits to _TRAITS in steppe/planner/models.py",
        )  # fmt: skip
    latent = bool(config.get("kv_lora_rank"))
    return ModelShape(
        model_type=kind,
        hidden=_width(config, "hidden_size"),
        num_layers=_width(config, "num_hidden_layers"),
        vocab=_width(config, "vocab_size"),
        num_heads=_width(config, "num_attention_heads"),
        num_kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        dense_width=_width(config, "intermediate_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        sliding_window=int(config.get("sliding_window") or 0),
        has_router_loss=bool(config.get("output_router_logits", False)),
        **(_latent_heads(config) if latent else _grouped_heads(config)),
        **(_experts(config, kind) if kind in MOE else {}),
        **_traits(config, kind),
    )


def _width(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"model config, {key}", got=repr(value), allowed="a positive integer", remedy=f"give {key} in config.json"
        )
    return value


def _grouped_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return {"head_dim": head_dim, "value_head_dim": head_dim}


def _latent_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _width(config, "qk_rope_head_dim")
    return {
        "head_dim": _width(config, "qk_nope_head_dim") + rope,
        "value_head_dim": _width(config, "v_head_dim"),
        "rope_head_dim": rope,
        "q_lora_rank": int(config.get("q_lora_rank") or 0),
        "kv_lora_rank": _width(config, "kv_lora_rank"),
    }


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in counts if key in config), counts[0])
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("n_shared_experts") or 0) if kind in ("glm4_moe", "deepseek_v3") else 0
    return {
        "num_experts": _width(config, key),
        "experts_per_token": _width(config, "num_experts_per_tok"),
        "expert_width": width,
        "num_shared_experts": shared,
        "shared_expert_width": shared * width,
        "num_dense_layers": int(config.get("first_k_dense_replace") or 0),
    }


def _traits(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    traits = dict(_TRAITS.get(kind, {}))
    if "attention_bias" in config and kind != "gpt_oss":
        traits["has_attention_bias"] = bool(config["attention_bias"])
    if config.get("use_qk_norm"):
        traits["has_qk_norm"] = True
    return traits
