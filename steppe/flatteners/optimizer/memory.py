"""Whether two parameters hold the same memory: their masters would part, and the last writer would win.

Note [memory]. Parameters that each fill one stretch share memory if and only if their stretches meet, which sorting
shows. Where a parameter with gaps lies among others (columns of one matrix), every byte that is taken is marked in a
map of that stretch, so views that interleave without meeting are told from those that meet, whatever their strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from steppe.core.errors import ShapeError
from steppe.flatteners.optimizer.rows import is_dense
from steppe.runtime import sharded

Places = list[tuple[int, tuple[int, ...]]]


class _Stretch(NamedTuple):
    """The bytes from a tensor's first element to its last, [start, stop)."""

    device: str
    start: int
    stop: int
    own: torch.Tensor


def places(parameters: Iterable[torch.Tensor]) -> Places:
    """Where each parameter's elements lie; as long as these are the same nothing has to be checked again."""
    owns = map(sharded.local, parameters)
    return [(own.data_ptr(), own.stride()) for own in owns]


def check_apart(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse two parameters that hold the same memory; views of one storage that don't meet are fine.

    Sorts the parameters by address. Peak: where one with gaps lies among others, a byte for each byte of that stretch.
    Raises: ShapeError.
    """
    found = (_stretch(sharded.local(p)) for p in dict.fromkeys(parameters))
    stretches = sorted((each for each in found if each is not None), key=lambda each: each[:3])
    for group in _groups(each for each in stretches if is_dense(each.own)):
        if len(group) > 1:
            raise _shared(group[0].own, group[1].own)
    for group in _groups(stretches):
        if len(group) > 1:
            _check_marks(group)


def _stretch(own: torch.Tensor) -> _Stretch | None:
    if own.is_meta or not own.numel() or not own.data_ptr():
        return None
    reach = 1 + sum((length - 1) * stride for length, stride in zip(own.shape, own.stride()))
    return _Stretch(str(own.device), own.data_ptr(), own.data_ptr() + reach * own.element_size(), own)


def _groups(stretches: Iterable[_Stretch]) -> Iterator[list[_Stretch]]:
    """Neighbours whose stretches meet, in the order of their addresses."""
    group: list[_Stretch] = []
    stop = 0
    for each in stretches:
        if group and (each.device != group[0].device or each.start >= stop):
            yield group
            group = []
        stop = max(stop, each.stop) if group else each.stop
        group.append(each)
    if group:
        yield group


def _check_marks(group: list[_Stretch]) -> None:
    first = group[0].start
    marks = torch.zeros(max(each.stop for each in group) - first, dtype=torch.bool)
    for index, (_, start, _, own) in enumerate(group):
        size = own.element_size()
        taken = marks.as_strided((*own.shape, size), (*(size * s for s in own.stride()), 1), start - first)
        if bool(taken.any()):
            other = next(each for each in group[:index] if each.stop > start)
            raise _shared(other.own, own)
        taken.fill_(True)


def _shared(one: torch.Tensor, other: torch.Tensor) -> ShapeError:
    return ShapeError(
        "memory of the parameters", got=f"two of shapes {tuple(one.shape)} and {tuple(other.shape)} that share memory",
        allowed="one place for each element", remedy="use one Parameter object in both places, as tied weights do",
    )  # fmt: skip
