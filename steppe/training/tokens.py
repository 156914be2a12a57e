"""From documents to tokens on disk: the tokenizer, and one flat file of token ids with the documents' ends."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from steppe.core.errors import ConfigError, DataError
from steppe.runtime import collectives
from steppe.training import text
from steppe.training.agreement import on_rank_zero, writing
from steppe.training.config import DataConfig

Ids = npt.NDArray[np.integer[Any]]
_VERSION = 2  # of the files below; part of their names
# What may stand beside a tokenizer.json and decides how transformers reads it.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
TOKENIZER_FILES = ("tokenizer.json", *_BESIDE)


@dataclass(frozen=True)
class TokenStore:
    """All tokens of a run, mapped from disk: `ids` [T] uint32 and `ends` [documents], the end of each document."""

    ids: Ids
    ends: npt.NDArray[np.int64]
    digest: str  # sha256 of the ids: the same digest is the same data
    tokenizer_file: str  # empty for pre-tokenised data
    largest_id: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def prepare(data: DataConfig, cache: Path, vocab: int, group: collectives.Group) -> TokenStore:
    """Tokenise once (rank 0, cached under `cache`) and map the result on every rank.

    Peak: one document and its tokens at a time on the host, whatever the size of the text.
    Raises: DataError for text or tokens that can't be used; ConfigError for a vocabulary that is too small.
    """
    with writing(cache):
        on_rank_zero(lambda: _build(data, cache), group)
    store = _open(cache / _name(data))
    _check_vocabulary(store, vocab)
    return store


def load_tokenizer(path: str | Path) -> Any:
    """A `tokenizers.Tokenizer` from a tokenizer.json or a directory that holds one. Raises: ConfigError."""
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as failure:  # tokenizers raises plain Exception
        raise ConfigError(
            "data.tokenizer", got=f"{file} ({failure})", allowed="a tokenizer.json of the tokenizers library",
            remedy="give the path of one, or leave data.tokenizer empty to train one on the text",
        ) from failure  # fmt: skip


def train_tokenizer(data: DataConfig) -> Any:
    """A byte-level BPE trained on the run's own text; every byte has a token, so any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.tokenizer_vocab,
        special_tokens=[data.end_of_document] if data.end_of_document else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.documents(data), trainer)
    return tokenizer


def _name(data: DataConfig) -> str:
    """The cache entry of these documents under this tokenizer: changes when any file of them does."""
    named = {k: v for k, v in asdict(data).items() if k not in ("seq_len", "packing", "validation")}
    sources = [*text.files(data)]
    if data.tokenizer:
        given = Path(data.tokenizer)
        sources.append(given / "tokenizer.json" if given.is_dir() else given)
    stamps = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sources if p.exists()]
    word = json.dumps([_VERSION, named, stamps], sort_keys=True)
    return "tokens-" + hashlib.sha256(word.encode()).hexdigest()[:16]


def _build(data: DataConfig, cache: Path) -> None:
    """Write the token file unless it is there; the directory appears whole or not at all."""
    target = cache / _name(data)
    if _is_whole(target):
        return
    shutil.rmtree(target, ignore_errors=True)
    work = cache / f".{target.name}.{os.getpid()}.tmp"
    work.mkdir(parents=True, exist_ok=True)
    try:
        _write(_pretokenised(data) if data.kind == "tokens" else _encoded(data, work), work)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(documents: Iterator[Ids], work: Path) -> None:
    """The documents' ids end to end, their ends, and a digest of both. Raises: DataError where there are none."""
    ends, digest, largest, total = [], hashlib.sha256(), 0, 0
    with (work / "ids.bin").open("wb") as file:
        for ids in documents:
            if len(ids):
                total += len(ids)
                largest = max(largest, int(ids.max()))
                raw = np.ascontiguousarray(ids, dtype="<u4").tobytes()
                digest.update(raw)
                file.write(raw)
                ends.append(total)
    if not total:
        raise DataError("tokens", got="none", allowed="at least one", remedy="check data.path and data.kind")
    np.save(work / "ends.npy", np.asarray(ends, dtype=np.int64))
    digest.update(np.asarray(ends, dtype="<i8").tobytes())
    (work / "meta.json").write_text(json.dumps({"digest": digest.hexdigest(), "largest_id": largest}))


def _encoded(data: DataConfig, work: Path) -> Iterator[Ids]:
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer else train_tokenizer(data)
    _save(tokenizer, data, work)
    end = tokenizer.token_to_id(data.end_of_document) if data.end_of_document else None
    for document in text.documents(data):
        ids = tokenizer.encode(document, add_special_tokens=False).ids
        yield np.asarray([*ids, end] if end is not None else ids, dtype=np.int64)


def _save(tokenizer: Any, data: DataConfig, work: Path) -> None:
    """tokenizer.json and what makes transformers read it as it is: by the model's type alone it may choose a class with
    a normaliser and a split of its own, and give other ids."""
    tokenizer.save(str(work / "tokenizer.json"))
    given = Path(data.tokenizer)
    found = tokenizer_files(given / "tokenizer.json") if data.tokenizer and given.is_dir() else []
    for path in found[1:]:
        shutil.copyfile(path, work / path.name)
    if not (work / "tokenizer_config.json").exists():
        end = data.end_of_document
        known = {"eos_token": end} if end and tokenizer.token_to_id(end) is not None else {}
        body = {"tokenizer_class": "PreTrainedTokenizerFast", **known}
        (work / "tokenizer_config.json").write_text(json.dumps(body, indent=1))


def tokenizer_files(tokenizer_file: str | Path) -> list[Path]:
    """A tokenizer.json and what stands beside it for transformers."""
    file = Path(tokenizer_file)
    return [file, *(path for name in _BESIDE if (path := file.with_name(name)).exists())]


def end_token_id(tokenizer_file: str | Path) -> int | None:
    """The id that ends a document by the tokenizer's own configuration; None where it names none."""
    file = Path(tokenizer_file).with_name("tokenizer_config.json")
    named = json.loads(file.read_text()).get("eos_token") if file.exists() else None
    end = named.get("content") if isinstance(named, dict) else named
    found = load_tokenizer(tokenizer_file).token_to_id(end) if end else None
    return found if found is None else int(found)


def _pretokenised(data: DataConfig) -> Iterator[Ids]:
    for path in text.files(data):
        stream = _read_ids(path, data)
        if data.end_of_document_id < 0:
            yield stream
            continue
        cuts = np.flatnonzero(stream == data.end_of_document_id) + 1
        yield from np.split(stream, cuts)


def _read_ids(path: Path, data: DataConfig) -> Ids:
    try:
        raw = np.load(path, mmap_mode="r") if path.suffix == ".npy" else np.memmap(path, data.token_dtype, mode="r")
    except (OSError, ValueError) as failure:
        raise text.unreadable(path, failure, f"a .npy array or raw {data.token_dtype} ids") from failure
    if raw.ndim != 1 or raw.dtype.kind not in "iu":
        raise DataError(
            f"{path}", got=f"{raw.dtype}{list(raw.shape)}", allowed="one axis of whole numbers",
            remedy="save the token ids as a flat array of integers",
        )  # fmt: skip
    if raw.size and int(raw.min()) < 0:
        raise DataError(f"{path}", got=f"token id {int(raw.min())}", allowed="0 or more", remedy="check the ids")
    return raw


def _is_whole(target: Path) -> bool:
    """Whether a token directory holds as many ids as its documents say; what a failed disk left is made again."""
    try:
        return bool(len(_open(target).ids) == np.load(target / "ends.npy")[-1])
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError):
        return False


def _open(target: Path) -> TokenStore:
    meta = json.loads((target / "meta.json").read_text())
    tokenizer = target / "tokenizer.json"
    return TokenStore(
        ids=np.memmap(target / "ids.bin", "<u4", mode="r"),
        ends=np.load(target / "ends.npy"),
        digest=meta["digest"],
        tokenizer_file=str(tokenizer) if tokenizer.exists() else "",
        largest_id=meta["largest_id"],
    )


def _check_vocabulary(store: TokenStore, vocab: int) -> None:
    entries = load_tokenizer(store.tokenizer_file).get_vocab_size() if store.tokenizer_file else store.largest_id + 1
    if entries > vocab:
        whose = "tokenizer entries" if store.tokenizer_file else f"token ids (the largest is {store.largest_id})"
        raise ConfigError(
            "model vocabulary", got=f"{vocab} for {entries} {whose}", allowed=f"at least {entries}",
            remedy=f"set model.shape.vocab_size = {entries} or more, or use a smaller tokenizer",
        )  # fmt: skip
