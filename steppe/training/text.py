"""Documents from wherever the text is: Python's own language reference, text files, JSONL, parquet.

`pydoc_topics` is the language reference that ships with every Python as `pydoc_data.topics` (generated from the
sections of docs.python.org's "The Python Language Reference" that `help()` shows; Python Software Foundation License).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

from steppe.core.errors import DataError
from steppe.training.config import PYDOC, DataConfig

_SUFFIXES: Final = {
    "text": (".txt", ".md", ".rst", ".py", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
}


def files(data: DataConfig) -> tuple[Path, ...]:
    """The files of a run's text in a fixed order; none for the built-in text. Raises: DataError."""
    if data.path == PYDOC:
        return ()
    path = Path(data.path)
    suffixes = _SUFFIXES[data.kind]
    if path.is_dir():
        found = tuple(sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file()))
    else:
        found = (path,)
    missing = [p for p in found if not p.exists()]
    if missing or not found:
        raise DataError(
            "data.path", got=f"{path} ({'does not exist' if missing else 'no file for this kind'})",
            allowed=f"a file, or a directory with {', '.join(suffixes)} files", remedy="check data.path and data.kind",
        )  # fmt: skip
    return found


def documents(data: DataConfig) -> Iterator[str]:
    """Every non-empty document of the text, in a fixed order.

    Raises: DataError naming file (and line) for what can't be read, and where there is no text at all.
    """
    if data.path == PYDOC:
        sources: Iterator[str] = iter(import_module("pydoc_data.topics").topics.values())
    else:
        readers = {"text": _text, "jsonl": _jsonl, "parquet": _parquet}
        sources = (doc for path in files(data) for doc in readers[data.kind](path, data.text_field))
    count = 0
    for document in sources:
        if document.strip():
            count += 1
            yield document
    if not count:
        raise DataError(
            "text", got=f"nothing but white space in {data.path}", allowed="at least one document with text",
            remedy="check data.path, data.kind and data.text_field",
        )  # fmt: skip


def _text(path: Path, _: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise unreadable(path, failure, "UTF-8 text") from failure


def _jsonl(path: Path, key: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _line(path, number, line, key)
    except (OSError, UnicodeDecodeError) as failure:
        raise unreadable(path, failure, "UTF-8 JSON lines") from failure


def _line(path: Path, number: int, line: str, key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise unreadable(path, f"line {number}: {failure}", "one JSON object a line") from failure
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"{path}, line {number}", got=f"no text under {key!r}", allowed=f'an object with "{key}": text',
            remedy="set data.text_field to the key that holds the text",
        )  # fmt: skip
    try:
        text.encode()  # JSON can write half a surrogate pair, which is no text
    except UnicodeEncodeError as failure:
        raise unreadable(path, f"line {number}: {failure}", "text that UTF-8 can hold") from failure
    return text


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            raise DataError(
                f"{path}", got=f"no column {column!r}", allowed=", ".join(table.schema_arrow.names),
                remedy="set data.text_field to one of these",
            )  # fmt: skip
        for batch in table.iter_batches(columns=[column], batch_size=1024):
            for value in batch.column(0).to_pylist():
                yield _cell(path, column, value)
    except (OSError, pyarrow.ArrowException) as failure:
        raise unreadable(path, failure, "a parquet file") from failure


def _cell(path: Path, column: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{path}, column {column!r}", got=type(value).__name__, allowed="text", remedy="choose a column of text"
        )
    return value or ""


def unreadable(path: Path, failure: object, allowed: str) -> DataError:
    """The refusal for a file that can't be read as what it should be."""
    return DataError(f"{path}", got=f"{failure}", allowed=allowed, remedy="mend the file, or set data.kind")
