"""Checkpoints that are whole or not there: DCP inside an atomic commit, verified before a byte is loaded.

Note [Commit]
Rank 0 makes `.step-N.tmp`; all ranks write their shards into it and fsync; each hashes a share of the files; rank 0
writes the manifest, fsyncs file and directory, renames the directory to `step-N`, fsyncs its parent, rewrites `latest`
and prunes. Whatever kills the job leaves the previous checkpoints untouched and at most a `.tmp` behind.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule

from steppe.core.errors import CheckpointError
from steppe.core.units import format_bytes
from steppe.runtime import collectives
from steppe.training import manifest as manifests
from steppe.training.agreement import on_rank_zero, together
from steppe.training.manifest import Manifest

LATEST: Final = "latest"
_STEP = re.compile(r"step-(\d{8})")

State = dict[str, torch.Tensor]
Writer = Callable[[State, Path, collectives.Group], None]


class Saveable(Protocol):
    """What a checkpoint needs of a trainer."""

    model: Any
    optimizer: Any
    group: collectives.Group
    next_step: int

    def identity(self) -> dict[str, Any]: ...
    def rows_read(self) -> int: ...
    def resume(self, step: int, rows_read: int) -> None: ...


def state_of(trainer: Saveable) -> State:
    """Every tensor that a run is made of, under its name: live storages, so that loading writes straight into them."""
    model = trainer.model
    if isinstance(model, FSDPModule):
        model.reshard()
    state: State = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    state |= {f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent}
    entries = trainer.optimizer.state
    for name, parameter in model.named_parameters():
        for key, value in entries.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optim.{name}.{key}"] = value.detach()
    return state


def write_shards(state: State, directory: Path, group: collectives.Group) -> None:
    """DCP with one fsynced file a rank."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=True), process_group=group)  # type: ignore[arg-type]


def save(trainer: Saveable, root: Path, *, keep: int, write: Writer = write_shards) -> Path:
    """Commit a checkpoint of the trainer as it stands (Note [Commit]) and keep the newest `keep`.

    Peak: nothing on the device; on the host one tensor at a time.
    Raises: CheckpointError on all ranks where there is no space or a disk fails; earlier checkpoints stay intact.
    """
    target = root / f"step-{trainer.next_step:08d}"
    work = root / f".{target.name}.tmp"
    state, group = state_of(trainer), trainer.group
    on_rank_zero(lambda: _prepare(root, work, state), group)
    try:
        together(lambda: _write(lambda: write(state, work, group), work), group)
        shares = collectives.all_gather_object(together(lambda: _hashes(work, group), group), group)
        files = {name: value for share in shares for name, value in share.items()}
        made = Manifest(
            trainer.next_step, trainer.rows_read(), collectives.size(group), trainer.identity(), files, describe(state)
        )
        on_rank_zero(lambda: _commit(made, work, target, keep), group)
    except (CheckpointError, OSError) as failure:
        on_rank_zero(lambda: shutil.rmtree(work, ignore_errors=True), group)
        raise failure if isinstance(failure, CheckpointError) else _disk(failure, work) from failure
    return target


def load(trainer: Saveable, directory: Path) -> Manifest:
    """Verify a checkpoint, then load it in place and set the trainer to go on behind it.

    Exactness: bitwise, on any number of ranks. Raises: CheckpointError on all ranks, with nothing changed.
    """
    group, rank = trainer.group, collectives.rank(trainer.group)
    found = together(lambda: _checked(trainer, directory, rank, collectives.size(group)), group)
    dcp.load(state_of(trainer), storage_reader=dcp.FileSystemReader(directory), process_group=group)  # type: ignore[arg-type]
    if hasattr(trainer.optimizer, "refresh_masters"):
        trainer.optimizer.refresh_masters()
    trainer.resume(found.step, found.rows_read)
    return found


def committed(root: Path) -> list[Path]:
    """The checkpoints that were committed, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())


def describe(state: State) -> dict[str, tuple[str, list[int]]]:
    """Key -> (dtype, global shape)."""
    return {key: (str(t.dtype).removeprefix("torch."), list(t.shape)) for key, t in state.items()}


def set_aside(root: Path, after_step: int) -> None:
    """Rename the checkpoints of later steps, which a run that resumes at `after_step` will write anew."""
    for directory in committed(root):
        if int(directory.name.removeprefix("step-")) > after_step:
            target, again = root / f"abandoned-{directory.name}", 1
            while target.exists():  # an earlier run went back, too: nothing is deleted
                again += 1
                target = root / f"abandoned-{directory.name}-{again}"
            directory.rename(target)


def _checked(trainer: Saveable, directory: Path, rank: int, world: int) -> Manifest:
    with _offering_another(directory):
        found = Manifest.read(directory)
    # Of another run: an older checkpoint would be refused like this one.
    manifests.check_keys(directory, found.keys, describe(state_of(trainer)))
    manifests.check_identity(directory, found.identity, trainer.identity())
    with _offering_another(directory):
        manifests.verify_files(directory, found, rank, world)
    return found


@contextmanager
def _offering_another(directory: Path) -> Iterator[None]:
    """Damage is refused with the newest other checkpoint that is whole as its remedy."""
    try:
        yield
    except CheckpointError as failure:
        raise _offering(failure, directory) from failure


def _offering(failure: CheckpointError, directory: Path) -> CheckpointError:
    for other in reversed(committed(directory.parent)):
        if other.name < directory.name and _is_whole(other):
            remedy = f'set output.resume = "{other.name}", the previous checkpoint, which is intact'
            return CheckpointError(failure.what, got=failure.got, allowed=failure.allowed, remedy=remedy)
    return failure


def _is_whole(directory: Path) -> bool:
    try:
        manifests.verify_files(directory, Manifest.read(directory), 0, 1)
    except CheckpointError:
        return False
    return True


def _prepare(root: Path, work: Path, state: State) -> None:
    """An empty directory on a disk with room enough. Raises: CheckpointError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".step-*.tmp"):
            shutil.rmtree(stale)
        work.mkdir()
        free = shutil.disk_usage(root).free
    except OSError as failure:
        raise _disk(failure, work) from failure
    needed = sum(t.numel() * t.element_size() for t in state.values())
    if free < needed:
        work.rmdir()
        raise _no_space(work, f"{format_bytes(free)} free", format_bytes(needed))


def _write(write: Callable[[], None], work: Path) -> None:
    """Run the writer; whatever DCP wraps a failed disk in comes out as a CheckpointError."""
    try:
        write()
    except CheckpointException as wrapped:  # a BaseException that holds every rank's own
        causes = [c for pair in wrapped.failures.values() for c in _chain(pair[0])]
        disk = next((c for c in causes if isinstance(c, OSError) and c.errno), None)
        text = next((str(c) for c in causes if "No space left" in str(c)), "")
        if disk is None and text:
            disk = OSError(errno.ENOSPC, text)
        if disk is None:
            disk = OSError(errno.EIO, f"{causes[0]}" if causes else str(wrapped))
        raise _disk(disk, work) from wrapped


def _chain(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = failure.__cause__ or failure.__context__


def _hashes(work: Path, group: collectives.Group) -> dict[str, tuple[str, int]]:
    """This rank's share of the files' hashes."""
    collectives.barrier(group)
    mine = manifests.data_files(work)[collectives.rank(group) :: collectives.size(group)]
    return {file.name: manifests.sha256_of(file) for file in mine}


def _commit(made: Manifest, work: Path, target: Path, keep: int) -> None:
    made.write(work)
    _fsync(work)
    shutil.rmtree(target, ignore_errors=True)  # of a future that was left behind
    work.rename(target)
    _fsync(target.parent)
    pointer = target.parent / f".{LATEST}.tmp"
    pointer.write_text(target.name + "\n")
    os.replace(pointer, target.parent / LATEST)
    _fsync(target.parent)
    for old in committed(target.parent)[:-keep]:
        shutil.rmtree(old)


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk(failure: OSError, work: Path) -> CheckpointError:
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(work, f"{failure.strerror or failure}", "room for the whole checkpoint")
    return CheckpointError(
        f"writing {work}", got=f"{failure}", allowed="a directory that can be written",
        remedy="check the disk and the permissions of output.dir; earlier checkpoints are intact",
    )  # fmt: skip


def _no_space(work: Path, got: str, needed: str) -> CheckpointError:
    kept = committed(work.parent)
    intact = f"{kept[-1].name} is intact" if kept else "there is no earlier checkpoint"
    return CheckpointError(
        f"space for {work}", got=got, allowed=needed,
        remedy=f"free space or choose an output.dir on another disk and start again; {intact}",
    )  # fmt: skip
