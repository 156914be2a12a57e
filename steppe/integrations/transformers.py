"""What is Hugging Face's own about a Hugging Face MoE: where its blocks, head and loss are, and how to make one.

The loss contract is transformers' own: `model.loss_function(hidden_or_logits, labels, vocab_size, ...)` on the
instance, with `lm_head.forward` the identity, so that projection and loss are one region that a flattener can replace.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steppe.core.errors import ConfigError
from steppe.runtime import scopes
from steppe.runtime.meter import charge

IGNORED = -100
_MASKS_FORGET_DOCUMENTS = ("gpt_oss",)  # their forward doesn't hand position ids to the mask functions


def load_config(path: str, shape: Mapping[str, Any]) -> Any:
    """A transformers configuration from a config.json, a directory with one, or `shape` alone.

    Raises: ConfigError for a file that can't be read, an unknown model_type or field values that don't fit.
    """
    from transformers import AutoConfig

    fields = {**(_read(Path(path)) if path else {}), **shape}
    model_type = fields.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError(
            "model", got="no model_type", allowed="a transformers config.json, or model.shape with a model_type",
            remedy='set model.config to a config.json, or model.shape = { model_type = "qwen3_moe", ... }',
        )  # fmt: skip
    try:
        loaded = AutoConfig.for_model(model_type, **fields)
        known = _fields_of(type(loaded)) | fields.keys() - shape.keys()
    except Exception as failure:
        raise ConfigError(
            "model configuration", got=f"{model_type}: {failure}", allowed="what transformers accepts",
            remedy="check model.config and model.shape",
        ) from failure  # fmt: skip
    unknown = {key for key in shape.keys() - {"model_type"} - known if not _is_read(key, type(loaded))}
    _check_names(unknown, known, type(loaded).__name__)
    _check_counts(loaded)
    return loaded


_ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}  # read by every family


def _fields_of(kind: Any) -> set[str]:
    """The fields that a configuration class knows; transformers itself takes any name, and forgets it."""
    declared = {name for cls in kind.__mro__ for name in vars(cls).get("__annotations__", {})}
    return declared | kind().to_dict().keys() | dict(kind.attribute_map).keys() | _ROPE


def _is_read(name: str, kind: Any) -> bool:
    """Whether a family's own code names a field that its configuration class doesn't declare, as some do."""
    folder = Path(inspect.getfile(kind)).parent
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(word.search(file.read_text(encoding="utf-8")) for file in folder.glob("*.py"))


def _check_names(unknown: set[str], known: set[str], kind: str) -> None:
    """Raises: ConfigError at a field of model.shape that would change nothing."""
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            "unknown key in [model.shape]", got=repr(name), allowed=f"the fields of transformers' {kind}",
            remedy=f"did you mean {close[0]!r}?" if close else "remove it",
        )  # fmt: skip


def _check_counts(config: Any) -> None:
    """Raises: ConfigError for counts that no model has; transformers would fail inside a step, or not at all."""
    text = config.get_text_config()
    counts = {name: getattr(text, name, None) for name in _COUNTS}
    for name, value in counts.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"model.shape.{name}", got=value, allowed="1 or more", remedy=f"raise {name}")
    heads, shared = counts["num_attention_heads"], counts["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ConfigError(
            "model.shape.num_key_value_heads", got=f"{shared} for {heads} attention heads",
            allowed=f"a divisor of {heads}", remedy="change one of the two",
        )  # fmt: skip
    experts = _num_experts(text)
    chosen = counts["num_experts_per_tok"]
    if experts and isinstance(chosen, int) and chosen > experts:
        raise ConfigError(
            "model.shape.num_experts_per_tok", got=f"{chosen} of {experts} experts", allowed=f"1 to {experts}",
            remedy="choose fewer experts a token",
        )  # fmt: skip


_COUNTS = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "num_experts_per_tok", "head_dim", "intermediate_size", "moe_intermediate_size",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(config: Any) -> bool:
    """Whether a transformers configuration is a mixture of experts'."""
    return _num_experts(config.get_text_config()) is not None


def _num_experts(text: Any) -> int | None:
    return next((v for name in _EXPERTS if isinstance(v := getattr(text, name, None), int)), None)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks in order. Raises: ConfigError for a model without `model.layers`."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ConfigError(
            "model", got=type(model).__name__, allowed="a transformers causal language model with model.layers",
            remedy="use one of the decoder-only families",
        )  # fmt: skip
    return list(layers)


def checkpoint_blocks(model: Any) -> None:
    """Torch's own non-reentrant checkpoint around every block: the plain program's boundaries."""
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint)


def _checkpoint(block: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a block keeps is its input: the boundary."""
    charge(hidden, "boundary")
    return checkpoint(block, hidden, *args, use_reentrant=False, context_fn=_recompute_labels, **kwargs)


class PlainLoss:
    """The plain program's projection and cross-entropy: one region, owned by the `vocab` peak.

    Peak: 3 x N x V float32 (logits, log-probabilities, their gradient), 2 bytes an element more in bfloat16.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._run = scopes.region("vocab", token_losses)
        self._last: torch.Tensor | None = None
        model.lm_head.forward = _identity
        model.loss_function = self

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *,
        num_items_in_batch: int | None = None, shift_labels: torch.Tensor | None = None, **_: object,
    ) -> torch.Tensor:  # fmt: skip
        """`logits` are the hidden states [B,S,H], since the head's forward is the identity."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        head = self._model.lm_head
        losses = self._run(logits, head.weight, head.bias, shift_labels)
        self._last = losses.detach()
        divisor = num_items_in_batch if num_items_in_batch is not None else (shift_labels != IGNORED).sum()
        return losses.sum() / divisor

    def token_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N] of the call that has just been made: nothing is computed twice."""
        assert self._last is not None
        return self._last

    def detach(self) -> None:
        """Give the model its own head and loss back."""
        del self._model.lm_head.forward
        del self._model._loss_function


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Plain cross-entropy of every token [N] in float32; 0 where the label is ignored."""
    logits = nn.functional.linear(hidden, weight, bias).flatten(0, -2)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide, labels.reshape(-1), ignore_index=IGNORED, reduction="none")


@dataclass(frozen=True)
class MicroLoss:
    """One micro-batch's loss: `total` is to be sent backward, the rest is detached, for the report."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    auxiliary: torch.Tensor  # the router's, unweighted; 0 where the model has none or it is switched off
    tokens: torch.Tensor | None  # [N] each token's cross-entropy, 0 without a label; None unless asked for


def loss_of(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, *,
    num_valid: int, share: float, keep_tokens: bool = False,
) -> MicroLoss:  # fmt: skip
    """This micro-batch's part of the global loss; `labels` are already shifted.

    The cross-entropy is summed over the valid tokens and divided by the global number of them; the auxiliary loss
    enters with this micro-batch's `share` of all tokens, so that summed gradients are those of the global mean.
    """
    with _bound(model, num_valid, share, keep_tokens) as (cross_entropy, tokens):
        masks = _document_masks(model, input_ids, position_ids)
        out = model(
            input_ids=input_ids, attention_mask=masks, position_ids=position_ids, labels=labels, use_cache=False
        )
    auxiliary = getattr(out, "aux_loss", None)
    none = out.loss.new_zeros(())
    auxiliary = none if auxiliary is None else auxiliary.detach()
    return MicroLoss(out.loss, cross_entropy[0], auxiliary, tokens[0] if tokens else None)


@contextmanager
def _bound(
    model: Any, num_valid: int, share: float, keep_tokens: bool
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The instance's loss with divisor and shifted labels bound, the auxiliary coefficient scaled.

    Yields two lists into which the loss and, when asked for, the tokens' losses go.
    """
    inner, coefficient = model.loss_function, getattr(model, "router_aux_loss_coef", None)
    values: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []

    def bound(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
        loss = inner(logits, labels, vocab_size, num_items_in_batch=num_valid, shift_labels=labels)
        values.append(loss.detach().clone())  # transformers adds the auxiliary loss in place
        if keep_tokens:
            # A profiled model's loss is wrapped in its region.
            tokens.append(inspect.unwrap(inner).token_losses(logits.detach(), labels))  # type: ignore[attr-defined]
        return loss

    model.loss_function = bound
    if coefficient is not None:
        model.router_aux_loss_coef = coefficient * share
    try:
        yield values, tokens
    finally:
        model.loss_function = inner
        if coefficient is not None:
            model.router_aux_loss_coef = coefficient


def _document_masks(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any] | None:
    """Masks that keep packed documents apart, for the families whose own forward would not; None for the others."""
    config = model.config
    if config._attn_implementation.startswith("steppe_"):
        return None  # our own attention knows the documents
    if config.model_type not in _MASKS_FORGET_DOCUMENTS or bool((position_ids[:, 1:] > position_ids[:, :-1]).all()):
        return None
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    shape = torch.empty((*input_ids.shape, 0), dtype=model.dtype, device=input_ids.device)
    make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    # By place: the fourth is `past_key_values` in older versions and `cache` in newer ones.
    return {kind: fn(config, shape, None, None, position_ids=position_ids) for kind, fn in make.items()}


def _recompute_labels() -> tuple[Any, Any]:
    """The checkpoint's two contexts: nothing in the forward, a label-free recompute wherever it starts."""
    return nullcontext(), scopes.fresh()


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise ConfigError(
            "model.config", got=f"{file} ({failure})", allowed="a readable config.json of a transformers model",
            remedy="give the path of the file or of the directory that holds it",
        ) from failure  # fmt: skip
    if not isinstance(fields, dict):
        raise ConfigError("model.config", got=type(fields).__name__, allowed="a JSON object", remedy="check the file")
    return fields
