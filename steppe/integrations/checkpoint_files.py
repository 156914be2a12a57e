"""Hugging Face safetensors of a sharded model: every rank reads and writes its own elements, nobody the whole.

Note [Regions]
A stored tensor is a stretch of the row-major elements of one parameter: the whole of it, or one expert's matrix inside
stacked experts. Which stretch stands under which name is transformers' own business: its conversion is run backwards
over probes that hold row numbers instead of weights, and what comes out says where each row went. So files have the
names that `save_pretrained` would give them and `from_pretrained` expects, and both layouts can be read.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import nn

from steppe.core.errors import ConfigError
from steppe.runtime.sharded import flat_range, local

INDEX: Final = "model.safetensors.index.json"
PIECE_BYTES: Final = 64 * 2**20  # that travel at a time; a longer row travels alone
_CODES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PROBE: Final = 2  # elements that stand for a row: one alone would be squeezed away
_TYPES: Final = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Region:
    """A stored tensor: the elements `start` .. `stop` of a parameter or buffer, under a name and in a shape."""

    key: str
    owner: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and persistent buffers by name: what a file holds."""
    persistent = model.state_dict().keys()
    return {name: p.detach() for name, p in model.named_parameters()} | {
        name: b for name, b in model.named_buffers() if name in persistent
    }


def regions(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[Region]:
    """Where each element stands in files as `save_pretrained` writes them (Note [Regions]), tensor by tensor."""
    found: list[Region] = []
    stacked = [name for name, tensor in tensors.items() if tensor.dim() == 3]
    flat = [name for name in tensors if name not in stacked]
    for names in ([flat] if flat else []) + [[name] for name in stacked]:
        found += _reverted(model, {name: tensors[name] for name in names})
    order = {name: place for place, name in enumerate(tensors)}
    return sorted(found, key=lambda region: (order[region.owner], region.start))


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[Region]:
    """Regions of some tensors. One whose conversion isn't a matter of whole rows keeps its name: that loads as well."""
    from transformers.core_model_loading import revert_weight_conversion

    rows, bases, first = {}, {}, 0
    for name, tensor in tensors.items():
        bases[name], count = first, prod(tensor.shape[:-1]) * min(_PROBE, tensor.shape[-1])
        rows[name] = torch.arange(first, first + count).reshape(*tensor.shape[:-1], -1)
        first += count
    found = []
    for key, probe in revert_weight_conversion(model, rows).items():
        low = int(probe.min())
        owner = next(name for name in reversed(bases) if bases[name] <= low)
        if not torch.equal(probe.reshape(-1), torch.arange(low, low + probe.numel())):
            return [Region(name, name, 0, tuple(tensor.shape)) for name, tensor in tensors.items()]
        width = tensors[owner].shape[-1]
        start = (low - bases[owner]) // min(_PROBE, width) * width
        found.append(Region(key, owner, start, (*probe.shape[:-1], width)))
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where its bytes begin, its type and shape."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@torch.no_grad()
def read(model: Any, directory: str | Path, *, piece_bytes: int = PIECE_BYTES) -> tuple[str, ...]:
    """Fill this rank's part of every parameter and persistent buffer; returns the stored names that nobody wanted.

    Peak: one piece of `piece_bytes`. Exactness: bitwise, save the cast to the parameter's type.
    Raises: ConfigError for a directory without safetensors, and where tensors are missing, cut short, of another shape
        or of a type that needs more than a cast; nothing has changed then.
    """
    tensors = tensors_of(model)
    stored = {key: value for file in stored_files(Path(directory)) for key, value in table_of(file).items()}
    wanted = _choose(model, tensors, stored, directory)
    for region in wanted:
        if stored[region.key].shape != region.shape:
            raise ConfigError(f"{region.key} in {directory}", got=f"shape {list(stored[region.key].shape)}",
                              allowed=f"{list(region.shape)}",
                              remedy="check that model.weights and model.config belong together")  # fmt: skip
    room = torch.empty(piece_bytes, dtype=torch.uint8)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(file.open("rb", buffering=0)) for file in {s.file for s in stored.values()}}
        for region in wanted:
            source = stored[region.key]
            _fill(tensors[region.owner], region, source, opened[source.file], room)
    return tuple(sorted(set(stored) - {region.key for region in wanted}))


def table_of(file: Path) -> dict[str, Stored]:
    """What a safetensors file holds, by name. Raises: ConfigError for a file that isn't one, or is cut short."""
    try:
        with file.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8))[0]
            table = json.loads(opened.read(length))
        table.pop("__metadata__", None)
        total, found = file.stat().st_size, {}
        for key, entry in table.items():
            first, last = entry["data_offsets"]
            if 8 + length + last > total:
                raise ValueError(f"{total} bytes, where {key} ends at {8 + length + last}")
            dtype = _TYPES[entry["dtype"]]
            if prod(entry["shape"]) * dtype.itemsize != last - first:
                raise ValueError(f"{last - first} bytes of {key}, whose shape is {entry['shape']}")
            found[key] = Stored(file, 8 + length + first, dtype, tuple(entry["shape"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError) as failure:
        raise ConfigError(
            f"weights in {file}", got=f"{type(failure).__name__}: {failure}",
            allowed=f"a whole safetensors file of {', '.join(_TYPES)}",
            remedy="download it again; quantised weights have to be converted first",
        ) from failure  # fmt: skip
    return found


def stored_files(directory: Path) -> list[Path]:
    """The safetensors of a directory: those of its index, else all. Raises: ConfigError."""
    if not directory.is_dir():
        raise ConfigError(
            "model.weights", got=f"{directory}, which is no directory",
            allowed='"random" or a directory of safetensors',
            remedy="check the path; what is on the Hub has to be downloaded first",
        )  # fmt: skip
    index = directory / INDEX
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    files = sorted(directory / name for name in names) if names else sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise ConfigError(
            "model.weights", got=f"{directory} without {missing[0] if missing else '*.safetensors'}",
            allowed="a directory of safetensors, whole", remedy="download it again, or save with save_pretrained",
        )  # fmt: skip
    return files


def _choose(
    model: Any, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any], directory: str | Path
) -> list[Region]:
    """The regions to read: a tensor under its own name (or a tied one's), else in the layout of `save_pretrained`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    twins = {name: twin for twin in names.values() for name in twin}
    chosen, elsewhere = [], {}
    for name, tensor in tensors.items():
        key = next((own for own in twins.get(name, [name]) if own in stored), None)
        if key is None:
            elsewhere[name] = tensor
        else:
            chosen.append(Region(key, name, 0, tuple(tensor.shape)))
    split = regions(model, elsewhere) if elsewhere else []
    if missing := sorted({region.owner for region in split if region.key not in stored}):
        raise ConfigError(
            "model.weights", got=f"{directory} without {len(missing)} of the model's tensors ({missing[0]}, ...)",
            allowed="all of them", remedy="check that model.weights and model.config belong together",
        )  # fmt: skip
    return chosen + split


def _fill(target: torch.Tensor, region: Region, stored: Stored, opened: IO[bytes], room: torch.Tensor) -> None:
    """Copy what this rank holds of a region, as many elements at a time as there is room for."""
    own, (start, stop) = local(target).view(-1), flat_range(target)
    low, high = max(start, region.start), min(stop, region.stop)
    size = stored.dtype.itemsize
    step = max(1, room.numel() // size)
    for first in range(low, high, step):
        last = min(first + step, high)
        piece = room[: (last - first) * size]
        opened.seek(stored.offset + (first - region.start) * size)
        _read_all(opened, memoryview(piece.numpy()))
        own[first - start : last - start] = piece.view(stored.dtype)


def _read_all(opened: IO[bytes], target: memoryview) -> None:
    while len(target):
        count = opened.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{opened.name} ended {len(target)} bytes early")
        target = target[count:]


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """One safetensors file to be: its regions, where each begins, and its header."""

    name: str
    regions: tuple[Region, ...]
    offsets: tuple[int, ...]
    header: bytes
    num_bytes: int


def plan_file(name: str, own: list[Region], dtypes: Mapping[str, torch.dtype]) -> File:
    """Lay a file out: 8 bytes of the header's length, the header, the tensors one behind the other."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, place = [], 0
    for region in own:
        num_bytes = prod(region.shape) * dtypes[region.owner].itemsize
        table[region.key] = {
            "dtype": _CODES[dtypes[region.owner]], "shape": list(region.shape),
            "data_offsets": [place, place + num_bytes],
        }  # fmt: skip
        ends.append(place)
        place += num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return File(name, tuple(own), tuple(len(header) + end for end in ends), header, len(header) + place)


def create(file: File, directory: Path) -> None:
    """Make the file at its full length, with its header; the tensors' bytes are zero until ranks write them."""
    with (directory / file.name).open("wb") as out:
        out.write(file.header)
        out.truncate(file.num_bytes)


def write_own(
    file: File, directory: Path, tensors: Mapping[str, torch.Tensor], mine: frozenset[str], piece_bytes: int
) -> None:
    """Write this rank's elements of the tensors named in `mine` to their place in the file, and fsync it.

    Peak: one piece of `piece_bytes` where tensors are on an accelerator; nothing on a CPU.
    """
    with (directory / file.name).open("r+b") as out:
        for region, offset in zip(file.regions, file.offsets, strict=True):
            if region.owner in mine:
                for place, piece in _pieces(tensors[region.owner], region, piece_bytes):
                    out.seek(offset + place)
                    out.write(piece)
        out.flush()
        os.fsync(out.fileno())


def _pieces(tensor: torch.Tensor, region: Region, piece_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """(byte offset in the region, bytes) of what this rank holds of a region."""
    own, (start, stop) = local(tensor).reshape(-1), flat_range(tensor)
    low, high = max(start, region.start), min(stop, region.stop)
    step = max(1, piece_bytes // tensor.element_size())
    for first in range(low, high, step):
        piece = own[first - start : min(first + step, high) - start].cpu()
        yield (first - region.start) * tensor.element_size(), memoryview(piece.view(torch.uint8).numpy())
