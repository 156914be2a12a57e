"""What expert dispatch costs in bytes, with and without PipelinedLLEP: integers only.

The peak stands in the backward of one MoE layer. `Cost` names every tensor of it; tests hold the allocator's own events
against `Cost.peak_bytes` from both sides.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Final

from steppe.core.errors import ConfigError
from steppe.core.ledger import EXPERTS_EARLY, EXPERTS_REDUCED, ROUTER_GRADIENT, ROUTER_LOSS, Entry, Moment
from steppe.core.policy import OFF, Off, Verdict
from steppe.core.shapes import MachineShape, RunShape
from steppe.core.units import format_bytes

DEFAULT_CHUNK_BYTES: Final = 2**30
TILE_ELEMENTS: Final = {"cpu": 2**16, "accelerator": 2**23}  # elementwise math runs on tiles of so many elements
_TILE_TENSORS: Final = 4  # of a tile's backward, in the dtype of sums: activated, act, gradient, gate's gradient
_GATE_FUNCTION: Final = 6  # autograd saves so many of a tile's size of a gate that is a function (gpt-oss clamps both)
_GATE_KEPT: Final = 3  # and the plain program so many more of the inner width: clamped gate, its sigmoid, clamped up
_WIDENED: Final = 3  # and gate, up and gradient where the rows are narrower
_AT_COMBINE: Final = 3  # gradients of all routes at the plain program's combine
_WIDENED_COMBINE: Final = 3  # and so many more where narrow rows meet float32 route weights
_ROUTE_BYTES: Final = 4  # int32 row order
_NORM_SUMS: Final = 16  # bytes an element by which a norm in float32 exceeds in its backward what it kept


@dataclass(frozen=True)
class DispatchPolicy:
    """How PipelinedLLEP runs. The cap on tokens of one source in a chunk, c, is given in one of three ways:
    `chunk_tokens`, `micro_chunks` (c = ceil(global_batch * seqlen / num_sources / micro_chunks)) or `chunk_bytes` of
    workspace (the default, 1 GiB).

    `max_load`: no rank computes more than this times the mean, where experts are spilled; `switch_ratio`: below this
    native max/mean load every expert stays home; `spill_slots`: foreign experts alive on a rank at a time (even);
    `min_rows`: no interval is moved for fewer rows than this; `ranks_per_node`: helpers on the owner's node come first.

    Raises: ConfigError for values that can't be meant.
    """

    chunk_tokens: int | None = None
    micro_chunks: int | None = None
    chunk_bytes: int | None = None
    max_load: float = 1.1
    switch_ratio: float = 1.3
    spill_slots: int = 2
    min_rows: int = 0
    ranks_per_node: int | None = None
    combine_dtype: str = "float32"

    def __post_init__(self) -> None:
        caps = {name: getattr(self, name) for name in ("chunk_tokens", "micro_chunks", "chunk_bytes")}
        given = {name: value for name, value in caps.items() if value is not None}
        _require(
            len(given) <= 1, "chunk size", given, "one of chunk_tokens, micro_chunks, chunk_bytes", "drop the others"
        )
        _require(all(v >= 1 for v in given.values()), "chunk size", given, "a positive integer", "raise it")
        _require(self.max_load >= 1, "max_load", self.max_load, "1.0 or more", "1.1 halves the transfers of 1.0")
        _require(self.switch_ratio >= 1, "switch_ratio", self.switch_ratio, "1.0 or more", "use 1.3")
        slots_fit = self.spill_slots >= 2 and self.spill_slots % 2 == 0
        _require(slots_fit, "spill_slots", self.spill_slots, "an even number, 2 or more", "use 2")
        _require(self.min_rows >= 0, "min_rows", self.min_rows, "0 or more", "use 0")
        _require(self.ranks_per_node is None or self.ranks_per_node >= 1, "ranks_per_node", self.ranks_per_node,
                 "None or 1 and more", "give the GPUs of a node")  # fmt: skip
        known = self.combine_dtype in ("float32", "tokens")
        _require(known, "combine_dtype", self.combine_dtype, "'float32' or 'tokens'", "use 'float32'")


def _require(holds: bool, what: str, got: object, allowed: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"DispatchPolicy.{what}", got=got, allowed=allowed, remedy=remedy)


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer on one rank, in integers."""

    num_tokens: int  # N, the most that a rank holds
    num_choices: int  # k
    num_experts: int  # E
    num_ranks: int  # E_p
    hidden: int  # H
    width: int  # I
    row_bytes: int  # of an activation element
    expert_elements: int  # of one expert, biases included
    weight_bytes: int  # of a weight element
    overlap: bool = False  # one rank whose rows are packed and combined on a lane beside compute
    tile_elements: int = TILE_ELEMENTS["cpu"]
    gate_is_function: bool = False

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum: float32, or float64 for float64 rows."""
        return max(4, self.row_bytes)

    @property
    def num_native(self) -> int:
        return self.num_experts // self.num_ranks


def chunk_tokens(policy: DispatchPolicy, layer: LayerShape) -> int:
    """c: the most tokens of one source in a chunk, given directly, by the method's formula, or from bytes."""
    if policy.chunk_tokens is not None:
        return int(policy.chunk_tokens)
    if policy.micro_chunks is not None:
        return max(1, math.ceil(layer.num_tokens / policy.micro_chunks))
    per_row = sum(width for _, width in row_buffers(layer))
    chunk_bytes = policy.chunk_bytes or DEFAULT_CHUNK_BYTES
    rows = chunk_bytes // per_row - layer.num_ranks
    if rows < layer.num_choices:
        raise ConfigError(
            "DispatchPolicy.chunk_bytes", got=format_bytes(chunk_bytes),
            allowed=f"{format_bytes(per_row * (layer.num_choices + layer.num_ranks))} or more (one token a source)",
            remedy="raise chunk_bytes",
        )  # fmt: skip
    return min(rows // layer.num_choices, max(1, layer.num_tokens))


def row_buffers(layer: LayerShape) -> tuple[tuple[str, int], ...]:
    """Buffers of the workspace and their bytes per row: x tokens, g output gradients, w route weights, h gate and up,
    a weighted activations and da their gradient. `sent_`, `came_`: the wire's; `back_`, `home_`: the way back."""
    wide, number = layer.hidden * layer.row_bytes, layer.sum_bytes
    rows = (("x", wide), ("g", wide), ("w", number))
    inner = layer.width * layer.row_bytes
    math_buffers = (("h", 2 * inner), ("a", inner), ("da", inner), ("dw", number))
    if layer.num_ranks > 1:
        wire = tuple((f"{side}_{name}", width) for side in ("sent", "came") for name, width in rows)
        back = tuple(
            (f"{side}_{name}", width) for side in ("back", "home") for name, width in (("x", wide), ("w", number))
        )
        return (*rows, *math_buffers, *wire, *back)
    second = tuple((f"{name}2", width) for name, width in (*rows, ("dw", number))) if layer.overlap else ()
    return (*rows, *math_buffers, *second)


@dataclass(frozen=True)
class Cost:
    """Bytes of one layer's dispatch in backward, beyond its inputs; `peak_bytes` is their sum."""

    workspace: int  # row buffers at the bound, allocated once, shared by all layers
    spill: int  # foreign weights, their gradients and receive slots, allocated once, shared by all layers
    output: int  # the layer's output, which the caller holds, and the upstream gradient
    token_gradients: int  # in the dtype of sums
    weight_gradients: int
    gradient_sums: int  # float32 sums of narrower weight gradients: of the experts in flight
    route_gradients: int
    row_order: int  # from forward to backward
    tile: int  # of the elementwise middle
    rounded: int  # the token gradients' narrower copy, after the last tile

    @property
    def peak_bytes(self) -> int:
        total: int = sum(asdict(self).values())
        return total - min(self.tile, self.rounded)


def cost(layer: LayerShape, policy: DispatchPolicy) -> Cost:
    """Every tensor of the backward, by name. Only `workspace` and `tile` depend on c, and nothing on routing.

    Sums of narrower weight gradients: an expert holds one from its first chunk to its last. With one rank at most one
    expert crosses a chunk's edge; with several, sources stand at different experts, so the bound is all natives.
    """
    narrow = layer.row_bytes < layer.sum_bytes
    tokens = layer.num_tokens * layer.hidden
    routes = layer.num_tokens * layer.num_choices
    rows = chunk_tokens(policy, layer) * layer.num_choices + layer.num_ranks
    expert_sum = layer.expert_elements * max(4, layer.weight_bytes)
    in_flight = 1 if layer.num_ranks == 1 else layer.num_native
    tile = min(layer.tile_elements, rows * layer.width) * layer.sum_bytes
    return Cost(
        workspace=rows * sum(width for _, width in row_buffers(layer)),
        spill=spill_bytes(layer, policy),
        output=2 * tokens * layer.row_bytes,
        token_gradients=tokens * layer.sum_bytes,
        weight_gradients=layer.num_native * layer.expert_elements * layer.weight_bytes,
        gradient_sums=in_flight * expert_sum if narrow else 0,
        route_gradients=routes * layer.sum_bytes,
        row_order=routes * _ROUTE_BYTES,
        tile=tile * (_TILE_TENSORS + _WIDENED * narrow + _GATE_FUNCTION * layer.gate_is_function),
        rounded=tokens * layer.row_bytes if narrow else 0,
    )


def spill_bytes(layer: LayerShape, policy: DispatchPolicy) -> int:
    """Slots of foreign experts: weights, sums of their gradients, and as many slots where gradients come home."""
    if layer.num_ranks == 1:
        return 0
    sums = max(4, layer.weight_bytes)
    return policy.spill_slots * layer.expert_elements * (layer.weight_bytes + sums) + layer.expert_elements * sums


def layer_of(shape: RunShape) -> LayerShape:
    """The MoE layer of a run, on the kind of device that its machine has."""
    model, dtypes, on_accelerator = shape.model, shape.dtypes, shape.machine.on_accelerator
    biases = (2 * model.expert_width + model.hidden) if model.has_expert_bias else 0
    return LayerShape(
        num_tokens=shape.tokens_per_rank, num_choices=model.experts_per_token, num_experts=model.num_experts,
        num_ranks=shape.mesh.expert, hidden=model.hidden, width=model.expert_width,
        row_bytes=dtypes.activation_bytes, weight_bytes=dtypes.weight_bytes,
        expert_elements=3 * model.hidden * model.expert_width + biases,
        overlap=on_accelerator and shape.mesh.expert == 1,
        tile_elements=TILE_ELEMENTS["accelerator" if on_accelerator else "cpu"], gate_is_function=model.has_expert_bias,
    )  # fmt: skip


def plain_rows(layer: LayerShape, imbalance: float = 1.0) -> int:
    """Routes on the fullest rank of plain expert parallelism; `imbalance` is its load over the mean."""
    return math.ceil(layer.num_tokens * layer.num_choices * imbalance)


def entries(shape: RunShape, policy: DispatchPolicy | Off) -> tuple[Entry, ...]:
    """Ledger entries of the dispatch peak of one MoE layer, forward and backward.

    OFF gives the plain program's: one all-to-all, grouped GEMMs, everything route-shaped alive in the backward,
    balanced routing.
    """
    if not shape.model.num_moe_layers:
        return ()
    layer = layer_of(shape)
    inside = frozenset({Moment.FORWARD, Moment.BACKWARD})
    if isinstance(policy, Off):
        widened = shape.model.has_float32_routes and layer.row_bytes < layer.sum_bytes
        return _plain_entries(layer, inside, _AT_COMBINE + (_WIDENED_COMBINE if widened else 0))
    held = cost(layer, policy)
    back = frozenset({Moment.BACKWARD})
    always = frozenset(Moment)
    named = [
        Entry("dispatch", "chunk workspace", held.workspace, always),
        Entry("dispatch", "slots of foreign experts", held.spill, always),
        Entry("dispatch", "float32 tile of the activation", held.tile, inside),
        Entry("dispatch", "float32 sums of weight gradients", held.gradient_sums, back),
        Entry("dispatch", "token gradients, float32", held.token_gradients, back),
        Entry("dispatch", "token gradients, rounded", max(0, held.rounded - held.tile), back),
        Entry("gathered", "expert gradients built so far", held.weight_gradients, back),
        Entry("dispatch", "route-weight gradients", held.route_gradients, back),
        Entry("router", "after the experts: gradients beyond theirs", _beyond_the_experts(shape, layer, held), back),
        Entry("dispatch", "combined output, float32", layer.num_tokens * layer.hidden * layer.sum_bytes,
              frozenset({Moment.FORWARD})),
        Entry("dispatch", "row order", held.row_order * shape.model.num_moe_layers, inside | {Moment.LOSS}),
    ]  # fmt: skip
    return tuple(named)


def _beyond_the_experts(shape: RunShape, layer: LayerShape, held: Cost) -> int:
    """Bytes by which what follows the experts' backward exceeds it, with the tile and the sums gone, and the gathered
    experts too where the complementary axis shards them. Two points compete there: the router's backward holds a
    gradient [N, H] beside the experts' own, by then rounded; that of the norm before holds float32 tensors [N, H]:
    its input's copy, kept, and five of its own math where the activations are narrower (24 bytes an element where 8
    were kept), four where they are not."""
    elements = layer.num_tokens * layer.hidden
    gathered = held.weight_gradients if shape.mesh.zero >= 3 and shape.mesh.world > shape.mesh.expert else 0
    during = held.token_gradients + max(held.tile, held.rounded) + held.gradient_sums + gathered
    router = elements * layer.row_bytes + (held.rounded or held.token_gradients)
    norm = elements * _NORM_SUMS if held.rounded else router
    return max(0, max(router, norm) - during)


def _plain_entries(layer: LayerShape, inside: frozenset[Moment], at_combine: int) -> tuple[Entry, ...]:
    """Two points of the backward compete: at the combine three more tensors of all routes, their gradients, are alive
    (`at_combine`: six where route weights are float32 and the rows narrower, since their products are float32, too);
    at the first grouped GEMM the gradients of all native experts beside two tensors of routes. The forward, without
    autograd, holds four tensors of routes at its combine or the activations at its second GEMM."""
    rows = plain_rows(layer)
    wide, inner = rows * layer.hidden * layer.row_bytes, rows * layer.width * layer.row_bytes
    back, forward = frozenset({Moment.BACKWARD}), inside - {Moment.BACKWARD}
    act = (2 + _GATE_KEPT * layer.gate_is_function) * inner
    kept = [("arrived rows", wide), ("gate and up", 2 * inner), ("activation", act), ("expert output", wide)]
    gradients = layer.num_native * layer.expert_elements * layer.weight_bytes
    return (
        *(Entry("dispatch", name, size, back) for name, size in kept),
        Entry("dispatch", "gradients of routes at the combine", at_combine * wide, back),
        Entry("gathered", "expert gradients beyond them", max(0, gradients - at_combine * wide - 2 * inner), back),
        Entry("dispatch", "rows and activations, forward", max(4 * wide, wide + 4 * inner), forward),
    )


def pays(shape: RunShape, machine: MachineShape) -> Verdict:
    """On where dispatch is a peak: E >= 64 and k >= 2 with experts spread over ranks, or routed rows that matter."""
    model = shape.model
    if not model.num_moe_layers:
        return Verdict(False, "the model has no experts")
    layer = layer_of(shape)
    plain = sum(e.num_bytes for e in entries(shape, OFF) if Moment.BACKWARD in e.during)
    ours = sum(e.num_bytes for e in entries(shape, DispatchPolicy()) if Moment.BACKWARD in e.during)
    share = plain / machine.device_memory_bytes
    numbers = f"plain {format_bytes(plain)} a layer when balanced, {share:.0%} of the device; flat {format_bytes(ours)}"
    if model.num_experts < 64 or model.experts_per_token < 2:
        few = (
            f"E {model.num_experts}, k {model.experts_per_token}: below E 64, k 2 the routed rows stay small; {numbers}"
        )
        return Verdict(plain > ours and share > 0.2, few)
    if ours >= plain:
        return Verdict(False, f"the workspace is no smaller than the routed rows it replaces: {numbers}")
    spread = f"E_p {layer.num_ranks}, " if layer.num_ranks > 1 else ""
    return Verdict(True, f"{spread}E {model.num_experts}, k {model.experts_per_token}: {numbers}")


def replaces(policy: DispatchPolicy) -> tuple[str, ...]:
    """The auxiliary loss comes from counts: no router logits are held, and no one-hot is built. Experts are FSDP2
    groups of their own, gathered and reduced one block at a time. The router's gradient competes with the experts'
    tile (`entries`)."""
    return (*ROUTER_LOSS, EXPERTS_EARLY, EXPERTS_REDUCED, ROUTER_GRADIENT)


def hides(policy: DispatchPolicy) -> tuple[str, ...]:
    """Parts of the step that run beside compute: the exchange of chunk j+1 while chunk j computes."""
    return ("expert exchange",)
