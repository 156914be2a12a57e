"""Modelled time of one optimizer step: operations and bytes over the machine's rates. Ratios, not promises.

Compute, the gathers of FSDP2 and the host link run beside each other, so the longest of them counts; an exchange that
nothing hides, and an update that starts when the gradient norm is known, are added. What the flatteners move is read
from their ledger entries: what lies on the host for part of a step travels there and back once a micro-batch, what
lies there always is read and written once a step while gradients come in and weights go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from steppe.core import parameters
from steppe.core.ledger import STEP, Ledger
from steppe.core.shapes import RunShape
from steppe.planner.block import key_width, query_width, value_width
from steppe.planner.sharding import gathered_block

ALWAYS_HIDDEN: Final = frozenset({"compute", "gathers", "link"})
_FORWARDS = 2  # the forward and its recompute
_PASSES = 4  # forward, recompute, two in the backward
_ATTENTION_PASSES = 4.5  # a fused backward recomputes the scores: 2.5 forwards


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on one rank, part by part."""

    parts: Mapping[str, float]
    hidden: frozenset[str]  # parts that run beside compute
    tokens: int  # of all ranks

    @property
    def seconds(self) -> float:
        """The longest of what runs beside compute, and all of what doesn't."""
        exposed = sum(seconds for part, seconds in self.parts.items() if part not in self.hidden)
        return max(self.parts[part] for part in self.hidden) + exposed

    @property
    def compute(self) -> float:
        return self.parts["compute"]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def longest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


def step_time(shape: RunShape, ledger: Ledger, hidden: Iterable[str] = (), recompute: float = 0.0) -> StepTime:
    """Model the step whose ledger is given (it says what lies on the host). `hidden`: parts that flatteners hide;
    `recompute`: seconds of a micro-batch that they compute again, beyond every block's own recompute."""
    machine, batches = shape.machine, shape.batch.micro_batches
    streams = host_bytes_in_passing(ledger) * batches
    parts = {
        "compute": batches * (micro_batch_operations(shape) / machine.matmul_rate + recompute),
        "gathers": batches * gathered_bytes(shape) / machine.network_rate,
        "link": max(streams / machine.to_host_rate, streams / machine.to_device_rate),
        "expert exchange": batches * expert_exchange_bytes(shape) / machine.network_rate,
        "heads exchange": batches * heads_exchange_bytes(shape) / machine.network_rate,
        "update": update_seconds(shape, ledger),
    }
    tokens = shape.tokens_per_rank * shape.mesh.world * batches // (shape.mesh.tensor * shape.mesh.pipeline)
    return StepTime(parts, ALWAYS_HIDDEN | frozenset(hidden), tokens)


def least_seconds(shape: RunShape) -> float:
    """Seconds that no program on this layout undercuts: nothing on the host, everything hidden that can be."""
    return step_time(shape, Ledger(0, {}, {}), ("expert exchange",)).seconds


def micro_batch_operations(shape: RunShape) -> float:
    """Matmul and attention operations of one micro-batch on one rank, block recompute included."""
    model, tokens = shape.model, shape.tokens_per_rank
    head = parameters.embedding_parameters(model)
    blocks = parameters.active_parameters(model) - head
    matmul = 2.0 * tokens * (_PASSES * blocks + 3 * head)
    seen = min(shape.batch.seq_len, model.sliding_window or shape.batch.seq_len) if model.sliding_window else None
    span = shape.batch.seq_len / 2
    if seen is not None:  # every other block of such models looks at a window only
        span = (span + min(seen, span)) / 2
    width = query_width(shape) + model.num_heads * (model.value_head_dim or model.head_dim) // shape.mesh.tensor
    attention = 2.0 * span * tokens * width * model.num_layers
    return (matmul + _ATTENTION_PASSES * attention) / (shape.mesh.tensor * shape.mesh.pipeline)


def gathered_bytes(shape: RunShape) -> float:
    """Two all-gathers and a reduce-scatter of every block and of both ends, one micro-batch, sent by one rank."""
    mesh, dtypes = shape.mesh, shape.dtypes
    if mesh.world == 1:
        return 0.0
    ends = 2 * parameters.embedding_parameters(shape.model)
    whole = gathered_block(shape) * shape.model.num_layers + ends
    return whole * (_FORWARDS * dtypes.activation_bytes + dtypes.gradient_bytes) * (mesh.world - 1) / mesh.world


def expert_exchange_bytes(shape: RunShape) -> float:
    """Rows to the experts and back: six passes of H a route (forward, recompute, backward)."""
    mesh, model = shape.mesh, shape.model
    routes = shape.tokens_per_rank * model.experts_per_token * model.num_moe_layers
    leaving = (mesh.expert - 1) / mesh.expert
    return 3 * _FORWARDS * routes * model.hidden * leaving * shape.dtypes.activation_bytes


def heads_exchange_bytes(shape: RunShape) -> float:
    """Queries, keys, values and output over the D ranks of a sequence, three times."""
    mesh = shape.mesh
    width = 2 * query_width(shape) + key_width(shape) + value_width(shape)
    heads = shape.tokens_per_rank * width * shape.model.num_layers
    return 3 * heads * (mesh.sequence - 1) / mesh.sequence * shape.dtypes.activation_bytes


def host_bytes_in_passing(ledger: Ledger) -> int:
    """Bytes that lie on the host for part of a step only: they travel there and back."""
    return sum(e.num_bytes for e in ledger.entries if e.place == "host" and not e.during >= STEP)


def host_bytes_that_stay(ledger: Ledger) -> int:
    return sum(e.num_bytes for e in ledger.entries if e.place == "host" and e.during >= STEP)


def update_seconds(shape: RunShape, ledger: Ledger) -> float:
    """Host state is read and written once, the node's memory shared by its ranks; or the wire if that is slower."""
    stays = host_bytes_that_stay(ledger)
    if not stays:
        return 0.0
    ranks = min(shape.mesh.ranks_per_node, shape.mesh.world)
    wire = parameters.parameters_per_rank(shape.model, shape.mesh.world)
    memory = (2 * stays + wire * (shape.dtypes.weight_bytes + shape.dtypes.gradient_bytes)) * ranks
    up = wire * shape.dtypes.weight_bytes / shape.machine.to_device_rate
    adamw = wire * ranks / shape.machine.adamw_rate
    return max(memory / shape.machine.host_memory_rate, up, adamw)


def rates_to_hide(shape: RunShape, ledger: Ledger) -> dict[str, float]:
    """Link bytes/s each way that hide what passes behind compute, and host-memory bytes/s of a node that keep the
    update within a tenth of the step."""
    time = step_time(shape, ledger)
    ranks = min(shape.mesh.ranks_per_node, shape.mesh.world)
    streams = host_bytes_in_passing(ledger) * shape.batch.micro_batches
    return {
        "link": streams / time.compute,
        "host_memory": 2 * host_bytes_that_stay(ledger) * ranks / (time.compute / 10),
    }
