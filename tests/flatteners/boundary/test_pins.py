"""What a recompute takes from the forward: top-k choices, results of operators, marked tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import steppe
from steppe import SCO, BoundaryPolicy
from steppe.core.errors import ConfigError
from steppe.core.shapes import MachineShape
from steppe.flatteners.boundary.attach import conflicts, diagnose
from steppe.flatteners.boundary.pins import Recorder, Replayer, Wanted
from steppe.flatteners.boundary.reference import checkpointed
from tests.flatteners.boundary.programs import Language, assert_same, gradients, plainly, rough_sco, seeded, with_sco

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


class Count(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).rsplit(".", 1)[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Router(nn.Module):
    """A top-2 mixture of four products whose scores are all tied in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8, 4))
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = (hidden.abs() @ self.gate).softmax(-1)  # four equal scores: any two are a right choice
        weights, chosen = torch.topk(scores, 2)
        weights /= weights.sum(-1, keepdim=True)  # in place, as transformers' routers do
        outs = torch.einsum("nh,ehd->ned", hidden, self.experts)
        picked = outs.gather(1, chosen[..., None].expand(-1, -1, 8))
        return hidden + (picked * weights[..., None]).sum(1)


class Fickle(TorchDispatchMode):
    """A top-k that breaks ties the other way at every second call: equal scores, other experts."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        Fickle.calls += 1
        if Fickle.calls % 2:
            return func(*args, **(kwargs or {}))
        scores, count = args[:2]
        values, indices = func(scores.flip(-1), count)
        return values, scores.shape[-1] - 1 - indices


def routed(checkpoint, fickle: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    router = Router()
    hidden = torch.randn(16, 8, requires_grad=True)
    Fickle.calls = 0

    def step():
        checkpoint(router, hidden * 1.0).square().sum().backward()

    if fickle:
        with Fickle():
            step()
        assert Fickle.calls >= 1
    else:
        step()
    return {"hidden": hidden.grad, "gate": router.gate.grad, "experts": router.experts.grad}


def test_a_tie_broken_the_other_way_in_the_recompute_does_not_change_a_gradient():
    honest = routed(lambda fn, x: fn(x), fickle=False)
    assert_same(routed(checkpointed, fickle=False), honest)
    spoiled = routed(checkpointed, fickle=True)
    assert not torch.equal(spoiled["experts"], honest["experts"])  # the fault is real
    sco = rough_sco()
    assert_same(routed(sco.checkpoint, fickle=True), honest)
    assert (sco.stats().topk_pinned, sco.stats().topk_replayed) == (1, 1)
    unpinned = SCO(BoundaryPolicy(min_bytes=0, pin_topk=False))
    assert not torch.equal(routed(unpinned.checkpoint, fickle=True)["experts"], honest["experts"])
    sco.close()


def test_routers_of_a_transformers_model_are_pinned_too():
    model = seeded(Language)
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    assert_same(gradients(model), plain)
    assert (sco.stats().topk_pinned, sco.stats().topk_replayed) == (4, 4)
    sco.close()


def attending(**kwargs) -> nn.Module:
    model = Language(**kwargs)
    model.model.set_attn_implementation("sdpa")
    return model


def counted(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    with Count() as count:
        results = gradients(model)
    return results, count.calls


def test_a_kept_attention_runs_once_and_changes_no_bit():
    model = seeded(attending)
    undo = plainly(model)
    plain, calls = counted(model)
    undo()
    assert calls[ATTENTION] == 8
    sco = rough_sco(BoundaryPolicy(offload_extra=(ATTENTION,), min_bytes=0))
    with_sco(model, sco)
    ours, calls = counted(model)
    assert calls[ATTENTION] == 4
    assert_same(ours, plain)
    stats = sco.stats()
    assert (stats.extras_kept, stats.extras_short_lived, stats.extras_missing) == (4, 0, ())
    # Three of four boundaries leave, each with hidden state, router choice, attention output and log-sum-exp.
    tokens = 2 * 24
    assert stats.bytes_offloaded == 3 * tokens * (32 * 4 + 2 * 4 + 4 * 8 * 4 + 4 * 4)
    sco.close()


def test_results_beyond_the_limit_are_recomputed_and_the_report_says_so():
    model = seeded(attending)
    undo = plainly(model)
    plain, before = counted(model)
    undo()
    sco = rough_sco(BoundaryPolicy(offload_extra=("aten.mm",), min_bytes=0))
    with_sco(model, sco)
    ours, after = counted(model)
    assert_same(ours, plain)
    stats = sco.stats()
    assert stats.extras_kept == 3 * 4
    assert stats.extras_short_lived > 0
    assert before["aten.mm"] - after["aten.mm"] == 3 * 4
    assert any("short-lived" in line for line in diagnose(stats))
    sco.close()


class Marked(nn.Module):
    """A block that marks its keys."""

    def __init__(self, spoil: bool = False) -> None:
        super().__init__()
        self.key, self.out, self.spoil = nn.Linear(16, 16, bias=False), nn.Linear(16, 16), spoil

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        keys = self.key(hidden)
        if self.spoil:
            keys.mul_(2.0)
        keys = steppe.long_lived(keys.view(-1, 4, 4), "kv")
        return hidden + self.out(keys.flatten(1).sin())


def marked(checkpoint, spoil: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Marked(spoil) for _ in range(3))
    hidden = torch.randn(8, 16, requires_grad=True)
    with Count() as count:
        out = hidden * 1.0
        for block in blocks:
            out = checkpoint(block, out)
        out.square().sum().backward()
    return {"hidden": hidden.grad} | {n: p.grad for n, p in blocks.named_parameters()}, count.calls


def test_a_marked_tensor_is_kept_and_what_made_it_is_not_run_again():
    plain, before = marked(checkpointed)
    sco = rough_sco(BoundaryPolicy(offload_extra=("kv",), min_bytes=0))
    ours, after = marked(sco.checkpoint)
    assert_same(ours, plain)
    assert before["aten.mm"] - after["aten.mm"] == 3
    assert sco.stats().extras_kept == 3
    assert sco.stats().bytes_offloaded == 2 * 2 * 8 * 16 * 4
    sco.close()


def test_a_mark_that_the_policy_does_not_name_is_reported():
    sco = rough_sco(BoundaryPolicy(offload_extra=("cache",), min_bytes=0))
    assert_same(marked(sco.checkpoint)[0], marked(checkpointed)[0])
    stats = sco.stats()
    assert stats.marks_ignored == 3
    assert stats.extras_missing == ("cache",)
    assert any("no block met: cache" in line for line in diagnose(stats))
    assert any("marks were ignored" in line for line in diagnose(stats))
    sco.close()


def test_a_tensor_changed_before_its_mark_is_refused():
    sco = SCO(BoundaryPolicy(offload_extra=("kv",), min_bytes=0))
    with pytest.raises(ConfigError, match="changed in place"):
        marked(sco.checkpoint, spoil=True)


def test_a_kept_result_changed_in_place_raises_in_backward():
    def step(hidden):
        return hidden.sin().mul_(2.0).exp()

    sco = SCO(BoundaryPolicy(offload_extra=("aten.sin",), min_bytes=0))
    hidden = torch.randn(8, 16, requires_grad=True)
    out = sco.checkpoint(step, sco.checkpoint(step, hidden * 1.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_operators_that_return_or_change_their_input_are_refused():
    sco = SCO(BoundaryPolicy(offload_extra=("aten.view",), min_bytes=0))
    with pytest.raises(ConfigError, match="new tensors"):
        sco.checkpoint(lambda h: h.view(-1).sin(), torch.randn(8, 16, requires_grad=True))


def test_random_numbers_after_a_kept_random_result_are_those_of_the_forward():
    def step(hidden):
        dropped, mask = torch.ops.aten.native_dropout(hidden, 0.5, True)
        return nn.functional.dropout(dropped.sin() * mask, 0.5).cos()

    def use(checkpoint):
        torch.manual_seed(0)
        hidden = torch.randn(64, 16, requires_grad=True)
        out = checkpoint(step, checkpoint(step, hidden * 1.0))
        return torch.autograd.grad(out.sum(), hidden)[0]

    sco = rough_sco(BoundaryPolicy(offload_extra=("aten.native_dropout",), min_bytes=0))
    assert torch.equal(use(sco.checkpoint), use(checkpointed))
    assert sco.stats().extras_kept == 2
    sco.close()


def test_kept_results_survive_a_retained_graph():
    model = seeded(attending)
    sco = rough_sco(BoundaryPolicy(offload_extra=(ATTENTION,), min_bytes=0))
    with_sco(model, sco)
    from tests.flatteners.boundary.programs import inputs_of

    loss = model(inputs_of(model))
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del loss
    sco.drain()
    assert sco.stats().bytes_lent == 0
    sco.close()


def test_auto_takes_what_pays_on_the_link_and_reports_every_candidate():
    model = seeded(attending)
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = SCO(BoundaryPolicy(offload_extra="auto", min_bytes=0), machine=MachineShape(to_device_rate=1e15))
    with_sco(model, sco)
    assert sco.report() == ()
    for _ in range(2):
        assert_same(gradients(model), plain)
    report = sco.report()
    kept = [c for c in report if c.choice == "keep"]
    assert len(kept) == 3
    assert all(c.recompute_ns > c.reload_ns for c in kept)
    rates = [c.recompute_ns / max(1, c.num_bytes) for c in report]
    assert rates == sorted(rates, reverse=True)
    assert not any(c.operator.startswith(("aten.view", "aten.detach", "aten.mul_")) for c in report)
    assert sco.stats().extras_kept == 3 * 4
    sco.close()


def test_auto_takes_nothing_on_a_slow_link():
    model = seeded(attending)
    sco = SCO(BoundaryPolicy(offload_extra="auto", min_bytes=0), machine=MachineShape(to_device_rate=1.0))
    with_sco(model, sco)
    for _ in range(2):
        gradients(model)
    assert sco.report()
    assert all(c.choice == "recompute" and "reload" in c.why for c in sco.report())
    assert sco.stats().extras_kept == 0
    sco.close()


def test_every_mode_lets_torch_compile_work():
    assert Recorder.ignore_compile_internals()
    assert Replayer.ignore_compile_internals()
    assert not Wanted(topk=False)


def test_a_kept_result_that_is_the_next_boundary_travels_once_and_leaves():
    def use(checkpoint):
        torch.manual_seed(0)
        hidden = torch.randn(8, 16, requires_grad=True)
        out = hidden * 1.0
        for _ in range(4):
            out = checkpoint(lambda h: h.sin().exp().cos(), out)
        return torch.autograd.grad(out.sum(), hidden)[0]

    sco = rough_sco(BoundaryPolicy(offload_extra=("aten.cos",), min_bytes=0))
    assert torch.equal(use(sco.checkpoint), use(checkpointed))
    assert sco.stats().extras_kept == 4
    assert sco.stats().bytes_offloaded == 3 * 8 * 16 * 4
    sco.close()


class StubAttention(torch.autograd.Function):
    """A fused attention's way with its output: its backward needs it, kept on the context or saved through autograd."""

    @staticmethod
    def forward(ctx, hidden, on_context):
        out = hidden.sin()
        ctx.on_context = on_context
        if on_context:
            ctx.hidden, ctx.out = hidden, out
        else:
            ctx.save_for_backward(hidden, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, out = (ctx.hidden, ctx.out) if ctx.on_context else ctx.saved_tensors
        return grad * hidden.cos() + 0 * out, None


class Attends(nn.Module):
    """A block whose attention output is marked as long-lived."""

    def __init__(self, on_context: bool) -> None:
        super().__init__()
        self.query, self.out, self.on_context = nn.Linear(16, 16), nn.Linear(16, 16), on_context

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = StubAttention.apply(self.query(hidden), self.on_context)
        return hidden + self.out(steppe.long_lived(attended, "attention"))


def pinned(on_context: bool, labels: tuple[str, ...] = ("attention",)):
    torch.manual_seed(0)
    blocks = nn.ModuleList(Attends(on_context) for _ in range(4))
    sco = rough_sco(BoundaryPolicy(offload_extra=labels, min_bytes=0))
    out = torch.randn(8, 16, requires_grad=True) * 1.0
    for block in blocks:
        out = sco.checkpoint(block, out)
    out.square().sum().backward()
    sco.drain()
    return sco


def test_an_attention_output_that_is_kept_twice_is_a_conflict():
    """The output lies on the function's context while SCO moves it to the host: the same storage is pinned twice."""
    sco = pinned(on_context=True)
    (found,) = conflicts(sco)
    assert "keeps them twice" in found.what
    assert "save_for_backward" in found.remedy
    assert sco.stats().bytes_held_elsewhere >= 2 * 8 * 16 * 4
    assert any("keeps them twice" in line for line in diagnose(sco.stats()))
    sco.close()


def test_an_attention_output_that_autograd_saves_is_kept_once():
    sco = pinned(on_context=False)
    assert conflicts(sco) == ()
    assert sco.stats().held_elsewhere == 0
    assert not any("twice" in line for line in diagnose(sco.stats()))
    sco.close()
