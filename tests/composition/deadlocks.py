"""Configurations drawn from a seed that shall finish: groups, subsets, skewed routes, uneven ranks, delays.

Ranks may have one token, no label, no arriving route. A whole model can't do without any token: transformers' masks and
attention refuse that, flattened or not; dispatch and vocabulary have tests of their own for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from steppe.compose import flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.runtime import collectives
from steppe.runtime.link import HostLink
from tests.composition.covering import SUBSETS, groups_of
from tests.composition.programs import policies
from tests.support.float64 import FAMILIES, toy_model

LENGTH = 8  # tokens of a sequence at most, over its ranks


@dataclass(frozen=True)
class Hunt:
    """One configuration; everything in it is a function of the seed."""

    seed: int
    names: tuple[str, ...]
    family: str
    mesh: MeshShape
    lengths: tuple[tuple[int, ...], ...]  # [step][group of a sequence] tokens a rank
    labelled: tuple[tuple[bool, ...], ...]  # [step][rank] whether its tokens have labels at all
    skew: str  # which tokens the ranks get: "even", "one" expert for all, "apart": each rank its own
    micro_batches: int
    delay_s: float
    overlap: bool
    frozen: bool

    def __str__(self) -> str:
        groups = f"W{self.mesh.world}D{self.mesh.sequence}E{self.mesh.expert}P{self.mesh.vocab}"
        return f"seed {self.seed}: {'+'.join(self.names) or 'none'} {self.family} {groups} {self.skew} {self.lengths}"


def hunt(seed: int) -> Hunt:
    """The configuration of a seed: four flatteners every second time, else any subset."""
    draw = random.Random(seed)
    world = draw.choice((2, 2, 4))
    mesh = MeshShape(world, *draw.choice(groups_of(world)))
    names = NAMES if seed % 2 else draw.choice(SUBSETS)
    steps, rows = 2, world // mesh.sequence
    lengths = [[draw.choice((1, LENGTH // mesh.sequence)) for _ in range(rows)] for _ in range(steps)]
    for step in lengths:
        step[draw.randrange(rows)] = LENGTH // mesh.sequence
    return Hunt(
        seed, names, draw.choice(FAMILIES), mesh, tuple(map(tuple, lengths)),
        tuple(tuple(draw.random() < 0.7 for _ in range(world)) for _ in range(steps)),
        draw.choice(("even", "one", "apart")), draw.choice((1, 2)), draw.choice((0.0, 0.0005, 0.002)),
        draw.random() < 0.5, draw.random() < 0.2,
    )  # fmt: skip


def run(rank: int, world_size: int, seed: int) -> float:
    """Two steps of the configuration on this rank; the last loss, summed over ranks."""
    spec, draw = hunt(seed), random.Random(seed * 31 + rank)
    link = HostLink(torch.device("cpu"), delay=lambda: draw.random() * spec.delay_s) if spec.delay_s else None
    model = toy_model(spec.family).train()
    if spec.frozen:
        model.get_input_embeddings().weight.requires_grad_(False)
    changes = {"optimizer": {"overlap_backward": spec.overlap, "max_norm": 1.0}}
    made = flatten_peaks(model, policies(spec.names, **changes), mesh=spec.mesh, link=link)
    optimizer = made.optimizer(0.01)
    total = torch.zeros(1)
    for step in range(len(spec.lengths)):
        for micro in range(spec.micro_batches):
            if "optimizer" in spec.names:
                optimizer.set_is_last_backward(micro == spec.micro_batches - 1)
            ids, labels = batch(spec, rank, step)
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=world_size * LENGTH, use_cache=False).loss
            loss.backward()
            total = loss.detach().reshape(1).float().clone()
        optimizer.step()
        optimizer.zero_grad()
    made.close()
    return float(collectives.all_reduce(total, collectives.world()))


def batch(spec: Hunt, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's tokens [1,n] and labels."""
    length = spec.lengths[step][rank // spec.mesh.sequence]
    made = torch.Generator().manual_seed(spec.seed + step)
    ids = torch.randint(256, (1, LENGTH), generator=made)[:, :length]
    if spec.skew != "even":  # equal tokens go to equal experts
        ids = torch.full_like(ids, 7 if spec.skew == "one" else 11 * rank)
    labels = ids if spec.labelled[step][rank] else torch.full_like(ids, -100)
    return ids, labels
