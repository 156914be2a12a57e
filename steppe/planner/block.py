"""What one block keeps for its backward besides the experts: attention, norms, router, dense MLP.

Counted as the modelling code of transformers writes them: norms work in float32, softmax over experts too, attention
is one fused kernel unless the model has none (`materialised`). Blocks are recomputed, so one block's worth is alive.
"""

from __future__ import annotations

from collections.abc import Iterator

from steppe.core.ledger import (
    ALWAYS,
    ATTENTION_BACKWARD,
    BLOCK_BACKWARD,
    MLP_BACKWARD,
    ROUTER_GRADIENT,
    ROUTER_LOSS,
    Entry,
    Moment,
)
from steppe.core.shapes import RunShape

_RUNS = BLOCK_BACKWARD | {Moment.FORWARD, Moment.LOSS, Moment.EVALUATE}


def block_entries(shape: RunShape) -> Iterator[Entry]:
    """Activations of one block and of the model's ends, on one rank.

    Peak: attention's saved tensors (O(N), or O(heads N S) where scores are materialised) plus norms, router and
    gradients of the hidden state, O(N H); a dense block adds its MLP.
    """
    yield from _attention(shape)
    yield from _hidden(shape)
    yield from _router(shape)
    yield from _dense_mlp(shape)


def norm_saved_bytes(elements: int, itemsize: int, *, input_is_kept_elsewhere: bool) -> int:
    """What an RMS norm keeps: a float32 copy of its input, the normalised value and the output."""
    if itemsize == 4:  # no copy is made of a float32 input; the input itself is kept
        return elements * (2 * 4 + (0 if input_is_kept_elsewhere else 4))
    return elements * (4 + 2 * itemsize)


def query_width(shape: RunShape) -> int:
    return shape.model.num_heads * shape.model.head_dim // shape.mesh.tensor


def key_width(shape: RunShape) -> int:
    """Width of the keys as attention takes them."""
    return _kv_heads(shape) * shape.model.head_dim // shape.mesh.tensor


def value_width(shape: RunShape) -> int:
    return _kv_heads(shape) * (shape.model.value_head_dim or shape.model.head_dim) // shape.mesh.tensor


def _kv_heads(shape: RunShape) -> int:
    """Keys and values are repeated to at least one head a sequence rank, and to all heads without a fused kernel."""
    if shape.model.kv_lora_rank or scores_are_materialised(shape):
        return shape.model.num_heads
    return max(shape.model.num_kv_heads, shape.mesh.sequence)


def scores_are_materialised(shape: RunShape) -> bool:
    """True where attention builds its [heads, N, S] scores: asked for, or sinks without a fused backward."""
    if shape.attention == "auto":
        return shape.model.has_attention_sinks
    return shape.attention == "materialised"


def scores_elements(shape: RunShape) -> int:
    """batch x heads x S x S, divided over the sequence and tensor groups."""
    heads = shape.model.num_heads
    return shape.batch.batch * heads * shape.batch.seq_len**2 // (shape.mesh.sequence * shape.mesh.tensor)


def _attention(shape: RunShape) -> Iterator[Entry]:
    tokens, itemsize, model = shape.tokens_per_rank, shape.dtypes.activation_bytes, shape.model
    queries, keys, values = query_width(shape), key_width(shape), value_width(shape)
    output = model.num_heads * (model.value_head_dim or model.head_dim) // shape.mesh.tensor
    projected = tokens * itemsize * (queries + keys + values + output)
    yield Entry("attention", "queries, keys, values, output", projected, BLOCK_BACKWARD)
    yield Entry("attention", "projections before them", _projections(shape), BLOCK_BACKWARD)
    gradients = 0 if scores_are_materialised(shape) else queries + keys + output
    yield Entry("attention", "their gradients", tokens * itemsize * (gradients + values), ATTENTION_BACKWARD)
    if shape.mesh.sequence > 1:
        yield Entry("attention", "output in its own layout", tokens * itemsize * output, BLOCK_BACKWARD)
        buffers = 2 * tokens * itemsize * queries
        moments = ATTENTION_BACKWARD | {Moment.FORWARD}
        yield Entry("communication", "all-to-all of the queries, both ends", buffers, moments)
    if scores_are_materialised(shape):
        yield from _scores(shape)
    else:
        statistics = 4 * tokens * model.num_heads // shape.mesh.tensor
        yield Entry("attention", "log-sum-exp of the scores", statistics, BLOCK_BACKWARD)


def _projections(shape: RunShape) -> int:
    """Saved between the normed hidden state and the rotated queries and keys."""
    tokens, itemsize, model = shape.tokens_per_rank, shape.dtypes.activation_bytes, shape.model
    if model.kv_lora_rank:
        latents = model.q_lora_rank + model.kv_lora_rank
        expanded = model.num_heads * (model.head_dim - model.rope_head_dim) // shape.mesh.tensor
        return norm_saved_bytes(tokens * latents, itemsize, input_is_kept_elsewhere=False) + (
            tokens * expanded * itemsize
        )
    if not model.has_qk_norm:
        return 0
    elements = tokens * (model.num_heads + model.num_kv_heads) * model.head_dim // shape.mesh.tensor
    return elements * (4 + itemsize)  # the norm's output itself is freed once rotated


def _scores(shape: RunShape) -> Iterator[Entry]:
    """With sinks: probabilities kept, three tensors at most; without: a float32 softmax beside its rounded copy."""
    one = scores_elements(shape) * shape.dtypes.activation_bytes
    rounded = shape.dtypes.activation_bytes < 4 and not shape.model.has_attention_sinks
    kept, at_most, forward = (3, 6, 5) if rounded else (1, 3, 3)
    yield Entry("attention", "scores, materialised", kept * one, BLOCK_BACKWARD)
    extra = (at_most - kept) * one
    yield Entry("attention", "scores' gradients", extra, ATTENTION_BACKWARD)
    during = frozenset({Moment.FORWARD, Moment.EVALUATE})
    yield Entry("attention", "scores and their copies", forward * one, during)
    kinds = 2 if shape.model.sliding_window else 1
    mask = shape.batch.batch * shape.batch.seq_len**2 * shape.dtypes.activation_bytes
    yield Entry("attention", "masks", kinds * mask, _RUNS)


def _hidden(shape: RunShape) -> Iterator[Entry]:
    itemsize, model = shape.dtypes.activation_bytes, shape.model
    elements = shape.tokens_per_rank * model.hidden
    first = norm_saved_bytes(elements, itemsize, input_is_kept_elsewhere=True)
    second = norm_saved_bytes(elements, itemsize, input_is_kept_elsewhere=False)
    yield Entry("attention", "norm before attention", first, BLOCK_BACKWARD)
    yield Entry("other", "norm before the MLP", second, MLP_BACKWARD | {Moment.DENSE_END})
    yield Entry("other", "final norm", second, frozenset({Moment.LOSS}))
    one, gradients = elements * itemsize, "gradients of the hidden state"
    yield Entry("other", gradients, 2 * one, frozenset({Moment.DENSE_END}))
    yield Entry("other", gradients, one, ATTENTION_BACKWARD)  # the residual's, which attention's output shares
    yield Entry("other", gradients, one if model.num_moe_layers else 2 * one, MLP_BACKWARD)
    forward = frozenset({Moment.FORWARD, Moment.EVALUATE})
    yield Entry("other", "residual and normed hidden state", 2 * elements * itemsize, forward)
    rotary = 2 * shape.tokens_per_rank * (model.rope_head_dim or model.head_dim) * itemsize
    yield Entry("other", "rotary tables", rotary, _RUNS)
    yield Entry("other", "token ids and labels", 2 * 8 * shape.tokens_per_rank, ALWAYS - {Moment.LOAD, Moment.SAVE})


def _router(shape: RunShape) -> Iterator[Entry]:
    model, tokens = shape.model, shape.tokens_per_rank
    if model.num_moe_layers:
        chosen = tokens * model.experts_per_token * (8 + 4)
        yield Entry("router", "probabilities and choices", 4 * tokens * model.num_experts + chosen, MLP_BACKWARD)
        back = tokens * model.hidden * shape.dtypes.activation_bytes
        yield Entry("router", ROUTER_GRADIENT, back, MLP_BACKWARD)


def router_loss_entries(shape: RunShape) -> Iterator[Entry]:
    """The auxiliary loss as transformers computes it.

    Peak: all layers' router logits, which the outputs hold, and their softmax. Before 5.16 a one-hot [L,N,k,E] in int64
    and its float32 copy beside it; since then experts are counted layer by layer.
    """
    model, tokens = shape.model, shape.tokens_per_rank
    if not (model.has_router_loss and model.num_moe_layers):
        return
    during = frozenset({Moment.LOSS})
    logits = model.num_moe_layers * tokens * model.num_experts * shape.dtypes.activation_bytes
    held, softmax, one_hot, copy = ROUTER_LOSS
    yield Entry("router", held, logits, BLOCK_BACKWARD | during)
    yield Entry("router", softmax, logits, during)
    if model.has_router_one_hot:
        yield Entry("router", one_hot, one_hot_bytes(shape), during)
        yield Entry("router", copy, one_hot_bytes(shape) // 2, during)


def one_hot_bytes(shape: RunShape) -> int:
    """L x N x k x E int64."""
    model = shape.model
    return 8 * model.num_moe_layers * shape.tokens_per_rank * model.experts_per_token * model.num_experts


def _dense_mlp(shape: RunShape) -> Iterator[Entry]:
    """Gate, up, activation and product are kept. The backward holds six of their size at most: the product is gone
    when its gradient becomes those of its two factors."""
    model = shape.model
    if not model.num_moe_layers:
        one = _mlp_tensor(shape, model.dense_width)
        yield Entry("other", "dense MLP, kept", 4 * one, MLP_BACKWARD)
        yield Entry("other", "dense MLP, gradients", 2 * one, MLP_BACKWARD)
        yield Entry("other", "dense MLP, forward", 3 * one, frozenset({Moment.FORWARD, Moment.EVALUATE}))
        return
    yield Entry("other", "shared expert, kept", 4 * _mlp_tensor(shape, model.shared_expert_width), MLP_BACKWARD)
    if model.num_dense_layers:
        leading = 6 * _mlp_tensor(shape, model.dense_width)
        yield Entry("other", "dense MLP of a leading block", leading, frozenset({Moment.DENSE_END}))


def _mlp_tensor(shape: RunShape, width: int) -> int:
    return shape.tokens_per_rank * width * shape.dtypes.activation_bytes // shape.mesh.tensor
