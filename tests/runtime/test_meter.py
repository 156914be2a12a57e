"""The Meter: every byte has one owner, nothing changes, nothing is left behind."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from steppe.core.ledger import Ledger
from steppe.runtime import scopes
from steppe.runtime.allocator import allocator_peak
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane
from steppe.runtime.meter import Meter, charge
from tests.support.peaks import assert_peak

FLOATS = 1 << 14
NUM_BYTES = 4 * FLOATS
N, H, V = 96, 32, 512


class Head(nn.Module):
    """Trunk, head and plain cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scopes.region("vocab", lambda hidden: F.cross_entropy(self.head(hidden), labels))(self.trunk(x))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, H, generator=generator), torch.randint(0, V, (N,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[torch.Tensor]:
    x, labels = batch()
    losses = []
    for _ in range(steps):
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model: nn.Module, foreach: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)


def assert_nothing_is_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert "resize_" not in torch.UntypedStorage.__dict__
    assert scopes._frames() == []
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_bytes_are_counted_once_however_many_views_there_are_and_end_with_the_last():
    with Meter() as meter:
        x = torch.empty(FLOATS)
        views = [x[1:], x.view(2, -1), x.detach()]
        assert meter.live_bytes() == NUM_BYTES
        del x, views[:2]
        assert meter.live_bytes() == NUM_BYTES
        views.clear()
        assert meter.live_bytes() == 0
    assert meter.ledger().device_peak_bytes == NUM_BYTES


def test_the_peak_is_the_highest_total_and_names_its_holders():
    with Meter() as meter:
        with scopes.label("attention"):
            kept = torch.empty(FLOATS)
            passing = torch.empty(4 * FLOATS)
        with scopes.label("router"):
            torch.empty(2 * FLOATS)
        del passing
    ledger = meter.ledger()
    assert ledger.device_peak_bytes == 7 * NUM_BYTES
    assert ledger.holders == {"attention": 5 * NUM_BYTES, "router": 2 * NUM_BYTES}
    assert ledger.peaks["attention"] == 5 * NUM_BYTES
    assert ledger.peaks["vocab"] == 0
    assert kept.numel() == FLOATS
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_storage_that_shrinks_and_grows_in_place_is_followed():
    with Meter() as meter:
        with scopes.label("gathered"):
            x = torch.empty(FLOATS)
        x.untyped_storage().resize_(0)
        assert meter.live_bytes() == 0
        x.untyped_storage().resize_(2 * NUM_BYTES)
        assert meter.live_bytes("gathered") == 2 * NUM_BYTES
    assert meter.ledger().peaks["gathered"] == 2 * NUM_BYTES


def test_a_death_on_another_thread_is_heard():
    with Meter() as meter:
        box = [torch.empty(FLOATS)]
        worker = threading.Thread(target=box.clear)
        worker.start()
        worker.join()
        torch.empty(2 * FLOATS)
    assert meter.ledger().device_peak_bytes == 2 * NUM_BYTES


def test_the_backward_of_plain_cross_entropy_is_charged_to_vocab():
    model = Head()
    with Meter(model) as meter:
        model(*batch()).backward()
    # log-softmax, the gradient into it and the gradient of the logits, alive together in the backward
    assert_peak(meter.ledger().peaks["vocab"], 3 * N * V * 4, 4096, "the mean's scalars and the count of labels")
    assert meter.ledger().moment == "loss"


@pytest.mark.parametrize("foreach", [False, True])
def test_weights_gradients_and_states_have_their_names(foreach):
    model = Head()
    optimizer = adamw(model, foreach)
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    with Meter(model, optimizer) as meter:
        meter.mark("first")
        x, labels = batch()
        model(x, labels).backward()
        assert meter.live_bytes("weights") == num_bytes
        assert meter.live_bytes("gradients") == num_bytes
        optimizer.step()
        steps = 4 * len(list(model.parameters()))
        assert meter.live_bytes("optimizer") == 2 * num_bytes + steps
        optimizer.zero_grad()
        assert meter.live_bytes("gradients") == 0
    ledger = meter.ledger()
    # beside the moments: foreach makes the denominator of all parameters at once, the loop two of one parameter
    scratch = num_bytes if foreach else 2 * model.head.weight.nbytes
    assert_peak(ledger.peaks["optimizer"], 2 * num_bytes + steps + scratch, 4096, "scalars of the bias corrections")
    assert ledger.peaks["gradients"] == num_bytes


def test_a_gradient_that_another_hook_takes_away_was_a_gradient_all_the_same():
    model = Head()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with Meter(model) as meter:
        model(*batch()).backward()
    assert meter.ledger().peaks["gradients"] >= model.head.weight.nbytes


def test_what_existed_before_is_named_as_well():
    model = Head()
    optimizer = adamw(model)
    train(model, optimizer)
    model(*batch()).backward()
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    with Meter(model, optimizer) as meter:
        pass
    peaks = meter.ledger().peaks
    assert peaks["weights"] == peaks["gradients"] == num_bytes
    assert peaks["optimizer"] == 2 * num_bytes + 4 * len(list(model.parameters()))


def test_a_charged_tensor_belongs_to_its_owner_from_birth_on():
    with Meter() as meter:
        with scopes.label("attention"):
            x = torch.empty(FLOATS)
        charge(x[2:], "boundary")
    peaks = meter.ledger().peaks
    assert peaks["boundary"] == NUM_BYTES
    assert "attention" not in peaks


def test_a_weight_stays_a_weight_whoever_claims_it():
    model = Head()
    with Meter(model) as meter:
        charge(model.head.weight, "boundary")
    assert meter.ledger().peaks["boundary"] == 0


def test_a_host_arena_counts_as_host():
    with Meter() as meter:
        arena = Arena("boundaries", pin=False)
        block = arena.lend(NUM_BYTES, "boundary")
        view = block.view((FLOATS,), torch.float32)
        with scopes.label("attention"):
            view.copy_(torch.ones(FLOATS))
    ledger = meter.ledger()
    assert ledger.host_bytes == NUM_BYTES
    assert ledger.host_holders == {"boundaries": NUM_BYTES}
    assert ledger.device_peak_bytes == NUM_BYTES  # the ones


def test_a_copy_on_a_lane_is_seen_once_and_its_end_too():
    lane = open_lane("probe", torch.device("cpu"), delay=lambda: 0.005)
    with Meter() as meter:
        source, target = torch.ones(FLOATS), torch.empty(FLOATS)
        ticket = lane.copy(target, source)
        del source
        ticket.synchronize()
        lane.drain()
        gc.collect()
        assert meter.live_bytes() == NUM_BYTES
    lane.close()
    assert meter.ledger().device_peak_bytes == 2 * NUM_BYTES


def test_a_mark_splits_the_run():
    with Meter() as meter:
        first = torch.empty(4 * FLOATS)
        small = torch.empty(FLOATS)
        del first
        meter.mark("steady")
        more = torch.empty(FLOATS)
    assert meter.ledger().device_peak_bytes == 5 * NUM_BYTES
    assert meter.ledger(since="steady").device_peak_bytes == 2 * NUM_BYTES
    assert meter.timeline(since="steady").peak[1] == 2 * NUM_BYTES
    assert small.numel() == more.numel()
    with pytest.raises(KeyError, match="steady"):
        meter.ledger(since="unknown")


def test_the_timeline_has_the_same_peak_also_when_it_is_small():
    model = Head()
    optimizer = adamw(model)
    with Meter(model, optimizer) as meter:
        train(model, optimizer)
    timeline = meter.timeline()
    assert timeline.peak[1] == meter.ledger().device_peak_bytes
    small = timeline.compact(7)
    assert small.seconds.size == 7
    assert small.peak == timeline.peak
    assert type(timeline).from_json(timeline.to_json(points=7)).peak[1] == timeline.peak[1]


def test_metering_changes_no_bit():
    plain, metered = Head(), Head()
    expected = train(plain, adamw(plain), steps=3)
    optimizer = adamw(metered)
    with Meter(metered, optimizer):
        actual = train(metered, optimizer, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), metered.parameters(), strict=True))


def test_nothing_is_left_behind():
    model = Head()
    optimizer = adamw(model)
    with Meter(model, optimizer), Meter(model, optimizer):
        train(model, optimizer)
    assert_nothing_is_left(model, optimizer)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in the middle")


def in_backward(model, optimizer):
    scopes.region("vocab", Fails.apply)(model.trunk(batch()[0])).sum().backward()


def in_step(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle")))
    model(*batch()).backward()
    try:
        optimizer.step()
    finally:
        optimizer._optimizer_step_pre_hooks.popitem()


@pytest.mark.parametrize("fails", [in_backward, in_step])
def test_an_exception_leaves_no_patch_no_hook_and_no_label(fails):
    model = Head()
    optimizer = adamw(model)
    with pytest.raises(RuntimeError, match="in the middle"), Meter(model, optimizer):
        fails(model, optimizer)
    assert_nothing_is_left(model, optimizer)


def test_nested_meters_see_the_same():
    with Meter() as outer:
        kept = torch.empty(FLOATS)
        with Meter() as inner:
            more = torch.empty(FLOATS)
            more.untyped_storage().resize_(3 * NUM_BYTES)
            more.add_(1)
        assert "resize_" in torch.UntypedStorage.__dict__
    assert inner.ledger().device_peak_bytes == 3 * NUM_BYTES
    assert outer.ledger().device_peak_bytes == 4 * NUM_BYTES
    assert kept.numel() == FLOATS
    assert "resize_" not in torch.UntypedStorage.__dict__


def test_scratch_inside_an_operator_is_what_the_meter_cannot_see():
    """docs/profiling.md says so; the allocator's events do see it."""
    x = torch.zeros(256, 256)

    def step() -> Meter:
        with Meter() as meter:
            torch.logsumexp(x, 0)
        return meter

    found = allocator_peak(step, alive=(x,))
    assert_peak(found.peak_bytes - found.result.ledger().device_peak_bytes, x.nbytes, 4096, "vectors of 256 floats")


def test_fake_tensors_are_counted_like_real_ones():
    def run(mode) -> Ledger:
        with mode, Meter() as meter:
            model = Head()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            meter.register(model, optimizer)
            x, labels = torch.zeros(N, H), torch.zeros(N, dtype=torch.int64)
            for _ in range(2):
                model(x, labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        return meter.ledger()

    assert run(FakeTensorMode()) == run(nullcontext())


def test_a_metered_first_step_leaves_compile_alone():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: (x * 2).sin(), backend=backend)
    with Meter():
        compiled(torch.ones(3))
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_an_accelerator_the_peak_is_the_caching_allocators():
    with Meter() as meter:
        with scopes.label("vocab"):
            x = torch.zeros(512, 512, device="cuda")
        base = torch.cuda.memory_allocated() - x.nbytes
        torch.logsumexp(x, 0)
    ledger = meter.ledger()
    assert ledger.device_peak_bytes == torch.cuda.max_memory_allocated()
    assert ledger.device_peak_bytes >= base + 2 * x.nbytes
    assert ledger.peaks["vocab"] == x.nbytes
    assert ledger.reserved_bytes >= ledger.device_peak_bytes
