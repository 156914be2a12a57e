"""How a chunk's rows come to the experts and go home: in one process, on a lane, or over a wire.

All three are driven the same way (`exchange.run_chunks`): `start(j)` packs and posts, `take(j)` gives the grouped rows,
`give(j)` sends the results home, where they are combined at the latest in `finish()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from steppe.core.errors import CollectiveTimeout
from steppe.flatteners.dispatch.experts import ChunkRows
from steppe.flatteners.dispatch.routes import Routes, Session
from steppe.flatteners.dispatch.workspace import Workspace
from steppe.runtime import collectives
from steppe.runtime.lanes import Lane, Ticket

_SEQUENTIAL_ADDS = ("cpu",)  # devices whose index_add_ takes its rows in order


@dataclass
class Source:
    """The own tokens' side: what is packed from, and what comes home is added to.

    Forward: `total` [N,H] is the output. Backward: `grads` [N,H] is the upstream gradient, `total` the token gradients,
    `weight_grads` [N*k] the route weights'.
    """

    routes: Routes
    tokens: torch.Tensor
    weights: torch.Tensor  # [N*k] in the dtype of sums
    total: torch.Tensor
    grads: torch.Tensor | None = None
    weight_grads: torch.Tensor | None = None

    def pack(self, chunk: int, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> int:
        """Gather the chunk's rows into the buffers; returns how many."""
        token, choice = self.routes.chunk(chunk)
        rows = len(token)
        torch.index_select(self.tokens, 0, token, out=x[:rows])
        torch.index_select(self.weights, 0, token * self.routes.layer.num_choices + choice, out=w[:rows])
        if self.grads is not None:
            torch.index_select(self.grads, 0, token, out=g[:rows])
        return rows

    def combine(self, chunk: int, rows: torch.Tensor, dw: torch.Tensor) -> None:
        """Add the chunk's results [R,H] to their tokens, choice by choice where adds are not sequential."""
        token, choice = self.routes.chunk(chunk)
        if self.weight_grads is not None:
            self.weight_grads.index_add_(0, token * self.routes.layer.num_choices + choice, dw[: len(token)])
        if rows.device.type in _SEQUENTIAL_ADDS:
            self._add(token, rows[: len(token)])
            return
        by_choice = torch.argsort(choice, stable=True).split(self.routes.choice_sizes[chunk])
        for part in by_choice:
            self._add(token[part], rows.index_select(0, part))

    def _add(self, token: torch.Tensor, rows: torch.Tensor) -> None:
        if rows.dtype == self.total.dtype:
            self.total.index_add_(0, token, rows)
            return
        step = max(1, self.routes.layer.tile_elements // rows.shape[1])
        for a in range(0, len(token), step):  # widened tile by tile
            self.total.index_add_(0, token[a : a + step], rows[a : a + step].to(self.total.dtype))


class Path(Protocol):
    """The way of the chunks of one pass."""

    ahead: bool  # the next chunk is started before this one is computed

    def start(self, chunk: int) -> None: ...

    def take(self, chunk: int) -> ChunkRows: ...

    def give(self, chunk: int) -> None: ...

    def finish(self) -> None: ...


class LocalPath:
    """One rank: rows are packed where they are computed, and combined from there at once."""

    ahead = False

    def __init__(self, source: Source, workspace: Workspace) -> None:
        self.source, self.workspace = source, workspace

    def start(self, chunk: int) -> None:
        self.source.pack(chunk, *(self.workspace[name] for name in "xwg"))

    def take(self, chunk: int) -> ChunkRows:
        return _chunk_rows(self.workspace, self.source, chunk)

    def give(self, chunk: int) -> None:
        rows = _chunk_rows(self.workspace, self.source, chunk)
        self.source.combine(chunk, rows.x if self.source.grads is None else rows.g, rows.dw)

    def finish(self) -> None:
        return None


class LanePath:
    """One rank, beside compute: two sets of buffers; the lane packs chunk j+1 and combines chunk j-1 meanwhile.

    The lane is a FIFO, so a set is combined from before it is packed again.
    """

    ahead = True

    def __init__(self, source: Source, workspace: Workspace, lane: Lane) -> None:
        self.source, self.lane = source, lane
        second = {name: workspace[f"{name}2"] for name in ("x", "w", "g", "dw")}
        self.sets = (workspace, Workspace(workspace.rows, {**workspace.buffers, **second}))
        self.packed: dict[int, Ticket] = {}

    def start(self, chunk: int) -> None:
        buffers = [self.sets[chunk % 2][name] for name in "xwg"]
        after = self.lane.mark() if chunk == 0 else None
        job = lambda: self.source.pack(chunk, *buffers)  # noqa: E731
        self.packed[chunk] = self.lane.run(job, after=after, stage="pack", buffer=f"chunk {chunk}")

    def take(self, chunk: int) -> ChunkRows:
        self.packed.pop(chunk).wait()
        return _chunk_rows(self.sets[chunk % 2], self.source, chunk)

    def give(self, chunk: int) -> None:
        rows = _chunk_rows(self.sets[chunk % 2], self.source, chunk)
        results = rows.x if self.source.grads is None else rows.g
        job = lambda: self.source.combine(chunk, results, rows.dw)  # noqa: E731
        self.last = self.lane.run(job, after=self.lane.mark(), stage="combine", buffer=f"chunk {chunk}")

    def finish(self) -> None:
        self.last.wait()


class WirePath:
    """Several ranks. Chunk j+1 is on its way out, and chunk j-1 on its way home, while chunk j is computed.

    `sent` is free again once its exchange was waited for, `came` once it is grouped, `back` and `home` when the way
    home of the chunk before was waited for: so one of each is enough.
    """

    ahead = True

    def __init__(self, source: Source, workspace: Workspace, session: Session, what: str) -> None:
        self.source, self.workspace, self.session, self.what = source, workspace, session, what
        self.names = ("x", "w", "g") if source.grads is not None else ("x", "w")
        self.out: list[collectives.Pending] = []
        self.back: tuple[int, list[collectives.Pending]] | None = None

    def start(self, chunk: int) -> None:
        self.session.pool.pause()
        routes, workspace = self.source.routes, self.workspace
        self.source.pack(chunk, *(workspace[f"sent_{name}"] for name in "xwg"))
        came, sent = routes.receives.splits[chunk], routes.sends.splits[chunk]
        self.out = [self._post(f"came_{n}", f"sent_{n}", came, sent, f"dispatch of chunk {chunk}") for n in self.names]

    def take(self, chunk: int) -> ChunkRows:
        self._wait(self.out)
        receives, workspace = self.source.routes.receives, self.workspace
        rows = sum(receives.splits[chunk])
        for name in self.names:
            _concatenate(workspace[f"came_{name}"], receives.gather[chunk], workspace[name][:rows])
        parts = {name: workspace[name][:rows] for name in ("x", "w", "g", "dw")}
        return ChunkRows(**parts, segments=receives.experts[chunk])

    def give(self, chunk: int) -> None:
        self._come_home()
        routes, workspace = self.source.routes, self.workspace
        receives, rows = routes.receives, sum(routes.receives.splits[chunk])
        backward = self.source.grads is not None
        _concatenate(workspace["g" if backward else "x"], receives.scatter[chunk], workspace["back_x"][:rows])
        if backward:
            _concatenate(workspace["dw"], receives.scatter[chunk], workspace["back_w"][:rows])
        came, sent = routes.sends.splits[chunk], receives.splits[chunk]
        names = ("x", "w") if backward else ("x",)
        self.session.pool.pause()
        posts = [self._post(f"home_{n}", f"back_{n}", came, sent, f"return of chunk {chunk}") for n in names]
        self.back = chunk, posts

    def finish(self) -> None:
        self._come_home()

    def _come_home(self) -> None:
        if self.back is not None:
            chunk, posts = self.back
            self._wait(posts)
            self.source.combine(chunk, self.workspace["home_x"], self.workspace["home_w"])
            self.back = None

    def _post(self, into: str, rows: str, came: list[int], sent: list[int], what: str) -> collectives.Pending:
        buffer = self.workspace[rows]
        counters = self.session.pool.counters
        if rows.endswith("x") or rows.endswith("g"):
            counters["wire_rows"] += sum(sent)
        num_bytes = sum(sent) * buffer[:1].numel() * buffer.element_size()
        counters["wire_bytes"] += num_bytes
        self.session.telemetry.stats.wire_bytes += num_bytes
        return collectives.all_to_all(
            self.workspace[into], buffer, came, sent, self.session.group, f"{self.what}, {what}"
        )

    def _wait(self, posts: list[collectives.Pending]) -> None:
        pool, device = self.session.pool, self.source.tokens.device
        pool.pause()
        try:
            with self.session.telemetry.exchange.span(device):
                for post in posts:
                    post.wait(pool.wait_limit_s(device))
        except CollectiveTimeout as late:
            peers = [r for r in range(self.session.num_ranks) if r != self.session.rank]
            raise CollectiveTimeout(f"{late}; peers of rank {self.session.rank}: {peers}") from late


def _chunk_rows(workspace: Workspace, source: Source, chunk: int) -> ChunkRows:
    receives = source.routes.receives
    rows = sum(receives.splits[chunk])
    return ChunkRows(**{n: workspace[n][:rows] for n in ("x", "w", "g", "dw")}, segments=receives.experts[chunk])


def _concatenate(rows: torch.Tensor, ranges: list[tuple[int, int]], out: torch.Tensor) -> None:
    """The ranges of rows, one after another, into `out`."""
    if ranges:
        torch.cat([rows[start : start + length] for start, length in ranges], out=out)
