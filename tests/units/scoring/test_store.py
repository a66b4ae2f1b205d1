"""The store of scores: lookups, damage and its size. These tests do not import torch."""

import copy
import os
import pickle
import shutil
import signal
import sqlite3
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stored_rows import ScoreStore, has, load, put, row

FILE = "scores.sqlite3"
SMALL = 2**16


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return ScoreStore(tmp_path)


def same(found: np.ndarray, *parts: Any) -> bool:
    return np.array_equal(found, np.concatenate(parts), equal_nan=True)


def test_several_sequences_of_one_call_and_float64_stays_float64(tmp_path: Path, store: Any) -> None:
    keys, values = zip(*(row(i, length) for i, length in enumerate((5, 2, 300))), strict=True)
    store.add(keys, [5, 2, 300], np.concatenate(values))
    for reader in (store, ScoreStore(tmp_path)):
        found = reader.read([keys[2], keys[0], keys[1], b"x" * 16], [300, 5, 2, 4])
        assert same(found, values[2], values[0], values[1], np.full(4, np.nan))
        assert found.dtype == np.float32
        assert reader.read([], []).shape == (0,)
    put(store, 2000, dtype=np.float64)
    assert has(store, 2000, dtype=np.float64)
    assert store.read([row(2000)[0]], [50]).dtype == np.float64
    store.add([keys[2]], [300], np.full(300, 1 / 3))
    assert same(store.read([keys[2]], [300]), np.where(np.isnan(values[2]), np.float64(1 / 3), values[2]))


def test_another_mask_adds_tokens_and_the_first_scores_stay(tmp_path: Path, store: Any) -> None:
    key, no = b"k" * 16, np.nan
    store.add([key, key], [4, 4], np.array([no, 1, 2, no, no, no, 9, no], np.float32))
    ScoreStore(tmp_path).add([key], [4], np.array([no, no, 7, 3], np.float32))
    for reader in (store, ScoreStore(tmp_path)):
        assert same(reader.read([key], [4]), [no, 1, 2, 3])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_copies_open_the_same_folder(tmp_path: Path, again: Callable[[Any], Any]) -> None:
    store = ScoreStore(tmp_path, max_bytes=10**6)
    put(store, 1)
    twin = again(store)
    assert has(twin, 1)
    assert (twin.max_bytes, twin.tokens_seen) == (10**6, 0)
    put(store, 2)
    assert has(twin, 2)


def test_threads_and_forks_share_a_store(store: Any) -> None:
    put(store, 0)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: put(store, *range(i, 40, 4)), range(4)))
    child = os.fork()
    if not child:
        signal.alarm(60)
        put(store, 99)
        os._exit(0 if all(has(store, i) for i in range(40)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(has(store, i) for i in (*range(40), 99))


def test_a_bound_below_the_smallest_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 65536, got 10"):
        ScoreStore(tmp_path, max_bytes=10)


def test_the_size_is_bounded_and_the_least_recently_read_scores_go(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, max_bytes=SMALL)
    for number in range(250):
        put(store, number)
        assert store.num_bytes <= SMALL
        assert has(store, 0), "read again and again"
    assert has(ScoreStore(tmp_path), 249)
    assert not has(store, 1)
    with pytest.warns(UserWarning, match="they take .* bytes, more than half of max_bytes=65536"):
        put(store, 999, length=20_000)
    assert not has(store, 999, length=20_000)
    assert has(store, 249)


def test_a_read_marks_scores_as_used_unless_another_process_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(load(), "_MARK_EVERY", 0.0)
    monkeypatch.setattr(load(), "_BUSY", 0.05)
    put(ScoreStore(tmp_path, max_bytes=SMALL), *range(100))
    reader = ScoreStore(tmp_path, max_bytes=SMALL)
    assert all(has(reader, number) for number in range(20))
    put(ScoreStore(tmp_path, max_bytes=SMALL), *range(1000, 1100))
    assert [number for number in range(100) if has(reader, number)][:20] == list(range(20))
    assert not has(reader, 20)
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("BEGIN IMMEDIATE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert has(ScoreStore(tmp_path), 0)
    other.close()


def test_a_folder_that_was_removed_is_made_again_and_one_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = ScoreStore(folder)
    put(store, 1)
    shutil.rmtree(folder)
    assert not has(store, 1)
    put(store, 2)
    assert has(store, 2)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.warns(UserWarning, match="could not be written.*Check the free space"):
        put(store, 1)
    with pytest.warns(UserWarning, match="could not be read"):
        assert not has(store, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, 2)
        assert not has(store, 1)


def test_a_file_that_another_process_locks_only_warns(tmp_path, store, monkeypatch):
    monkeypatch.setattr(load(), "_BUSY", 0.05)
    put(store, 1)
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("BEGIN EXCLUSIVE")
    late = ScoreStore(tmp_path)
    with pytest.warns(UserWarning, match="locked"):
        put(late, 2)
    with pytest.warns(UserWarning, match="locked"):
        assert not has(late, 1)
    other.close()
    assert has(late, 1)
    put(late, 2)
    assert has(late, 2)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the header": lambda data: data[:40],
    "cut in a page": lambda data: data[:-100],
    "half": lambda data: data[: len(data) // 2],
    "of another kind": lambda data: b"PAR1" + data[4:],
    "zeros in the pages": lambda data: data[:100] + bytes(len(data) - 100),
    "noise": lambda data: np.random.default_rng(0).bytes(len(data)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_file_is_a_miss_with_a_warning(tmp_path: Path, store: Any, name: str) -> None:
    put(store, *range(60))
    path = tmp_path / FILE
    path.write_bytes(CHANGES[name](path.read_bytes()))
    reader = ScoreStore(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert not all([has(reader, number) for number in range(60)])
    assert found
    assert all("delete it" in str(each.message) or "replace it" in str(each.message) for each in found)


def record_of(number: int) -> bytes:
    """The record of three tokens under the key of a row."""
    return load()._encode_scores(row(number)[0], np.array([np.nan, -0.5, -1], np.float32))


BAD_RECORDS = {
    "of another key": record_of(2),
    "of another length": load()._encode_scores(row(1)[0], np.array([np.nan, -0.5], np.float32)),
    "cut": record_of(1)[:-1],
    "short": record_of(1)[:4],
    "empty": b"",
    "text": "7" * 40,
}


@pytest.mark.parametrize("record", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_damaged_record_is_a_miss_and_is_replaced(tmp_path: Path, store: Any, record: bytes | str) -> None:
    key, want = row(1)[0], np.array([np.nan, -0.25, -1], np.float32)
    put(store, 1, 2)
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("INSERT OR REPLACE INTO records VALUES (?, 0.0, ?)", (key, record))
    with pytest.warns(UserWarning, match="holds a damaged record. Its scores are recomputed and replace it"):
        assert np.isnan(store.read([key], [3])).all()
    assert has(store, 2)
    store.add([key], [3], want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(ScoreStore(tmp_path).read([key], [3]), want)


@pytest.mark.parametrize("flips", [50, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_flipped_bit_yields_a_wrong_score(tmp_path: Path, store: Any, flips: int) -> None:
    put(store, *range(20))
    path, rng, lost = tmp_path / FILE, np.random.default_rng(0), 0
    good = path.read_bytes()
    for at in rng.choice(len(good) * 8, flips, replace=False).tolist():
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = ScoreStore(tmp_path)
            lost += not all([has(reader, number) for number in range(20)])  # `has` checks the scores
    assert lost > flips / 5
