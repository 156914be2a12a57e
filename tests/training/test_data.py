"""Text becomes rows: every kind of source, what is refused, and how documents are packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steppe.core.errors import CheckpointError, ConfigError, DataError, SteppeError, WorkingSetError
from steppe.training import text
from steppe.training.config import DataConfig, RunConfig
from steppe.training.data import IGNORED, RowSource, WorkingSet
from steppe.training.tokens import (
    TokenStore,
    end_token_id,
    load_tokenizer,
    prepare,
    tokenizer_files,
    train_tokenizer,
)
from tests.training.toys import TEXT, toy_run


def _prepare(folder: Path, vocab: int = 512, **data: Any) -> TokenStore:
    return prepare(DataConfig(**{"seq_len": 8, "tokenizer_vocab": 300, **data}), folder / "cache", vocab, None)


def _refused(folder: Path, error: type[SteppeError] = DataError, **data: Any) -> str:
    with pytest.raises(error) as refused:
        _prepare(folder, **data)
    assert "Remedy" in str(refused.value)
    assert not list((folder / "cache").glob(".*")), "nothing half made stays"
    return str(refused.value)


def test_the_builtin_text_is_the_language_reference_of_this_python() -> None:
    documents = list(text.documents(DataConfig(seq_len=8)))
    assert len(documents) > 50
    assert any(d.startswith('The "assert" statement') or "assert" in d[:80] for d in documents)
    assert sum(map(len, documents)) > 300_000


def test_text_jsonl_and_parquet_give_the_same_tokens(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    documents = [TEXT[:600], TEXT[600:1500], TEXT[1500:1600]]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document)
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"body": d, "id": 1}) for d in documents))
    pyarrow.parquet.write_table(pyarrow.table({"body": documents}), tmp_path / "docs.parquet")
    stores = [
        _prepare(tmp_path, path=str(folder)),
        _prepare(tmp_path, path=str(tmp_path / "docs.jsonl"), kind="jsonl", text_field="body"),
        _prepare(tmp_path, path=str(tmp_path / "docs.parquet"), kind="parquet", text_field="body"),
    ]
    assert len({store.digest for store in stores}) == 1
    assert len(stores[0].ends) == 3
    tokenizer = load_tokenizer(stores[0].tokenizer_file)
    first = stores[0].ids[: stores[0].ends[0]].tolist()
    assert first[-1] == tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.decode(first) == documents[0], "byte-level: every text comes back whole"


def test_npy_and_raw_tokens_are_cut_into_documents(tmp_path: Path) -> None:
    ids = np.array([5, 6, 7, 1, 8, 9, 1, 2], dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    ids.tofile(tmp_path / "ids.bin")
    stores = [
        _prepare(tmp_path, path=str(tmp_path / name), kind="tokens", end_of_document_id=1)
        for name in ("ids.npy", "ids.bin")
    ]
    for store in stores:
        assert store.ids.tolist() == ids.tolist()
        assert store.ends.tolist() == [4, 7, 8]
    assert stores[0].digest == stores[1].digest


def test_tokens_that_a_failed_disk_left_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT[:900])
    store = _prepare(tmp_path, path=str(tmp_path / "a.txt"))
    whole = store.digest, store.ids.tolist()
    del store  # mapped
    (folder,) = (tmp_path / "cache").iterdir()
    for damage in (
        lambda: (folder / "ids.bin").write_bytes(b""),
        lambda: (folder / "ids.bin").write_bytes((folder / "ids.bin").read_bytes()[:-4]),
        lambda: (folder / "meta.json").write_text(""),
        lambda: (folder / "meta.json").unlink(),
        lambda: (folder / "ends.npy").unlink(),
    ):
        damage()
        again = _prepare(tmp_path, path=str(tmp_path / "a.txt"))
        assert (again.digest, again.ids.tolist()) == whole


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT[:900])
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match=r"check output\.dir"):
        _prepare(tmp_path, path=str(tmp_path / "a.txt"))


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_text_with_nothing_to_predict_is_refused(packing: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full(64, 3))
    data = {"path": str(tmp_path / "ids.npy"), "kind": "tokens", "end_of_document_id": 3, "packing": packing}
    run = toy_run(tmp_path, data=data)
    with pytest.raises(DataError, match="64 documents of one token"):
        RowSource(run, prepare(run.data, tmp_path / "cache", 320, None), rank=0, world=1)
    run = toy_run(tmp_path, data={**data, "packing": "stream"})
    RowSource(run, prepare(run.data, tmp_path / "cache", 320, None), rank=0, world=1)


def test_text_that_cannot_be_read_is_refused_by_file_and_line(tmp_path: Path) -> None:
    assert "does not exist" in _refused(tmp_path, path=str(tmp_path / "none.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"caf\xe9")
    assert "bytes.txt" in _refused(tmp_path, path=str(tmp_path / "bytes.txt"))
    (tmp_path / "empty.txt").write_text(" \n\t\n")
    assert "nothing but white space" in _refused(tmp_path, path=str(tmp_path / "empty.txt"))
    (tmp_path / "dir").mkdir()
    assert "no file for this kind" in _refused(tmp_path, path=str(tmp_path / "dir"))
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    assert "line 2" in _refused(tmp_path, path=str(tmp_path / "a.jsonl"), kind="jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    assert "line 2" in _refused(tmp_path, path=str(tmp_path / "b.jsonl"), kind="jsonl")
    for number, line in enumerate(('{"text": "half a pair: \\ud800"}', "[" * 100_000, f'{{"text": {"9" * 5000}}}')):
        (tmp_path / f"d{number}.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
        assert "line 2" in _refused(tmp_path, path=str(tmp_path / f"d{number}.jsonl"), kind="jsonl")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    assert "c.parquet" in _refused(tmp_path, path=str(tmp_path / "c.parquet"), kind="parquet")
    np.save(tmp_path / "floats.npy", np.zeros(4))
    assert "float64" in _refused(tmp_path, path=str(tmp_path / "floats.npy"), kind="tokens")


def test_a_file_without_permission_is_refused_where_permissions_count(tmp_path: Path) -> None:
    file = tmp_path / "closed.txt"
    file.write_text(TEXT)
    file.chmod(0)
    try:
        file.read_text()
    except PermissionError:
        assert "Permission denied" in _refused(tmp_path, path=str(file))
    else:
        assert _prepare(tmp_path, path=str(file)).num_tokens, "root reads everything"


def test_a_parquet_column_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "t.parquet")
    assert "body, n" in _refused(tmp_path, path=str(tmp_path / "t.parquet"), kind="parquet")
    assert "int" in _refused(tmp_path, path=str(tmp_path / "t.parquet"), kind="parquet", text_field="n")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_the_size_it_needs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    said = _refused(tmp_path, ConfigError, path=str(tmp_path / "a.txt"), vocab=299)
    assert "299 for 300 tokenizer entries" in said
    assert "vocab_size = 300" in said
    np.save(tmp_path / "ids.npy", np.array([1, 2, 700]))
    assert "at least 701" in _refused(tmp_path, ConfigError, path=str(tmp_path / "ids.npy"), kind="tokens")


def test_less_text_than_a_row_is_refused_with_the_length_that_fits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    config = toy_run(tmp_path / "run", data={"path": str(tmp_path / "a.txt"), "seq_len": 128})
    store = prepare(config.data, tmp_path / "cache", 512, None)
    with pytest.raises(DataError, match=f"set data.seq_len = {store.num_tokens}"):
        RowSource(config, store, rank=0, world=1)


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "tokenizer.json").write_text("{}")
    for given in (tmp_path / "none.json", tmp_path / "tokenizer.json"):
        assert "data.tokenizer" in _refused(tmp_path, ConfigError, path=str(tmp_path / "a.txt"), tokenizer=str(given))


def test_a_users_tokenizer_is_used_and_training_one_twice_gives_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = DataConfig(seq_len=8, path=str(tmp_path / "a.txt"), tokenizer_vocab=320)
    first, second = train_tokenizer(data), train_tokenizer(data)
    assert first.to_str() == second.to_str()
    first.save(str(tmp_path / "tokenizer.json"))
    own, given = (
        _prepare(tmp_path, path=data.path, tokenizer_vocab=320),
        _prepare(tmp_path, path=data.path, tokenizer=str(tmp_path)),
    )
    assert own.digest == given.digest


def test_the_token_file_is_made_once_and_again_when_the_text_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    first = _prepare(tmp_path, path=str(file))
    stamp = Path(first.tokenizer_file).stat().st_mtime_ns
    assert Path(_prepare(tmp_path, path=str(file)).tokenizer_file).stat().st_mtime_ns == stamp
    file.write_text(TEXT + " More of it.")
    assert _prepare(tmp_path, path=str(file)).digest != first.digest


def _store(*lengths: int) -> TokenStore:
    ends = np.cumsum(lengths)
    return TokenStore(np.arange(1, ends[-1] + 1, dtype=np.uint32), ends.astype(np.int64), "d", "", int(ends[-1]))


def _rows(packing: str, store: TokenStore, **sections: Any) -> RowSource:
    config = toy_run(Path(sections.pop("folder")), data={"seq_len": 6, "packing": packing}, **sections)
    return RowSource(config, store, rank=sections.get("rank", 0), world=1)


def _all(source: RowSource) -> list[tuple[list[int], list[int], list[int]]]:
    rows = [source._row(index) for index in range(source.num_rows)]
    return [tuple(part.tolist() for part in row) for row in rows]  # type: ignore[misc]


def test_cut_rows_are_full_and_positions_and_labels_stay_inside_documents(tmp_path: Path) -> None:
    rows = _all(_rows("cut", _store(4, 9), folder=tmp_path))
    x = IGNORED
    assert rows == [
        ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0, 1], [2, 3, 4, x, 6, 7]),
        ([7, 8, 9, 10, 11, 12], [0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]),
    ]


def test_stream_rows_take_the_text_for_one_document(tmp_path: Path) -> None:
    rows = _all(_rows("stream", _store(4, 8), folder=tmp_path))
    assert rows[0] == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7])
    assert rows[1][2][-1] == IGNORED, "nothing follows the last token"


def test_whole_rows_never_split_a_document(tmp_path: Path) -> None:
    rows = _all(_rows("whole", _store(4, 2, 1, 5, 6), folder=tmp_path))
    assert [row[0] for row in rows] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17, 18]]
    assert rows[0][1] == [0, 1, 2, 3, 0, 1]


def test_the_slices_of_a_sequence_are_its_row(tmp_path: Path) -> None:
    def batches(sequence: int, config: RunConfig, rank: int) -> Any:
        wide = config.replace("launch", sequence=sequence, ranks=sequence)
        return RowSource(wide, _store(5, 3, 30), rank=rank, world=sequence).batches(1)[0]

    for packing in ("cut", "whole"):
        config = toy_run(tmp_path, data={"seq_len": 8, "packing": packing}, train={"batch": 2})
        whole = batches(1, config, 0)
        parts = [batches(2, config, rank) for rank in range(2)]
        for name in ("input_ids", "position_ids", "labels"):
            joined = np.concatenate([getattr(part, name).numpy() for part in parts], axis=1)
            assert (joined[:, : whole.input_ids.shape[1]] == getattr(whole, name).numpy()).all()
        assert sum(part.num_valid for part in parts) == whole.num_valid


def test_a_loader_is_looked_at_before_launch(tmp_path: Path) -> None:
    source = RowSource(toy_run(tmp_path, data={"seq_len": 6}), _store(60), rank=0, world=1)
    loader = [source.batch(step, 0) for step in range(5)]
    assert WorkingSet(6).check(loader) == 6
    assert WorkingSet(5).check(loader, batches=0) == 0
    with pytest.raises(WorkingSetError, match="batch 0 of the loader: got 6 tokens; allowed: N = 5"):
        WorkingSet(5).check(loader)


def test_another_number_of_ranks_goes_on_behind_the_rows_already_read(tmp_path: Path) -> None:
    config, store = toy_run(tmp_path, data={"seq_len": 6}), _store(600)
    before = [RowSource(config, store, rank=rank, world=2) for rank in range(2)]
    read = [batch.input_ids for step in range(3) for source in before for batch in source.batches(step)]
    after = RowSource(config, store, rank=0, world=1)
    after.resume(3, before[0].rows_read(3))
    onward = [batch.input_ids for step in range(3, 9) for batch in after.batches(step)]
    firsts = [int(ids[0, 0]) for ids in [*read, *onward]]
    assert len(set(firsts)) == len(firsts), "no row twice, none left out"


def test_what_stands_beside_a_users_tokenizer_goes_with_it(tmp_path: Path) -> None:
    given = tmp_path / "tokenizer"
    given.mkdir()
    (tmp_path / "a.txt").write_text("flat " * 50)
    train_tokenizer(DataConfig(seq_len=8, path=str(tmp_path / "a.txt"), tokenizer_vocab=300)).save(
        str(given / "tokenizer.json")
    )
    (given / "tokenizer_config.json").write_text('{"tokenizer_class": "X", "eos_token": {"content": "<|endoftext|>"}}')
    (given / "chat_template.jinja").write_text("{{ messages }}")
    store = _prepare(tmp_path, path=str(tmp_path / "a.txt"), tokenizer=str(given))
    names = [path.name for path in tokenizer_files(store.tokenizer_file)]
    assert names == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert end_token_id(store.tokenizer_file) == load_tokenizer(given).token_to_id("<|endoftext|>")
