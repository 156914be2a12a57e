"""A model that is described before it holds anything: parameters on the meta device, buffers real.

Whoever shards it needs no memory for what other ranks will hold; `materialize` then gives every rank its own part, and
`fill_random` (or `checkpoint_files.read`) the values.

Note [Recipe]
The family's own `_init_weights` runs once over the meta parameters while a dispatch mode writes down what it does to
each: in-place operations with plain numbers (normal_, zero_, fill_ ...) on a stretch of its elements. Replayed piece by
piece, each piece from a generator of its own, seeded by (seed, parameter, operation, piece), the values of an element
depend on nothing else: any rank can make any stretch of any parameter, and all of them make the same.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steppe.core.errors import ConfigError
from steppe.integrations.transformers import has_experts
from steppe.runtime.sharded import flat_range, local

PIECE_ELEMENTS: Final = 1 << 18  # that are made at a time; part of the values' definition
_ABSOLUTE: Final = ("normal_", "uniform_", "fill_", "zero_")  # what was there before doesn't matter to these
_RELATIVE: Final = ("mul_", "div_", "add_", "sub_", "clamp_", "erfinv_")


@dataclass(frozen=True)
class Write:
    """One in-place operation on the elements `start` .. `stop` of a parameter, row-major."""

    operation: str
    numbers: tuple[float, ...]
    start: int
    stop: int

    def replay(self, stretch: torch.Tensor, generator: torch.Generator) -> None:
        random = {"generator": generator} if self.operation in ("normal_", "uniform_") else {}
        getattr(stretch, self.operation)(*self.numbers, **random)


Recipe = tuple[Write, ...]


@dataclass(frozen=True)
class Skeleton:
    """A causal language model without weights, and how its family would make each of them, by parameter name."""

    model: Any
    recipes: Mapping[str, Recipe]


def skeleton(config: Any, *, dtype: torch.dtype, attention: str = "auto", experts: str = "grouped_mm") -> Skeleton:
    """The model of a transformers configuration with its parameters on the meta device and its buffers filled.

    Peak: the buffers. Raises: ConfigError where transformers doesn't know the model or the implementation asked for,
        or for an initialisation that isn't written down (Note [Recipe]).
    """
    from transformers import AutoModelForCausalLM

    chosen = None if attention == "auto" else attention
    told = {"experts_implementation": experts} if has_experts(config) else {}  # a dense family refuses the word
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, attn_implementation=chosen, **told
            )
    except (ValueError, ImportError, KeyError) as failure:
        raise ConfigError(
            f"model {config.model_type}", got=f"{failure}", allowed="a causal language model of transformers",
            remedy="check model.config, model.shape, model.attention and model.experts",
        ) from failure  # fmt: skip
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
        vars(module).pop("_is_hf_initialized", None)
    with _Recorder(model) as recorder:
        model.initialize_weights()
    return Skeleton(model, recorder.recipes())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter uninitialised memory for this rank's part of it. Objects and ties stay as they are.

    Peak: this rank's shards, and one of them more where FSDP2 pads it.
    """
    sharded = any(isinstance(p, torch.Tensor) and hasattr(p, "_local_tensor") for p in model.parameters())
    if sharded:  # Module._apply swaps the insides of DTensors, and FSDP2's override of it follows
        model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
        return
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fresh = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fresh)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


@torch.no_grad()
def fill_random(model: nn.Module, recipes: Mapping[str, Recipe], seed: int) -> None:
    """Make this rank's part of every parameter as the family would, from the seed (Note [Recipe]).

    Peak: one piece of PIECE_ELEMENTS float32. Exactness: bitwise over any number of ranks and any way to shard.
    """
    room = torch.empty(PIECE_ELEMENTS, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        start, stop = flat_range(parameter)
        own = local(parameter).view(-1)
        for place, stretch in _made(name, parameter.numel(), recipes[name], seed, start, stop, room):
            own[place - start : place - start + len(stretch)] = stretch


def _made(
    name: str, num_elements: int, recipe: Recipe, seed: int, start: int, stop: int, room: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """(place, values) of the elements `start` .. `stop` of a parameter, made in `room`: valid until the next."""
    generator = torch.Generator()
    for piece in range(start // PIECE_ELEMENTS, -(-stop // PIECE_ELEMENTS)):
        first = piece * PIECE_ELEMENTS
        whole = room[: num_elements - first].zero_()
        for number, write in enumerate(recipe):
            low, high = max(write.start, first), min(write.stop, first + len(whole))
            if low < high:
                generator.manual_seed(_seed_of(seed, name, number, piece))
                write.replay(whole[low - first : high - first], generator)
        low, high = max(start, first), min(stop, first + len(whole))
        yield low, whole[low - first : high - first]


def _seed_of(seed: int, name: str, number: int, piece: int) -> int:
    word = hashlib.blake2b(f"{seed}/{name}/{number}/{piece}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") & (2**63 - 1)


class _Recorder(TorchDispatchMode):
    """Writes down what happens in place to a model's meta parameters, and which of its buffers are written."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._alive = (*model.parameters(), *model.buffers())  # so that no storage's address is met twice
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}
        self._unwritten = {b.untyped_storage()._cdata: name for name, b in model.named_buffers()}
        self._sizes = {name: p.numel() for name, p in model.named_parameters()}
        self._writes: dict[str, list[Write]] = {name: [] for name in self._sizes}

    def recipes(self) -> dict[str, Recipe]:
        """What counts of each parameter's writes. Raises: ConfigError for what was never written."""
        for name, writes in self._writes.items():
            if not writes or (writes[0].start, writes[0].stop) != (0, self._sizes[name]):
                raise _unknown(name, "no value for some of its elements")
        for name in self._unwritten.values():
            raise _unknown(name, "a buffer that only the constructor fills")
        return {name: tuple(writes) for name, writes in self._writes.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func._schema.is_mutable and target is not None:
            storage = target.untyped_storage()._cdata
            self._unwritten.pop(storage, None)
            if storage in self._names:
                self._write(self._names[storage], target, func, args[1:], kwargs)
        return func(*args, **kwargs)

    def _write(self, name: str, target: torch.Tensor, func: Any, rest: Any, kwargs: Any) -> None:
        operation = func._schema.name.removeprefix("aten::")
        given = [*rest, *(value for key, value in kwargs.items() if key != "generator")]
        numbers = tuple(value for value in given if isinstance(value, (int, float)))
        known = operation in (*_ABSOLUTE, *_RELATIVE) and len(numbers) == len([v for v in given if v is not None])
        if not (known and target.is_contiguous()):
            raise _unknown(name, operation)
        start = target.storage_offset()
        write = Write(operation, numbers, start, start + target.numel())
        if operation in _ABSOLUTE and target.numel() == self._sizes[name]:
            self._writes[name].clear()
        self._writes[name].append(write)


def _unknown(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"random weights of {name}", got=what, allowed="an initialisation by in-place numbers (normal_, zero_, ...)",
        remedy="start from safetensors: model.weights = a directory",
    )  # fmt: skip
