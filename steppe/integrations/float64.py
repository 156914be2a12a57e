"""Truth in float64 for Hugging Face models.

`model.double()` is not float64: the modelling code casts norms, rotary angles, softmax and router to float32 by name.
So the modelling source is loaded as text with every such cast widened, and executed as a sibling module of the same
package. Experts run eagerly there, since `grouped_mm` refuses float64.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

_WIDER = (
    (re.compile(r"\btorch\.float32\b"), "torch.float64"),
    (re.compile(r"\btorch\.float\b"), "torch.double"),
    (re.compile(r"\.float\(\)"), ".double()"),
)


def float64_source(family: str) -> ModuleType:
    """The family's modelling module in float64, executed once a process as a sibling of the original."""
    name = f"transformers.models.{family}.modeling_{family}_float64"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    for narrow, wide in _WIDER:
        source = narrow.sub(wide, source)
    sibling = importlib.util.spec_from_loader(name, loader=None, origin=spec.origin)
    assert sibling is not None
    module = importlib.util.module_from_spec(sibling)
    module.__file__ = spec.origin
    sys.modules[name] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def float64_model(config: Any, weights: dict[str, torch.Tensor] | None = None, seed: int = 0) -> nn.Module:
    """The causal language model of `config` that computes in float64 throughout.

    `weights` is a full (unsharded) state dict in any dtype, copied in exactly; without it they come from the seed.
    """
    module = float64_source(config.model_type)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    config.dtype = torch.float64
    stem = type(config).__name__.removesuffix("Config")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(module, f"{stem}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    model.loss_function = _mean_cross_entropy
    if weights is not None:
        model.load_state_dict({name: value.detach().double() for name, value in weights.items()})
    assert all(p.dtype == torch.float64 for p in model.parameters())
    return model


def _mean_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: int | torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    **_: object,
) -> torch.Tensor:
    """transformers' causal language model loss, whose own code casts logits to float32 by name."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = logits.reshape(-1, vocab_size)
    loss = nn.functional.cross_entropy(flat, shift_labels.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def float64_truth(model: nn.Module) -> nn.Module:
    """A float64 program with exactly the weights (and buffers' meaning) of an unsharded Hugging Face model."""
    truth = float64_model(model.config, dict(model.state_dict()))
    return truth.train(model.training)
