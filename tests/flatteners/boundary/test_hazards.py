"""Orders, failures and aliases that broke comparable software; each would give a wrong result or hold memory."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import pytest
import torch

from steppe import SCO, BoundaryPolicy
from steppe.core.errors import HostMemoryError, LaneError
from steppe.flatteners.boundary.attach import IdleOffloadError, diagnose
from steppe.flatteners.boundary.crossing import Crossing
from steppe.flatteners.boundary.reference import checkpointed
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane
from tests.flatteners.boundary.programs import (
    ALL,
    CPU,
    Language,
    Stack,
    assert_same,
    gradients,
    inputs_of,
    plainly,
    rough_sco,
    seeded,
    with_sco,
)


def both(make, use):
    """`use(model)` under plain checkpointing and under SCO with delays; the SCO stays open for questions."""
    model = seeded(make)
    undo = plainly(model)
    plain = use(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    return use(model), plain, sco


def summed(model, backwards):
    """Two forwards, then the backwards in the order given."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    losses = [model(inputs_of(model, seed)) for seed in (1, 2)]
    for which in backwards:
        losses[which].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("make", [lambda: Stack(dropout=0.1), Language], ids=["stack", "qwen3_moe"])
def test_two_forwards_before_two_backwards_in_both_orders(make, order):
    ours, plain, sco = both(make, lambda model: summed(model, order))
    assert_same(ours, plain)
    sco.drain()
    assert sco.stats().bytes_lent == 0


def test_a_retained_graph_can_be_used_twice():
    def use(model):
        model.zero_grad(set_to_none=True)
        loss = model(inputs_of(model))
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    ours, plain, sco = both(Stack, use)
    assert_same(ours, plain)
    sco.drain()
    assert sco.stats().bytes_lent == 0


@pytest.mark.parametrize("failing", [0, 2, 4])
@pytest.mark.parametrize("make", [Stack, lambda: Language(num_hidden_layers=5)], ids=["stack", "qwen3_moe"])
def test_a_backward_that_fails_in_the_middle_can_be_tried_again(make, failing):
    def use(model):
        model.zero_grad(set_to_none=True)
        layers = model.model.model.layers if isinstance(model, Language) else model.layers
        attempts = []

        def fail(grad):
            attempts.append(grad)
            if len(attempts) == 1:
                raise ZeroDivisionError("in the middle of a backward")

        hook = layers[failing].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        loss = model(inputs_of(model))
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        loss.backward()
        hook.remove()
        assert len(attempts) == 2
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours, plain, sco = both(make, use)
    assert_same(ours, plain)
    sco.drain()
    assert sco.stats().bytes_lent == 0


def test_a_block_that_fails_in_forward_leaves_nothing_behind():
    model = seeded(Stack)
    sco = rough_sco()
    with_sco(model, sco)
    expected = gradients(model)
    hook = model.layers[3].drop.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs_of(model))
    hook.remove()
    sco.drain()
    assert sco.stats().bytes_lent == 0
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("policy", [ALL, BoundaryPolicy(per_boundary={2: "recompute"}, min_bytes=0)])
def test_a_hundred_forwards_without_a_backward_lend_nothing(policy):
    model = seeded(Stack)
    sco = SCO(policy, arena=Arena("boundary", poison=True))
    with_sco(model, sco)
    gradients(model)
    sco.drain()
    reserved = sco.stats().bytes_reserved
    gc.collect()
    before = sum(type(found) is Crossing for found in gc.get_objects())  # of other tests' models
    gc.disable()  # handles die by reference counts, not by the cycle collector
    try:
        for _ in range(100):
            model(inputs_of(model))
        sco.drain()
        stats = sco.stats()
        crossings = sum(type(found) is Crossing for found in gc.get_objects())
    finally:
        gc.enable()
    assert crossings - before <= 2  # links hold nobody
    assert stats.bytes_lent == 0
    # Blocks of a forward that just died may still be in a copy when the next one asks: a few more, not a hundred.
    assert stats.bytes_reserved <= 3 * reserved
    sco.close()


def test_part_of_a_backward_is_enough():
    def use(model):
        hidden = inputs_of(model)
        outs = []
        for layer in model.layers:
            hidden = layer(hidden)
            outs.append(hidden)
        first = torch.autograd.grad(hidden.sum(), outs[2], retain_graph=True)[0]
        second = torch.autograd.grad(outs[3].sum(), model.layers[0].up.weight)[0]
        return {"late": first, "early": second, "out": hidden.detach()}

    ours, plain, sco = both(Stack, use)
    assert_same(ours, plain)
    sco.drain()
    assert sco.stats().bytes_lent == 0


@pytest.mark.parametrize("block", [0, 2, 4])
def test_changing_a_boundary_in_place_raises_what_autograd_raises(block):
    def use(checkpoint):
        model = seeded(Stack)
        hidden = inputs_of(model) * 1.0
        seen = []
        for layer in model.layers:
            seen.append(hidden)
            hidden = checkpoint(layer, hidden)
        with torch.no_grad():
            seen[block].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            hidden.sum().backward()
        return str(error.value)

    sco = rough_sco()
    ours, plain = use(sco.checkpoint), use(checkpointed)
    assert "is at version 1; expected version 0 instead" in plain
    assert "is at version 1; expected version 0 instead" in ours
    assert "[24, 16]" in ours


def test_parameters_buffers_and_their_views_are_left_alone():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(16, 16))
            self.register_buffer("table", torch.randn(16, 16))

        def forward(self, hidden, *others):
            return torch.stack([hidden @ other for other in others]).sum(0)

    holder = Holder()
    sco = SCO(ALL)
    others = (holder.weight, holder.weight.view(16, 16), holder.weight.detach(), holder.table, holder.table[:, :16],
              torch.ones(1, 1).expand(16, 16))  # fmt: skip
    hidden = torch.randn(4, 16, requires_grad=True) * 1.0
    for _ in range(3):
        hidden = sco.checkpoint(holder, hidden, *others)
    hidden.sum().backward()
    stats = sco.stats()
    assert stats.left_alone == {"parameter": 2 * 3, "parameter or buffer": 3 * 3, "overlapping": 3}
    assert stats.bytes_offloaded == 2 * 4 * 16 * 4
    sco.close()


def test_tiny_tensors_are_left_alone():
    sco = SCO(BoundaryPolicy(min_bytes=1000))
    hidden = torch.randn(32, 16, requires_grad=True) * 1.0
    scale = torch.randn(16)
    for _ in range(3):
        hidden = sco.checkpoint(lambda h, s: h * s, hidden, scale)
    assert sco.stats().left_alone == {"tiny": 3}
    assert sco.stats().bytes_offloaded == 2 * 32 * 16 * 4
    sco.close()


def test_one_storage_met_twice_is_copied_once_whatever_its_views():
    def use(checkpoint):
        start = torch.randn(24, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        hidden = start * 1.0
        residual = hidden
        for _ in range(4):
            whole, half, turned = hidden, hidden[:12], hidden.t()
            hidden = checkpoint(lambda a, b, c, d, r: a.sin() + b.mean() + c.t().cos() * d + 0.5 * r,
                                whole, half, turned, hidden, residual)  # fmt: skip
            residual = whole
        return torch.autograd.grad(hidden.sum(), start)[0]

    sco = rough_sco()
    assert torch.equal(use(sco.checkpoint), use(checkpointed))
    # Four boundaries; the last one and the one that it still reads as its residual never leave.
    assert sco.stats().bytes_offloaded == 2 * 24 * 16 * 4
    sco.close()


@pytest.mark.parametrize("num_tables", [1, 2])
def test_tables_that_several_blocks_read_stay_where_they_are(num_tables):
    """One table for all blocks, or two in turn (masks of full and sliding attention)."""
    tables = [torch.randn(24, 16) for _ in range(num_tables)]

    def use(checkpoint):
        start = torch.ones(24, 16, requires_grad=True)
        hidden = start * 1.0
        for block in range(6):
            hidden = checkpoint(lambda h, t: h.sin() * t, hidden, tables[block % num_tables])
        return torch.autograd.grad(hidden.sum(), start)[0]

    sco = rough_sco()
    assert torch.equal(use(sco.checkpoint), use(checkpointed))
    stats = sco.stats()
    # In turn, each table leaves before it is met again; none is ever fetched.
    assert stats.bytes_offloaded == (5 + (num_tables if num_tables > 1 else 0)) * 24 * 16 * 4
    assert stats.bytes_reloaded == 4 * 24 * 16 * 4
    sco.close()


@pytest.mark.parametrize(
    "layout",
    [lambda h: h.t().contiguous().t(), lambda h: torch.cat([h, h], 1)[:, :16], lambda h: torch.cat([h, h])[24:]],
    ids=["transposed", "with gaps", "with an offset"],
)
def test_strides_come_back_as_they_were(layout):
    seen = []

    def step(hidden):
        seen.append((hidden.stride(), hidden.detach().clone()))
        return hidden.sin()

    sco = rough_sco()
    start = torch.randn(24, 16, requires_grad=True)
    hidden = layout(start * 1.0)
    for _ in range(3):
        hidden = layout(sco.checkpoint(step, hidden))
    hidden.sum().backward()
    assert len(seen) == 6
    for (stride, value), (again, recomputed) in zip(seen[:3], reversed(seen[3:]), strict=True):
        assert stride == again
        assert torch.equal(value, recomputed)
    sco.close()


def test_a_recycled_address_is_not_taken_for_the_same_tensor():
    addresses = []

    def use(checkpoint):
        hidden = torch.ones(64, 64, requires_grad=True)
        out = hidden * 1.0
        for place in range(60):
            # An own input per block that nobody else keeps: once it has left, its address can be given out again.
            fresh = torch.full((64, 64), 0.9 + 0.001 * place)
            addresses.append(fresh.untyped_storage()._cdata)
            out = checkpoint(lambda h, f: (h * f).sin(), out, fresh)
            del fresh
        return torch.autograd.grad(out.sum(), hidden)[0]

    sco = SCO(ALL, arena=Arena("boundary", poison=True))
    assert torch.equal(use(sco.checkpoint), use(checkpointed))
    assert sco.stats().bytes_offloaded == 59 * 2 * 64 * 64 * 4
    assert len(set(addresses[:60])) == 60  # none while a handle of the former tensor lives
    sco.close()


def test_storages_are_never_resized():
    model = seeded(Stack)
    sco = rough_sco()
    seen = []
    with_sco(model, sco)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(inputs_of(model)).backward()
    assert [t.untyped_storage().size() for t in seen] == [24 * 16 * 4] * 5
    assert all(torch.isfinite(t).all() for t in seen)
    sco.close()


def test_reloads_are_bounded_by_the_progress_of_the_backward():
    """Each unpack may ask for its own boundary and the one before it, however far the host runs ahead."""
    model = seeded(lambda: Stack(num_layers=12))
    lanes = open_lane("out", CPU), open_lane("in", CPU, delay=lambda: 0.01)
    sco = SCO(ALL, lanes=lanes)
    with_sco(model, sco)
    gradients(model)
    stats = sco.stats()
    assert stats.reloads == 11  # all but the last, which never left
    assert 1 <= stats.most_outstanding_reloads <= 2
    sco.close()


class LateTicket:
    """A reload that is not there before somebody waits for it, and then takes a millisecond."""

    def __init__(self, ticket) -> None:
        self.ticket, self.waited = ticket, False

    def done(self) -> bool:
        return self.waited and self.ticket.done()

    def release(self) -> None:
        time.sleep(1e-3)
        self.waited = True
        self.ticket.release()


def test_reloads_that_come_late_are_counted_and_reported_as_a_slow_link():
    model = seeded(lambda: Stack(num_layers=4))
    lanes = open_lane("out", CPU), open_lane("in", CPU)
    copy = lanes[1].copy
    lanes[1].copy = lambda *args, **kwargs: LateTicket(copy(*args, **kwargs))
    sco = SCO(ALL, lanes=lanes)
    with_sco(model, sco)
    gradients(model)
    stats = sco.stats()
    assert stats.waits == stats.reloads == 3
    assert stats.wait_ms >= 3
    assert any("3 of 3 reloads came late" in line for line in diagnose(stats))
    assert diagnose(replace(stats, waits=0)) == ()
    sco.close()


def test_the_reload_of_the_previous_boundary_is_issued_before_the_recompute():
    order = []
    lanes = open_lane("out", CPU), open_lane("in", CPU)
    copy = lanes[1].copy
    lanes[1].copy = lambda *args, **kwargs: order.append("reload") or copy(*args, **kwargs)
    sco = SCO(ALL, lanes=lanes)
    model = seeded(lambda: Stack(num_layers=4))
    with_sco(model, sco)
    loss = model(inputs_of(model))
    for index, layer in enumerate(model.layers):
        layer.norm.register_forward_pre_hook(lambda module, args, index=index: order.append(index))
    loss.backward()
    assert order == ["reload", 3, "reload", 2, "reload", 1, 0]
    sco.close()


def test_a_failed_copy_is_raised_with_lane_stage_and_buffer():
    def broken():
        raise OSError("the link is gone")

    model = seeded(Stack)
    sco = SCO(ALL, lanes=(open_lane("out", CPU), open_lane("in", CPU, delay=broken)))
    with_sco(model, sco)
    loss = model(inputs_of(model))
    with pytest.raises(LaneError, match=r"'in', stage 'reload', buffer '384 float32'.*the link is gone"):
        loss.backward()


def test_a_host_cap_that_is_too_low_says_how_many_bytes_are_missing():
    model = seeded(Stack)
    sco = SCO(BoundaryPolicy(host_bytes=2 * 1536, min_bytes=0))
    with_sco(model, sco)
    with pytest.raises(HostMemoryError, match="1,536 bytes too many"):
        model(inputs_of(model))
    sco.close()


def test_a_run_that_asked_for_offload_and_moved_nothing_is_an_error():
    model = seeded(Stack)
    sco = SCO(BoundaryPolicy(min_bytes=10**6))
    with_sco(model, sco)
    with pytest.raises(IdleOffloadError, match="5 tiny"):
        model(inputs_of(model))
    assert any("nothing moved" in line for line in diagnose(sco.stats()))


def test_any_function_that_moved_nothing_is_an_error_at_the_next_forward():
    sco = SCO(BoundaryPolicy(min_bytes=10**6))

    def step():
        hidden = torch.randn(4, 4, requires_grad=True)
        for _ in range(3):
            hidden = sco.checkpoint(torch.sin, hidden)
        hidden.sum().backward()

    step()
    with pytest.raises(IdleOffloadError, match="none of 3 boundaries moved"):
        step()


def test_a_switch_that_somebody_flips_back_is_noticed():
    model = seeded(Language)
    sco = SCO(ALL)
    with_sco(model, sco)
    gradients(model)
    model.model._set_gradient_checkpointing(enable=False)
    with pytest.raises(IdleOffloadError, match="no block went through SCO"):
        model(inputs_of(model))
    sco.close()
