"""How many parameters a model has, tensor by tensor, from its widths alone.

Everything that memory planning multiplies by "bytes a parameter" starts from these counts; they equal the published
totals of the shipped models to the last parameter.
"""

from __future__ import annotations

from steppe.core.shapes import ModelShape


def attention_parameters(model: ModelShape) -> int:
    """Projections, biases, query/key norms and sinks of one block's attention (MLA or grouped queries)."""
    return _latent_attention(model) if model.kv_lora_rank else _grouped_attention(model)


def _grouped_attention(model: ModelShape) -> int:
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    count = model.hidden * (queries + 2 * keys) + queries * model.hidden
    if model.has_attention_bias:
        count += queries + 2 * keys
    if model.has_attention_sinks:  # such models give the output projection a bias too
        count += model.num_heads + model.hidden
    if model.has_qk_norm:
        count += queries + keys if model.qk_norm_over_heads else 2 * model.head_dim
    return count


def _latent_attention(model: ModelShape) -> int:
    value, nope = model.value_head_dim, model.head_dim - model.rope_head_dim
    queries = model.num_heads * model.head_dim
    if model.q_lora_rank:
        query = model.hidden * model.q_lora_rank + model.q_lora_rank + model.q_lora_rank * queries
    else:
        query = model.hidden * queries
    latent = model.hidden * (model.kv_lora_rank + model.rope_head_dim) + model.kv_lora_rank
    expand = model.kv_lora_rank * model.num_heads * (nope + value)
    return query + latent + expand + model.num_heads * value * model.hidden


def norm_parameters(model: ModelShape) -> int:
    """The two norms of one block."""
    return 2 * model.hidden


def router_parameters(model: ModelShape) -> int:
    """One block's router, [E,H], with its bias where experts have biases."""
    return model.num_experts * (model.hidden + (1 if model.has_expert_bias else 0))


def expert_parameters(model: ModelShape) -> int:
    """One gated expert: gate_up [2I,H] and down [H,I]."""
    bias = 2 * model.expert_width + model.hidden if model.has_expert_bias else 0
    return 3 * model.hidden * model.expert_width + bias


def shared_expert_parameters(model: ModelShape) -> int:
    """The shared experts of one block, taken together."""
    return 3 * model.hidden * model.shared_expert_width


def moe_block_dense_parameters(model: ModelShape) -> int:
    """All of one MoE block but its routed experts."""
    attention = attention_parameters(model) + norm_parameters(model)
    return attention + router_parameters(model) + shared_expert_parameters(model)


def dense_block_parameters(model: ModelShape) -> int:
    """One block with a dense MLP."""
    return attention_parameters(model) + norm_parameters(model) + 3 * model.hidden * model.dense_width


def block_parameters(model: ModelShape) -> int:
    """The largest block: an MoE block where there is one."""
    if not model.num_moe_layers:
        return dense_block_parameters(model)
    return moe_block_dense_parameters(model) + model.num_experts * expert_parameters(model)


def embedding_parameters(model: ModelShape) -> int:
    """The [V,H] embedding; the head is as large, or the same tensor when tied."""
    return model.vocab * model.hidden


def expert_parameters_total(model: ModelShape) -> int:
    """All routed experts of all blocks: what expert parallelism divides."""
    return model.num_moe_layers * model.num_experts * expert_parameters(model)


def dense_parameters_total(model: ModelShape) -> int:
    """Everything but the routed experts, embedding, head and last norm included."""
    dense_blocks = model.num_layers - model.num_moe_layers
    blocks = dense_blocks * dense_block_parameters(model) + model.num_moe_layers * moe_block_dense_parameters(model)
    ends = embedding_parameters(model) * (1 if model.tied else 2) + model.hidden
    return blocks + ends + model.extra_parameters


def total_parameters(model: ModelShape) -> int:
    """All parameters of the model."""
    return dense_parameters_total(model) + expert_parameters_total(model)


def active_parameters(model: ModelShape) -> int:
    """Parameters that one token's forward multiplies with: matmul work is 2 flops a parameter and token."""
    chosen = model.num_moe_layers * model.experts_per_token * expert_parameters(model)
    return dense_parameters_total(model) - (0 if model.tied else embedding_parameters(model)) + chosen


def parameters_per_rank(model: ModelShape, world: int) -> int:
    """One rank's shard of everything (FSDP2 over W, experts over E_p x W/E_p): ceil(total / W)."""
    return -(-total_parameters(model) // world)
