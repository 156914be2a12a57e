"""Learning rates and row orders: pure functions of seed and step."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steppe.training.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of update number `step` (0 is the first): linear warm-up, then constant or a cosine to its floor."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    if train.schedule == "constant":
        return train.lr
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * fall)


def dropout_seed(seed: int, step: int, micro: int, rank: int) -> int:
    """The generator seed of one micro-batch on one rank: nothing else may decide what dropout drops."""
    word = hashlib.blake2b(f"{seed}/{step}/{micro}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") & (2**63 - 1)


def row_at(position: int, num_rows: int, seed: int) -> int:
    """Which row stands at a position of the endless stream: each pass over the rows is a fresh permutation."""
    epoch, place = divmod(position, num_rows)
    return int(_permutation(seed, epoch, num_rows)[place])


def positions(step: int, micro: int, rank: int, *, batch: int, micro_batches: int, world: int, start: int = 0) -> range:
    """Places in the stream that one rank reads in one micro-batch; `start` is where step 0 would begin."""
    first = start + ((step * micro_batches + micro) * world + rank) * batch
    return range(first, first + batch)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)
