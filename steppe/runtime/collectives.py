"""The only door to torch.distributed.

The group is always an argument. `None` is this process alone: every collective is then a local copy, so one rank runs
the same lines as many. Peers are group ranks and are translated to global ranks here. The order of collectives must
never depend on data, on requires_grad or on a rank being empty: that is the callers' rule, and nothing here looks at
sizes to decide whether to communicate, except that empty point-to-point messages, whose emptiness both ends know, are
left out.

Note [gloo at exit]. A gloo thread drops the tensors of a collective after it woke the waiter, and a tensor that Python
let go of meanwhile needs the GIL for that. Once the interpreter ends, a thread that asks for the GIL is unwound out of
a destructor, which aborts the process behind its last step (torch 2.11 and 2.13; FSDP2's all-gathers are enough). So
the interpreter's end waits, the GIL free, until these threads rest.
"""

from __future__ import annotations

import atexit
import datetime
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steppe.core.errors import CollectiveTimeout

Group = dist.ProcessGroup | None
Message = tuple[torch.Tensor, int]

# torch 2.13 deprecates the *_into_tensor names in favour of *_single; 2.11 has only the old ones.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_GLOO_THREAD = "pt_gloo_runloop"
_REST_S, _LOOKS = 0.005, 2  # seconds between looks at gloo's threads, and how often they must be found asleep in a row
_END_S = 10.0
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def world() -> Group:
    """The group of all ranks; None when torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def global_rank(group: Group, group_rank: int) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def new_group(ranks: Sequence[int]) -> Group:
    """A process group of these global ranks; every rank of the world must call this, in the same order."""
    return dist.new_group(list(ranks))


def node_share(group: Group) -> tuple[int, int]:
    """(this rank's place among the group's ranks on its node, their number), by host name; one gather at set-up."""
    names = all_gather_object(socket.gethostname(), group)
    here = [r for r, name in enumerate(names) if name == names[rank(group)]]
    return here.index(rank(group)), len(here)


class Pending:
    """Collectives in flight. `wait` may be called more than once; the tensors are kept alive until then."""

    def __init__(self, works: Sequence[Any], what: str, keep: tuple[Any, ...] = ()) -> None:
        self._works, self._what, self._keep = list(works), what, keep

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all of it (on an accelerator: the current stream waits). Raises CollectiveTimeout."""
        started = time.monotonic()
        while self._works:
            # gloo's point-to-point works may be waited for once only: forget each before the wait can fail.
            work = self._works.pop(0)
            try:
                if timeout_s is None:
                    work.wait()
                else:
                    left = max(0.001, timeout_s - (time.monotonic() - started))
                    work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as failure:
                raise CollectiveTimeout(f"{self._what}: {failure}") from failure
        self._keep = ()


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Reduce in place over the group and return the tensor."""
    if size(group) > 1:
        dist.all_reduce(tensor, _OPS[op], group=group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """[size, *tensor.shape]: every rank's tensor, equal shapes."""
    out = tensor.new_empty((size(group), *tensor.shape))
    all_gather_into(out.view(-1), tensor.reshape(-1), group)
    return out


def all_gather_into(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> None:
    """Gather equal flat shares of every rank into `out`, in rank order."""
    if size(group) == 1:
        out.copy_(tensor)
    else:
        _gather_single(out, tensor.contiguous(), group=group)


def reduce_scatter_into(out: torch.Tensor, tensor: torch.Tensor, group: Group) -> None:
    """Sum over ranks, each keeping its equal share of the first dimension."""
    if size(group) == 1:
        out.copy_(tensor)
    else:
        _scatter_single(out, tensor.contiguous(), op=dist.ReduceOp.SUM, group=group)


def broadcast(tensor: torch.Tensor, group: Group, src: int) -> torch.Tensor:
    """Give every rank of the group the tensor of group rank `src`, in place."""
    if size(group) > 1:
        dist.broadcast(tensor, global_rank(group, src), group=group)
    return tensor


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every rank's Python value, in rank order; for set-up and errors, not for steps."""
    if size(group) == 1:
        return [value]
    values: list[Any] = [None] * size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def barrier(group: Group) -> None:
    if size(group) > 1:
        dist.barrier(group=group)


def all_to_all(
    out: torch.Tensor, rows: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: Group,
    what: str = "all_to_all",
) -> Pending:  # fmt: skip
    """Start exchanging row ranges: `in_splits[r]` rows go to rank r, `out_splits[r]` come from it."""
    if size(group) == 1:
        out[: out_splits[0]].copy_(rows[: in_splits[0]])
        return Pending((), what)
    work = dist.all_to_all_single(
        out[: sum(out_splits)], rows[: sum(in_splits)], list(out_splits), list(in_splits), group=group, async_op=True
    )
    return Pending((work,), f"{what} over {size(group)} ranks", (out, rows))


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: Group, what: str = "exchange") -> Pending:
    """Post one batch of point-to-point messages between group ranks; messages to oneself are copied.

    Tensors must be contiguous. Empty messages are left out on both ends. Equal-sized messages between one pair of
    ranks match in the order in which they are listed.
    """
    me = rank(group)
    own_out = [tensor for tensor, peer in sends if peer == me]
    own_in = [tensor for tensor, peer in receives if peer == me]
    for target, source in zip(own_in, own_out, strict=True):
        target.copy_(source)
    ops = [
        dist.P2POp(kind, tensor, global_rank(group, peer), group)
        for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
        for tensor, peer in messages
        if peer != me and tensor.numel()
    ]
    peers = sorted({peer for _, peer in (*sends, *receives) if peer != me})
    works = dist.batch_isend_irecv(ops) if ops else ()
    return Pending(works, f"{what} of rank {me} with ranks {peers}", (tuple(sends), tuple(receives)))


def warm_up(group: Group, device: torch.device) -> None:
    """One all-reduce, so that the group's communicator exists before its first point-to-point batch (NCCL wants it)."""
    all_reduce(torch.zeros(1, device=device), group)


@atexit.register
def _let_gloo_rest() -> None:
    """Wait until every gloo thread of this process sleeps. See Note [gloo at exit]."""
    deadline, asleep = time.monotonic() + _END_S, 0
    while (states := _gloo_states()) and asleep < _LOOKS and time.monotonic() < deadline:
        time.sleep(_REST_S)
        asleep = asleep + 1 if set(states) == {"S"} else 0


def _gloo_states() -> list[str]:
    """The scheduler's letter for each of gloo's threads; none where the system doesn't tell."""
    states = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:  # a thread that just ended
            continue
        if name == _GLOO_THREAD:
            states.append(rest.split()[0])
    return states
