"""Rows of tokens, documents packed into them, and the batches of a step: a pure function of (seed, step, rank).

Note [Packing]
`cut` lays all documents end to end and cuts the stream every S tokens: rows are full, a document may go on in another
row, where its positions start at 0 again. `whole` never splits a document: a row holds as many whole documents as fit
into N = batch * S tokens, so rows have different lengths. In both, position ids restart with each document, attention
stays inside it and its last token has no label. `stream` cuts as `cut` does and takes a row for one text: attention
crosses the documents' ends, and no mask of S x S elements is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steppe.core.errors import DataError, WorkingSetError
from steppe.training.config import RunConfig
from steppe.training.schedule import positions, row_at
from steppe.training.tokens import TokenStore

IGNORED = -100  # the label of a token that has nothing to predict
_PADDING = (0, 0, IGNORED)  # ids, positions, labels: each padding token is a document of its own


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank, all [rows, length] int64; `labels` are already shifted."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_valid(self) -> int:
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        return Batch(self.input_ids.to(device), self.position_ids.to(device), self.labels.to(device))


@dataclass(frozen=True)
class WorkingSet:
    """What is declared at launch: `num_tokens` (N) is the most that a micro-batch of one rank may have."""

    num_tokens: int

    def admit(self, num_tokens: int, where: str) -> None:
        """Raises: WorkingSetError for more than N tokens; fewer run in the same buffers."""
        if num_tokens > self.num_tokens:
            raise WorkingSetError(
                where, got=f"{num_tokens} tokens", allowed=f"N = {self.num_tokens}, declared at launch",
                remedy='cut the documents (data.packing = "cut"), or start again with a larger data.seq_len',
            )  # fmt: skip

    def check(self, loader: Iterable[Batch], batches: int = 100) -> int:
        """Look at the first batches before launch; the most tokens among them. Raises: WorkingSetError."""
        most = 0
        for number, batch in enumerate(islice(loader, batches)):
            self.admit(batch.num_tokens, f"batch {number} of the loader")
            most = max(most, batch.num_tokens)
        return most


class StepBatches(Sequence[Batch]):
    """A step's micro-batches, none of which is kept: however many there are, one is alive."""

    def __init__(self, source: RowSource, step: int, count: int) -> None:
        self._source, self._step, self._count = source, step, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, micro: Any) -> Any:
        if not 0 <= micro < self._count:
            raise IndexError(micro)
        return self._source.batch(self._step, micro)


class RowSource:
    """The rows of a run and their order. The D ranks of a sequence read the same rows and take a slice each."""

    def __init__(self, config: RunConfig, store: TokenStore, *, rank: int, world: int) -> None:
        self._config, self._store, self._slices = config, store, config.launch.sequence
        self._rank, self._slice = divmod(rank, self._slices)
        self._world = world // self._slices
        self._start = 0
        if config.data.packing == "whole":
            self._bounds = _whole_rows(store.ends, config.train.batch * config.data.seq_len)
        else:
            self._bounds = _cut_rows(store.num_tokens, config.data.seq_len)
        _check_labels(store, one_text=config.data.packing == "stream")

    @property
    def num_rows(self) -> int:
        return len(self._bounds)

    @property
    def rows_per_step(self) -> int:
        """Rows that all ranks together read in a step."""
        return self._rows_a_batch * self._config.train.micro_batches * self._world

    @property
    def _rows_a_batch(self) -> int:
        return 1 if self._config.data.packing == "whole" else self._config.train.batch

    def rows_read(self, step: int) -> int:
        """Rows read before `step`, by all ranks."""
        return self._start + step * self.rows_per_step

    def resume(self, step: int, rows_read: int) -> None:
        """Go on where another number of ranks stopped; with the same number this changes nothing."""
        self._start = rows_read - step * self.rows_per_step

    def batches(self, step: int) -> StepBatches:
        """The micro-batches of this rank in `step`, each made when it is asked for."""
        return StepBatches(self, step, self._config.train.micro_batches)

    def batch(self, step: int, micro: int) -> Batch:
        """One micro-batch of this rank."""
        places = positions(
            step, micro, self._rank, batch=self._rows_a_batch, micro_batches=self._config.train.micro_batches,
            world=self._world, start=self._start,
        )  # fmt: skip
        rows = [self._row(row_at(place, self.num_rows, self._config.train.seed)) for place in places]
        return Batch(*(torch.from_numpy(self._own(np.stack(parts), fill)) for parts, fill in zip(zip(*rows), _PADDING)))

    def _own(self, rows: npt.NDArray[np.int64], fill: int) -> npt.NDArray[np.int64]:
        """This rank's columns, after padding to a multiple of D (which only whole documents can need)."""
        length = -(-rows.shape[1] // self._slices)
        padded = np.pad(rows, ((0, 0), (0, length * self._slices - rows.shape[1])), constant_values=fill)
        return np.ascontiguousarray(padded[:, self._slice * length : (self._slice + 1) * length])

    def _row(self, index: int) -> tuple[npt.NDArray[np.int64], ...]:
        start, stop = self._bounds[index]
        return row_of(self._store, int(start), int(stop), one_text=self._config.data.packing == "stream")


def row_of(store: TokenStore, start: int, stop: int, *, one_text: bool = False) -> tuple[npt.NDArray[np.int64], ...]:
    """Ids, positions and labels of the stream's tokens `start` .. `stop`; `one_text` ignores where documents end."""
    ends = store.ends[-1:] if one_text else store.ends
    ids = store.ids[start:stop].astype(np.int64)
    where = np.arange(start, stop)
    document = np.searchsorted(ends, where, side="right")
    begins = np.concatenate(([0], ends))[document]
    labels = np.full(stop - start, IGNORED, dtype=np.int64)
    inside = where + 1 < ends[document]
    labels[inside] = store.ids[where[inside] + 1]
    return ids, where - np.maximum(begins, start), labels


def _check_labels(store: TokenStore, *, one_text: bool) -> None:
    """Raises: DataError where no token has a next one in its document: every loss would be 0 over 0 labels."""
    longest = store.num_tokens if one_text else int(np.diff(store.ends, prepend=0).max())
    if longest < 2:
        raise DataError(
            "text", got=f"{len(store.ends)} documents of one token", allowed="a document of two tokens or more",
            remedy='check data.end_of_document_id, or set data.packing = "stream"',
        )  # fmt: skip


def _cut_rows(num_tokens: int, length: int) -> npt.NDArray[np.int64]:
    if num_tokens < length:
        raise DataError(
            "text", got=f"{num_tokens} tokens", allowed=f"at least one row of {length}",
            remedy=f"set data.seq_len = {num_tokens} or less, or give more text",
        )  # fmt: skip
    starts = np.arange(num_tokens // length, dtype=np.int64) * length
    return np.stack([starts, starts + length], axis=1)


def _whole_rows(ends: npt.NDArray[np.int64], allowed_tokens: int) -> npt.NDArray[np.int64]:
    """Consecutive documents, as many whole ones a row as fit. A longer one is met when its step comes."""
    rows, start, end = [], 0, 0
    for stop in ends.tolist():
        if stop - start > allowed_tokens and end > start:
            rows.append((start, end))
            start = end
        end = stop
    rows.append((start, end))
    return np.asarray(rows, dtype=np.int64)
