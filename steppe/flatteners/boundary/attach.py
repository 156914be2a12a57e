"""SCO: the object a user holds, and how it joins a live model and leaves it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from steppe.core.errors import ConfigError
from steppe.core.policy import Conflict, Off
from steppe.core.shapes import MachineShape
from steppe.flatteners.boundary import extras, joining
from steppe.flatteners.boundary.budget import BoundaryPolicy
from steppe.flatteners.boundary.checkpoint import Checkpointer, modules_of
from steppe.flatteners.boundary.compiling import Compiler
from steppe.flatteners.boundary.parcels import Counts, Transit
from steppe.flatteners.boundary.pins import Timings
from steppe.flatteners.boundary.replay import tensors_of
from steppe.flatteners.boundary.report import BoundaryStats, IdleOffloadError, diagnose, double_pins, read, refuse_idle
from steppe.flatteners.boundary.schedule import Candidate
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import Lane, open_lane
from steppe.runtime.link import HostLink

__all__ = ["SCO", "USES_LINK", "BoundaryStats", "IdleOffloadError", "attach", "conflicts", "diagnose"]

USES_LINK: Final = True


class SCO:
    """Selective Checkpoint Offload: blocks are recomputed in backward, their inputs wait on the host.

    `device` is that of the first tensor seen where it is not given; `lanes` are (to_host, to_device); `arena` holds
    the host blocks; `machine` gives the link's rate to `offload_extra="auto"`.
    Peak: 2 boundaries on the device, `budget.entries`.
    Exactness: bitwise those of `torch.utils.checkpoint`.
    Source: docs/boundary.md.
    """

    def __init__(
        self,
        policy: BoundaryPolicy | None = None,
        device: torch.device | str | None = None,
        lanes: tuple[Lane, Lane] | None = None,
        arena: Arena | None = None,
        machine: MachineShape | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, BoundaryPolicy):
            raise ConfigError("SCO", got=repr(policy), allowed="a BoundaryPolicy", remedy="SCO(BoundaryPolicy(...))")
        self.policy = policy or BoundaryPolicy()
        self._device = None if device is None else torch.device(device)
        self._lanes, self._owns_lanes = lanes, lanes is None
        self._arena = arena or Arena("boundary", self.policy.host_bytes)
        self._rate = (machine or MachineShape()).to_device_rate
        self._counts = Counts()
        self._compiler = Compiler(self.policy)
        self._candidates: list[Candidate] = []
        self._engine: Checkpointer | None = None
        self._indices: dict[int, int] = {}  # id of a block, which `_undo` keeps alive -> its boundary
        self._undo: list[Callable[[], object]] = []
        self._paused = False

    @property
    def pins_topk(self) -> bool:
        """Whether a recompute gets the router's choices from the forward."""
        return self.policy.pin_topk

    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`; in backward it is recomputed and its tensors come back from the host.

        Without gradients it is a plain call. Raises: IdleOffloadError when an earlier forward and backward asked for
        offload and moved nothing; ConfigError; HostMemoryError when the host cap is too low; LaneError.
        """
        return self._run(None, fn, args, kwargs)

    def at(self, index: int) -> Callable[..., Any]:
        """`checkpoint` for boundary `index`, for policies that name boundaries."""

        def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._run(index, fn, args, kwargs)

        return checkpoint

    def apply(self, model_or_modules: nn.Module | Iterable[nn.Module]) -> SCO:
        """Join a Hugging Face model, a model with one list of equal blocks, or the blocks themselves.

        Raises: ConfigError when no blocks are found, or this SCO or another one is applied already.
        """
        if self._undo:
            raise ConfigError("SCO", got="a second apply", allowed="one model", remedy="call detach() first")
        root = model_or_modules if isinstance(model_or_modules, nn.Module) else None
        joining.refuse_joined(root)
        if root is not None and joining.is_transformers(root):
            blocks = joining.blocks_of_transformers(root)
            self._undo.append(joining.switch_on(root, self.checkpoint, self._pause))
        else:
            blocks = list(dict.fromkeys(joining.find_blocks(model_or_modules)))  # a shared block is wrapped once
            joining.refuse_joined(*blocks)
            self._undo += [joining.wrap_forward(block, self.at(index)) for index, block in enumerate(blocks)]
        self._check_named(len(blocks))
        self._indices = {id(block): index for index, block in enumerate(blocks)}
        self._undo.append(partial(blocks.clear))  # keeps the blocks, and so their ids, until then
        self._compiler.attach(blocks)
        if root is not None:
            hook = root.register_forward_hook(self._after_forward)
            before = root.register_forward_pre_hook(self._before_forward)
            self._undo += [hook.remove, before.remove]
        return self

    def _check_named(self, num_blocks: int) -> None:
        """Raises: ConfigError when the policy names a boundary that these blocks don't have; nothing stays applied."""
        beyond = [index for index, _ in self.policy.named if index >= num_blocks]
        if beyond:
            self.detach()
            raise ConfigError(
                "per_boundary", got=f"boundary {beyond[0]} of {num_blocks} blocks",
                allowed=f"0 to {num_blocks - 1}", remedy="name boundaries that the model has",
            )  # fmt: skip

    def detach(self) -> None:
        """Leave the model as it was. Graphs in flight keep working."""
        while self._undo:
            self._undo.pop()()
        self._indices.clear()
        self._compiler.detach()

    def reserve(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Allocate (bytes, count) host blocks before the first step; `budget.host_blocks` says which."""
        for num_bytes, count in blocks:
            self._arena.reserve(num_bytes, count)

    def drain(self) -> None:
        """Wait for every copy under way and give back what nobody needs."""
        if self._engine is not None:
            self._engine.chain.settle()
            self._engine.chain.transit.drain()

    def close(self) -> None:
        """Detach, wait for the copies, and end the lanes that SCO opened itself."""
        self.detach()
        self.drain()
        if self._owns_lanes and self._lanes is not None:
            for lane in self._lanes:
                lane.close()

    def stats(self) -> BoundaryStats:
        """What happened so far."""
        if self._engine is not None:
            self._engine.chain.transit.sweep()
            self._engine.chain.transit.read_stalls()
        return read(self._counts, self._arena, self.policy, self._compiler.graphs)

    def __reduce_ex__(self, _: Any) -> Any:
        """Copies and pickles of a model that it is applied to ask for it."""
        raise joining.no_copy()

    def report(self) -> tuple[Candidate, ...]:
        """What `offload_extra="auto"` measured, best first: operator, bytes, recompute and reload time, choice, why."""
        return tuple(self._candidates)

    def _run(self, index: int | None, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        modules = modules_of(fn)
        if index is None:
            index = next((self._indices[id(m)] for m in modules if id(m) in self._indices), None)
        fn = self._compiler.of_block(modules[0] if modules else None, fn)
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        engine = self._engine or self._start(args, kwargs)
        if engine.chain.backwards and engine.chain.passed and not self._counts.bytes_offloaded:
            refuse_idle(f"none of {self._counts.offloaded} boundaries moved", self._counts.left_alone)
        if engine.timings is not None and engine.timings.recomputes >= extras.PROFILED_RECOMPUTES:
            engine.wanted, self._candidates = extras.choose(
                engine.timings, engine.wanted, self._rate, self.policy.min_bytes
            )
            engine.timings = None
        return engine.run(index, fn, args, kwargs)

    def _start(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Checkpointer:
        if self._device is None:
            self._device = next((t.device for t in tensors_of((args, kwargs))), torch.device("cpu"))
        if self._lanes is None:
            self._lanes = open_lane("boundary out", self._device), open_lane("boundary in", self._device)
        transit = Transit(*self._lanes, self._arena, self._counts)
        self._engine = Checkpointer(self.policy, self._device, transit, self._counts)
        if self.policy.offload_extra == "auto":
            self._engine.timings = Timings()
        return self._engine

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def _before_forward(self, root: nn.Module, inputs: object) -> None:
        tiny = self._counts.left_alone["tiny"]
        self._before = self._counts.boundaries, self._counts.bytes_offloaded, self._passed(), tiny

    def _after_forward(self, root: nn.Module, inputs: object, outputs: object) -> None:
        """The boundary in transit has left, and a forward that moved nothing is refused."""
        if self._engine is not None:
            self._engine.chain.settle()
        if not (root.training and torch.is_grad_enabled()) or self._paused:
            return
        boundaries, moved, passed, tiny = self._before
        if self._counts.boundaries == boundaries:
            refuse_idle("a training forward in which no block went through SCO", {})
        if moved and self._counts.left_alone["tiny"] > tiny:
            return  # a micro-batch of a few tokens among others
        if self._passed() > passed and self._counts.bytes_offloaded == moved:
            refuse_idle("a training forward whose boundaries all stayed", self._counts.left_alone)

    def _passed(self) -> int:
        return 0 if self._engine is None else self._engine.chain.passed


def attach(
    model: nn.Module, policy: BoundaryPolicy | Off, mesh: object = None, *, link: HostLink | None = None
) -> SCO | None:
    """SCO on a model, as its policy says; None when that is off. `mesh` makes no difference: boundaries are local.

    On a shared `link` its copies are the urgent ones: a backward waits for every reload, and that for its own offload.
    """
    if isinstance(policy, Off):
        return None
    lanes = None
    if link is not None:
        lanes = link.lane("boundary out", "to_host", urgent=True), link.lane("boundary in", "to_device", urgent=True)
    return SCO(policy, lanes=lanes).apply(model)


def conflicts(*live: object) -> tuple[Conflict, ...]:
    """What of these live objects (models, contexts) would undo SCO's work, and the remedy."""
    found: list[Conflict] = []
    for item in live:
        if isinstance(item, torch.autograd.graph.save_on_cpu):
            found.append(Conflict("save_on_cpu moves what SCO moves", "leave that context out"))
        if isinstance(item, SCO):  # a run under way: what its last step held twice
            found += double_pins(item.stats())
        if isinstance(item, nn.Module):
            found += _conflicts_of_model(item)
    return tuple(found)


def _conflicts_of_model(model: nn.Module) -> Iterable[Conflict]:
    names = {type(module).__name__ for module in model.modules()}
    for wrapper in sorted(names & {"CheckpointWrapper", "OffloadWrapper"}):
        yield Conflict(f"{wrapper} already checkpoints blocks of this model", "apply SCO to the unwrapped model")
    if sorted(names & {"PipelineStage"}):
        yield Conflict("pipeline parallelism keeps boundaries of its own", "use SCO without pipeline stages")
    whole = "OptimizedModule" in names or getattr(model, "_compiled_call_impl", None) is not None
    if whole:
        yield Conflict(
            "torch.compile around the whole model gives up at SCO's hooks, silently",
            'compile inside the checkpoint: BoundaryPolicy(compile="parts")',
        )
