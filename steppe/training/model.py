"""The model of a run, sharded over the ranks: FSDP2 block by block, gradients summed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from steppe import compose
from steppe.compose import Flattened
from steppe.core.errors import ConfigError
from steppe.integrations import checkpoint_files, skeleton
from steppe.integrations import transformers as hf
from steppe.integrations.skeleton import Skeleton
from steppe.integrations.ulysses import Ulysses
from steppe.runtime import collectives, scopes
from steppe.training.config import RunConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model_config(config: RunConfig) -> Any:
    """The transformers configuration of a run, checked against it. Raises: ConfigError."""
    loaded = hf.load_config(config.model.config, config.model.shape)
    longest = getattr(loaded, "max_position_embeddings", None)
    if longest is not None and config.data.seq_len > longest:
        raise ConfigError(
            "data.seq_len", got=config.data.seq_len, allowed=f"at most the model's max_position_embeddings, {longest}",
            remedy=f"set model.shape.max_position_embeddings = {config.data.seq_len}, or a smaller data.seq_len",
        )  # fmt: skip
    return loaded


def make_skeleton(config: RunConfig, model_config: Any) -> Skeleton:
    """The run's model in training mode, without a byte of weights: `fill` gives each rank its own part after sharding.

    Raises: ConfigError.
    """
    attention = "auto" if config.model.attention == "packed" else config.model.attention
    made = skeleton.skeleton(
        model_config, dtype=DTYPES[config.model.dtype], attention=attention, experts=config.model.experts
    )
    made.model.train()
    return made


def fill(made: Skeleton, config: RunConfig, device: torch.device) -> None:
    """Memory and values for this rank's part of every weight: from the seed, or from `model.weights`.

    Peak: the shards and one piece, of checkpoint_files.PIECE_BYTES or 4 * skeleton.PIECE_ELEMENTS.
    Exactness: bitwise the same weights on any ranks. Raises: ConfigError.
    """
    with scopes.label("weights"):
        skeleton.materialize(made.model, device)
        if config.model.weights == "random":
            skeleton.fill_random(made.model, made.recipes, config.train.seed)
        else:
            unused = checkpoint_files.read(made.model, config.model.weights)
            if unused:
                warnings.warn(f"{len(unused)} tensors in {config.model.weights} are not the model's ({unused[0]}, ...)",
                              stacklevel=2)  # fmt: skip


def build_model(config: RunConfig, model_config: Any) -> Any:
    """The whole model on the host of this rank: for those who judge, not for training.

    Peak: the full model in its storage type.
    """
    made = make_skeleton(config, model_config)
    fill(made, config, torch.device("cpu"))
    return made.model


def join_sequences(model: Any, config: RunConfig) -> Ulysses | None:
    """Attention over the D ranks of a sequence, document by document; None for the model's own attention."""
    num_slices = config.launch.sequence
    if num_slices == 1 and config.model.attention != "packed":
        return None
    world, rank = collectives.size(collectives.world()), collectives.rank(collectives.world())
    starts = range(0, world, num_slices)
    groups = [collectives.new_group(range(s, s + num_slices)) if num_slices > 1 else None for s in starts]
    return Ulysses(model, groups[rank // num_slices])


def shard(flattened: Flattened, config: RunConfig, device: torch.device) -> None:
    """FSDP2 over all ranks in the run's precision; what a flattener placed keeps its own placement."""
    precision = MixedPrecisionPolicy()
    if config.computes_in_copies:
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[config.train.dtype], reduce_dtype=torch.float32)
    # transformers slices the hidden states before the head, whose forward is the identity here: nobody writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    assert flattened.meshes is not None
    with scopes.label("weights"):
        compose.shard(flattened, flattened.meshes, mp_policy=precision)
        for owner in flattened.model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.to(device))
