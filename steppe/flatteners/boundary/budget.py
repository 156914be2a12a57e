"""What the boundaries cost: the policy, its ledger entries and whether moving them pays.

A boundary is the input of one block, [N,H]: the tensor a checkpointed block keeps from its forward to its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from steppe.core.errors import ConfigError
from steppe.core.ledger import BLOCK_BACKWARD, FIRST_BLOCKS, Entry, Moment
from steppe.core.policy import OFF, Off, Verdict
from steppe.core.shapes import MachineShape, RunShape
from steppe.core.units import format_bytes
from steppe.flatteners.boundary.equal import plan_equal
from steppe.flatteners.boundary.schedule import (
    CHOICES,
    Boundaries,
    BoundaryPlan,
    Choice,
    NoPlan,
    device_boundaries,
    plan,
    stored_on_host,
)

PER_BOUNDARY: Final = frozenset({Moment.FORWARD, Moment.LOSS, Moment.BACKWARD})
IN_TRANSIT: Final = BLOCK_BACKWARD | {Moment.FORWARD}  # beside every block but the very first
IN_FORWARD: Final = frozenset({Moment.FORWARD})
LAST_BLOCK: Final = frozenset({Moment.BACKWARD, Moment.ATTENTION})
PRIOR_RATE: Final = 16e9  # PCIe gen4 x8, bytes per second each way: below it the schedule stays off unless forced
MIN_LAYERS: Final = 3  # two boundaries stay on the device whatever happens
INDEX_BYTES: Final = 4  # a pinned choice is kept as int32
Compile = Literal["off", "parts", "block"]


@dataclass(frozen=True)
class BoundaryPolicy:
    """What happens to each block's input between forward and backward.

    `default` holds for every boundary that `per_boundary` does not name ({index: choice}, or one choice a boundary):
    `offload` to the host, `keep` on the device, or `recompute` from the previous boundary. `offload_extra` names
    operators (`"aten._scaled_dot_product_flash_attention"`) whose results, or labels (`"kv"`) of
    `steppe.long_lived(tensor, "kv")` whose tensors, are kept too, so that the recompute need not redo them; `"auto"`
    profiles one block and takes what pays. At most `extra_limit` results a boundary are kept; the others count as
    short-lived and are recomputed. `pin_topk` replays the router's choice in the recompute. `host_bytes` caps the host
    arena; tensors below `min_bytes` are left alone. `compile` compiles inside the checkpoint: `parts` (attention and
    norms) or `block`; `compile_varying` says that the length of a row varies from step to step: for parts it is then
    marked dynamic from the first graph on, and everything else stays static.
    """

    default: Choice = "offload"
    per_boundary: tuple[tuple[int, Choice], ...] | Mapping[int, Choice] | Sequence[Choice] = ()
    offload_extra: tuple[str, ...] | Literal["auto"] = ()
    extra_limit: int = 3
    pin_topk: bool = True
    host_bytes: int | None = None
    min_bytes: int = 4096
    compile: Compile = "off"
    compile_backend: str = "inductor"
    compile_varying: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_boundary", _pairs(self.per_boundary))
        if isinstance(self.offload_extra, str) and self.offload_extra != "auto":
            _refuse("offload_extra", self.offload_extra, '"auto" or a tuple of operators and labels', "write a tuple")
        if not isinstance(self.offload_extra, str):
            object.__setattr__(self, "offload_extra", tuple(self.offload_extra))
        for choice in (self.default, *(choice for _, choice in self.named)):
            if choice not in CHOICES:
                _refuse("boundary choice", choice, ", ".join(CHOICES), "choose one of them")
        for name in ("extra_limit", "min_bytes", "host_bytes"):
            if (getattr(self, name) or 0) < 0:
                _refuse(f"boundary {name}", getattr(self, name), "0 or more", "raise it, or leave it out")
        if self.compile not in ("off", "parts", "block"):
            _refuse("boundary compile", self.compile, "off, parts, block", "choose one of them")
        if (0, "recompute") in self.named:
            _refuse("boundary 0", "recompute", "offload, keep", "there is no previous boundary to recompute it from")

    @property
    def named(self) -> tuple[tuple[int, Choice], ...]:
        assert isinstance(self.per_boundary, tuple)
        return self.per_boundary

    def choice(self, index: int) -> Choice:
        """What happens to boundary `index`; the first one has no predecessor, so it is never recomputed by default."""
        named = dict(self.named).get(index)
        if named is not None:
            return named
        return "offload" if index == 0 and self.default == "recompute" else self.default

    def choices(self, num_layers: int) -> tuple[Choice, ...]:
        return tuple(self.choice(index) for index in range(num_layers))

    @property
    def labels(self) -> tuple[str, ...]:
        """The entries of `offload_extra` that are labels of `long_lived` (operators have a dot in their name)."""
        return () if self.offload_extra == "auto" else tuple(name for name in self.offload_extra if "." not in name)

    @property
    def operators(self) -> tuple[str, ...]:
        return () if self.offload_extra == "auto" else tuple(name for name in self.offload_extra if "." in name)


def boundary_bytes(shape: RunShape) -> int:
    """One boundary: N*H*b."""
    return shape.tokens_per_rank * shape.model.hidden * shape.dtypes.activation_bytes


def entries(shape: RunShape, policy: BoundaryPolicy | Off = OFF) -> tuple[Entry, ...]:
    """The boundary entries of one rank's ledger.

    Peak: off L*N*H*b on the device; on 2*N*H*b there (plus what `keep` keeps; in the forward up to 4, whatever L) and
    (L-1)*N*H*b on the host, plus extras.
    """
    size, num_layers = boundary_bytes(shape), shape.model.num_layers
    first = "inputs of the first blocks"
    still_to_come = tuple(Entry("boundary", first, count * size, moments) for count, moments in _first_inputs(shape))
    if isinstance(policy, Off):
        return (Entry("boundary", "block inputs", num_layers * size, PER_BOUNDARY), *still_to_come)
    choices = policy.choices(num_layers)
    held, moving = device_boundaries(choices)
    rows = [
        Entry("boundary", "block inputs in the forward", forward_boundaries(choices) * size, IN_FORWARD),
        Entry("boundary", "block inputs kept on the device", held * size, PER_BOUNDARY - IN_FORWARD),
        Entry("boundary", "block input in transit", moving * size, LAST_BLOCK),
        *still_to_come,
        Entry("boundary", "block inputs", stored_on_host(choices) * size, PER_BOUNDARY, "host"),
    ]
    for what, per_block in (("extras", extra_bytes(shape, policy)), ("pinned choices", pinned_bytes(shape, policy))):
        blocks = num_layers if what == "extras" else shape.model.num_moe_layers
        if per_block and blocks:
            rows += _companions(what, per_block, blocks, moving)
    return tuple(rows)


def forward_boundaries(choices: Sequence[Choice]) -> int:
    """Boundaries on the device when the last one is made: what is kept, the input of the block that makes it, the one
    before, whose copy may still run, and the first, which the model's forward holds as its embeddings."""
    last = len(choices) - 1
    kept = {index for index, choice in enumerate(choices) if choice == "keep"}
    return len(kept | ({0, last - 2, last - 1, last} & set(range(last + 1))))


def _first_inputs(shape: RunShape) -> tuple[tuple[int, frozenset[Moment]], ...]:
    """Where nearly all gradients are there: one block has none before it on one rank; where gradients wait to be
    reduced it is the second block, beside whose input stands the first one's. A single leading dense block is first."""
    second = 1 if shape.mesh.world == 1 else min(2, max(shape.model.num_layers - 1, 1))
    dense, own = frozenset({Moment.DENSE_END}), _own_input(shape)
    leading = min(second, max(shape.model.num_dense_layers, 1))
    return (second - own, FIRST_BLOCKS - dense), (leading - own, dense)


def _own_input(shape: RunShape) -> int:
    """1 where the block at work gives its input back once it is recomputed: narrow activations, of which its norm keeps
    a float32 copy."""
    return 1 if shape.dtypes.activation_bytes < 4 else 0


def _companions(what: str, per_block: int, blocks: int, moving: int) -> list[Entry]:
    """Extras and pinned choices travel with their block's boundary: the last block's stay, one more is in transit."""
    return [
        Entry("boundary", f"{what} of the last block", per_block, PER_BOUNDARY),
        Entry("boundary", f"{what} in transit", min(moving, blocks - 1) * per_block, IN_TRANSIT),
        Entry("boundary", what, (blocks - 1) * per_block, PER_BOUNDARY, "host"),
    ]


def attention_result_bytes(shape: RunShape) -> int:
    """Output and float32 log-sum-exp of one block's attention: N*heads*(head_dim*b + 4)."""
    model = shape.model
    width = model.value_head_dim or model.head_dim
    return shape.tokens_per_rank * model.num_heads * (width * shape.dtypes.activation_bytes + 4)


def key_value_bytes(shape: RunShape) -> int:
    model = shape.model
    return 2 * shape.tokens_per_rank * model.num_kv_heads * model.head_dim * shape.dtypes.activation_bytes


def extra_bytes(shape: RunShape, policy: BoundaryPolicy) -> int:
    """Bytes of the extras of one block. Names that say attention count its output, `kv` counts keys and values, any
    other name one [N,H]; `auto` counts the attention output, its usual choice."""
    names = ("attention",) if policy.offload_extra == "auto" else policy.offload_extra
    sizes = {"attention": attention_result_bytes(shape), "kv": key_value_bytes(shape), "": boundary_bytes(shape)}
    return sum(sizes[_kind(name)] for name in names[: policy.extra_limit])


def pinned_bytes(shape: RunShape, policy: BoundaryPolicy) -> int:
    """The router's choice of one block: N*k int32."""
    return shape.tokens_per_rank * shape.model.experts_per_token * INDEX_BYTES if policy.pin_topk else 0


def host_blocks(shape: RunShape, policy: BoundaryPolicy) -> tuple[tuple[int, int], ...]:
    """(bytes, count) of the host blocks to reserve before the first step."""
    stored = stored_on_host(policy.choices(shape.model.num_layers))
    return ((boundary_bytes(shape), stored),) if stored else ()


def block_seconds(shape: RunShape, machine: MachineShape) -> float:
    """A lower bound of one block's recompute: its matmuls' 2 operations a weight and token, and causal attention."""
    model, tokens = shape.model, shape.tokens_per_rank
    heads = model.num_heads * model.head_dim
    attention = model.hidden * (2 * heads + 2 * model.num_kv_heads * model.head_dim)
    routed = 3 * model.hidden * (
        model.experts_per_token * model.expert_width + model.num_shared_experts * model.shared_expert_width
    )  # fmt: skip
    mlp = routed if model.num_experts else 3 * model.hidden * model.dense_width
    scores = 2 * tokens * heads * shape.batch.seq_len  # QK^T and PV, half of them masked
    return (2 * tokens * (attention + mlp) + scores) / machine.matmul_rate


def recompute_seconds(shape: RunShape, policy: BoundaryPolicy) -> float:
    """What recomputed boundaries add to one micro-batch: the forwards from the nearest stored boundary on."""
    forwards = stored = 0
    for index, choice in enumerate(policy.choices(shape.model.num_layers)):
        if choice == "recompute":
            forwards += index - stored
        else:
            stored = index
    return forwards * block_seconds(shape, shape.machine)


def boundaries(shape: RunShape, machine: MachineShape) -> Boundaries:
    """The run's boundaries as `schedule.plan` takes them; a backward is the recompute and twice its work."""
    count, forward = shape.model.num_layers, round(block_seconds(shape, machine) * 1e9)
    return Boundaries(
        (boundary_bytes(shape),) * count, (forward,) * count, (3 * forward,) * count,
        round(machine.to_host_rate), round(machine.to_device_rate),
    )  # fmt: skip


def fastest_policy(
    shape: RunShape, machine: MachineShape, *, device_bytes: int, host_bytes: int
) -> tuple[BoundaryPolicy, BoundaryPlan] | NoPlan:
    """The policy that adds the least time while the boundaries hold at most so many bytes on device and host."""
    found = plan(boundaries(shape, machine), device_bytes, host_bytes)
    if isinstance(found, NoPlan):
        return found
    return BoundaryPolicy(per_boundary=found.choices, host_bytes=host_bytes), found


def pays(shape: RunShape, machine: MachineShape) -> Verdict:
    """Whether moving the boundaries pays: a link at least as fast as the prior, and a reload that ends before the
    recompute which hides it."""
    size, num_layers = boundary_bytes(shape), shape.model.num_layers
    if num_layers < MIN_LAYERS:
        return Verdict(False, f"{num_layers} blocks: two boundaries stay on the device anyway")
    rate = min(machine.to_host_rate, machine.to_device_rate)
    if rate < PRIOR_RATE:
        return Verdict(False, f"the link moves {rate / 1e9:.1f} GB/s, below the {PRIOR_RATE / 1e9:.0f} GB/s it takes")
    reload_ms, recompute_ms = size / machine.to_device_rate * 1e3, block_seconds(shape, machine) * 1e3
    saved = format_bytes((num_layers - 2) * size)
    if reload_ms >= recompute_ms:
        return Verdict(
            False, f"a reload takes {reload_ms:.2f} ms and the recompute that hides it {recompute_ms:.2f} ms"
        )
    return Verdict(
        True, f"frees {saved} of {format_bytes(num_layers * size)}; a reload of {reload_ms:.2f} ms hides behind a "
        f"recompute of {recompute_ms:.2f} ms",
    )  # fmt: skip


def _kind(name: str) -> str:
    lowered = name.lower()
    if any(word in lowered for word in ("attention", "attn", "flash")):
        return "attention"
    return "kv" if lowered == "kv" else ""


def _pairs(given: Any) -> tuple[tuple[int, Any], ...]:
    """(boundary, choice) in order, from pairs, choices or a mapping; TOML's keys are text. Raises: ConfigError."""
    allowed = "choices, or pairs or a table of boundary and choice"
    if isinstance(given, str):
        _refuse("per_boundary", given, allowed, 'write per_boundary = { 3 = "keep" }, or use default')
    if not isinstance(given, Mapping) and all(isinstance(item, str) for item in given):
        return tuple(enumerate(given))
    try:
        pairs = [(int(index), choice) for index, choice in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        _refuse("per_boundary", given, allowed, 'write per_boundary = { 3 = "keep" }')
    named = [index for index, _ in pairs]
    if min(named, default=0) < 0 or len(set(named)) < len(named):
        _refuse("per_boundary", given, "each boundary once, counted from 0", "name every boundary once")
    return tuple(sorted(pairs, key=lambda pair: pair[0]))


def _refuse(what: str, got: object, allowed: str, remedy: str) -> NoReturn:
    raise ConfigError(what, got=repr(got), allowed=allowed, remedy=remedy)


def fitted(shape: RunShape, machine: MachineShape, device_room: int, host_room: int) -> BoundaryPolicy | None:
    """The fastest policy within so many bytes of one rank's device and host, from the machine's rates.

    None: none fits, or every boundary may stay where it is, which is no schedule.
    """
    pinned, blocks = pinned_bytes(shape, BoundaryPolicy()), shape.model.num_moe_layers
    device_room, host_room = device_room - 2 * pinned, host_room - max(0, blocks - 1) * pinned
    found = plan_equal(boundaries(shape, machine), device_room, host_room)
    if isinstance(found, NoPlan) or set(found.choices) == {"keep"}:
        return None
    default = max(CHOICES, key=found.choices.count)
    named = {index: choice for index, choice in enumerate(found.choices) if choice != default}
    return BoundaryPolicy(default=default, per_boundary=named)
