"""What the optimizer costs: the policy, its ledger entries and whether moving its state to the host pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from steppe.core import parameters
from steppe.core.errors import ConfigError
from steppe.core.ledger import ALWAYS, BLOCK_BACKWARD, EARLY_GRADIENTS, GRADIENT_SHARDS, Entry, Moment
from steppe.core.policy import OFF, Off, Verdict
from steppe.core.shapes import MachineShape, RunShape
from steppe.core.units import MiB, format_bytes
from steppe.flatteners.optimizer.schedule import STATE_BYTES, device_slots, ring_slot_bytes

DEFAULT_BUCKET_BYTES: Final = 128 * MiB
THRESHOLD: Final = 0.5  # of the device's memory: below it the state stays there unless forced
AFTER_LOAD: Final = ALWAYS - {Moment.LOAD}  # torch makes its state in the first step
SUM_BYTES: Final = 4  # a gradient's float32 sum on the host, under overlap_backward


@dataclass(frozen=True)
class OptimizerPolicy:
    """How the optimizer's state lives on the host and is updated.

    A slot holds `bucket_bytes`: gradients or parameters in their own dtype on their way (`update="host"`), or float32
    state on the device (`update="device"`); `slots` of them are in flight. `overlap_backward` sends gradients off as
    they are accumulated. `max_norm` clips by the global norm (infinity: only watch it); a non-finite norm skips the
    step. `threads` and `streams` size the host arithmetic; `numa="auto"` pins it.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    slots: int = 2
    update: Literal["host", "device"] = "host"
    overlap_backward: bool = False
    max_norm: float | None = None
    threads: int | None = None
    streams: int | Literal["auto"] = "auto"
    numa: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        _require(self.bucket_bytes >= 4096, "bucket_bytes", self.bucket_bytes, "4096 or more", "64..256 MiB is usual")
        _require(self.slots >= 1, "slots", self.slots, "1 or more", "2 let copies and updates overlap")
        _require(self.update in ("host", "device"), "update", repr(self.update), "'host' or 'device'", "choose one")
        _require(self.max_norm is None or self.max_norm > 0, "max_norm", self.max_norm, "above 0, or None",
                 "None switches clipping off")  # fmt: skip
        _require(self.threads is None or self.threads >= 1, "threads", self.threads, "1 or more, or None",
                 "None takes this rank's share of the CPUs")  # fmt: skip
        _require(self.streams == "auto" or (isinstance(self.streams, int) and self.streams >= 1), "streams",
                 repr(self.streams), "1 or more, or 'auto'", "'auto' takes one a NUMA node")  # fmt: skip
        _require(self.numa in ("auto", "off"), "numa", repr(self.numa), "'auto' or 'off'", "'off' leaves threads free")


def _require(holds: bool, what: str, got: object, allowed: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(what, got=got, allowed=allowed, remedy=remedy)


def num_elements(shape: RunShape) -> int:
    """Parameters whose state one rank keeps: its shard of everything, or whole replicas without ZeRO."""
    model, mesh = shape.model, shape.mesh
    if mesh.zero >= 1:
        return parameters.parameters_per_rank(model, mesh.world)
    dense = parameters.dense_parameters_total(model) // mesh.tensor
    return -(-(dense + parameters.expert_parameters_total(model) // mesh.expert) // mesh.pipeline)


def entries(shape: RunShape, policy: OptimizerPolicy | Off = OFF) -> tuple[Entry, ...]:
    """The optimizer's entries of one rank's ledger.

    Peak: off both moments, a master where weights are narrower, and foreach's transient of one state tensor each; on
    nothing on the device (`update="device"`: slots * bucket_bytes in the update) and 12 bytes a parameter on the host.
    """
    count = num_elements(shape)
    return tuple(_plain(shape, count) if isinstance(policy, Off) else (*_host(shape, policy, count),
                                                                       *_device(shape, policy, count)))  # fmt: skip


def replaces(policy: OptimizerPolicy) -> tuple[str, ...]:
    """With overlap_backward gradients don't wait on the device."""
    return (GRADIENT_SHARDS, EARLY_GRADIENTS) if policy.overlap_backward else ()


def _plain(shape: RunShape, count: int) -> list[Entry]:
    state = count * shape.dtypes.state_bytes
    rows = [
        Entry("optimizer", "exp_avg", state, AFTER_LOAD),
        Entry("optimizer", "exp_avg_sq", state, AFTER_LOAD),
        Entry("optimizer", "foreach transient", state, frozenset({Moment.UPDATE})),
    ]
    if shape.dtypes.weight_bytes < shape.dtypes.state_bytes:
        rows.append(Entry("optimizer", "master weights", state, AFTER_LOAD))
    return rows


def _host(shape: RunShape, policy: OptimizerPolicy, count: int) -> list[Entry]:
    rows = [Entry("optimizer", "master, exp_avg and exp_avg_sq", STATE_BYTES * count, AFTER_LOAD, "host")]
    if policy.update == "host":
        wire = max(shape.dtypes.weight_bytes, shape.dtypes.gradient_bytes)
        slot = ring_slot_bytes(count * wire, policy.bucket_bytes)
        streams = policy.streams if isinstance(policy.streams, int) else 1
        rows.append(Entry("optimizer", "rings", 2 * policy.slots * streams * slot, AFTER_LOAD, "host"))
    if policy.overlap_backward:
        rows.append(Entry("optimizer", "gradient sums", SUM_BYTES * count, AFTER_LOAD, "host"))
    return rows


def _device(shape: RunShape, policy: OptimizerPolicy, count: int) -> list[Entry]:
    rows = []
    if policy.update == "device":
        regions = 4 if policy.overlap_backward else 3
        slots = device_slots(policy.bucket_bytes, policy.slots, regions, count)
        rows.append(Entry("optimizer", "state slots", slots.num_bytes, frozenset({Moment.UPDATE})))
    if policy.overlap_backward:
        window = min(policy.slots * policy.bucket_bytes, count * shape.dtypes.gradient_bytes)
        rows.append(Entry("gradients", "gradients on their way to the host", window, BLOCK_BACKWARD))
    return rows


def stage_seconds(shape: RunShape, machine: MachineShape, policy: OptimizerPolicy | None = None) -> dict[str, float]:
    """Modelled seconds of each stage of one rank's step, were it alone; the longest is the step's."""
    count, ranks = num_elements(shape), min(shape.mesh.ranks_per_node, shape.mesh.world)
    if policy is not None and policy.update == "device":
        return {
            "fetch": STATE_BYTES * count / machine.to_device_rate,
            "store": STATE_BYTES * count / machine.to_host_rate,
        }
    return {
        "to_host": count * shape.dtypes.gradient_bytes / machine.to_host_rate,
        "update": count * ranks / machine.adamw_rate,
        "to_device": count * shape.dtypes.weight_bytes / machine.to_device_rate,
    }


def pays(shape: RunShape, machine: MachineShape) -> Verdict:
    """Whether state belongs on the host: it fills half the device's memory or more, and the host can hold it."""
    held = sum(e.num_bytes for e in entries(shape) if e.tensor != "foreach transient")
    stages = stage_seconds(shape, machine)
    slowest = max(stages, key=lambda name: stages[name])
    share = held / machine.device_memory_bytes
    told = f"state of {format_bytes(held)} is {share:.0%} of the device's {format_bytes(machine.device_memory_bytes)}"
    ranks = min(shape.mesh.ranks_per_node, shape.mesh.world)
    needed = ranks * sum(e.num_bytes for e in entries(shape, OptimizerPolicy()) if e.place == "host")
    if share < THRESHOLD:
        return Verdict(False, f"{told}, below {THRESHOLD:.0%}: it stays there")
    if needed > machine.host_memory_bytes:
        return Verdict(False, f"{told}, but a node's {ranks} ranks would need {format_bytes(needed)} of host memory; "
                              f"there are {format_bytes(machine.host_memory_bytes)}")  # fmt: skip
    return Verdict(True, f"{told}, at or above {THRESHOLD:.0%}; a step takes about {stages[slowest]:.2f} s, set by "
                         f"{slowest} ({', '.join(f'{name} {s:.2f} s' for name, s in stages.items())})")  # fmt: skip


def choices() -> tuple[OptimizerPolicy, ...]:
    """The policies that a search tries, the plainest first: gradients that leave in the backward cost host memory."""
    return (OptimizerPolicy(), OptimizerPolicy(overlap_backward=True))
