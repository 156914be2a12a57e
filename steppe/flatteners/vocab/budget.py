"""What Ring-DTP holds, in bytes, and when it pays. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from steppe.core.errors import ConfigError
from steppe.core.ledger import BLOCK_BACKWARD, HEAD_GATHERED, HEAD_GRADIENT, Entry, Moment
from steppe.core.policy import Off, Verdict
from steppe.core.shapes import MachineShape, RunShape, shard_bounds
from steppe.core.units import MiB, format_bytes
from steppe.flatteners.vocab.schedule import (
    COEFFICIENTS,
    CPU_RATES,
    LABEL_BYTES,
    RING_BUFFERS,
    SCHEDULES,
    Head,
    Limits,
    Rates,
    Tiles,
    choose,
)

ACCELERATOR_BUDGET_BYTES: Final = 256 * MiB
ACCELERATOR_SCRATCH_BYTES: Final = 32 * MiB
CPU_BUDGET_BYTES: Final = 16 * MiB  # and up to four times as much where the last-level cache is larger
CPU_SCRATCH_BYTES: Final = MiB  # elementwise work stays in a core's own cache
SMALL_VOCAB: Final = 50_000
LARGE_VOCAB: Final = 100_000
STATE_BYTES: Final = 4  # of an element of statistics and accumulators
LOGITS_SHARE: Final = 0.2  # of the device's memory
PLAIN_IN_FLOAT32: Final = ("log-softmax", "gradient of the log-softmax", "gradient of the logits")


@dataclass(frozen=True)
class VocabPolicy:
    """How the vocabulary projection and its loss are done; None lets the byte budget decide.

    `budget_bytes` bounds the strip of logits, and, apart from it, the buffers that travel.
    """

    schedule: str = "auto"
    tile_tokens: int | None = None
    tile_vocab: int | None = None
    num_chunks: int | None = None
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("auto", *SCHEDULES):
            raise ConfigError(
                "vocabulary schedule", got=repr(self.schedule), allowed=f"auto or one of {SCHEDULES}",
                remedy="use auto, which chooses by modelled time",
            )  # fmt: skip
        for name in ("tile_tokens", "tile_vocab", "num_chunks", "budget_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"VocabPolicy.{name}", got=value, allowed="1 or more, or None", remedy="leave it out")

    def limits(self, budget_bytes: int, scratch_bytes: int) -> Limits:
        """The policy's sizes over the defaults of a device."""
        return Limits(
            self.budget_bytes or budget_bytes, scratch_bytes, self.tile_tokens, self.tile_vocab, self.num_chunks
        )


@dataclass(frozen=True)
class Transient:
    """Bytes held while a call runs, by name, beside its inputs, its outputs, the gradients and `accumulators`, the
    float32 sums that 16-bit gradients are rounded from."""

    forward: dict[str, int]
    backward: dict[str, int]
    accumulators: dict[str, int] = field(default_factory=dict)

    @property
    def forward_bytes(self) -> int:
        return sum(self.forward.values())

    @property
    def backward_bytes(self) -> int:
        return sum(self.backward.values())

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


def transient(schedule: str, head: Head, sizes: Tiles, *, entropy: bool = False, ignoring: bool = False) -> Transient:
    """What one rank holds under a schedule; `ignoring`: some labels are ignored, so rows are picked by index."""
    most_rows, state = max(head.rows), head.state_bytes
    cast_rows, cast_weight = (head.operand_bytes * (item != head.operand_bytes) for item in _items(head))
    at_once = schedule in ("local", "one_pass")
    tall = sizes.tile_tokens * (head.ranks if at_once else 1)
    common = {
        "strip": sizes.strip_bytes,
        "scratch": sizes.scratch_bytes * (1 + int(entropy)),
        "cast rows": tall * head.hidden * cast_rows,
        "cast weight": sizes.tile_vocab * head.hidden * cast_weight,
        "row statistics": most_rows * head.num_fields * state,
        "row index": most_rows * LABEL_BYTES if ignoring else 0,
    }
    if at_once:
        forward = common | _meeting(head, sizes, ignoring)
        return Transient(forward, {}, _accumulators(head, by_rows=False, rows_too=False))
    forward, backward = (common | _travelling(schedule, head, sizes, ignoring, back) for back in (False, True))
    sums = _accumulators(head, by_rows=schedule == "weights", rows_too=ignoring)
    return Transient(forward, backward if head.grad else {}, sums)


def _items(head: Head) -> tuple[int, int]:
    return head.hidden_bytes, head.weight_bytes


def _meeting(head: Head, sizes: Tiles, ignoring: bool) -> dict[str, int]:
    """Blocks of all ranks, and partial gradients of their hidden states."""
    block, row, turns = sizes.tile_tokens, head.hidden * head.state_bytes, min(2, head.ranks)
    return {
        "blocks": turns * head.ranks * block * (head.hidden * head.hidden_bytes + LABEL_BYTES),
        "picked rows": block * head.hidden * head.hidden_bytes if ignoring and not head.hidden_grad else 0,
        "returning": (turns * head.ranks + head.ranks - 1) * block * row if head.hidden_grad else 0,
    }


def _travelling(schedule: str, head: Head, sizes: Tiles, ignoring: bool, back: bool) -> dict[str, int]:
    """Visiting blocks, and results on their way home."""
    state, visiting = head.state_bytes, min(2, head.ranks - 1)
    copies = RING_BUFFERS if head.ranks > 1 else 1
    if schedule == "weights":
        row = head.hidden * head.weight_bytes + head.num_vectors * state
        home = (head.hidden * head.weight_grad + head.bias_grad) * state if back else 0
        own = sizes.tile_tokens * head.hidden * head.hidden_bytes if ignoring else 0
    else:
        row = head.hidden * head.hidden_bytes + LABEL_BYTES + (COEFFICIENTS * state if back else 0)
        home = (head.hidden if back else head.num_fields) * state
        home = home if head.hidden_grad or not back else 0
        picked = head.hidden * head.hidden_bytes + LABEL_BYTES if ignoring else 0
        own = sizes.chunk * (picked + (COEFFICIENTS * state if back else 0))
    return {"visiting": visiting * sizes.chunk * row, "own": own, "home": copies * sizes.chunk * home}


def _accumulators(head: Head, *, by_rows: bool, rows_too: bool) -> dict[str, int]:
    """Float32 sums that are not themselves the gradients that are returned."""
    hidden = max(head.rows) * head.hidden * head.state_bytes if by_rows and head.hidden_grad else 0
    weight = max(head.shards) * head.hidden * head.state_bytes if not by_rows and head.weight_grad else 0
    return {
        "hidden gradient in float32": hidden if head.hidden_bytes < head.state_bytes or rows_too else 0,
        "weight gradient in float32": weight if head.weight_bytes < head.state_bytes else 0,
    }


def head_of(shape: RunShape) -> Head:
    """The head of a run. An accelerator's GEMMs give float32 from 16-bit operands; for a CPU's they are cast."""
    ranks = shape.mesh.vocab
    shards = tuple(stop - start for start, stop in shard_bounds(shape.model.vocab, ranks))
    return Head(
        rows=(shape.tokens_per_rank,) * ranks, shards=shards, hidden=shape.model.hidden,
        hidden_bytes=shape.dtypes.activation_bytes, weight_bytes=shape.dtypes.weight_bytes,
        operand_bytes=shape.dtypes.activation_bytes if shape.machine.on_accelerator else STATE_BYTES,
    )  # fmt: skip


def entries(shape: RunShape, policy: VocabPolicy | Off) -> tuple[Entry, ...]:
    """Ledger entries of the `vocab` peak, which stands at the loss.

    Off, three float32 tensors of all logits are alive together in the loss's backward: the log-softmax, the gradient
    into it and the one out of it, 12 bytes an element. A caller that holds the model's outputs holds the logits too,
    until its backward is over: 14 bytes in bf16.
    """
    if isinstance(policy, Off):
        return _plain(shape)
    head = head_of(shape)
    limits = _limits(policy, shape.machine)
    rates = Rates.of(shape.machine) if shape.machine.on_accelerator else CPU_RATES
    schedule, sizes = choose(policy.schedule, head, limits, rates)
    held = transient(schedule, head, sizes)
    terms = max(held.forward, held.backward, key=lambda named: sum(named.values()))
    terms = terms | held.accumulators | _products(head, sizes)
    terms["hidden gradient"] = shape.tokens_per_rank * head.hidden * head.hidden_bytes
    return tuple(_entry(name, size) for name, size in terms.items() if size)


def _limits(policy: VocabPolicy, machine: MachineShape) -> Limits:
    """On a CPU the strip follows its cache, which is looked up at run time: the least of it where nothing is asked."""
    if machine.on_accelerator:
        return policy.limits(ACCELERATOR_BUDGET_BYTES, ACCELERATOR_SCRATCH_BYTES)
    return policy.limits(CPU_BUDGET_BYTES, CPU_SCRATCH_BYTES)


def _products(head: Head, sizes: Tiles) -> dict[str, int]:
    """On an accelerator, 16-bit operands are rounded copies of a tile and products arrive before they are added."""
    if head.operand_bytes == head.state_bytes:
        return {}
    rows = sizes.tile_tokens * head.ranks
    return {
        "product": max(sizes.tile_vocab, rows) * head.hidden * head.state_bytes,
        "rounded tile": rows * sizes.tile_vocab * head.operand_bytes,
    }


def _plain(shape: RunShape) -> tuple[Entry, ...]:
    elements = shape.tokens_per_rank * shape.model.vocab
    rows = [_entry(name, elements * 4) for name in PLAIN_IN_FLOAT32]
    if shape.holds_logits:
        during = BLOCK_BACKWARD | {Moment.LOSS}
        rows.append(Entry("vocab", "logits, held by the caller", elements * shape.dtypes.activation_bytes, during))
    return tuple(rows)


def _entry(name: str, num_bytes: int) -> Entry:
    return Entry("vocab", name, num_bytes, frozenset({Moment.LOSS}))


def pays(shape: RunShape, machine: MachineShape) -> Verdict:
    """Worth it where the vocabulary is large and whole logits take a fifth of the device."""
    vocab = shape.model.vocab
    logits = sum(entry.num_bytes for entry in _plain(shape))
    share = logits / machine.device_memory_bytes
    told = f"V {vocab:,}: whole logits and their gradient take {format_bytes(logits)}, {share:.0%} of the device"
    if vocab < SMALL_VOCAB:
        return Verdict(False, f"{told}; below V {SMALL_VOCAB:,} the plain projection is as good")
    if vocab < LARGE_VOCAB:
        between = f"between V {SMALL_VOCAB:,} and {LARGE_VOCAB:,}"
        return Verdict(False, f"{told}; {between} it stays off unless a measurement (steppe compare) says that it pays")
    if share <= LOGITS_SHARE:
        return Verdict(False, f"{told}; below {LOGITS_SHARE:.0%} they are not the peak")
    return Verdict(True, told)


def replaces(policy: VocabPolicy) -> tuple[str, ...]:
    """The head stays sharded: FSDP2 neither gathers it nor reduces a whole gradient of it."""
    return (HEAD_GATHERED, HEAD_GRADIENT)
