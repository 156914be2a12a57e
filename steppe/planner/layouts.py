"""Which groups a job can have: every D, E_p and P that divide what they must, or the ones that were asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from steppe.core.errors import ConfigError
from steppe.core.parameters import total_parameters
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import format_bytes

LARGEST_RING = 64  # ranks of the vocabulary group: beyond it the head's shard is no longer what counts


@dataclass(frozen=True)
class Job:
    """What is asked: a model, a length, W devices; the groups are open where they are None."""

    model: ModelShape
    batch: BatchShape
    world: int
    sequence: int | None = None
    expert: int | None = None
    vocab: int | None = None
    ranks_per_node: int = 8
    machine: MachineShape = field(default_factory=MachineShape)
    dtypes: Dtypes = field(default_factory=Dtypes)
    attention: str = "auto"
    forced: tuple[tuple[str, bool], ...] = ()  # flatteners that are on or off whatever pays
    zero: int = 3
    without: frozenset[str] = frozenset()  # tensors that the program at hand doesn't have ("foreach transient")

    def shape(self, sequence: int, expert: int, vocab: int) -> RunShape:
        mesh = MeshShape(
            self.world, sequence, expert, vocab, ranks_per_node=min(self.ranks_per_node, self.world), zero=self.zero
        )
        return RunShape(self.model, self.batch, mesh, self.machine, self.dtypes, self.attention)

    def with_seq_len(self, seq_len: int) -> Job:
        return replace(self, batch=replace(self.batch, seq_len=seq_len))

    def with_world(self, world: int) -> Job:
        return replace(self, world=world)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending; O(sqrt(number))."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def check(job: Job) -> None:
    """Refuse groups that can't be. Raises: ConfigError with what is allowed."""
    if job.world < 1:
        raise ConfigError("ranks W", got=job.world, allowed="1 or more", remedy="give the number of devices")
    heads, experts = job.model.num_heads, job.model.num_experts
    _divides("E_p", job.expert, (("W", job.world), ("E", experts or 1)))
    _divides("D", job.sequence, (("W", job.world), ("heads", heads), ("S", job.batch.seq_len)))
    _divides("P", job.vocab, (("W", job.world),))


def _divides(name: str, size: int | None, of: tuple[tuple[str, int], ...]) -> None:
    if size is None:
        return
    allowed = [n for n in divisors(of[0][1]) if all(number % n == 0 for _, number in of)]
    if size not in allowed:
        what = " and ".join(f"{letter} {number:,}" for letter, number in of)
        raise ConfigError(
            f"group size {name}", got=size, allowed=f"a divisor of {what}: {', '.join(map(str, allowed))}",
            remedy=f"choose {name} among these, or leave it out",
        )  # fmt: skip


def layouts(job: Job, *, longest_first: bool = False) -> Iterator[RunShape]:
    """Every run shape that `job` leaves open; with `longest_first` only the largest D, which holds most tokens."""
    check(job)
    sequences = _choices(job.sequence, job.world, job.model.num_heads, job.batch.seq_len)
    if longest_first:
        sequences = sequences[-1:]
    experts = _choices(job.expert, job.world, job.model.num_experts or 1)
    for sequence in sequences:
        for expert in experts:
            for vocab in _vocab_groups(job):
                yield job.shape(sequence, expert, vocab)


def _choices(asked: int | None, *numbers: int) -> tuple[int, ...]:
    if asked is not None:
        return (asked,)
    return tuple(n for n in divisors(numbers[0]) if all(number % n == 0 for number in numbers))


def _vocab_groups(job: Job) -> tuple[int, ...]:
    """One node, or the most ranks up to 64: a smaller group keeps more of the head on each rank."""
    if job.vocab is not None:
        return (job.vocab,)
    all_of_them = divisors(job.world)
    return tuple(sorted({max(n for n in all_of_them if n <= most) for most in (job.ranks_per_node, LARGEST_RING)}))


def check_weights_fit(job: Job, usable_bytes: int, smallest: Callable[[], str]) -> None:
    """Refuse a job whose weights alone don't fit; `smallest` says which W the whole run takes.

    Raises: ConfigError with bytes missing, the smallest W that holds the weights and the one that works.
    """
    total = total_parameters(job.model) * job.dtypes.weight_bytes
    shard = -(-total // job.world) if job.zero >= 3 else total // (job.expert or 1)
    if shard > usable_bytes:
        remedy = f"the smallest W that holds the weights is {-(-total // max(usable_bytes, 1)):,}"
        if job.zero < 3:
            remedy = f"shard the weights (ZeRO-3, FSDP2); then {remedy}"
        raise ConfigError(
            "weights", got=f"{format_bytes(shard)} a rank, {format_bytes(shard - usable_bytes)} too many",
            allowed=f"{format_bytes(usable_bytes)} of device memory", remedy=f"{remedy}; {smallest()}",
        )  # fmt: skip
