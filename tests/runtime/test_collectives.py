"""The collectives' contract on one, two and four gloo ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from steppe.core.errors import CollectiveTimeout
from steppe.runtime import collectives
from tests.support.ranks import RankFailure, run_ranks


def _reductions(rank: int, world_size: int) -> None:
    group = collectives.world()
    total = collectives.all_reduce(torch.tensor([float(rank)]), group)
    assert total.item() == sum(range(world_size))
    highest = collectives.all_reduce(torch.tensor([float(rank)]), group, "max")
    assert highest.item() == world_size - 1
    gathered = collectives.all_gather(torch.full((2, 3), rank), group)
    assert gathered.shape == (world_size, 2, 3)
    assert gathered[:, 0, 0].tolist() == list(range(world_size))
    share = torch.empty(2)
    collectives.reduce_scatter_into(share, torch.arange(2.0 * world_size), group)
    assert share.tolist() == [world_size * 2.0 * rank, world_size * (2.0 * rank + 1)]
    assert collectives.all_gather_object(rank, group) == list(range(world_size))
    assert collectives.broadcast(torch.tensor([rank]), group, world_size - 1).item() == world_size - 1


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_reductions_and_gathers_agree_with_arithmetic(world_size: int) -> None:
    run_ranks(_reductions, world_size)


def test_no_group_is_this_process_alone() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    assert collectives.size(None) == 1
    assert torch.equal(collectives.all_gather(tensor, None), tensor[None])
    out = torch.zeros(4, 2)
    collectives.all_to_all(out, tensor, [3], [3], None).wait()
    assert torch.equal(out[:3], tensor)
    collectives.exchange([(tensor, 0)], [(out[:3], 0)], None).wait()


def _uneven_all_to_all(rank: int, world_size: int) -> None:
    group = collectives.world()
    # rank r sends r + s rows to rank s; rank 0 sends nothing to itself
    in_splits = [rank + s for s in range(world_size)]
    out_splits = [s + rank for s in range(world_size)]
    rows = torch.full((sum(in_splits), 2), float(rank))
    out = torch.full((sum(out_splits) + 3, 2), torch.nan)
    pending = collectives.all_to_all(out, rows, out_splits, in_splits, group)
    pending.wait()
    pending.wait()  # a second wait is harmless
    expected = [float(s) for s in range(world_size) for _ in range(s + rank)]
    assert out[: sum(out_splits), 0].tolist() == expected
    assert out[sum(out_splits) :].isnan().all(), "rows past the splits were written"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_uneven_and_empty_splits_reach_their_rows(world_size: int) -> None:
    run_ranks(_uneven_all_to_all, world_size)


def _ring(rank: int, world_size: int) -> None:
    group = collectives.world()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    lengths = [3 * r for r in range(world_size)]  # rank 0 sends nothing
    mine = torch.full((lengths[rank],), float(rank))
    incoming = torch.full((lengths[left],), torch.nan)
    pending = collectives.exchange([(mine, right)], [(incoming, left)], group, "ring")
    pending.wait()
    pending.wait()
    assert incoming.tolist() == [float(left)] * lengths[left]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_ring_shift_leaves_empty_messages_out_on_both_ends(world_size: int) -> None:
    run_ranks(_ring, world_size)


def _subgroup(rank: int, world_size: int) -> None:
    pairs = [collectives.new_group([0, 2]), collectives.new_group([1, 3])]
    group = pairs[rank % 2]
    assert collectives.global_rank(group, 1) == rank % 2 + 2
    incoming = torch.zeros(1)
    other = 1 - collectives.rank(group)
    collectives.exchange([(torch.tensor([float(rank)]), other)], [(incoming, other)], group).wait()
    assert incoming.item() == (rank + 2) % 4


def test_group_ranks_are_translated_to_global_ranks() -> None:
    run_ranks(_subgroup, 4)


def _missing_peer(rank: int, world_size: int) -> str:
    if rank == 1:
        return ""
    pending = collectives.exchange([], [(torch.zeros(1), 1)], collectives.world(), "shard 3")
    with pytest.raises(CollectiveTimeout, match=r"shard 3 of rank 0 with ranks \[1\]") as caught:
        pending.wait(timeout_s=0.5)
    return str(caught.value)


def test_a_missing_peer_times_out_with_the_peer_named() -> None:
    assert "shard 3" in run_ranks(_missing_peer, 2)[0]


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the words of rank one")


def test_the_crew_reports_the_failing_rank_and_recovers() -> None:
    with pytest.raises(RankFailure, match="the words of rank one"):
        run_ranks(_raise_on_one, 2)
    run_ranks(_reductions, 2)


def _share(rank: int, world_size: int) -> tuple[int, int]:
    return collectives.node_share(collectives.world())


def test_ranks_of_one_node_share_it_in_their_order() -> None:
    assert run_ranks(_share, 2) == [(0, 2), (1, 2)]
    assert collectives.node_share(None) == (0, 1)


_ENDS_EARLY = """
import torch, torch.distributed as dist
from steppe.runtime import collectives
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
whole, part = torch.empty(0), torch.ones(1 << 20)
works = [gather(torch.empty(1 << 20), part, async_op=True) for _ in range(300)]
torch.kept = dist.group.WORLD  # as FSDP2's states keep it: gloo's threads live to the end
if {looks}:
    collectives._let_gloo_rest()
    print("left", sum(not work.is_completed() for work in works))
works.clear()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("looks", [True, False])
def test_a_process_ends_well_while_gloo_still_holds_its_last_tensors(looks: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ENDS_EARLY.format(looks=looks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not looks or "left 0" in done.stdout
