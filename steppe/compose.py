"""Join any subset of the four flatteners to a live model; knows none of them by name.

Each flattener's `attach.py` gives `attach(model, policy, mesh)`, `conflicts(*live)` and `diagnose(stats)`. What it
attaches has `detach()` and `stats()`. A module may say more about itself, and only then is it asked:

* `MESH = (size, axes)`: the group size of MeshShape whose mesh of two axes it wants, and the axes' names;
* `USES_LINK = True`: it moves bytes between device and host, on lanes of the one link that it is given;
* `AFTER_SHARDING = True`: it wants the parameters as FSDP2 leaves them, `groups` of them and its `share` of the node;
* `attach_plain(model, mesh)`: what the plain program does on several ranks.

A handle may offer `parameters` (FSDP2 leaves them alone), `shard_complement(axis, **options)` (it shards some itself,
over the replicas of its mesh), and `loss` or `optimizer` in place of the plain ones. One that has `sums_shares` is told
that ranks sum what they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from steppe.core.errors import ConfigError, ConflictError
from steppe.core.policy import OFF
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES, half
from steppe.integrations.ulysses import Ulysses
from steppe.runtime import scopes
from steppe.runtime.link import HostLink
from steppe.runtime.mesh import Meshes, make_meshes


@dataclass
class Flattened:
    """A model with flatteners attached; `detach()` gives the plain model back (sharded parameters stay sharded)."""

    model: Any
    attached: dict[str, Any]
    meshes: Meshes | None = None
    later: dict[str, Any] = field(default_factory=dict)  # policies of what attaches to the sharded parameters
    sequence: Ulysses | None = None
    link: HostLink | None = None

    def offers(self, what: str) -> Any | None:
        """What an attached flattener puts in place of the plain `what`; None: nobody does."""
        for handle in self.attached.values():
            if (offered := getattr(handle, what, None)) is not None:
                return offered
        return None

    def loss(self, hidden_or_outputs: Any, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        """The loss of the model's outputs (their own, where they have one) or of hidden states [B,S,H].

        `options` are those of the attached loss or of transformers' `loss_function`. Peak: the vocabulary peak,
        flattened where a loss is attached. Raises: ConfigError for outputs that hold neither, and for logits where a
        loss is attached that takes hidden states.
        """
        if (own := getattr(hidden_or_outputs, "loss", None)) is not None:
            return own  # type: ignore[no-any-return]
        if (attached := self.offers("loss")) is not None:
            if not isinstance(hidden_or_outputs, torch.Tensor):
                raise ConfigError("loss", got="outputs of a forward without labels, beside an attached loss",
                                  allowed="outputs with a loss, or hidden states [B,S,H]",
                                  remedy="pass labels to the model: it makes no logits then")  # fmt: skip
            return attached(hidden_or_outputs, labels, **options)  # type: ignore[no-any-return]
        logits = getattr(hidden_or_outputs, "logits", None)
        if logits is None and isinstance(hidden_or_outputs, torch.Tensor):
            logits = self.model.lm_head(hidden_or_outputs)
        if logits is None:
            raise ConfigError("loss", got=type(hidden_or_outputs).__name__, allowed="outputs with a loss or logits, "
                              "or hidden states", remedy="pass labels to the model, or hidden states here")  # fmt: skip
        width = self.model.config.get_text_config().vocab_size
        return self.model.loss_function(logits, labels, width, **options)  # type: ignore[no-any-return]

    def optimizer(
        self, lr: float = 1e-3, *, groups: Iterable[Mapping[str, Any]] | None = None, **settings: Any
    ) -> torch.optim.Optimizer:
        """AdamW over the model's parameters: the attached flattener's, or torch's own.

        `groups` are parameter groups (default: all trainable parameters in one); `settings` are AdamW's.
        Raises: ConfigError where the attached optimizer was made already: it keeps the settings it was made with.
        """
        if self.offers("optimizer") is not None:
            raise ConfigError("optimizer", got="a second call", allowed="one optimizer, with its first settings",
                              remedy="keep the first one; change its param_groups, or add_param_group")  # fmt: skip
        given = [dict(group) for group in groups] if groups is not None else None
        with scopes.label("optimizer"):
            for name, policy in list(self.later.items()):
                share = (0, 1) if self.meshes is None else self.meshes.node_share
                module = half(name, "attach")
                options = _link_of(module, self) | settings
                handle = module.attach(self.model, policy, None, groups=given, share=share, lr=lr, **options)
                self.attached[name] = handle
                del self.later[name]
            if (attached := self.offers("optimizer")) is not None:
                return attached  # type: ignore[no-any-return]
            trainable = given or [p for p in self.model.parameters() if p.requires_grad]
            kind = {} if settings.get("fused") else {"foreach": True}
            return torch.optim.AdamW(trainable, lr=lr, **kind | settings)

    def stats(self) -> dict[str, Any]:
        """What each flattener counts; the plain loss over ranks, which counts nothing, is left out."""
        counted = {name: handle.stats() for name, handle in self.attached.items()}
        return {name: stats for name, stats in counted.items() if stats is not None}

    def diagnose(self) -> tuple[str, ...]:
        """The failure signals of every attached flattener, in words."""
        return tuple(line for name, stats in self.stats().items() for line in half(name, "attach").diagnose(stats))

    def detach(self) -> None:
        """Take off whatever is attached, last one first. Graphs in flight keep working: so does the link."""
        self.later.clear()
        while self.attached:
            self.attached.popitem()[1].detach()
        if self.sequence is not None:
            self.sequence.detach()
            self.sequence = None

    def close(self) -> None:
        """Detach, finish what is on the link and end its workers."""
        self.detach()
        if self.link is not None:
            self.link.close()


def flatten_peaks(
    model: nn.Module, plan: Any, *, mesh: MeshShape | None = None, device: torch.device | None = None,
    mp_policy: Any = None, link: HostLink | None = None,
) -> Flattened:  # fmt: skip
    """Attach a plan's flatteners to a Hugging Face causal language model and shard it, in the order they need.

    `plan`: a Plan, or a mapping of flattener names to policies. `mesh`: group sizes over the ranks of this job
    (default: the plan's, else all ranks with groups of one). With sequence groups each rank is given its own S/D
    tokens (and labels) of a row, neighbours in one group. FSDP2 shards every block over all ranks; gradients are
    summed. So the model's own loss is this rank's share, whatever is attached: of the mean over the labels of all
    ranks, or of the sum over `num_items_in_batch`, the auxiliary loss included; one of your own divides by the global
    number of labels. All copies between device and host share one `link` (default: the device's), reloads of boundaries
    before optimizer traffic.

    Peak: `planner.predict` of the plan. Exactness: each flattener's own.
    Raises: ConfigError for unknown names, group sizes that don't fit, and modules of two types; ConflictError for what
        is live on the model, an FSDP2 wrapping by somebody else included. Nothing stays attached after an error.
    """
    policies = getattr(plan, "policies", plan)
    _check_policies(policies)
    refuse_foreign_sharding(model)
    blocks = blocks_of(model)
    wanted = mesh or getattr(plan, "mesh", None)
    meshes = make_meshes(wanted, device or torch.device("cpu"), copies=not is_as_stored(mp_policy))
    for unit in (*blocks, model) if meshes.dense is not None else ():
        _of_other_types(unit, set())  # raises while nothing is placed yet
    sequence = join_sequences(model, meshes)
    try:
        flattened = attach_all(model, policies, meshes, link)
    except BaseException:
        if sequence is not None:
            sequence.detach()
        raise
    flattened.sequence = sequence
    for handle in flattened.attached.values():
        if hasattr(handle, "sums_shares"):
            handle.sums_shares = True
    try:
        shard(flattened, meshes, mp_policy=mp_policy)
    except BaseException:
        flattened.detach()
        raise
    return flattened


def join_sequences(model: nn.Module, meshes: Meshes) -> Ulysses | None:
    """Attention over this rank's D ranks of a sequence; None where every rank has whole ones."""
    group = meshes.sequence_group()
    return None if group is None else Ulysses(model, group)


def attach_all(
    model: Any, policies: Mapping[str, Any], meshes: Meshes | None = None, link: HostLink | None = None
) -> Flattened:
    """Attach every flattener whose policy isn't off, in the design's order; those AFTER_SHARDING wait for `optimizer`.

    Raises: ConfigError for an unknown flattener; ConflictError for what a flattener finds on the live model. Nothing
    stays attached after an error.
    """
    _check_policies(policies)
    wanted = {name: policies.get(name, OFF) for name in NAMES}
    device = torch.device("cpu" if meshes is None else meshes.device_type)
    flattened = Flattened(model, {}, meshes, link=link or HostLink(device))
    for name, policy in wanted.items():  # all of them before the first one places a parameter
        if policy != OFF:
            refuse_conflicts(name, model)
    try:
        for name, policy in wanted.items():
            _attach(flattened, name, half(name, "attach"), policy, meshes)
        _introduce(flattened.attached.values())
    except BaseException:
        flattened.detach()
        raise
    return flattened


def _check_policies(policies: Any) -> None:
    if not isinstance(policies, Mapping):
        raise ConfigError("plan", got=repr(policies), allowed="a Plan, or flattener names and their policies",
                          remedy='e.g. {"boundary": BoundaryPolicy()}')  # fmt: skip
    if unknown := sorted(set(policies) - set(NAMES)):
        raise ConfigError("flattener", got=unknown, allowed=NAMES, remedy="use these names")
    for name, policy in policies.items():  # None would be taken for the defaults, and text for an object
        if policy is None or isinstance(policy, (bool, str, Mapping)):
            raise ConfigError(f"policy of {name}", got=repr(policy), allowed="OFF or a policy object",
                              remedy=f"steppe.OFF, or steppe.{name.title()}Policy(...)")  # fmt: skip


def _attach(flattened: Flattened, name: str, module: ModuleType, policy: Any, meshes: Meshes | None) -> None:
    """One flattener, or what the plain program does in its place."""
    mesh = mesh_of(module, meshes)
    if policy == OFF:
        if mesh is not None and mesh.size() > 1 and hasattr(module, "attach_plain"):
            flattened.attached[name] = module.attach_plain(flattened.model, mesh)
        return
    if getattr(module, "AFTER_SHARDING", False):
        flattened.later[name] = policy
    else:
        flattened.attached[name] = module.attach(flattened.model, policy, mesh, **_link_of(module, flattened))


def _link_of(module: ModuleType, flattened: Flattened) -> dict[str, HostLink | None]:
    return {"link": flattened.link} if getattr(module, "USES_LINK", False) else {}


def _introduce(handles: Iterable[Any]) -> None:
    """Tell whoever depends on it (`ties_pinned`) that another one pins the router's top-k across a recompute."""
    pinned = any(getattr(handle, "pins_topk", False) for handle in handles)
    for handle in handles:
        if hasattr(handle, "ties_pinned"):
            handle.ties_pinned = pinned


def mesh_of(module: ModuleType, meshes: Meshes | None) -> Any | None:
    """The two-axis mesh that a flattener names with MESH, the same object whenever asked."""
    wanted = getattr(module, "MESH", None)
    return None if wanted is None or meshes is None else meshes.of(*wanted)


def is_as_stored(mp_policy: Any) -> bool:
    """Whether a mixed-precision policy leaves everything in the type that it is stored in."""
    return mp_policy in (None, MixedPrecisionPolicy())


def shard(flattened: Flattened, meshes: Meshes, *, mp_policy: Any = None, blocks: Iterable[nn.Module] = ()) -> None:
    """FSDP2 over all ranks on every block and on the rest; what a flattener placed keeps its own placement.

    Gradients are summed, never averaged. Without ranks the model stays as it is.
    Raises: ConfigError for a precision that nobody would keep to, without ranks.
    """
    if meshes.dense is None:
        if not is_as_stored(mp_policy):
            raise ConfigError("mp_policy", got=f"{mp_policy} without ranks", allowed="none: FSDP2 shards nothing here",
                              remedy="init_process_group first (one rank will do), or model.to(dtype)")  # fmt: skip
        return
    options = {} if mp_policy is None else {"mp_policy": mp_policy}
    ignored: set[nn.Parameter] = set()
    for name, handle in flattened.attached.items():
        if (place := getattr(handle, "shard_complement", None)) is not None:
            mesh = mesh_of(half(name, "attach"), meshes)
            place(mesh[mesh.mesh_dim_names[0]], **options)
        own = getattr(handle, "parameters", None)
        ignored |= set(own() if callable(own) else own or ())
    for module in (*(blocks or blocks_of(flattened.model)), flattened.model):
        for part in _of_other_types(module, ignored):
            fully_shard(part, mesh=meshes.dense, ignored_params=ignored, **options)
        fully_shard(module, mesh=meshes.dense, ignored_params=ignored, **options)
    for module in flattened.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _of_other_types(unit: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """The modules in a unit of FSDP2's whose own parameters aren't of the unit's main type: FSDP2 reduces the gradients
    of a unit in one. Some families keep their routers in float32, whatever the others are.

    Raises: ConfigError where one module mixes types.
    """
    held = [(module, p) for module in _unsharded(unit) for p in module.parameters(recurse=False)
            if p.requires_grad and p not in ignored]  # fmt: skip
    counts: dict[torch.dtype, int] = {}
    for _, parameter in held:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    main = max(counts, key=lambda dtype: counts[dtype], default=None)
    others = dict.fromkeys(module for module, parameter in held if parameter.dtype != main)
    for module in others:
        if len(types := {str(p.dtype) for owner, p in held if owner is module}) > 1 or module is unit:
            raise ConfigError(f"parameters of {type(module).__name__}", got=", ".join(sorted(types | {str(main)})),
                              allowed="one type a module", remedy="cast them to one before flatten_peaks")  # fmt: skip
    return list(others)


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those below it that FSDP2 hasn't sharded already."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _unsharded(child)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder blocks of a Hugging Face causal language model. Raises: ConfigError for another kind of model."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ConfigError(
            "model", got=type(model).__name__, allowed="a transformers causal language model with model.layers",
            remedy="attach the flatteners one by one: each works on plain modules (examples/)",
        )  # fmt: skip
    return list(layers)


def refuse_foreign_sharding(model: nn.Module) -> None:
    """Raise ConflictError for a model that FSDP2 has sharded already: the head could no longer be left out."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConflictError(
            "flatten_peaks", got="a model that FSDP2 has sharded already", allowed="an unsharded model",
            remedy="load it without an fsdp plan (DistributedConfig without fsdp_size) and let flatten_peaks shard it",
        )  # fmt: skip


def refuse_conflicts(name: str, *live: Any) -> None:
    """Raise ConflictError when a flattener finds something live that would undo its work."""
    for conflict in half(name, "attach").conflicts(*live):
        raise ConflictError(f"{name} flattener", got=conflict.what, allowed="neither or one", remedy=conflict.remedy)
