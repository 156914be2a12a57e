"""Names for a model's and an optimizer's memory: what tells the Meter which storage is a weight, which a gradient.

Parameters and buffers are "weights". Their gradients are "gradients" when accumulated. FSDP2's unsharded parameters,
the buffers they are gathered through and their unsharded gradients are "gathered"; what its reduce-scatter needs is
"communication". An optimizer's states and all that its step makes are "optimizer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from steppe.core.errors import ConfigError
from steppe.runtime import scopes


class Books(Protocol):
    """What is told the names: the Meter."""

    def own(self, tensors: Iterable[torch.Tensor], owner: str) -> None: ...

    def updating(self, depth: int) -> None: ...


class Naming:
    """Names what exists of `model` and `optimizer` and hooks what is still to come; `remove()` takes the hooks off."""

    def __init__(self, books: Books, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._books = books
        self._undo: list[Callable[[], None]] = []
        self._step_label: scopes.label | None = None
        try:
            if model is not None:
                self._name_model(model)
            if optimizer is not None:
                self._name_optimizer(optimizer)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take every hook off again, also in the middle of a step that failed."""
        self._end_step()
        while self._undo:
            self._undo.pop()()

    def _name_model(self, model: torch.nn.Module) -> None:
        groups = list(_fsdp_groups(model))
        unsharded = {id(p._unsharded_param) for g in groups for p in g.fsdp_params if hasattr(p, "_unsharded_param")}
        managed = {id(p.sharded_param) for g in groups for p in g.fsdp_params} | unsharded
        for group in groups:
            self._follow(group)
        self._books.own(model.buffers(), "weights")
        for parameter in model.parameters():
            if id(parameter) not in unsharded:
                self._books.own([parameter], "weights")
            if parameter.grad is not None and id(parameter) not in unsharded:
                self._books.own([parameter.grad], "gradients")
            if id(parameter) not in managed and parameter.requires_grad:
                self._on_gradient(parameter, "gradients")

    def _on_gradient(self, parameter: torch.Tensor, owner: str) -> None:
        def name(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._books.own([parameter.grad], owner)

        handle = parameter.register_post_accumulate_grad_hook(name)
        # First in line: another hook may take the gradient away. Autograd goes by the order of insertion, which
        # `move_to_end` does not touch.
        hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for other in [key for key in hooks if key != handle.id]:
            hooks[other] = hooks.pop(other)
        self._undo.append(handle.remove)

    def _follow(self, group: Any) -> None:
        """Name what one FSDP2 parameter group holds, now and at its three turning points."""
        hooked: set[int] = set()

        def gathered() -> None:
            for parameter in group.fsdp_params:
                self._books.own([*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors], "gathered")
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None and unsharded.requires_grad and id(unsharded) not in hooked:
                    hooked.add(id(unsharded))
                    self._on_gradient(unsharded, "gathered")

        def reduced() -> None:
            shards = [parameter.sharded_param for parameter in group.fsdp_params]
            self._books.own([shard.grad for shard in shards if shard.grad is not None], "gradients")

        self._books.own([parameter.sharded_param for parameter in group.fsdp_params], "weights")
        gathered()
        reduced()
        self._around(group, "unshard", "gathered", None)
        self._around(group, "wait_for_unshard", "gathered", gathered)
        self._around(group, "post_backward", "communication", reduced)

    def _around(self, owner: Any, method: str, name: str, after: Callable[[], None] | None) -> None:
        inner = getattr(owner, method)

        @wraps(inner)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            with scopes.label(name):
                out = inner(*args, **kwargs)
            if after is not None:
                after()
            return out

        self._undo.append(replace(owner, method, labelled))

    def _name_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer = _unwrapped(optimizer)
        self._books.own(_state_tensors(optimizer), "optimizer")
        before = optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        self._undo.append(before.remove)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._end_step()
            self._books.own(_state_tensors(optimizer), "optimizer")

        self._undo.append(optimizer.register_step_post_hook(after).remove)

    def _begin_step(self) -> None:
        self._end_step()  # a step that failed had no end
        self._step_label = scopes.label("optimizer")
        self._step_label.__enter__()
        self._books.updating(+1)

    def _end_step(self) -> None:
        if self._step_label is not None:
            self._step_label.__exit__()
            self._step_label = None
            self._books.updating(-1)


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on the instance and return what puts the former state back (last one first)."""
    own = vars(owner)
    if name in own:
        former = own[name]
        setattr(owner, name, value)
        return lambda: setattr(owner, name, former)
    setattr(owner, name, value)
    return lambda: delattr(owner, name)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose step can be hooked, inside the wrapper that another library puts around it.

    Raises: ConfigError for what has none.
    """
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks"):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ConfigError(
                "optimizer", got=type(optimizer).__name__, allowed="a torch.optim.Optimizer, or a wrapper with one",
                remedy="pass the optimizer that takes the step, or several in a list",
            )  # fmt: skip
    return inner  # type: ignore[no-any-return]


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """States that lie in the optimizer; where reading them would make them (a copy of the weights, say), none."""
    if getattr(optimizer, "state_is_made_when_read", False):
        return
    for state in optimizer.state.values():
        yield from (leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor))


def _fsdp_groups(model: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of a model: one a state up to torch 2.12, several since."""
    seen: set[int] = set()
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state is not None else []
        for group in groups:
            if group is not None and id(group) not in seen:
                seen.add(id(group))
                yield group
