"""A standing crew of gloo processes: `run_ranks(fn, 2)` runs `fn(rank, world_size, *args)` on two ranks.

The processes stay between calls, so a call costs milliseconds, not imports. Every call gets a fresh process group with
a file rendezvous. A failure on one rank, or a time-out, is raised in the caller with that rank's traceback and the
crew is replaced, so one hung collective can't poison the next test.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing as mp
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run a top-level function on `world_size` gloo ranks and return the results in rank order."""
    global _crew
    if _crew is None:
        _crew = _Crew()
    try:
        return _crew.run(fn, world_size, args, timeout_s)
    except BaseException:
        _crew.dismiss()
        _crew = None
        raise


class _Crew:
    def __init__(self) -> None:
        self.members: list[tuple[mp.process.BaseProcess, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="steppe-ranks-")
        self.calls = 0

    def run(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        while len(self.members) < world_size:
            self._hire()
        self.calls += 1
        store = str(Path(self.folder.name) / f"store-{self.calls}")
        for rank, (_, pipe) in enumerate(self.members[:world_size]):
            pipe.send((fn.__module__, fn.__qualname__, rank, world_size, store, args, timeout_s))
        return self._collect(fn.__qualname__, world_size, timeout_s)

    def _collect(self, name: str, world_size: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.members[:world_size])}
        # The first call of a process waits for its imports: those seconds are not the test's.
        deadline = time.monotonic() + timeout_s + 60.0
        while len(results) + len(failures) < world_size:
            open_pipes = [pipe for pipe, rank in pipes.items() if rank not in results and rank not in failures]
            # After a first failure the others get a moment to fail with their own words, no more.
            limit = min(deadline - time.monotonic(), 10.0) if failures else deadline - time.monotonic()
            ready = wait(open_pipes, timeout=max(0.0, limit))
            if not ready:
                missing = sorted(set(range(world_size)) - results.keys() - failures.keys())
                failures.update(dict.fromkeys(missing, "did not finish in time"))
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, f"died with exit code {self.members[rank][0].exitcode}"
                (results if ok else failures)[rank] = value
        if failures:
            told = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise RankFailure(f"{name} on {world_size} ranks:\n{told}")
        return [results[rank] for rank in range(world_size)]

    def _hire(self) -> None:
        context = mp.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.members.append((process, mine))

    def dismiss(self) -> None:
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()
        self.members.clear()
        self.folder.cleanup()


_crew: _Crew | None = None


@atexit.register
def _dismiss() -> None:
    if _crew is not None:
        _crew.dismiss()


def _work(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            module, name, rank, world_size, store, args, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            fn = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            pipe.send((True, _on_rank(fn, rank, world_size, store, args, timeout_s)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _on_rank(fn: Any, rank: int, world_size: int, store: str, args: tuple[Any, ...], timeout_s: float) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size),
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    try:
        dist.barrier()  # a rank that is done may not leave while another one still connects to it
        torch.manual_seed(0)
        return fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers layouts by mesh, and a mesh of the next call may be equal while its groups are others."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
