"""Untouched models: their attention, experts, router, head and boundaries are charged to the right peaks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from steppe.core.ledger import Ledger
from steppe.runtime import scopes
from steppe.runtime.allocator import allocator_peak
from steppe.runtime.attribution import attribute
from steppe.runtime.meter import Meter
from tests.support.float64 import FAMILIES, toy_config, toy_model
from tests.support.peaks import assert_peak

LAYERS, HIDDEN, VOCAB, BATCH, LENGTH = 4, 64, 1024, 2, 64
TOKENS = BATCH * LENGTH
BOUNDARY = TOKENS * HIDDEN * 4


def family_model(family: str) -> nn.Module:
    model = toy_model(family, num_hidden_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)
    model.train()
    model.activation_checkpointing_enable()
    return model


def token_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def forwards_of(model: nn.Module) -> list[dict]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_recognised_and_charged(family):
    model, ids = family_model(family), token_ids()
    handle = attribute(model)
    dense = 1 if family in ("glm4_moe", "deepseek_v3") else 0  # their first layer has no experts
    counts = {owner: len(names) for owner, names in handle.found.items()}
    assert counts["boundary"] == counts["attention"] == LAYERS
    assert counts["dispatch"] == LAYERS - dense
    assert counts["vocab"] == 2
    with Meter(model) as meter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    peaks = meter.ledger().peaks
    assert_peak(peaks["boundary"], LAYERS * BOUNDARY, 0, "boundaries are nothing else")
    assert_peak(peaks["vocab"], 3 * TOKENS * VOCAB * 4, 4096, "scalars of the mean")
    assert peaks["attention"] > 0
    assert peaks["router"] > 0
    assert peaks["dispatch"] > TOKENS * HIDDEN * 4  # the experts' output alone is that


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_fake_tensors_take_what_real_ones_take_owner_by_owner(family):
    """Eager attention and grouped_mm experts, in bfloat16: the programs that fake tensors can run."""
    from transformers import AutoModelForCausalLM

    config = toy_config(family, num_hidden_layers=LAYERS, hidden_size=HIDDEN, vocab_size=VOCAB)
    config._experts_implementation = "grouped_mm"

    def run(mode: AbstractContextManager) -> Ledger:
        with mode:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.train()
            model.activation_checkpointing_enable()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
            attribute(model)
            with Meter(model, optimizer) as meter:
                for _ in range(2):
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return meter.ledger()

    assert run(FakeTensorMode()) == run(nullcontext())


def test_a_foreign_model_keeps_its_bits_and_its_forwards():
    ids = token_ids()
    plain, charged = family_model("qwen3_moe"), family_model("qwen3_moe")
    before = forwards_of(charged)
    handle = attribute(charged)
    losses = []
    for model in (plain, charged):
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    handle.remove()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), charged.parameters(), strict=True))
    charged.zero_grad()
    assert forwards_of(charged) == before


def test_the_auxiliary_loss_of_the_router_is_charged_to_it():
    model, ids = family_model("qwen3_moe"), token_ids()
    handle = attribute(model)
    assert "load_balancing_loss_func" in handle.found["router"]
    with Meter(model) as meter:
        model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True).loss.backward()
    handle.remove()
    logits = LAYERS * TOKENS * 8 * 4
    assert_peak(meter.ledger().peaks["router"], 2 * logits, logits + 4096, "logits and softmax of all layers, gradient")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(torch.tanh(x + self.attention(x)))


class Plain(nn.Module):
    """A model of nobody's library, checkpointed by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.lm_head(x)


def test_a_plain_model_is_charged_by_place_and_its_loss_by_a_region():
    model, ids = Plain(), token_ids().flatten()
    handle = attribute(model)
    assert {owner: len(names) for owner, names in handle.found.items()} == {
        "boundary": LAYERS, "attention": LAYERS, "vocab": 1,
    }  # fmt: skip
    with Meter(model) as meter:
        scopes.region("vocab", F.cross_entropy)(model(ids), ids).backward()
    peaks = meter.ledger().peaks
    assert_peak(peaks["boundary"], LAYERS * BOUNDARY, 0, "boundaries are nothing else")
    # the logits live as long as the caller's frame: one N x V more
    assert_peak(peaks["vocab"], 3 * TOKENS * VOCAB * 4, TOKENS * VOCAB * 4 + 4096, "logits held by the caller")


def labels_at(module: nn.Module) -> list[str]:
    seen: list[str] = []
    module.register_forward_pre_hook(lambda *_: seen.append(scopes.current()))
    return seen


def test_a_recompute_starts_free_of_the_label_that_is_open_where_it_starts():
    """A block whose tail is a region: its backward opens the label and then recomputes the whole block."""

    class Block(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scopes.region("dispatch", lambda y: torch.tanh(self.mlp(y)))(self.early(x) + self.attention(x))

    model = Plain()
    model.layers = nn.ModuleList(Block() for _ in range(LAYERS))
    handle = attribute(model)
    seen = labels_at(model.layers[1].early)
    model(token_ids().flatten()).sum().backward()
    handle.remove()
    assert seen == ["other", "other"]


def test_a_recompute_of_a_hugging_face_layer_starts_free_of_labels_too():
    model, ids = family_model("qwen3_moe"), token_ids()
    handle = attribute(model)
    seen = labels_at(model.model.layers[1].input_layernorm)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    handle.remove()
    assert seen == ["other", "other"]


class Trained(nn.Module):
    """What DDP, an accelerator or a trainer makes of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.value_head = nn.Linear(HIDDEN, 1)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [Trained, nn.DataParallel])
def test_head_and_loss_are_found_inside_a_wrapper(wrapped):
    model, ids = wrapped(family_model("qwen3_moe")), token_ids()
    handle = attribute(model)
    assert handle.found["vocab"] == ["module.lm_head", "module.loss_function"]
    with Meter(model) as meter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    handle.remove()
    assert_peak(meter.ledger().peaks["vocab"], 3 * TOKENS * VOCAB * 4, 4096, "scalars of the mean")
    plain = nn.Sequential(Plain())
    assert attribute(plain).found["vocab"] == ["0.lm_head"]


@pytest.mark.parametrize("how", ["blocks", "replaced blocks", "whole", "wrapper"])
def test_compiled_modules_keep_their_graphs_and_are_left_as_they_were(how):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, ids = toy_model("qwen3_moe"), torch.arange(32)[None]
    layers = model.model.layers
    if how == "blocks":
        for layer in layers:
            layer.compile(backend=backend)
    elif how == "replaced blocks":
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, backend=backend)
    elif how == "whole":
        model.compile(backend=backend)
    called = torch.compile(model, backend=backend) if how == "wrapper" else model
    called(input_ids=ids, labels=ids).loss.backward()
    before, made = forwards_of(model), len(graphs)
    handle = attribute(called)
    called(input_ids=ids, labels=ids).loss.backward()
    handle.remove()
    assert len(graphs) == made > 0
    assert forwards_of(model) == before
    expected = ["model.layers.0", "model.layers.1"] if "blocks" in how else [""]
    assert handle.found["compiled"] == expected
    assert ("lm_head" in handle.found.get("vocab", ())) is ("blocks" in how)


def test_a_compiled_module_stays_compiled():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model, ids = Plain(), token_ids().flatten()
    for layer in model.layers:
        layer.attention.compile(backend=backend)
    handle = attribute(model)
    with Meter(model) as meter:
        model(ids).sum().backward()
    handle.remove()
    assert calls
    assert meter.ledger().peaks["attention"] > 0


def test_attribution_costs_no_memory():
    def peak(attributed: bool) -> int:
        model, ids = Plain(), token_ids().flatten()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        handle = attribute(model) if attributed else None
        found = allocator_peak(lambda: F.cross_entropy(model(ids), ids).backward())
        if handle is not None:
            handle.remove()
        return found.peak_bytes

    assert peak(True) == peak(False)
