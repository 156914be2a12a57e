"""The toy configurations of the six model families; their truth in float64 comes from the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steppe.integrations.float64 import float64_model, float64_source, float64_truth

__all__ = ["FAMILIES", "float64_model", "float64_source", "float64_truth", "toy_config", "toy_model"]

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3")

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 8, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
    },
    "glm4_moe": {
        "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip


def toy_config(family: str, **changes: object) -> Any:
    """A configuration of about 45k parameters of one family; `changes` replace fields (`num_hidden_layers=4`)."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**_COMMON, **_OWN[family], **changes})
    config._attn_implementation = "eager"
    return config


def toy_model(family: str, seed: int = 0, **changes: object) -> nn.Module:
    """A float32 toy of one family with random weights that are a function of the seed."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(toy_config(family, **changes))
