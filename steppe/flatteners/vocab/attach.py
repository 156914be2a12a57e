"""Ring-DTP in a live Hugging Face model: the loss takes hidden states, the head stays sharded over the vocabulary."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from steppe.core.errors import ConflictError, ShapeError
from steppe.core.policy import Conflict
from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.embedding import vocab_parallel_embedding
from steppe.flatteners.vocab.logits import vocab_parallel_logits
from steppe.flatteners.vocab.ring import ring_dtp_loss
from steppe.flatteners.vocab.shared import SharedCount, count_labels, take_back
from steppe.flatteners.vocab.stats import RingStats
from steppe.runtime import collectives
from steppe.runtime.collectives import Group

Tensor = torch.Tensor
MESH: Final = ("vocab", ("vocab_replica", "vocab"))
_SUM_ROWS = 4096  # rows of a gradient that are summed over the replicas at a time, in float32


class RingDTPLoss:
    """Gives a causal language model a loss that never holds N x V logits, and shards its head over the vocabulary.

    `mesh` has one axis (the P vocabulary ranks) or two (replicas, vocabulary); None is one rank. Call it before
    `fully_shard`, and leave the head out: `fully_shard(model, mesh=mesh, ignored_params=loss.parameters)`. The loss is
    this rank's share: shares sum over the mesh to the mean over all its labels (or to the sum over
    `num_items_in_batch`), so gradients have to be summed over ranks, not averaged
    (`set_gradient_divide_factor(1.0)`). The head's own gradient is complete, a DTensor like the head. With labels the
    model returns no logits; without, it returns them as before. A tied embedding is the same parameter, used through
    `vocab_parallel_embedding`. A deep copy of the model has a loss of its own, its `loss_function`.

    Peak: `budget.transient`; no [V,H] is gathered, no dense [V,H] gradient is made.
    Exactness: reordered.
    Raises: ConflictError, ShapeError where the head can't be sharded.
    """

    def __init__(self, model: nn.Module, *, mesh: DeviceMesh | None = None, policy: VocabPolicy | None = None) -> None:
        for conflict in conflicts(model):
            raise ConflictError(
                "Ring-DTP", got=conflict.what, allowed="a plain, unsharded head", remedy=conflict.remedy
            )
        if mesh is not None and mesh.ndim > 2:
            raise ShapeError(
                "mesh of Ring-DTP", got=f"{mesh.ndim} axes", allowed="(vocabulary) or (replicas, vocabulary)",
                remedy="give mesh[axis, axis] of a larger mesh",
            )  # fmt: skip
        self._model, self._policy, self._stats = model, policy or VocabPolicy(), RingStats()
        self._group: Group = None if mesh is None else mesh.get_group(mesh.ndim - 1)
        self._replicas: Group = None if mesh is None or mesh.ndim == 1 else mesh.get_group(0)
        self._head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        self._embedding = embedding if embedding.weight is self._head.weight else None
        self._vocab = model.config.get_text_config().vocab_size
        self._restore: list[Callable[[], None]] = []
        self._projects = True  # the head's forward makes logits; off while the loss takes hidden states
        if mesh is not None:
            self._shard(mesh)
        self._install()

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that FSDP2 must ignore."""
        return {p for p in (self._head.weight, self._head.bias) if p is not None}

    def __call__(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int | None = None, *,
        num_items_in_batch: float | Tensor | None = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """The model's `loss_function`: hidden states [B,S,H] come as `logits`, the name that transformers calls it by.
        Labels are shifted here, unless they come shifted."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            num_items_in_batch = count_labels(shift_labels, ignore_index, (self._group, self._replicas))
        bias = None if self._head.bias is None else self._local(self._head.bias)
        return ring_dtp_loss(
            logits, self._local(self._head.weight), shift_labels, group=self._group, bias=bias,
            num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, vocab_size=self._vocab,
            policy=self._policy, stats=self._stats,
        )  # fmt: skip

    def loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """This rank's share of the loss of hidden states [B,S,H]: what the model computes when it is given labels."""
        return self(hidden, labels, **options)

    @torch.no_grad()
    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[N] each token's loss, 0 where its (already shifted) label is ignored; all ranks of the group call it."""
        bias = None if self._head.bias is None else self._local(self._head.bias)
        return ring_dtp_loss(
            hidden, self._local(self._head.weight), labels, group=self._group, bias=bias, reduction="none",
            vocab_size=self._vocab, policy=self._policy,
        ).reshape(-1)  # fmt: skip

    @contextlib.contextmanager
    def takes_hidden(self) -> Iterator[None]:
        """While it lasts the head hands hidden states on and makes no logits."""
        self._projects = False
        try:
            yield
        finally:
            self._projects = True

    def stats(self) -> RingStats:
        """Counters since the last `stats().reset()`."""
        return self._stats

    def detach(self) -> None:
        """Put the model back: its head whole again (a gather of the weight), its own loss and forward."""
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()

    def _local(self, parameter: Tensor) -> Tensor:
        """This rank's shard, whose gradient is summed over the replicas."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return _SumOverReplicas.apply(local, self._replicas) if collectives.size(self._replicas) > 1 else local

    def _shard(self, mesh: DeviceMesh) -> None:
        placements: list[Placement] = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
        for name in ("weight", "bias"):
            whole = getattr(self._head, name)
            if whole is not None:
                shared = distribute_tensor(whole.data, mesh, placements)
                self._put(name, nn.Parameter(shared, requires_grad=whole.requires_grad))
                self._restore.append(functools.partial(self._unshard, name))

    def _unshard(self, name: str) -> None:
        shared = getattr(self._head, name)
        self._put(name, nn.Parameter(shared.detach().full_tensor(), requires_grad=shared.requires_grad))

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        setattr(self._head, name, parameter)
        if self._embedding is not None and name == "weight":
            self._embedding.weight = parameter

    def _install(self) -> None:
        """Bound methods and objects, never closures: a deep copy of the model has to run on itself."""
        self._override(self._head, "forward", self._head_forward)
        self._override(self._model, "forward", _WithLoss(self, self._model.forward))
        self._override(self._model, "loss_function", self)
        if self._embedding is not None:
            self._override(self._embedding, "forward", self._look_up)

    def _override(self, owner: nn.Module, name: str, value: Any) -> None:
        """Set an attribute on the instance and remember how to take it back."""
        mine = vars(owner).get(name, vars(owner).get(f"_{name}"))
        setattr(owner, name, value)
        self._restore.append(functools.partial(take_back, owner, name, mine))

    def __deepcopy__(self, memo: dict[int, Any]) -> RingDTPLoss:
        """The loss of the copied model, with the same process groups."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            vars(twin)[name] = value if name in ("_group", "_replicas") else copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConflictError(
            "Ring-DTP", got="a model to pickle with its loss attached", allowed="its state_dict",
            remedy="save model.state_dict(), or detach the loss first",
        )  # fmt: skip

    def _head_forward(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden) if self._projects else hidden

    def _look_up(self, ids: Tensor) -> Tensor:
        assert self._embedding is not None
        weight, padding = self._local(self._head.weight), self._embedding.padding_idx
        return vocab_parallel_embedding(ids, weight, group=self._group, padding_idx=padding)

    def _logits(self, hidden: Tensor) -> Tensor:
        bias = None if self._head.bias is None else self._local(self._head.bias)
        return vocab_parallel_logits(hidden, self._local(self._head.weight), bias, self._group)


class _WithLoss:
    """The model's forward, whose head hands hidden states on when there are labels; has the forward's signature."""

    def __init__(self, loss: RingDTPLoss, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._loss, self._forward, self._signature = loss, forward, inspect.signature(forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _WithLoss:
        return _WithLoss(copy.deepcopy(self._loss, memo), copy.deepcopy(self._forward, memo))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**self._signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        if given.get("labels") is None:
            return self._forward(*args, **kwargs)
        as_tuple = kwargs.pop("return_dict", None) is False
        with self._loss.takes_hidden():
            output = self._forward(*args, **kwargs, return_dict=True)
        output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return output.to_tuple() if as_tuple else output


class _SumOverReplicas(torch.autograd.Function):
    """Identity; the gradient is summed over the replicas in float32, some rows at a time, and rounded once."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = torch.empty_like(grad)
        for start in range(0, grad.shape[0], _SUM_ROWS):
            rows = grad[start : start + _SUM_ROWS]
            wide = rows.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            total[start : start + _SUM_ROWS] = collectives.all_reduce(wide, ctx.group)
        return total, None


def attach(model: nn.Module, policy: VocabPolicy, mesh: DeviceMesh | None = None) -> RingDTPLoss:
    """Give the model a Ring-DTP loss; `.detach()` puts it back."""
    return RingDTPLoss(model, mesh=mesh, policy=policy)


def attach_plain(model: nn.Module, mesh: DeviceMesh) -> SharedCount:
    """The model's own loss over several ranks: divided by the labels of all of them, as the attached one is."""
    return SharedCount(model, [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1])


def conflicts(*live: object) -> tuple[Conflict, ...]:
    """What in these live objects would undo Ring-DTP's work."""
    return tuple(found for model in live if isinstance(model, nn.Module) for found in _conflicts_of(model))


def _conflicts_of(model: nn.Module) -> list[Conflict]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return [Conflict(f"{type(model).__name__} has no head (get_output_embeddings)", "use ring_dtp_loss directly")]
    found = []
    if isinstance(getattr(vars(head).get("forward"), "__self__", None), RingDTPLoss):
        found.append(Conflict("a head that has a Ring-DTP loss already", "detach() that loss first, or use it"))
    if hasattr(head, "base_layer") or "lora_A" in dict(head.named_children()):
        found.append(Conflict("a LoRA-wrapped head", "leave the head out of target_modules, or merge the adapter"))
    elif type(head) is not nn.Linear or torch.nn.utils.parametrize.is_parametrized(head):
        found.append(Conflict(f"a head of type {type(head).__name__}", "use a plain nn.Linear as the head"))
    elif isinstance(head.weight, DTensor):
        found.append(
            Conflict(
                "a head that FSDP2 or tensor parallelism has sharded already",
                "load the model unsharded (ep_size only), attach Ring-DTP, then fully_shard with ignored_params",
            )
        )
    elif head.weight.dim() != 2 or head.weight.numel() == 0:
        found.append(
            Conflict(
                f"a head weight of shape {tuple(head.weight.shape)}, as FSDP1 and ZeRO-3 leave it",
                "use FSDP2, and attach Ring-DTP before sharding",
            )
        )
    found += [
        Conflict(f"{name}={value}, applied to the logits by the model itself", "use ring_dtp_loss with this option")
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if (value := getattr(getattr(model, "config", None), name, None)) not in (None, 1, 1.0)
    ]
    return found


def diagnose(stats: RingStats) -> tuple[str, ...]:
    """What the counters say is wrong, in words with figures."""
    told = []
    if not stats.calls:
        told.append("vocab: no loss has gone through the ring; is the model's loss_function still ours?")
    if stats.busy_s and stats.wait_s > 0.25 * stats.busy_s:
        share = stats.wait_s / stats.busy_s
        told.append(
            f"vocab: bound by synchronisation: {share:.0%} of {stats.busy_s:.2f} s was spent waiting for other ranks; "
            "a smaller vocabulary group P or a larger budget_bytes sends less often"
        )
    if stats.calls and stats.tile_tokens < 64 and stats.rows / stats.calls > 64:
        told.append(
            f"vocab: strips of {stats.tile_tokens} tokens are thin for the GEMM; a larger budget_bytes widens them"
        )
    return tuple(told)
