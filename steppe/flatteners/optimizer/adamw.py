"""OffloadStreamAdamW: AdamW whose master weights and moments live on the host, pipelined bucket by bucket."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from steppe.core.errors import CheckpointError, ConfigError, ShapeError, SteppeError
from steppe.flatteners.optimizer import memory, norms, state
from steppe.flatteners.optimizer.budget import DEFAULT_BUCKET_BYTES, OptimizerPolicy
from steppe.flatteners.optimizer.engine import Engine, Wiring, one_device
from steppe.flatteners.optimizer.pipeline import Task
from steppe.flatteners.optimizer.rows import Row, check_gradient, check_parameter, flat_like, flat_of
from steppe.flatteners.optimizer.schedule import clip_factor, fold
from steppe.runtime import scopes, sharded

Found = list[tuple[torch.Tensor, dict[str, Any]]]


class OffloadStreamAdamW(torch.optim.Optimizer):
    """AdamW with float32 masters and moments in host memory; gradients and parameters travel in their own dtype.

    State is allocated and first touched at the first step, by `materialize()`, or when `.state` is read. `max_norm`
    clips by the global norm (infinity: only watch it; `grad_norm` holds it) and skips a step whose norm isn't finite.
    With `overlap_backward` gradients leave during backward and `p.grad` is None afterwards; call `materialize()` before
    the first backward, and `set_is_last_backward(False)` for all but the last of several micro-batches. `replicas`
    says how many ranks hold the same part of a parameter, where DTensor placements don't tell. `wiring` hands in lanes,
    arenas and this process's share of the CPUs.

    Parameters that share memory are refused when their state is opened or follows them; views of one storage that don't
    meet are fine, interleaved ones too, whatever their strides. Where no version counter sees a write (`.data`), 64
    elements a tensor are looked at: a 16-bit parameter written there in less than about 1/64 of its elements may be set
    back by the next step. Write in place under `torch.no_grad()`, or call `refresh_masters()`.

    Peak: on the device slots * bucket_bytes with update="device", nothing but gradients in flight with "host"; on the
    host 12 bytes a parameter (16 with overlap_backward) and 2 * slots * bucket_bytes of rings. See `budget.entries`.
    Exactness: bitwise over bucket size, slots, streams, threads, update site, split points and, with one backward a
    step, overlap_backward. Error against float64 no larger than torch.optim.AdamW's in float32.
    Raises: ConfigError, ShapeError and CheckpointError before anything has changed; HostMemoryError before anything is
    allocated; LaneError and LaneTimeout naming lane, stage and bucket.
    Source: Loshchilov and Hutter, Decoupled weight decay regularization (arXiv 1711.05101); arXiv 2609.14306.
    """

    state_is_made_when_read = True  # whoever only looks on (a Meter) leaves `.state` alone

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        slots: int = 2,
        update: Literal["host", "device"] = "host",
        overlap_backward: bool = False,
        max_norm: float | None = None,
        threads: int | None = None,
        streams: int | Literal["auto"] = "auto",
        numa: Literal["auto", "off"] = "auto",
        maximize: bool = False,
        replicas: norms.Replicas | None = None,
        wiring: Wiring | None = None,
    ) -> None:
        self.policy = OptimizerPolicy(bucket_bytes, slots, update, overlap_backward, max_norm, threads, streams, numa)
        self.grad_norm: float | None = None
        self.num_steps = self.num_skipped = 0
        self._wiring, self._replicas = wiring or Wiring(), replicas
        self._engine: Engine | None = None
        self._places: list[list[torch.Tensor]] = []
        self._memory: memory.Places = []  # where the parameters were found to share none
        self._torn = ""
        self._is_last_backward = True
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """Each parameter's step, exp_avg, exp_avg_sq and master; reading it allocates them.

        torch.distributed.checkpoint asks for it before it saves or loads, and would otherwise run a step of zeros.
        """
        if any(p.requires_grad and p not in self._rows for p in self._parameters()):
            self.materialize()
        found: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        found.update({p: self._rows[p].entry for p in self._parameters() if p in self._rows})
        return found

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """torch's constructor assigns an empty one; anything else goes through `load_state_dict`."""
        if value:
            raise CheckpointError("optimizer.state", got="an assignment", allowed="load_state_dict", remedy="use that")

    @property
    def _rows(self) -> dict[torch.Tensor, Row]:
        return self._engine.rows if self._engine is not None else {}

    def materialize(self) -> None:
        """Allocate and first touch the state of every trainable parameter that has none. Masters are taken here."""
        self._check_process()
        self._follow()
        self._open([p for p in self._parameters() if p.requires_grad])

    @torch.no_grad()
    def _open(self, parameters: list[torch.Tensor]) -> None:
        missing = [p for p in dict.fromkeys(parameters) if p not in self._rows]
        if not missing:
            return
        for parameter in missing:
            check_parameter(parameter)
        memory.check_apart([*self._with_state(), *missing])
        engine = self._engine or Engine(self.policy, self._wiring, one_device(list(self._parameters())))
        engine.open(missing)
        self._engine = engine
        self._memory = memory.places(self._with_state())
        engine.arrivals.is_last_backward = self._is_last_backward
        if self.policy.overlap_backward:
            engine.arrivals.watch(self._parameters(), self._row_of)

    def _check_process(self) -> None:
        if self._engine is not None:
            self._engine.check_process()

    def _row_of(self, parameter: torch.Tensor) -> Row | None:
        self._check_process()
        return self._rows.get(parameter)

    def _with_state(self) -> list[torch.Tensor]:
        return [p for p in dict.fromkeys(self._parameters()) if p in self._rows]

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def refresh_masters(self) -> int:
        """Compare all weights with their masters and take those that were changed from outside; how many elements.

        A step does this by itself for changes that version counters, addresses or a probe of each tensor show.
        """
        before = self._engine.refreshed if self._engine else 0
        for row in self._rows.values():
            row.forget()
        if self._engine is not None:
            self._engine.reconcile()
        return self._engine.refreshed - before if self._engine else 0

    def _adopt_swapped(self) -> None:
        """State follows its place in the groups when the parameter objects there are replaced (as wrappers do)."""
        places = [list(group["params"]) for group in self.param_groups]
        moved = [
            (old, new)
            for before, now in zip(self._places, places)
            for old, new in zip(before, now)
            if old is not new and old in self._rows and new not in self._rows
        ]
        for old, new in moved:
            self._rows[old].replace(new)
            self._rows[new] = self._rows.pop(old)
        if moved and self._engine is not None and self.policy.overlap_backward:
            self._engine.arrivals.watch(self._parameters(), self._row_of)
        self._places = places

    # --- a step ------------------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last: bool) -> None:
        """Announce whether the next backward is the last of this step, so that its norm can be summed meanwhile."""
        self._is_last_backward = is_last
        if self._engine is not None:
            self._engine.arrivals.is_last_backward = is_last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those that have left during backward included."""
        if self._engine is not None:
            self._engine.arrivals.land()
            for row in self._rows.values():
                row.arrivals, row.squares = 0, None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; the others keep their state and step count."""
        self._check_process()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with scopes.label("optimizer"):
            self._step()
        return loss

    def _step(self) -> None:
        if self._torn:
            raise SteppeError(f"an earlier step stopped midway ({self._torn}): its parameters are partly updated. "
                              "Load a saved state to go on")  # fmt: skip
        settings = [_settings(group) for group in self.param_groups]
        self._check_gradients()
        self._follow()
        self._open([p for p in self._parameters() if p.requires_grad or p.grad is not None])
        if self._engine is None:  # nothing to train on this rank, but the norm is everybody's
            self.grad_norm = self._norm([])
            return
        found = self._gradients()
        self.grad_norm = self._norm([(row, flat) for row, flat, _ in found])
        if self.grad_norm is not None and not math.isfinite(self.grad_norm):
            self.num_skipped += 1
        else:
            self._update(found, settings)
            self.num_steps += 1
        for row, _, _ in found:
            row.arrivals, row.squares = 0, None

    def _follow(self) -> None:
        """State follows objects that were swapped and memory that was laid out anew; another device is refused."""
        device = one_device(list(self._parameters()))
        if self._engine is not None and device != self._engine.device:
            raise ShapeError("device of the parameters", got=device, allowed=f"{self._engine.device}, as before",
                             remedy="move the model before the optimizer's first step")  # fmt: skip
        self._adopt_swapped()
        held = self._with_state()
        if (places := memory.places(held)) != self._memory:
            memory.check_apart(held)
            self._memory = places
        for parameter, row in self._rows.items():
            row.replace(parameter)

    def _check_gradients(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                check_parameter(parameter)
                check_gradient(parameter.grad, parameter)

    def _gradients(self) -> list[tuple[Row, torch.Tensor, int]]:
        """Rows that take part in this step, with their flat gradients and group numbers."""
        engine, found = self._engine, []
        assert engine is not None
        for number, group in enumerate(self.param_groups):
            for parameter in dict.fromkeys(group["params"]):
                row = self._rows.get(parameter)
                if row is None:
                    continue
                if self.policy.overlap_backward:
                    if parameter.grad is not None:
                        engine.arrivals.take(parameter, row)
                    if row.arrivals:
                        assert row.gradient is not None
                        found.append((row, row.gradient, number))
                elif parameter.grad is not None:
                    found.append((row, flat_like(sharded.local_as(parameter.grad, parameter), row.own), number))
        engine.arrivals.land()
        return found

    def _norm(self, gradients: list[tuple[Row, torch.Tensor]]) -> float | None:
        if self.policy.max_norm is None:
            return None
        group = norms.group_of(self._parameters())
        count = self._replicas or (lambda parameter: sharded.replicas(parameter, group))
        summed = self._engine.squares_of(gradients) if self._engine is not None else []
        parts = [(part, count(row.parameter)) for part, (row, _) in zip(summed, gradients)]
        device = next((sharded.local(p).device for p in self._parameters()), torch.device("cpu"))
        return norms.total_norm(parts, group, device)

    def _update(self, found: list[tuple[Row, torch.Tensor, int]], settings: list[dict[str, Any]]) -> None:
        engine = self._engine
        assert engine is not None
        engine.reconcile()
        scale = clip_factor(self.grad_norm, self.policy.max_norm) if self.grad_norm is not None else 1.0
        tasks, twins = [], []
        for row, gradient, number in found:
            constants = fold(t=int(row.step) + 1, scale=scale, **settings[number])
            flat = flat_of(row.own)
            if not row.dense:
                twins.append((row.own, flat))
            tasks.append(Task(row, gradient, flat, constants))
        self._torn = "it did not return"
        try:
            engine.run(tasks)
        except BaseException as failure:
            self._torn = repr(failure)
            raise
        for own, flat in twins:
            own.copy_(flat.view(own.shape))
        for task in tasks:
            task.row.step += 1
            task.row.remember()
        self._torn = ""

    # --- torch's bookkeeping -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own. Raises ConfigError or ShapeError, with nothing added."""
        super().add_param_group(param_group)
        try:
            _settings(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                check_parameter(parameter)
        except Exception:
            self.param_groups.pop()
            raise
        self._places.append(list(self.param_groups[-1]["params"]))

    def state_dict(self) -> dict[str, Any]:
        """torch's structure, {step, exp_avg, exp_avg_sq, master} a parameter; empty before there is any state.

        Tensors are views of the slabs: copy them (or save) before the next step.
        """
        if self._engine is None:
            return _without_state(self)
        self._follow()
        with torch.no_grad():
            self._engine.arrivals.land()
            self._engine.reconcile()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a saved state straight into the slabs, never cast. torch.optim.AdamW's states load as well.

        Weights are not changed; where they are not their loaded masters rounded, they win.
        Raises: CheckpointError with nothing changed.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_groups, saved = deepcopy(list(state_dict["param_groups"])), state_dict["state"]
        self._follow()
        groups = state.checked_groups(self.param_groups, saved_groups)
        for group in groups:
            _settings(group)
        entries = state.checked_state(self.param_groups, saved_groups, saved)
        self._open(list(entries))
        if self._engine is not None:
            self._engine.arrivals.land()
        for parameter, row in self._rows.items():
            state.fill(row, entries.get(parameter))
        for own, loaded in zip(self.param_groups, groups):
            own.update(loaded)
        self._torn = ""
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OffloadStreamAdamW holds threads and host slabs; save optimizer.state_dict() instead")

    def stats(self) -> dict[str, Any]:
        """Which kernel runs, on how many threads and streams, host bytes, steps taken and skipped, and last timings."""
        counted = {"steps": self.num_steps, "skipped": self.num_skipped, "grad_norm": self.grad_norm}
        return counted | (self._engine.stats() if self._engine is not None else {})

    def close(self) -> None:
        """Remove the hooks and end the threads; the optimizer can't step afterwards."""
        if self._engine is not None:
            self._engine.close()
        self._torn = "the optimizer was closed"


def _without_state(optimizer: OffloadStreamAdamW) -> dict[str, Any]:
    """torch's state dict before the first step, hooks included, without allocating anything."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)
    numbers = {id(p): i for i, p in enumerate(optimizer._parameters())}
    groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    packed: dict[str, Any] = {"state": {}, "param_groups": groups}
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        packed = hook(optimizer, packed) or packed
    return packed


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters as plain numbers, checked."""
    lr, betas = _number(group["lr"]), tuple(_number(b) for b in group["betas"])
    eps, weight_decay = _number(group["eps"]), _number(group["weight_decay"])
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ConfigError(name, got=value, allowed="a finite number from 0", remedy=f"check the group's {name}")
    if len(betas) != 2 or not all(0.0 <= b < 1.0 for b in betas):
        raise ConfigError("betas", got=betas, allowed="two numbers from 0, below 1", remedy="(0.9, 0.999) is usual")
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": bool(group["maximize"])}


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
