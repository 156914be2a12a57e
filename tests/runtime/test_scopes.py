"""Labels: who is charged, forward and backward, and that nothing is left open."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from steppe.runtime import scopes


class Seen(torch.autograd.Function):
    """Identity that notes the label at its forward and at its backward."""

    @staticmethod
    def forward(ctx, x, notes, name):
        ctx.notes, ctx.name = notes, name
        notes.append((name, "forward", scopes.current()))
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        ctx.notes.append((ctx.name, "backward", scopes.current()))
        return grad, None, None


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_labels_nest_and_leave_in_order():
    assert scopes.current() == "other"
    with scopes.label("vocab"):
        with scopes.label("router"):
            assert scopes.current() == "router"
        assert scopes.current() == "vocab"
    assert scopes.current() == "other"


def test_a_label_left_by_exception_is_closed():
    with pytest.raises(RuntimeError), scopes.label("vocab"):
        raise RuntimeError
    assert scopes.current() == "other"


def test_a_label_belongs_to_its_thread():
    seen = []
    with scopes.label("vocab"):
        worker = threading.Thread(target=lambda: seen.append(scopes.current()))
        worker.start()
        worker.join()
    assert seen == ["other"]


def test_a_region_is_charged_in_forward_and_backward_and_nothing_else_is():
    notes: list = []
    before = Seen.apply(leaf(), notes, "before")
    inside = scopes.region("vocab", lambda x: Seen.apply(x, notes, "inside"))(before)
    Seen.apply(inside, notes, "after").sum().backward()
    assert notes == [
        ("before", "forward", "other"),
        ("inside", "forward", "vocab"),
        ("after", "forward", "other"),
        ("after", "backward", "other"),
        ("inside", "backward", "vocab"),
        ("before", "backward", "other"),
    ]


def test_regions_nest_in_the_backward():
    notes: list = []
    inner = scopes.region("router", lambda x: Seen.apply(x, notes, "inner"))
    outer = scopes.region("dispatch", lambda x: Seen.apply(inner(Seen.apply(x, notes, "early")), notes, "late"))
    outer(leaf()).sum().backward()
    backward = [(name, owner) for name, direction, owner in notes if direction == "backward"]
    assert backward == [("late", "dispatch"), ("inner", "router"), ("early", "dispatch")]


def test_keyword_arguments_nested_outputs_and_other_values_pass_through():
    def fn(x, *, pair, flag):
        return {"sum": x + pair[0], "rest": [pair[1] * 2, flag, None]}

    x, y, z = leaf(), leaf(), leaf()
    out = scopes.region("router", fn)(x, pair=(y, z), flag="kept")
    assert out["rest"][1:] == ["kept", None]
    (out["sum"].sum() + out["rest"][0].sum()).backward()
    assert [t.grad.tolist() for t in (x, y, z)] == [[1.0] * 3, [1.0] * 3, [2.0] * 3]


def test_a_gradient_that_was_none_stays_none():
    x, y = leaf(), leaf()
    first, _second = scopes.region("router", lambda x, y: (x * 2, y * 2))(x, y)
    first.sum().backward()
    assert x.grad is not None
    assert y.grad is None


def test_a_region_changes_no_bit():
    weight = torch.randn(64, 32, requires_grad=True)
    hidden = torch.randn(16, 32, requires_grad=True)

    def loss(hidden, weight):
        return torch.nn.functional.cross_entropy(hidden @ weight.T, torch.arange(16))

    plain = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    charged = torch.autograd.grad(scopes.region("vocab", loss)(hidden, weight), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, charged, strict=True))


def test_results_and_inputs_may_be_changed_in_place_as_without_the_region():
    def fn(x):
        x.mul_(3.0)
        return x * 2.0

    def grad(fn):
        x = torch.full((3,), 0.1, requires_grad=True)
        out = fn(x * 1.0)
        out += 1.0
        out.log().sum().backward()
        return x.grad

    assert torch.equal(grad(fn), grad(scopes.region("vocab", fn)))


def test_a_parameter_reaches_the_function_as_it_is():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert scopes.region("vocab", lambda p: p is parameter)(parameter)


def test_an_input_used_beside_the_region_closes_it_all_the_same():
    notes: list = []
    x = Seen.apply(leaf(), notes, "before")
    beside = Seen.apply(x, notes, "beside")
    inside = scopes.region("vocab", lambda x: Seen.apply(x, notes, "inside"))(x)
    (inside + beside).sum().backward()
    backward = [(name, owner) for name, direction, owner in notes if direction == "backward"]
    assert backward == [("inside", "vocab"), ("beside", "other"), ("before", "other")]


def test_a_region_without_grad_is_a_label_only():
    notes: list = []
    with torch.no_grad():
        out = scopes.region("vocab", lambda x: Seen.apply(x, notes, "inside"))(leaf())
    assert notes == [("inside", "forward", "vocab")]
    assert out.grad_fn is None


def test_a_region_whose_inputs_need_no_gradient_is_closed_after_the_backward():
    weight = leaf()
    scopes.region("vocab", lambda x: x * weight)(torch.ones(3)).sum().backward()
    assert scopes.current() == "other"


def test_a_failed_backward_leaves_no_label_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("in the middle")

    out = scopes.region("vocab", Fails.apply)(leaf())
    with pytest.raises(RuntimeError, match="in the middle"):
        out.sum().backward()
    assert scopes.current() == "other"
    with scopes.label("router"):
        assert scopes.current() == "router"
    assert scopes._thread.frames == []


def test_retain_graph_opens_and_closes_twice():
    notes: list = []
    out = scopes.region("vocab", lambda x: Seen.apply(x, notes, "inside"))(Seen.apply(leaf(), notes, "before")).sum()
    out.backward(retain_graph=True)
    out.backward()
    backward = [(name, owner) for name, direction, owner in notes if direction == "backward"]
    assert backward == [("inside", "vocab"), ("before", "other")] * 2


def test_early_stop_of_a_recompute_leaves_the_labels_balanced():
    notes: list = []

    def block(x):
        return scopes.region("attention", lambda x: Seen.apply(x, notes, "attention"))(x) * 1.0

    out = checkpoint(block, leaf(), use_reentrant=False)
    Seen.apply(out, notes, "after").sum().backward()
    assert scopes._thread.frames == []
    assert ("attention", "backward", "attention") in notes


@pytest.mark.parametrize("reset", [True, False])
def test_a_recompute_started_inside_an_open_label_is_charged_to_it_unless_fresh(reset):
    notes: list = []

    def block(x):
        x = Seen.apply(x, notes, "early")
        return scopes.region("dispatch", lambda x: Seen.apply(x, notes, "late"))(x)

    def contexts():
        return nullcontext(), scopes.fresh() if reset else nullcontext()

    checkpoint(block, leaf(), use_reentrant=False, context_fn=contexts).sum().backward()
    recomputed = [owner for name, direction, owner in notes if (name, direction) == ("early", "forward")][1]
    assert recomputed == ("other" if reset else "dispatch")
