"""torch.compile inside the checkpoint (backend aot_eager: graphs without code generation)."""

from __future__ import annotations

import warnings

import pytest
import torch

from steppe import SCO, BoundaryPolicy
from steppe.core.errors import ConfigError
from steppe.flatteners.boundary.attach import diagnose
from steppe.flatteners.boundary.compiling import Compiler
from steppe.flatteners.boundary.joining import blocks_of_transformers
from tests.flatteners.boundary.programs import (
    Language,
    Stack,
    assert_same,
    gradients,
    inputs_of,
    plainly,
    seeded,
    with_sco,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("mode", "make"),
    [("parts", lambda: Language(num_hidden_layers=3)), ("block", lambda: Stack(num_layers=3))],
    ids=["parts of a transformers model", "whole plain blocks"],
)
def test_what_is_compiled_inside_the_checkpoint_gives_the_same_bits(mode, make):
    """Compiled programs are reordered against eager ones: the plain program has the same parts compiled."""
    model = seeded(make)
    policy = BoundaryPolicy(compile=mode, compile_backend="aot_eager", min_bytes=0)
    undo = plainly(model)
    compiler = Compiler(policy)
    compiler.attach(blocks_of_transformers(model.model) if mode == "parts" else [])
    plain = gradients(model)
    compiler.detach()
    undo()
    sco = SCO(policy)
    with_sco(model, sco)
    assert_same(gradients(model), plain)
    graphs = sco.stats().compiled_graphs
    assert graphs > 0
    assert_same(gradients(model), plain)
    assert sco.stats().compiled_graphs == graphs  # the second step compiles nothing more
    assert sco.stats().bytes_offloaded > 0
    assert not any("compiled" in line for line in diagnose(sco.stats()))
    sco.close()
    assert all(part._compiled_call_impl is None for part in model.modules())


def test_a_run_that_asked_for_compile_and_compiled_nothing_says_so():
    model = seeded(lambda: Stack(num_layers=3))
    sco = SCO(BoundaryPolicy(compile="parts", compile_backend="aot_eager", min_bytes=0))
    with_sco(model, sco)
    with torch.compiler.set_stance("force_eager"):
        model(inputs_of(model)).backward()
    assert any("nothing was compiled" in line for line in diagnose(sco.stats()))
    sco.close()


def test_blocks_without_attention_or_norm_are_refused():
    blocks = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    with pytest.raises(ConfigError, match='compile="block"'):
        SCO(BoundaryPolicy(compile="parts")).apply(blocks)
