"""What a checkpoint says about itself: hashes of its files, its keys, the run it belongs to.

DCP loads a flipped byte without a word and ignores keys that the model doesn't have; so every file is hashed, and the
keys and the run's identity are compared before a byte is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from steppe.core.errors import CheckpointError

NAME: Final = "manifest.json"
_VERSION: Final = 1
_PIECE: Final = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """`files`: name -> [sha256, bytes]; `keys`: key -> [dtype, shape]; `identity`: what a resumed run must share."""

    step: int  # updates that the weights have seen
    rows_read: int
    world: int
    identity: Mapping[str, Any]
    files: Mapping[str, tuple[str, int]]
    keys: Mapping[str, tuple[str, list[int]]]
    version: int = _VERSION

    def write(self, directory: Path) -> None:
        """Write and fsync, with a digest over the manifest's own text."""
        body = json.dumps(asdict(self), sort_keys=True)
        text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
        with (directory / NAME).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises: CheckpointError when it is missing, cut short or altered."""
        file = directory / NAME
        try:
            outer = json.loads(file.read_text())
            body = outer["manifest"]
            if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
                raise ValueError("its own sha256 doesn't match")
            fields = json.loads(body)
            if fields["version"] != _VERSION:
                raise ValueError(f"version {fields['version']}")
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
            raise damaged(file, f"{failure}", "the manifest that was written") from failure


def damaged(file: Path, got: str, allowed: str) -> CheckpointError:
    """The refusal for a file that isn't what was written."""
    return CheckpointError(str(file), got=got, allowed=allowed, remedy="resume from another checkpoint")


def sha256_of(file: Path) -> tuple[str, int]:
    """Hash and length, read piece by piece."""
    digest, length = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            length += len(piece)
    return digest.hexdigest(), length


def data_files(directory: Path) -> list[Path]:
    """Every file of a checkpoint save the manifest, in a fixed order."""
    return sorted(p for p in directory.iterdir() if p.is_file() and p.name != NAME)


def verify_files(directory: Path, manifest: Manifest, rank: int, world: int) -> None:
    """Check this rank's share of the files. Raises: CheckpointError naming the first one that is wrong."""
    for name in sorted(manifest.files)[rank::world]:
        file = directory / name
        expected_hash, expected_bytes = manifest.files[name]
        if not file.exists():
            raise damaged(file, "missing", f"{expected_bytes} bytes")
        try:
            found_hash, found_bytes = sha256_of(file)
        except OSError as failure:
            raise damaged(file, f"{failure}", "a readable file") from failure
        if found_bytes != expected_bytes:
            raise damaged(file, f"{found_bytes} bytes", f"{expected_bytes} bytes")
        if found_hash != expected_hash:
            raise damaged(file, f"sha256 {found_hash[:12]}...", f"sha256 {expected_hash[:12]}..., as it was written")


def check_keys(directory: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises: CheckpointError where keys, shapes or types differ: a checkpoint of another model."""
    missing, foreign = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or foreign:
        got = [f"without {missing[0]!r} ({len(missing)} in all)"] if missing else []
        got += [f"with {foreign[0]!r}, which the model doesn't have ({len(foreign)} in all)"] if foreign else []
        raise CheckpointError(
            f"keys of {directory}", got=" and ".join(got), allowed="exactly the model's tensors and their state",
            remedy=f"{_model_or_optimizer(missing, foreign)}, or start in an empty output.dir",
        )  # fmt: skip
    for key, value in wanted.items():
        if list(saved[key]) != list(value):
            type_only = list(saved[key][1]) == list(value[1])
            back = f'set model.dtype = "{saved[key][0]}"' if type_only else "resume with the model that was saved"
            raise CheckpointError(
                f"{key} in {directory}", got=f"{saved[key][0]}{saved[key][1]}", allowed=f"{value[0]}{value[1]}",
                remedy=f"{back}, or start in an empty output.dir",
            )  # fmt: skip


def _model_or_optimizer(missing: list[str], foreign: list[str]) -> str:
    """What to change: only the optimizer of [flatten] has masters."""
    if all(key.startswith("optim.") and key.endswith(".master") for key in (*missing, *foreign)):
        return f"set flatten.optimizer {'off' if missing else 'on'} again, as it was when this was saved"
    return "resume with the model that was saved"


def check_identity(directory: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises: CheckpointError naming the fields in which the checkpoint's run and this one differ."""
    before, now = dict(_flat(saved)), dict(_flat(wanted))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        first = changed[0]
        raise CheckpointError(
            f"the run of {directory}", got=f"{first} = {now.get(first)!r} (of {len(changed)} that differ)",
            allowed=f"{first} = {before.get(first)!r}, as it was saved",
            remedy=f"{_way_back(first)}, or start in an empty output.dir",
        )  # fmt: skip


def _way_back(key: str) -> str:
    """Which keys of the run.toml a field of the identity comes from."""
    if key == "data.tokens":  # a hash
        return "bring back the text and the tokenizer that data.path and the keys beside it gave"
    if key.startswith("model.") and key != "model.dtype":
        return f"set {key.removeprefix('model.')} back in model.shape or model.config"
    return f"set {key} back"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
