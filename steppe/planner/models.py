"""Model shapes: from a Hugging Face `config.json`, from a folder that holds one, or shipped by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

from steppe.core.errors import ConfigError
from steppe.core.shapes import ModelShape

SHIPPED: Final = Path(__file__).parent / "models"
_HUB_NAME: Final = re.compile(r"(?P<organisation>[\w-][\w.-]*/)?(?P<model>[\w-][\w.-]*)")

DENSE: Final = ("llama", "mistral", "qwen2", "qwen3")
MOE: Final = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "deepseek_v3")
KNOWN: Final = (*DENSE, *MOE)

_LARGEST: Final = 10**9  # of any width or count
_MOST_LAYERS: Final = 1024  # what stands for each layer, as a plan of boundaries does, takes time for more
COUNTS_EXPERTS: Final = (5, 16)  # the first transformers whose auxiliary loss counts experts layer by layer

# Differences that a config.json leaves to the modelling code of its type.
_TRAITS: Final[dict[str, dict[str, bool]]] = {
    "qwen2": {"has_attention_bias": True},
    "qwen3": {"has_qk_norm": True},
    "qwen3_moe": {"has_qk_norm": True},
    "olmoe": {"has_qk_norm": True, "qk_norm_over_heads": True},
    "gpt_oss": {"has_attention_bias": True, "has_attention_sinks": True, "has_expert_bias": True},
    "mixtral": {"has_float32_routes": True},
    "glm4_moe": {"has_float32_routes": True},
    "deepseek_v3": {"has_float32_routes": True},
}
# What transformers takes for a key that is missing, where that isn't what the other keys suggest.
_DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "qwen3": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "glm4_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3},
}
_EXPERTS_ARE_INTERMEDIATE: Final = ("mixtral", "gpt_oss", "olmoe")  # their experts have the width `intermediate_size`
_WINDOW_IS_ASKED_FOR: Final = ("qwen2", "qwen3", "qwen3_moe")  # a window counts where use_sliding_window is true


def shipped_models() -> tuple[str, ...]:
    """Names of the shapes that come with steppe."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def load_model(name: str | Path) -> ModelShape:
    """A shape from a shipped name, a config.json or the folder of a model.

    Raises: ConfigError for a name that is none of them, or a model type that isn't known.
    """
    return shape_from_config(_read(model_path(name)))


def with_router_loss(model: ModelShape, transformers: str) -> ModelShape:
    """The model with its auxiliary loss on, as that version of transformers ("5.15.1") computes it.

    Raises: ConfigError for what is no version.
    """
    found = re.match(r"(\d+)\.(\d+)", transformers)
    if found is None:
        raise ConfigError("transformers version", got=repr(transformers), allowed="a version as 5.15 or 4.57.1",
                          remedy="write the version that the run uses")  # fmt: skip
    version = int(found.group(1)), int(found.group(2))
    return replace(model, has_router_loss=True, has_router_one_hot=version < COUNTS_EXPERTS)


def installed_transformers() -> str | None:
    """The version of transformers that is installed here, from its metadata: nothing is imported."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def model_path(name: str | Path) -> Path:
    """The config.json that a name means. A shipped one may stand behind an organisation, as on the Hub; a folder that
    isn't there, or holds none, is never taken for a shipped model of its name.

    Raises: ConfigError when there is none.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    hub = _HUB_NAME.fullmatch(str(name))
    if not path.is_file() and hub is not None and not (hub["organisation"] and Path(name).is_dir()):
        path = SHIPPED / f"{hub['model'].lower()}.json"
    if not path.is_file():
        raise ConfigError(
            "model",
            got=repr(str(name)),
            allowed="a config.json, a folder that holds one, or one of " + ", ".join(shipped_models()),
            remedy="download the model's config.json and give its path",
        )
    return path


def portable_path(name: str | Path, folder: Path) -> str:
    """What a file in `folder` writes for a model so that it is found from there: a shipped name where one was meant,
    a relative path where one was given. Raises: ConfigError as `model_path`.
    """
    path = model_path(name)
    if path.parent == SHIPPED:
        return path.stem
    return str(path) if path.is_absolute() else os.path.relpath(path.resolve(), folder.resolve())


def longest_position(name: str | Path) -> int:
    """The `max_position_embeddings` of a config, 0 where it has none. Raises: ConfigError as `load_model`."""
    longest = _read(model_path(name)).get("max_position_embeddings")
    return longest if isinstance(longest, int) else 0


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
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and _kind(config) not in KNOWN:  # multi-modal configs nest the language model
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**tied, **nested}
    kind = _kind(config)
    if kind not in KNOWN:
        raise ConfigError(
            "model type", got=repr(kind or None), allowed=", ".join(KNOWN),
            remedy="write a config.json with the widths and the model_type of the nearest known family, "
            "or add the type to KNOWN and its traits to _TRAITS in steppe/planner/models.py",
        )  # fmt: skip
    config = {**_DEFAULTS.get(kind, {}), **config}
    latent = bool(config.get("kv_lora_rank"))
    shape = ModelShape(
        model_type=kind,
        hidden=_width(config, "hidden_size"),
        num_layers=_layers(config),
        vocab=_width(config, "vocab_size"),
        num_heads=_width(config, "num_attention_heads"),
        num_kv_heads=_width(config, "num_key_value_heads", "num_attention_heads"),
        dense_width=_width(config, "intermediate_size"),
        tied=_flag(config, "tie_word_embeddings"),
        sliding_window=_window(config, kind),
        has_router_loss=_flag(config, "output_router_logits"),
        **(_latent_heads(config) if latent else _grouped_heads(config)),
        **(_experts(config, kind) if kind in MOE else {}),
        **_traits(config, kind),
    )
    _check(shape)
    return shape


def _kind(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type", ""))
    return {"qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3"}.get(kind, kind)


def _check(model: ModelShape) -> None:
    """Counts that no model has. Raises: ConfigError."""
    if model.num_heads % model.num_kv_heads:
        _refuse("num_key_value_heads", model.num_kv_heads, f"a divisor of the {model.num_heads} attention heads")
    if not model.head_dim:
        _refuse("num_attention_heads", model.num_heads, f"at most hidden_size {model.hidden}, or give head_dim")
    if model.num_experts and model.experts_per_token > model.num_experts:
        _refuse("num_experts_per_tok", model.experts_per_token, f"at most the {model.num_experts} experts")
    if model.num_dense_layers > model.num_layers:
        _refuse("first_k_dense_replace", model.num_dense_layers, f"at most the {model.num_layers} layers")


def _refuse(key: str, got: object, allowed: str) -> NoReturn:
    raise ConfigError(f"model config, {key}", got=repr(got), allowed=allowed, remedy=f"correct {key} in config.json")


def _width(config: Mapping[str, Any], key: str, otherwise: str = "") -> int:
    """A positive integer at `key`, or where that is missing or null at `otherwise`."""
    value = config.get(key)
    if value is None and otherwise:
        return _width(config, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        _refuse(key, value, "a positive integer")
    return value


def _layers(config: Mapping[str, Any]) -> int:
    layers = _width(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        _refuse("num_hidden_layers", layers, f"at most {_MOST_LAYERS}")
    return layers


def _count(config: Mapping[str, Any], key: str) -> int:
    """As `_width`, and 0 where it is missing, null or 0."""
    return _width(config, key) if config.get(key) else 0


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """True or false at `key`, false where it is missing or null: "false" in quotes is neither."""
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        _refuse(key, value, "true or false")
    return value


def _window(config: Mapping[str, Any], kind: str) -> int:
    """The sliding window that some blocks look at, 0 where none does, whatever length stands in the config."""
    asked = kind not in _WINDOW_IS_ASKED_FOR or _flag(config, "use_sliding_window")
    types = config.get("layer_types")
    slides = not isinstance(types, list) or "sliding_attention" in types
    return _count(config, "sliding_window") if asked and slides else 0


def _grouped_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("head_dim") is not None:
        head_dim = _width(config, "head_dim")
    else:
        head_dim = _width(config, "hidden_size") // _width(config, "num_attention_heads")
    return {"head_dim": head_dim, "value_head_dim": head_dim}


def _latent_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _width(config, "qk_rope_head_dim")
    return {
        "head_dim": _width(config, "qk_nope_head_dim") + rope,
        "value_head_dim": _width(config, "v_head_dim"),
        "rope_head_dim": rope,
        "q_lora_rank": _count(config, "q_lora_rank"),
        "kv_lora_rank": _width(config, "kv_lora_rank"),
    }


def _experts(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in counts if config.get(key) is not None), counts[0])
    width = _width(config, "intermediate_size" if kind in _EXPERTS_ARE_INTERMEDIATE else "moe_intermediate_size")
    shared = _count(config, "n_shared_experts") if kind in ("glm4_moe", "deepseek_v3") else 0
    return {
        "num_experts": _width(config, key),
        "experts_per_token": _width(config, "num_experts_per_tok"),
        "expert_width": width,
        "num_shared_experts": shared,
        "shared_expert_width": shared * width,
        "num_dense_layers": _dense_layers(config),
    }


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Blocks without experts: the leading ones of DeepSeek and GLM, or those that Qwen lists or skips."""
    listed, every = config.get("mlp_only_layers") or (), _count(config, "decoder_sparse_step") or 1
    if not isinstance(listed, Sequence) or not all(isinstance(index, int) for index in listed):
        _refuse("mlp_only_layers", listed, "a list of layer numbers")
    layers = range(_layers(config))
    skipped = [index for index in layers if index in listed or (index + 1) % every]
    return _count(config, "first_k_dense_replace") or len(skipped)


def _traits(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    traits = dict(_TRAITS.get(kind, {}))
    if "attention_bias" in config and kind != "gpt_oss":
        traits["has_attention_bias"] = _flag(config, "attention_bias")
    if _flag(config, "use_qk_norm"):
        traits["has_qk_norm"] = True
    return traits
