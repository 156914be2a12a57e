"""A whole model's plain step on fake tensors: FSDP2 over a fake process group, checkpointing, stock experts and loss.

Nothing is computed and no memory is taken, so any size can be traced on one CPU. Fake grouped GEMMs don't see routing:
it is the balanced case. Without an optimizer, whose update the planner counts apart.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from steppe.core.ledger import STEP, Ledger, Moment
from steppe.core.shapes import BatchShape, MeshShape, RunShape
from steppe.integrations import transformers as hf
from steppe.planner.models import SHIPPED, shape_from_config
from steppe.planner.predict import program_entries
from steppe.runtime.attribution import attribute
from steppe.runtime.meter import Meter


@dataclass(frozen=True)
class Traced:
    """One shipped model on `world` ranks with `tokens` on each; `layers` and `vocab` cut it down."""

    model: str
    world: int
    attention: str = "sdpa"
    tokens: int = 8192
    layers: int | None = None
    vocab: int | None = None

    @property
    def fields(self) -> dict[str, object]:
        fields = json.loads((SHIPPED / f"{self.model}.json").read_text())
        fields["max_position_embeddings"] = self.tokens
        fields |= {} if self.layers is None else {"num_hidden_layers": self.layers}
        return fields | ({} if self.vocab is None else {"vocab_size": self.vocab})

    @property
    def shape(self) -> RunShape:
        attention = "materialised" if self.attention == "eager" else "fused"
        model = shape_from_config(self.fields)
        return RunShape(model, BatchShape(self.tokens), MeshShape(self.world), attention=attention)

    @property
    def causal_mask_bytes(self) -> int:
        """Bool, [1,1,S,S]: transformers leaves it out for the fused kernel, but never while it is traced."""
        return self.tokens**2 if self.attention == "sdpa" else 0


def predicted(what: Traced) -> Ledger:
    """The planner's ledger of the same step: all moments but the update, no optimizer."""
    entries = [e for e in program_entries(what.shape) if e.owner != "optimizer"]
    return Ledger.from_entries(entries, moments=STEP - {Moment.UPDATE})


def trace(what: Traced, *, keep_outputs: bool = True) -> Ledger:
    """One plain bf16 step of it on fake tensors under the Meter; the caller holds the outputs, or the loss alone."""
    with _fake_ranks(what.world) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(what)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
        handle = attribute(model)
        ids = torch.zeros(1, what.tokens, dtype=torch.int64)
        with Meter(model) as meter:
            out = model(input_ids=ids, labels=ids, use_cache=False)
            loss = out.loss
            if not keep_outputs:
                del out
            loss.backward()
        handle.remove()
    return meter.ledger()


def _model(what: Traced) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = what.fields
    logging.getLogger("transformers").setLevel(logging.ERROR)  # a shorter rotary table than was trained, and told so
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=what.attention, experts_implementation="grouped_mm"
    )
    hf.checkpoint_blocks(model)
    return model.train()


@contextmanager
def _fake_ranks(world: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()
