"""A store of this attempt's own: what an earlier attempt of the job left in the launcher's can't be met again.

Note [Restarts]
torchrun gives a restarted job the store of the attempt that failed, addresses of dead ranks included, under the very
keys that the new ranks use. Whoever looks before his peer has written connects to nobody. The number of restarts is no
way out: it differs between nodes. So the ranks agree on a word: each says hello with a word that nobody has used, rank
0 answers whatever hellos it finds with its own new word, and goes on when all have repeated that one.
"""

from __future__ import annotations

import datetime
import time
import uuid

import torch.distributed as dist

from steppe.core.errors import CollectiveTimeout

_POLL_S = 0.005


def meet(rank: int, world: int, timeout_s: float) -> dist.Store:
    """The launcher's store (rendezvous by its environment) under a prefix that only this attempt's ranks know.

    Raises: CollectiveTimeout naming the ranks that rank 0 has not met.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    return dist.PrefixStore(agree(store, rank, world, timeout_s), store)


def agree(store: dist.Store, rank: int, world: int, timeout_s: float) -> str:
    """One word for all ranks that are here now, whatever others left in the store."""
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"steppe/hello/{rank}", mine)
        store.wait([f"steppe/answer/{mine}"], datetime.timedelta(seconds=timeout_s))
        word: str = store.get(f"steppe/answer/{mine}").decode()
        store.set(f"steppe/{word}/{rank}", "here")
        return word
    answered: set[str] = set()
    missing, until = set(range(1, world)), time.monotonic() + timeout_s
    while missing:
        if time.monotonic() > until:
            raise CollectiveTimeout(f"start of {world} ranks: rank 0 has not met ranks {sorted(missing)}")
        for other in sorted(missing):
            if store.check([f"steppe/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"steppe/hello/{other}"]):
                hello = store.get(f"steppe/hello/{other}").decode()
                if hello not in answered:
                    answered.add(hello)
                    store.set(f"steppe/answer/{hello}", mine)
        time.sleep(_POLL_S)
    return mine
