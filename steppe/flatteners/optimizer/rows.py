"""Where a parameter's float32 state lives: one row of three (or four) host slabs, and whether it still fits.

Note [who wins]. A parameter is written by this optimizer only through its master, so before a step the two agree: the
parameter is its master rounded to the parameter's dtype. Weights changed behind the optimizer's back break that, and
then the parameter wins, element by element: where it still equals the rounded master the master keeps its extra bits.
So masters survive weights and optimizer state being loaded in either order. Changes are noticed by version counter
(in-place writes), address (`.data =`) and a probe of a few elements a tensor (`.data.copy_`).

Note [own master]. A float32 parameter in host memory that the kernel writes in place is always equal to its master, so
it is its own: one tensor less to hold and to write. Whoever reads the state is given a copy of it, since loaders write
into what they are given (torch.distributed.checkpoint does), and loaded weights win.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from steppe.core.errors import ShapeError
from steppe.flatteners.optimizer.kernel import KINDS
from steppe.flatteners.optimizer.schedule import aligned
from steppe.runtime import sharded
from steppe.runtime.arena import Arena

PROBE = 64  # elements of a tensor that are looked at for silent changes
RECONCILE = 2**20  # elements compared with their masters at a time
STATE = ("master", "exp_avg", "exp_avg_sq")


class Row:
    """State of one parameter: flat float32 views into the slabs, its step count, and what it last wrote.

    `slabs` are exp_avg, exp_avg_sq and, if asked for, the float32 sum of what arrived during backward. Without a
    `master` the parameter is its own (Note [own master]).
    """

    def __init__(
        self, parameter: torch.Tensor, slabs: Sequence[torch.Tensor], master: torch.Tensor | None = None
    ) -> None:
        self.exp_avg, self.exp_avg_sq = slabs[:2]
        self.gradient = slabs[2] if len(slabs) > 2 else None
        self.owns_master = master is None
        self.master = flat_of(sharded.local(parameter)) if master is None else master
        self._shown: tuple[int, torch.Tensor] | None = None  # the copy that readers have, and its version
        self.step = torch.zeros((), dtype=torch.float32)
        self.arrivals = self.refreshed = 0
        self.squares: list[float] | torch.Tensor | None = None
        self.adopt(parameter)

    def adopt(self, parameter: torch.Tensor) -> None:
        """Keep the state of this object from now on (at first, or in another one's place)."""
        self.parameter = parameter
        self._seen: tuple[int, int, int] | None = None
        self._strides = self.own.stride()
        self.dense = is_dense(self.own)
        self.slabs = {"step": self.step, **{name: self.shaped(getattr(self, name)) for name in reversed(STATE[1:])}}
        self._find_master()

    def _find_master(self) -> None:
        """A parameter that is its own master may have moved; what can't be it any more gets a master beside it."""
        if self.owns_master and not is_own_master(self.own):  # cast, or laid out with gaps
            self.owns_master, self.master = False, self.master.clone()
        elif self.owns_master:
            self.master = flat_of(self.own)
        if not self.owns_master:
            self.slabs["master"] = self.shaped(self.master)

    @property
    @torch.no_grad()
    def entry(self) -> dict[str, torch.Tensor]:
        """step, exp_avg, exp_avg_sq and master as readers see them: views of the slabs, or a copy of the weights."""
        if not self.owns_master:
            if self._written_in_place():
                self.reconcile()
            return self.slabs
        if not self.unchanged():
            self.reconcile()
        if self._shown is None or self._shown[0] != self._shown[1]._version:
            copy = self.shaped(self.master.clone())
            self._shown = (copy._version, copy)
        return {**self.slabs, "master": self._shown[1]}

    @torch.no_grad()
    def replace(self, parameter: torch.Tensor) -> None:
        """Go on with this object, whose elements may be laid out otherwise in memory.

        Raises: ShapeError when it isn't the same parameter, with nothing changed.
        """
        old, new = self.parameter, sharded.local(parameter)
        if new.shape != self.shape:
            raise ShapeError("shape of a parameter that has state", got=tuple(new.shape), allowed=tuple(self.shape),
                             remedy="shard or resize the model before the optimizer's first step")  # fmt: skip
        split = self.owns_master and not is_own_master(new)
        if split:
            self.owns_master, self.master = False, self.master.clone()
        if new.stride() != self._strides:
            master = None if self.owns_master else self.master
            flats = [flat for flat in (master, self.exp_avg, self.exp_avg_sq, self.gradient) if flat is not None]
            values = [_view(flat, self.shape, self._strides).clone() for flat in flats]
            for flat, value in zip(flats, values):
                _view(flat, new.shape, new.stride()).copy_(value)
        if split or parameter is not old or new.stride() != self._strides:
            self.adopt(parameter)

    @property
    def own(self) -> torch.Tensor:
        return sharded.local(self.parameter)

    @property
    def shape(self) -> torch.Size:
        return sharded.local(self.slabs["exp_avg"]).shape

    @property
    def num_elements(self) -> int:
        return self.exp_avg.numel()

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A slab's part in the parameter's shape, strides and sharding."""
        return sharded.with_local(self.parameter, _view(flat, self.own.shape, self.own.stride()))

    def unchanged(self) -> bool:
        return self._seen == self._identity()

    def _written_in_place(self) -> bool:
        """Whether only a version counter has moved; not known after a load, whose weights may still be on their way."""
        same_place = self._seen is not None and self._seen[0] == self._identity()[0]
        same_layout = self.own.shape == self.shape and self.own.stride() == self._strides
        return same_place and same_layout and not self.unchanged()

    def remember(self) -> None:
        """The parameter and its master agree as of now."""
        self._seen, self._shown = self._identity(), None

    def forget(self) -> None:
        """Compare with the parameter before the next step."""
        self._seen = None

    def _identity(self) -> tuple[int, int, int]:
        own = self.own
        return own.data_ptr(), own._version, self.parameter._version

    def reconcile(self) -> int:
        """Take the parameter's value wherever it is not its master rounded (Note [who wins]); how many elements."""
        if self.owns_master:
            self._find_master()
        if self.owns_master:
            self.remember()
            return 0
        flat, changed = flat_of(self.own), 0
        for start in range(0, self.num_elements, RECONCILE):
            given = flat[start : start + RECONCILE].cpu()
            master = self.master[start : start + RECONCILE]
            differs = master.to(given.dtype) != given
            changed += int(differs.sum())
            master[differs] = given[differs].float()
        self.remember()
        self.refreshed += changed
        return changed


def open_rows(
    parameters: Sequence[torch.Tensor], arena: Arena, *, gradients: bool, in_place: bool = False
) -> dict[torch.Tensor, Row]:
    """Allocate and first touch the slabs of these parameters: exp_avg, exp_avg_sq, if asked gradients, and masters.

    `in_place`: the kernel writes parameters where they are, so that those that can are their own masters.
    Peak: 12 bytes an element (16 with gradients; 4 less for its own master), each tensor rounded up to whole cache
    lines.
    Raises: HostMemoryError before anything is allocated.
    """
    for parameter in parameters:
        if sharded.local(parameter).is_meta:
            raise ShapeError("device of a parameter", got="meta", allowed="a device with memory",
                             remedy="give the model its weights before the first step")  # fmt: skip
    count = 2 + gradients
    lengths = [aligned(sharded.local(p).numel()) for p in parameters]
    own_master = [in_place and is_own_master(sharded.local(p)) for p in parameters]
    total, masters = sum(lengths), sum(itertools.compress(lengths, (not own for own in own_master)))
    slab = arena.lend(4 * (count * total + masters), "optimizer state").view((count * total + masters,), torch.float32)
    slab.zero_()
    slabs, beside, rows = slab[: count * total].view(count, total), slab[count * total :], {}
    for parameter, length, own in zip(parameters, lengths, own_master):
        local = sharded.local(parameter)
        taken = [slab[: local.numel()] for slab in slabs]
        rows[parameter] = row = Row(parameter, taken, None if own else beside[: local.numel()])
        if not own:
            row.master.copy_(flat_of(local))
            beside = beside[length:]
        row.remember()
        slabs = slabs[:, length:]
    return rows


def is_own_master(own: torch.Tensor) -> bool:
    """Whether a parameter's memory can be its float32 master as well (Note [own master])."""
    return own.dtype == torch.float32 and own.device.type == "cpu" and is_dense(own)


def _view(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A slab's part as a parameter of this shape and layout (Note [order])."""
    dense = _fills(shape, strides)
    return flat.as_strided(shape, strides, flat.storage_offset()) if dense else flat.view(tuple(shape))


# Note [order]. State has the order of the parameter's own memory where that is one stretch (also if transposed), so
# that buckets are flat copies; a parameter with gaps has its state in row-major order and is written through a copy.
def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills one stretch of memory in some order of its dimensions."""
    return _fills(tensor.shape, tensor.stride())


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(strides, shape) if n > 1):
        if stride != expected:
            return False
        expected *= length
    return True


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of the state: the tensor's own memory if it is dense, a row-major copy if not."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return tensor.reshape(-1).contiguous()


def flat_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in the order of `like`'s state; a copy where the two are laid out differently."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    if not is_dense(like):
        return tensor.reshape(-1).contiguous()
    if tensor.stride() != like.stride() and tensor.numel() > 1:
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def check_parameter(parameter: torch.Tensor) -> None:
    """Refuse parameters whose step could not be exact."""
    own = sharded.local(parameter)
    if own.layout != torch.strided:
        raise ShapeError("layout of a parameter", got=own.layout, allowed="dense (strided) tensors",
                         remedy="keep sparse parameters in an optimizer of their own")  # fmt: skip
    if own.dtype not in KINDS:
        raise ShapeError("dtype of a parameter", got=own.dtype, allowed="float32, bfloat16, float16",
                         remedy="keep parameters of other dtypes in torch.optim.AdamW")  # fmt: skip
    if any(stride == 0 and length > 1 for stride, length in zip(own.stride(), own.shape)):
        raise ShapeError("memory of a parameter", got=f"strides {own.stride()}: elements share memory",
                         allowed="one place for each element", remedy="pass a contiguous copy")  # fmt: skip


def check_gradient(gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse a gradient that doesn't belong to its parameter."""
    if gradient.layout != torch.strided:
        raise ShapeError("layout of a gradient", got=gradient.layout, allowed="dense (strided) tensors",
                         remedy="build embeddings with sparse=False")  # fmt: skip
    if gradient.dtype not in KINDS:
        raise ShapeError("dtype of a gradient", got=gradient.dtype, allowed="float32, bfloat16, float16",
                         remedy="cast the gradient")  # fmt: skip
    if gradient.shape != parameter.shape:
        raise ShapeError("shape of a gradient", got=tuple(gradient.shape), allowed=tuple(parameter.shape),
                         remedy="run backward again after the parameter was resized")  # fmt: skip
    if gradient.device != parameter.device:
        raise ShapeError("device of a gradient", got=gradient.device, allowed=parameter.device,
                         remedy="move parameter and gradient together")  # fmt: skip


class Probes:
    """A few elements of every parameter, to notice writes that no version counter saw."""

    def __init__(self) -> None:
        self._samples: dict[tuple[torch.device, torch.dtype, int], tuple[list[Row], torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, rows: Iterable[Row]) -> None:
        groups: dict[tuple[torch.device, torch.dtype, int], list[Row]] = {}
        for row in rows:
            if row.num_elements:
                own = row.own
                groups.setdefault((own.device, own.dtype, min(PROBE, row.num_elements)), []).append(row)
        self._samples = {kind: (members, _sample(members)) for kind, members in groups.items()}

    @torch.no_grad()
    def check(self) -> None:
        """Have rows whose sample changed compared with their masters."""
        for members, before in self._samples.values():
            differs = _sample(members) != before
            if bool(differs.any()):
                for row in itertools.compress(members, differs.any(dim=1).tolist()):
                    row.forget()


def _sample(rows: Sequence[Row]) -> torch.Tensor:
    """[rows, elements] bits of evenly spread elements, PROBE of each tensor (all of a shorter one)."""
    words = {2: torch.int16, 4: torch.int32}
    stacked = torch.stack([_few(row) for row in rows])
    return stacked.view(words[stacked.element_size()])


def _few(row: Row) -> torch.Tensor:
    own, count = row.own.detach(), row.num_elements
    flat = own if row.dense else flat_of(own)
    return flat.as_strided((min(PROBE, count),), (max(1, count // PROBE),), flat.storage_offset())
