"""Which schedule, how large the tiles, how many passes and bytes: pure functions over integers.

Letters: P ranks of the vocabulary group, N tokens and V_r vocabulary rows of a rank, H hidden width. A *pass* is one
matrix product of N x V x H multiply-adds a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from steppe.core.errors import ConfigError
from steppe.core.shapes import MachineShape

SCHEDULES: Final = ("local", "one_pass", "weights", "activations")
LABEL_BYTES: Final = 8
SHARD_ROWS: Final = 8192  # most rows that go round at a time, and of a streaming tile: the method's shard size
RING_BUFFERS: Final = 5  # float32 gradients of one chunk: two at home, two leaving, one arriving
COEFFICIENTS: Final = 5  # numbers a row that its gradient needs: peak, slope, tilt, target, smooth


@dataclass(frozen=True)
class Head:
    """One call of the vocabulary projection, in integers that are the same on every rank."""

    rows: tuple[int, ...]  # counted tokens of each rank: label not ignored
    shards: tuple[int, ...]  # vocabulary rows of each rank, padding left out
    hidden: int
    hidden_bytes: int  # of an element of the hidden states
    weight_bytes: int  # of an element of the weight
    state_bytes: int = 4  # of an element of statistics and accumulators
    num_fields: int = 3  # statistics a row
    num_vectors: int = 0  # vocabulary vectors beside the weight: bias, class weights
    hidden_grad: bool = True
    weight_grad: bool = True
    bias_grad: bool = False
    scalar: bool = True  # the upstream gradient is a scalar known to be one at forward
    operand_bytes: int = 4  # of an element as it is multiplied: tiles of other widths are cast

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def vocab(self) -> int:
        return sum(self.shards)

    @property
    def grad(self) -> bool:
        return self.hidden_grad or self.weight_grad or self.bias_grad


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second: multiply-adds, bytes of device memory, bytes to another rank."""

    matmul: float
    memory: float
    network: float

    @classmethod
    def of(cls, machine: MachineShape) -> Rates:
        """A device's memory does about 1 byte for every 100 multiply-adds of its matrix units."""
        return cls(machine.matmul_rate / 2, machine.matmul_rate / 2 / 100, machine.network_rate)


CPU_RATES: Final = Rates(matmul=5e10, memory=1e10, network=1e9)
ACCELERATOR_RATES: Final = Rates.of(MachineShape())


@dataclass(frozen=True)
class Limits:
    """Bytes that tiles may take, and sizes that were asked for (None: they follow from the bytes)."""

    budget_bytes: int
    scratch_bytes: int
    tile_tokens: int | None = None
    tile_vocab: int | None = None
    num_chunks: int | None = None


@dataclass(frozen=True)
class Tiles:
    """Sizes of one call: a strip is `tile_tokens x tile_vocab`; `chunk` rows of every rank go round at a time."""

    strip_bytes: int
    tile_tokens: int
    tile_vocab: int
    chunk: int
    scratch_bytes: int


def passes(schedule: str, head: Head) -> int:
    """Matrix passes of forward and backward: 3 at most for local and one_pass, 4 for the streaming schedules."""
    recompute = int(head.grad and schedule in ("weights", "activations"))
    return 1 + recompute + int(head.hidden_grad) + int(head.weight_grad)


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sends in a step: hidden states, weights and gradients; and the small messages beside them."""

    forward: int
    backward: int
    side: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.side


def wire(schedule: str, head: Head, rank: int) -> Wire:
    """What `rank` sends; for equal shares of N tokens and V_r rows, with b bytes an element:

    one_pass (P-1) N H b forward and (P-1) N H 4 for the gradients (formed in the forward);
    weights (P-1) V_r H b forward, (P-1) V_r H (b+4) backward; activations (P-1) N H b and (P-1) N H (b+4).
    """
    others = head.ranks - 1
    width, state = head.hidden, head.state_bytes
    if schedule in ("local", "one_pass"):
        rows = sum(head.rows)
        own, theirs = head.rows[rank] * others, rows - head.rows[rank]
        grads = theirs * width * state if head.hidden_grad else 0
        side = own * LABEL_BYTES + others * rows * head.num_fields * state
        return Wire(own * width * head.hidden_bytes + grads, 0, side)
    turns = 1 + int(head.grad)
    if schedule == "weights":
        sent, homed = _passed_on(head.shards, rank)
        out = sent * width * head.weight_bytes
        home = homed * width * state if head.weight_grad else 0
        side = sent * head.num_vectors * state * turns + homed * state * int(head.bias_grad)
    else:
        sent, homed = _passed_on(head.rows, rank)
        out = sent * width * head.hidden_bytes
        home = homed * width * state if head.hidden_grad else 0
        side = sent * (LABEL_BYTES * turns + COEFFICIENTS * state * int(head.grad)) + homed * head.num_fields * state
    return Wire(out, out + home if head.grad else 0, side)


def _passed_on(shares: tuple[int, ...], rank: int) -> tuple[int, int]:
    """What `rank` passes on, and what goes home by it: all shares but its own. A travelling block takes P-1 hops: what
    a rank visits last it doesn't pass on."""
    total = sum(shares)
    return total - shares[(rank + 1) % len(shares)], total - shares[rank]


def chunk_bounds(length: int, chunk: int, index: int) -> tuple[int, int]:
    """Rows of a `length`-row share that go round in chunk `index`; later chunks of a short share are empty."""
    return min(index * chunk, length), min((index + 1) * chunk, length)


def num_chunks(lengths: tuple[int, ...], chunk: int) -> int:
    """Chunks that every rank takes part in: those of the longest share."""
    return -(-max(lengths) // chunk)


def tiles(schedule: str, head: Head, limits: Limits) -> Tiles:
    """Tile sizes under a byte budget for the strip; explicit sizes win, and the strip then follows from them."""
    if schedule in ("local", "one_pass"):
        return _block_tiles(head, limits)
    return _ring_tiles(schedule, head, limits)


def _block_tiles(head: Head, limits: Limits) -> Tiles:
    """P blocks of B tokens meet one shard at once, so a rank holds P*B x V_r logits: B follows from the budget."""
    most_rows, most_vocab = max(1, *head.rows), max(1, *head.shards)
    row_bytes = head.state_bytes * most_vocab * head.ranks
    block = min(limits.tile_tokens or max(1, limits.budget_bytes // row_bytes), most_rows)
    strip = block * row_bytes
    if limits.tile_tokens is None and most_rows > block:
        strip = max(strip, limits.budget_bytes)  # a fixed working set, whatever the vocabulary's divisors are
    width = most_vocab
    if head.weight_bytes != head.operand_bytes or head.operand_bytes < head.state_bytes:  # cast, or added products
        width = min(limits.tile_vocab or max(1, limits.budget_bytes // (4 * head.state_bytes * head.hidden)), width)
    return Tiles(strip, block, width, block, _scratch(strip, most_vocab, head, limits))


def _ring_tiles(schedule: str, head: Head, limits: Limits) -> Tiles:
    """Chunks of shards or of token blocks whose travelling buffers stay under the budget, and a strip within them."""
    most_rows, most_vocab = max(1, *head.rows), max(1, *head.shards)
    by_weights = schedule == "weights"
    travelling = most_vocab if by_weights else most_rows
    item = head.weight_bytes if by_weights else head.hidden_bytes
    copies = RING_BUFFERS if head.ranks > 1 else 1
    row_bytes = head.hidden * (min(2, head.ranks - 1) * item + copies * head.state_bytes)
    chunk = min(travelling, SHARD_ROWS, max(1, limits.budget_bytes // row_bytes))
    if limits.num_chunks is not None:
        chunk = -(-travelling // min(limits.num_chunks, travelling))
    width = min(limits.tile_vocab or SHARD_ROWS, chunk if by_weights else most_vocab)
    if limits.tile_tokens and not limits.tile_vocab:
        width = min(width, max(1, limits.budget_bytes // (head.state_bytes * limits.tile_tokens)))
    height = limits.tile_tokens or max(1, limits.budget_bytes // (head.state_bytes * width))
    height = min(height, most_rows if by_weights else chunk)
    strip = height * width * head.state_bytes
    return Tiles(strip, height, width, chunk, _scratch(strip, width, head, limits))


def _scratch(strip_bytes: int, width: int, head: Head, limits: Limits) -> int:
    """Elementwise work goes by groups of rows of this size: at least one row, at most the strip."""
    return min(max(limits.scratch_bytes, width * head.state_bytes), strip_bytes)


def modelled_seconds(schedule: str, head: Head, sizes: Tiles, rates: Rates) -> float:
    """Time of forward and backward: matrix work, traffic of weight and gradient, or what travels: the longest."""
    rows, shard = max(head.rows), max(head.shards)
    madds = passes(schedule, head) * rows * head.vocab * head.hidden
    streaming = schedule in ("weights", "activations")
    steps = -(-rows * (head.ranks if streaming else 1) // sizes.tile_tokens)
    weight_reads = (1 + int(head.hidden_grad) + int(head.grad and streaming)) * head.weight_bytes
    updates = 2 * head.state_bytes if head.weight_grad else 0
    traffic = steps * shard * head.hidden * (weight_reads + updates)
    return max(madds / rates.matmul, traffic / rates.memory, most_sent(schedule, head) / rates.network)


def most_sent(schedule: str, head: Head) -> int:
    """Bytes that leave the busiest rank."""
    return max(wire(schedule, head, rank).total for rank in range(head.ranks))


def allowed(head: Head) -> tuple[str, ...]:
    """Schedules that are exact for this call: gradients at once need a scalar upstream gradient."""
    at_once = ("local",) if head.ranks == 1 else ("one_pass",)
    streaming = ("weights",) if head.ranks == 1 else ("weights", "activations")
    return (*at_once, *streaming) if head.scalar or not head.grad else streaming


def choose(wanted: str, head: Head, limits: Limits, rates: Rates) -> tuple[str, Tiles]:
    """The schedule and its tiles: the one asked for, or under "auto" the one with the least modelled time.

    Raises: ConfigError where the one asked for can't be exact here.
    """
    sized = {name: tiles(name, head, limits) for name in SCHEDULES}
    if wanted == "auto":
        # As if all gradients were wanted: evaluation then takes the same steps as training, bit by bit.
        full = replace(head, hidden_grad=True, weight_grad=True)
        name = min(
            allowed(full), key=lambda name: (modelled_seconds(name, full, sized[name], rates), most_sent(name, full))
        )
        return name, sized[name]
    if wanted in ("local", "one_pass") and head.ranks == 1:
        wanted = "local"  # one rank runs the same lines under either name
    if wanted not in SCHEDULES or (wanted == "local" and head.ranks > 1):
        raise ConfigError(
            "vocabulary schedule", got=f"{wanted!r} on {head.ranks} ranks", allowed=f"auto or {allowed(head)}",
            remedy='use VocabPolicy(schedule="auto")',
        )  # fmt: skip
    if wanted in ("local", "one_pass") and head.grad and not head.scalar:
        raise ConfigError(
            "vocabulary schedule", got=f"{wanted!r} with a gradient by row",
            allowed='"weights" or "activations": "one_pass" forms gradients before the upstream gradient is known',
            remedy='use schedule="auto", or reduction "mean" or "sum" and want=("loss", "num_correct")',
        )  # fmt: skip
    return wanted, sized[wanted]


def counted_rows(head: Head, rank: int, schedule: str) -> int:
    """Rows x vocabulary that one pass of `rank` multiplies, in units of one row of the whole vocabulary."""
    return head.rows[rank] * head.vocab if schedule == "weights" else sum(head.rows) * head.shards[rank]
