"""Which tensor a failed allocation was: every tensor of the run, under every reading, against the size as printed.

A printed size has few digits, so a reading matches when it prints the same digits in the same unit (GiB or GB), not
when it is near. torch's message prints what it asks the driver for, whole segments, so a tensor's size rounded up to
them matches too. Readings of whole tensors come before copies of them, this run's own dtypes before others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from steppe.core import parameters
from steppe.core.errors import ConfigError
from steppe.core.shapes import RunShape
from steppe.core.units import GiB, KiB, MiB, format_bytes
from steppe.planner import block, sharding

UNITS: Final = {
    "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1,
    "bytes": 1,
}  # fmt: skip
_DIGITS: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"  # no sign, no decimal comma
_SIZE: Final = re.compile(rf"(?<![-\d,.])({_DIGITS})\s*(KiB|MiB|GiB|TiB|KB|MB|GB|TB|bytes|B)\b")
# torch, its CPU allocator, XLA and numpy ask to allocate; NCCL fails to calloc; cudaMallocAsync was requested.
_TRIED: Final = re.compile(
    r"(?:(?:tr(?:ied|ying)\s+to|unable\s+to|failed\s+to|can't|cannot)[\w\s]{0,20}?\s[cm]?alloc(?:ate)?\b"
    r"|exceed\s+allowed\s+memory.{1,120}?\brequested\s*:)(?=(.{1,40}))",
    re.IGNORECASE | re.DOTALL,
)
# Metal's allocator writes KB, MB and GB for powers of 2 (newer versions KiB, MiB and GiB).
_METAL: Final = re.compile(r"\s(?:KB|MB|GB)\s+on\s+(?:private|shared)\s+pool")
# Figures that stand beside the allocation in such messages and are none.
_READ_OUT: Final = re.compile(r"capacity|memory in use|\bfree\b|allocated|reserved|max allowed|\bhas\b", re.IGNORECASE)
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
SEGMENT: Final = 2 * MiB  # the caching allocator's: up to 1 MiB one of these, below 10 MiB ten, then whole ones
_SMALL, _LARGE, _LARGE_SEGMENT = MiB, 10 * MiB, 20 * MiB
FILLING: Final = "any tensor of up to 1 MiB prints as 2.00 MiB and any of 1 to 10 MiB as 20.00 MiB"


@dataclass(frozen=True)
class Printed:
    """A size as an error message prints it: the digits and the unit, and so an interval of bytes."""

    number: str
    unit: str

    @property
    def num_bytes(self) -> float:
        return float(self.number.replace(",", "")) * UNITS[self.unit]

    def matches(self, num_bytes: int) -> bool:
        """True when `num_bytes`, printed in this unit to as many decimals, shows the same digits."""
        decimals = len(self.number.partition(".")[2])
        return f"{num_bytes / UNITS[self.unit]:.{decimals}f}" == self.number.replace(",", "")

    @property
    def is_any_small_tensor(self) -> bool:
        """True for the two sizes that torch's allocator asks for whatever small tensor is wanted."""
        return self.num_bytes in (SEGMENT, _LARGE_SEGMENT)

    def __str__(self) -> str:
        return f"{self.number} {self.unit}"


def segment_bytes(num_bytes: int) -> int:
    """What torch's caching allocator asks the driver for, and prints, when it has no room for such a tensor.

    Source: pytorch, c10/cuda/CUDACachingAllocator.cpp, get_allocation_size.
    """
    if num_bytes < _LARGE:
        return SEGMENT if num_bytes <= _SMALL else _LARGE_SEGMENT
    return -(-num_bytes // SEGMENT) * SEGMENT


def find_sizes(text: str) -> tuple[Printed, ...]:
    """The allocations in a size or in a whole log: all that were tried, each once; or the only size there.

    Raises: ConfigError when there is none, or only what a message says of the device beside it.
    """
    plain = _STYLE.sub("", text)
    tried = [found for part in _TRIED.findall(plain) if (found := _SIZE.search(part))]
    if not tried:
        sizes = list(_SIZE.finditer(plain))
        tried = sizes if len(sizes) == 1 and not _READ_OUT.search(plain) else []
    if not tried:
        raise ConfigError(
            "failed allocation", got=repr(text[:80]), allowed='a size as "37.09 GiB", or the whole error message',
            remedy='copy the line that says "Tried to allocate"; where no line does ("CUDA error: out of memory"), '
            "no tensor is named: `steppe plan` says which peak is the largest",
        )  # fmt: skip
    return tuple(dict.fromkeys(_printed(found) for found in tried))


def _printed(found: re.Match[str]) -> Printed:
    number, unit = found.groups()
    binary = _METAL.match(found.string, found.start(2) - 1)
    return Printed(number, f"{unit[0]}iB" if binary else unit)


def find_size(text: str) -> Printed:
    """The first of them. Raises: ConfigError when no size is there."""
    return find_sizes(text)[0]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a run: its elements, the bytes an element that it may have, its peak and what removes it."""

    name: str
    formula: str
    elements: int
    itemsizes: tuple[int, ...]
    owner: str
    remedy: str
    in_pieces: bool = False  # a sum over blocks or parameters: no single allocation has this size


@dataclass(frozen=True)
class Reading:
    """A tensor whose size prints as the failed allocation does."""

    tensor: Tensor
    itemsize: int
    copies: int
    num_bytes: int

    def to_json(self) -> dict[str, object]:
        tensor = self.tensor
        return {
            "tensor": tensor.name, "formula": tensor.formula, "itemsize": self.itemsize, "copies": self.copies,
            "num_bytes": self.num_bytes, "peak": tensor.owner, "remedy": tensor.remedy, "in_pieces": tensor.in_pieces,
        }  # fmt: skip

    def __str__(self) -> str:
        count = f"{self.copies} x " if self.copies > 1 else ""
        return (
            f"{count}{self.tensor.name}: {self.tensor.formula}, {self.itemsize} bytes an element = "
            f"{format_bytes(self.num_bytes)} ({self.num_bytes:,} bytes). "
            f"Peak: {self.tensor.owner}. {self.tensor.remedy}"
        )


def explain(printed: Printed, shape: RunShape) -> tuple[Reading, ...]:
    """Every reading that prints the same digits, the simplest first; empty when none does."""
    found = [
        Reading(tensor, itemsize, copies, tensor.elements * itemsize * copies)
        for tensor in catalogue(shape)
        for itemsize in dict.fromkeys(tensor.itemsizes)
        for copies in (1, 2, 3, 4)
        if tensor.elements and _prints_as(printed, tensor.elements * itemsize * copies, in_pieces=tensor.in_pieces)
    ]
    return tuple(sorted(found, key=lambda r: (r.copies, r.tensor.in_pieces)))


def _prints_as(printed: Printed, num_bytes: int, *, in_pieces: bool) -> bool:
    """True for the tensor's own bytes or the segments asked for it; small ones all print alike and tell nothing."""
    in_segments = num_bytes >= _LARGE and not in_pieces
    return printed.matches(num_bytes) or (in_segments and printed.matches(segment_bytes(num_bytes)))


_VOCAB = "Ring-DTP (`vocab`) never holds it: a tile of fixed bytes instead; chunked cross-entropy shrinks it."
_ROUTER = "Count the chosen experts instead of a one-hot (steppe does), or set output_router_logits=false."
_ATTENTION = "A fused attention kernel never builds scores; for sinks take one whose backward knows them."
_DISPATCH = "PipelinedLLEP (`dispatch`) holds chunks of fixed size instead of all routes."
_BOUNDARY = "SCO (`boundary`) keeps block inputs on the host; two stay on the device."
_OPTIMIZER = "OffloadStreamAdamW (`optimizer`) keeps state on the host and updates bucket by bucket."
_FOREACH = f"foreach=False or fused=True saves the transient; {_OPTIMIZER}"
_WEIGHTS = "More ranks in the FSDP group or expert parallelism divide it."


def catalogue(shape: RunShape) -> Iterator[Tensor]:
    """Every tensor of the run that grows with tokens or parameters and is allocated in one piece."""
    yield from _token_tensors(shape)
    yield from _route_tensors(shape)
    yield from _parameter_tensors(shape)


def _token_tensors(shape: RunShape) -> Iterator[Tensor]:
    model, mesh, tokens = shape.model, shape.mesh, shape.tokens_per_rank
    floats = _preferred(shape.dtypes.activation_bytes)
    kinds = {shape.batch.seq_len: "S", shape.batch.batch * shape.batch.seq_len: "batch x S", tokens: "N"}
    for count, letter in kinds.items():
        logits = count * model.vocab
        formula = f"{letter} {count:,} x V {model.vocab:,}"
        yield Tensor("logits", formula, logits, (4, *floats), "vocab", _VOCAB)
        if mesh.tensor > 1:
            shard = f"{formula} / TP {mesh.tensor}"
            yield Tensor("logits of one tensor rank", shard, logits // mesh.tensor, (4, *floats), "vocab", _VOCAB)
    heads = model.num_heads // mesh.tensor
    scores = f"batch {shape.batch.batch} x heads {heads} x S {shape.batch.seq_len:,}^2"
    if mesh.sequence > 1:
        scores += f" / D {mesh.sequence}"
    elements = block.scores_elements(shape)
    yield Tensor("attention scores, materialised", scores, elements, floats, "attention", _ATTENTION)
    boundary = tokens * model.hidden
    name = f"N {tokens:,} x H {model.hidden:,}"
    yield Tensor("one block input", name, boundary, floats, "boundary", _BOUNDARY)
    layers = f"L {model.num_layers} x {name}"
    yield Tensor("block inputs of all layers", layers, model.num_layers * boundary, floats, "boundary", _BOUNDARY, True)


def _route_tensors(shape: RunShape) -> Iterator[Tensor]:
    model, tokens = shape.model, shape.tokens_per_rank
    if not model.num_moe_layers:
        width = f"N {tokens:,} x {model.dense_width:,}"
        floats = _preferred(shape.dtypes.activation_bytes)
        yield Tensor(
            "MLP activation", width, tokens * model.dense_width, floats, "other", "Split the tokens over ranks."
        )
        return
    routes = tokens * model.experts_per_token
    floats = _preferred(shape.dtypes.activation_bytes)
    letter = f"N {tokens:,} x k {model.experts_per_token}"
    hot = f"{letter} x E {model.num_experts}"
    elements = routes * model.num_experts
    whole = f"L {model.num_moe_layers} x {hot}"
    yield Tensor("one-hot of the chosen experts", whole, model.num_moe_layers * elements, (8, 4), "router", _ROUTER)
    yield Tensor("one-hot of one layer", hot, elements, (8, 4), "router", _ROUTER)
    yield Tensor(
        "dispatched tokens", f"{letter} x H {model.hidden:,}", routes * model.hidden, floats, "dispatch", _DISPATCH
    )
    gate_up = f"{letter} x 2I {2 * model.expert_width:,}"
    yield Tensor("gate and up", gate_up, routes * 2 * model.expert_width, floats, "dispatch", _DISPATCH)
    inner = f"{letter} x I {model.expert_width:,}"
    yield Tensor("expert activation", inner, routes * model.expert_width, floats, "dispatch", _DISPATCH)


def _parameter_tensors(shape: RunShape) -> Iterator[Tensor]:
    model, mesh = shape.model, shape.mesh
    shard = parameters.parameters_per_rank(model, mesh.world)
    total = parameters.total_parameters(model)
    formula = f"{total:,} parameters / W {mesh.world}"
    yield Tensor("one optimizer moment (exp_avg or exp_avg_sq)", formula, shard, (4, 2), "optimizer", _OPTIMIZER, True)
    yield Tensor("both moments of AdamW", f"2 x {formula}", 2 * shard, (4, 2), "optimizer", _OPTIMIZER, True)
    yield Tensor("foreach transient of AdamW", formula, shard, (4,), "optimizer", _FOREACH, True)
    yield Tensor("weights of one rank", formula, sharding.held_weights(shape), (2, 4), "weights", _WEIGHTS, True)
    yield Tensor(
        "gradients of one rank", formula, sharding.held_gradients(shape), (2, 4), "gradients", _OPTIMIZER, True
    )
    table = parameters.embedding_parameters(model)
    ends = f"V {model.vocab:,} x H {model.hidden:,}"
    yield Tensor("embedding or head, whole", ends, table, (2, 4), "gathered", "Ring-DTP leaves the head sharded.")
    if model.num_moe_layers:
        yield from _expert_tensors(shape)
    else:
        yield Tensor(
            "one block's weights, gathered", "a block", sharding.unsharded_block(shape), (2, 4), "gathered", _WEIGHTS
        )


def _expert_tensors(shape: RunShape) -> Iterator[Tensor]:
    model, mesh = shape.model, shape.mesh
    local, layers = model.num_experts // mesh.expert, model.num_moe_layers // mesh.pipeline
    one = parameters.expert_parameters(model)
    matrices = f"{local} local experts x 3 x H {model.hidden:,} x I {model.expert_width:,}"
    remedy = f"A second copy comes from casting, merging or wrapping frozen experts: keep one. {_WEIGHTS}"
    yield Tensor("routed experts of a block on this rank", matrices, local * one, (2, 4), "gathered", _WEIGHTS)
    stage = f"{layers} blocks x {matrices}"
    yield Tensor(
        "routed experts of all blocks on this rank", stage, layers * local * one, (2, 4), "weights", remedy, True
    )
    gate_up = local * 2 * model.expert_width * model.hidden
    yield Tensor("gate_up weights of a block", f"{local} x 2I x H", gate_up, (2, 4), "gathered", _WEIGHTS)


def _preferred(itemsize: int) -> tuple[int, ...]:
    return (itemsize, *(size for size in (2, 4) if size != itemsize))
