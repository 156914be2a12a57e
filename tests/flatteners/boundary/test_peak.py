"""The device holds two boundaries whatever L is; the host holds the exact sum of the others."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from steppe import SCO, BoundaryPolicy
from steppe.flatteners.boundary import budget
from steppe.flatteners.boundary.reference import checkpointed
from steppe.runtime.allocator import allocator_peak
from tests.flatteners.boundary.programs import Block
from tests.support.peaks import assert_peak, measured_peak

N, H, L = 1024, 128, 16
SIZE = N * H * 4
CRUMBS = 8 * 2**10 * L  # the CPU generator's state, 5 KB a block, and what is smaller: probes, loss


class Program:
    """L blocks whose parameters and their gradients exist beforehand; nobody but autograd holds a boundary."""

    def __init__(self, num_layers: int) -> None:
        torch.manual_seed(0)
        self.blocks = [Block(H) for _ in range(num_layers)]
        # The first boundary is computed: a leaf would be held by its own gradient's node all the time.
        self.row = torch.nn.Parameter(torch.ones(1, H))
        for parameter in (self.row, *(p for block in self.blocks for p in block.parameters())):
            parameter.grad = torch.zeros_like(parameter)

    def start(self) -> torch.Tensor:
        return self.row.expand(N, H) * 1.0

    def step(self, checkpoint, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            hidden = self.start()
            for block in self.blocks:
                hidden = checkpoint(block, hidden)
            loss = hidden.sum()
            del hidden
            loss.backward()


def peak_with_sco(num_layers: int, policy: BoundaryPolicy, micro_batches: int = 1) -> int:
    program = Program(num_layers)
    sco = SCO(policy)
    sco.reserve([(SIZE, num_layers - 1)])
    program.step(sco.checkpoint)
    sco.drain()
    peak = measured_peak(lambda: program.step(sco.checkpoint, micro_batches))
    sco.close()
    return peak


def working_set() -> int:
    """What one block holds beside its boundary: its output, the recompute, gradients in flight."""
    program = Program(1)
    program.step(checkpointed)
    return measured_peak(lambda: program.step(checkpointed)) - SIZE


def test_the_device_holds_two_boundaries_of_sixteen():
    plain = Program(L)
    plain.step(checkpointed)
    beside = working_set()
    why = "one block's output, recompute and gradients; random states and probes"
    assert_peak(measured_peak(lambda: plain.step(checkpointed)) - beside, L * SIZE - CRUMBS, 2 * CRUMBS, why)
    assert_peak(peak_with_sco(L, BoundaryPolicy()) - beside, 2 * SIZE - CRUMBS, 2 * CRUMBS, why)


@pytest.mark.parametrize("kept", [1, 5])
def test_kept_boundaries_are_the_only_ones_more(kept):
    beside = working_set()
    policy = BoundaryPolicy(per_boundary=dict.fromkeys(range(3, 3 + kept), "keep"))
    program = Program(L)
    sco = SCO(policy)

    def step():
        program_step_numbered(program, sco)

    step()
    sco.drain()
    formula = (2 + kept) * SIZE
    assert_peak(measured_peak(step) - beside, formula - CRUMBS, 2 * CRUMBS, "one block's working set; crumbs")
    assert sco.stats().bytes_reserved == (L - 1 - kept) * SIZE
    sco.close()


def test_recomputed_boundaries_take_no_host_memory():
    policy = BoundaryPolicy(per_boundary=("offload", "recompute") * (L // 2))
    program = Program(L)
    sco = SCO(policy)
    program_step_numbered(program, sco)
    sco.drain()
    assert sco.stats().bytes_reserved == L // 2 * SIZE
    peak = measured_peak(lambda: program_step_numbered(program, sco)) - working_set()
    # A boundary that is made again stands beside the one it is made from and that block's own intermediates [N,2H].
    assert_peak(peak, 2 * SIZE - CRUMBS, 6 * SIZE + 2 * CRUMBS, "the previous block's forward runs once more")
    sco.close()


def program_step_numbered(program: Program, sco: SCO) -> None:
    hidden = program.start()
    for index, block in enumerate(program.blocks):
        hidden = sco.at(index)(block, hidden)
    loss = hidden.sum()
    del hidden
    loss.backward()


def test_the_peak_does_not_depend_on_the_number_of_blocks_or_micro_batches():
    peaks = [peak_with_sco(4, BoundaryPolicy(), micro) for micro in (1, 4, 16)] + [peak_with_sco(8, BoundaryPolicy())]
    assert max(peaks) - min(peaks) <= CRUMBS, peaks


def resident_bytes() -> int:
    """What the system says this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_host_bytes_are_the_exact_sum():
    sco = SCO()
    big = 40 * 2**20  # mapped for itself, so that the system's count shows this memory and no other
    resident = resident_bytes()
    sco.reserve([(big, 3)])
    assert_peak(resident_bytes() - resident, 3 * big, 3 * big // 50, "under 2% for all the rest")
    assert sco.stats().bytes_reserved == 3 * big
    sco.close()


def test_a_step_lends_exactly_the_boundaries_that_leave():
    program, sco = Program(L), SCO()
    program.step(sco.checkpoint)
    sco.drain()
    stats = sco.stats()
    assert stats.bytes_reserved == stats.high_water_bytes == stats.bytes_offloaded == (L - 1) * SIZE
    assert stats.bytes_lent == 0
    sco.close()


def test_the_loss_sees_one_boundary_when_the_model_is_joined():
    program = Program(L)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(program.blocks)

        def forward(self):
            hidden = program.start()
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    model = Model()
    sco = SCO().apply(model)
    sco.reserve([(SIZE, L - 1)])
    model().sum().backward()
    held: list[torch.Tensor] = []
    after = allocator_peak(lambda: held.append(model()))
    # What is left behind at the end of the forward, by what the drop of the graph gives back.
    left = measured_peak(lambda: held.clear() or held.append(torch.ones(1)))
    assert left <= CRUMBS
    assert after.peak_bytes - after.base_bytes <= 2 * SIZE + working_set() + CRUMBS
    sco.close()


def test_the_budget_says_what_was_measured():
    from steppe.core.ledger import STEP, Ledger, Moment
    from steppe.core.shapes import BatchShape, Dtypes, ModelShape, RunShape

    model = ModelShape(
        "toy", hidden=H, num_layers=L, vocab=1, num_heads=1, num_kv_heads=1, head_dim=H, dense_width=2 * H
    )
    shape = RunShape(model, BatchShape(N), dtypes=Dtypes("float32", "float32", "float32", "float32"))
    # In the forward the ledger counts what a model's own forward holds as well; a bare stack of blocks peaks behind it.
    predicted = Ledger.from_entries(budget.entries(shape, BoundaryPolicy()), moments=STEP - {Moment.FORWARD})
    assert predicted.peaks["boundary"] == 2 * SIZE
    measured = peak_with_sco(L, BoundaryPolicy()) - working_set()
    assert_peak(measured, predicted.peaks["boundary"] - CRUMBS, 2 * CRUMBS, "random states and probes")
    assert predicted.host_bytes == (L - 1) * SIZE
    assert budget.host_blocks(shape, BoundaryPolicy()) == ((SIZE, L - 1),)
