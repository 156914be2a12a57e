"""Joining live models: Hugging Face's own checkpointing switch, or the `forward` of plain blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from steppe.core.errors import ConfigError, ConflictError

Checkpoint = Callable[..., Any]
Undo = Callable[[], object]
_ON = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_OFF = ("activation_checkpointing_disable", "gradient_checkpointing_disable")


def is_transformers(model: object) -> bool:
    """Whether a model has Hugging Face's checkpointing switch."""
    return isinstance(model, nn.Module) and hasattr(model, "_set_gradient_checkpointing")


def blocks_of_transformers(model: nn.Module) -> list[nn.Module]:
    """The modules that Hugging Face checkpoints, in the order of the model."""
    return [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and not is_transformers(m)]


def find_blocks(model_or_modules: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks themselves, or the one list of at least two blocks of one class in a model.

    Raises: ConfigError when there is none, or more than one.
    """
    if not isinstance(model_or_modules, Iterable | nn.Module):
        raise _no_blocks(type(model_or_modules).__name__)
    if not isinstance(model_or_modules, nn.Module):
        blocks = list(model_or_modules)
        if blocks and all(isinstance(block, nn.Module) for block in blocks):
            return blocks
        raise _no_blocks("an empty list" if not blocks else "something that is no module")
    lists = [m for m in model_or_modules.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and _is_uniform(m)]
    outermost = [m for m in lists if not any(m is not other and m in set(other.modules()) for other in lists)]
    if len(outermost) != 1:
        raise _no_blocks(f"a model with {len(outermost)} lists of equal blocks")
    return list(outermost[0])


def switch_on(model: Any, checkpoint: Checkpoint, paused: Callable[[bool], object]) -> Undo:
    """Hand `checkpoint` to Hugging Face's switch, and keep it there.

    Trainer switches checkpointing on again when training starts and would put its own function in: the switches of
    this instance put ours in instead. `paused(True)` is called when somebody switches checkpointing off on purpose.
    Input gradients, which Hugging Face switches on with reentrant checkpointing in mind, are left as they are: they
    would keep the first boundary on the device.
    """
    was_on = {id(m): m.gradient_checkpointing for m in blocks_of_transformers(model)}
    functions = {id(m): vars(m).get("_gradient_checkpointing_func") for m in model.modules()}

    def on(*args: Any, **kwargs: Any) -> None:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
        paused(False)

    def off(*args: Any, **kwargs: Any) -> None:
        model._set_gradient_checkpointing(enable=False, gradient_checkpointing_func=checkpoint)
        paused(True)

    switches = dict.fromkeys(_ON, on) | dict.fromkeys(_OFF, off)
    switches = {name: switch for name, switch in switches.items() if hasattr(model, name)}
    on.of_sco = off.of_sco = True  # type: ignore[attr-defined]
    for name, switch in switches.items():
        setattr(model, name, switch)
    on()

    def undo() -> None:
        for name in switches:
            vars(model).pop(name, None)
        model._set_gradient_checkpointing(enable=False)
        for module in model.modules():
            if id(module) in was_on:
                module.gradient_checkpointing = was_on[id(module)]
            if functions.get(id(module)) is not None:
                module._gradient_checkpointing_func = functions[id(module)]

    return undo


def refuse_joined(*modules: nn.Module | None) -> None:
    """Raises: ConfigError for what another SCO has joined: both would move the same inputs, and part in any order."""
    for module in modules:
        names = () if module is None else ("forward", *_ON)
        if any(getattr(vars(module).get(name), "of_sco", False) for name in names):
            raise ConfigError(
                "SCO", got=f"a {type(module).__name__} that another SCO is applied to", allowed="one SCO a model",
                remedy="call detach() on that one first",
            )  # fmt: skip


def wrap_forward(block: nn.Module, checkpoint: Checkpoint) -> Undo:
    """Put `checkpoint` around `forward`, not `__call__`: module hooks, FSDP2's too, stay outside the recompute."""
    forward = block.forward
    had = "forward" in vars(block)
    block.forward = _Checkpointed(checkpoint, forward)

    def undo() -> None:
        if had:
            block.forward = forward
        else:
            vars(block).pop("forward", None)

    return undo


class _Checkpointed:
    """A block's forward inside the checkpoint. An object, no closure: in a copy of the block that would run the
    original, silently."""

    of_sco = True

    def __init__(self, checkpoint: Checkpoint, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._checkpoint, self._forward = checkpoint, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._checkpoint(self._forward, *args, **kwargs)

    def __reduce_ex__(self, _: Any) -> Any:
        raise no_copy()


def no_copy() -> ConflictError:
    """The refusal to copy what SCO is applied to."""
    return ConflictError(
        "a copy of the model", got="SCO is applied to it", allowed="a plain model",
        remedy="copy before apply(), or detach() first; its state_dict() can be saved at any time",
    )  # fmt: skip


def _is_uniform(modules: nn.Module) -> bool:
    children = list(modules.children())
    return len(children) >= 2 and len({type(child) for child in children}) == 1


def _no_blocks(got: str) -> ConfigError:
    return ConfigError(
        "SCO", got=got, allowed="a Hugging Face model, a model with one list of equal blocks, or the blocks",
        remedy="pass the blocks: sco.apply(model.layers)",
    )  # fmt: skip
