"""The store of scores: what comes back, what damage costs, how large it grows. Without torch."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
import signal
import sqlite3
import threading
import warnings
from collections.abc import Callable
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


def test_several_sequences_of_one_call(tmp_path: Path, store: Any) -> None:
    keys, masks, values = zip(*(row(i, length) for i, length in enumerate((5, 2, 300))), strict=True)
    store.add(keys, [5, 2, 300], np.concatenate(masks), np.concatenate(values))
    for reader in (store, ScoreStore(tmp_path)):
        known, found = reader.read([keys[2], keys[0], keys[1], b"x" * 16], [300, 5, 2, 4])
        assert np.array_equal(known, np.concatenate([masks[2], masks[0], masks[1], np.zeros(4, bool)]))
        assert np.array_equal(found, np.concatenate([values[2], values[0], values[1], np.zeros(4, np.float32)]))
        assert found.dtype == np.float32


def test_float64_stays_float64(store: Any) -> None:
    put(store, 1)
    put(store, 2, dtype=np.float64)
    assert has(store, 1)
    assert has(store, 2, dtype=np.float64)
    assert store.read([row(2)[0]], [50])[1].dtype == np.float64
    key, mask = row(1)[0], np.ones(50, bool)
    store.add([key], [50], mask, np.full(50, 1 / 3))
    known, values = store.read([key], [50])
    assert known.all()
    assert np.array_equal(values, np.where(row(1)[1], row(1)[2], np.float64(1 / 3))), "each as it was stored"


def test_another_mask_adds_tokens_and_the_first_scores_stay(tmp_path: Path, store: Any) -> None:
    key = b"k" * 16
    twice = np.array([0, 1, 2, 0, 0, 0, 9, 4], np.float32)
    store.add([key, key], [4, 4], np.array([0, 1, 1, 0, 0, 0, 1, 0], bool), twice)
    ScoreStore(tmp_path).add([key], [4], np.array([0, 0, 1, 1], bool), np.array([0, 0, 7, 3], np.float32))
    for reader in (store, ScoreStore(tmp_path)):
        known, values = reader.read([key], [4])
        assert known.tolist() == [False, True, True, True]
        assert values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_copies_open_the_same_folder(tmp_path: Path, again: Callable[[Any], Any]) -> None:
    store = ScoreStore(tmp_path, max_bytes=10**6)
    put(store, 1)
    twin = again(store)
    assert has(twin, 1)
    assert twin.max_bytes == 10**6
    store.close()
    put(store, 2)  # opens it again
    assert has(twin, 2)


def test_threads_and_forks_share_a_store(store: Any) -> None:
    put(store, 0)
    threads = [threading.Thread(target=put, args=(store, *range(i, 40, 4))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with store._lock:
            held.set()
            forked.wait()

    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()  # while another thread uses the store
    if not child:
        signal.alarm(60)  # ends a child that waits for that thread
        store.close()
        put(store, 99)
        os._exit(0 if all(has(store, i) for i in range(40)) else 1)
    forked.set()
    assert os.waitpid(child, 0)[1] == 0
    assert all(has(store, i) for i in (*range(40), 99))


def test_wrong_arguments(tmp_path: Path, store: Any) -> None:
    mask = np.ones(3, bool)
    for message, call in [
        ("max_bytes must be at least 65536, got 10", lambda: ScoreStore(tmp_path, max_bytes=10)),
        ("a boolean mask and scores of 3 tokens", lambda: store.add([b"k"], [3], mask[:2], np.zeros(3, np.float32))),
        ("float32 or float64, got float16", lambda: store.add([b"k"], [3], mask, np.zeros(3, np.float16))),
        ("scores must be finite", lambda: store.add([b"k"], [3], mask, np.full(3, np.nan))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


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


def test_reads_alone_keep_scores_and_take_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in later epochs, where nothing is added. Where the file cannot be written, what is read is right all the same."""
    put(ScoreStore(tmp_path, max_bytes=SMALL), *range(200))
    reader, statements = ScoreStore(tmp_path, max_bytes=SMALL), []
    assert all(has(reader, number) for number in range(20))
    reader._file._open.set_trace_callback(statements.append)
    reader.close()
    assert statements.count("BEGIN IMMEDIATE") == statements.count("COMMIT") == 1
    assert sum(each.startswith("UPDATE") for each in statements) == 20
    put(ScoreStore(tmp_path, max_bytes=SMALL), *range(1000, 1100))
    assert [number for number in range(200) if has(reader, number)][:20] == list(range(20))
    assert not has(reader, 20)
    monkeypatch.setattr(load(), "_BUSY", 0.05)
    monkeypatch.setattr(load(), "_MARK_EVERY", 0.0)
    other, late = sqlite3.connect(tmp_path / FILE), ScoreStore(tmp_path)
    other.execute("BEGIN IMMEDIATE")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert has(late, 0)
    other.close()
    assert has(late, 0)
    assert not late._used, "marked as soon as it can be"


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


def test_a_writer_that_does_not_end_costs_the_scores_and_not_the_run(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    store.close()
    path = tmp_path / FILE
    path.write_bytes(CHANGES[name](path.read_bytes()))
    reader = ScoreStore(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert not all([has(reader, number) for number in range(60)])
    assert found
    assert all("delete it" in str(each.message) or "replace it" in str(each.message) for each in found)


def forged(folder: Path, key: bytes, mask: np.ndarray, values: np.ndarray) -> None:
    """A record with a right checksum."""
    replaced(folder, key, *load()._encode(key, mask, values))


def replaced(folder: Path, key: bytes, *columns: bytes) -> None:
    with sqlite3.connect(folder / FILE) as file:
        file.execute("INSERT OR REPLACE INTO scores VALUES (?, 0.0, ?, ?, ?)", (key, *columns))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(math.nan, np.float32), (math.inf, np.float64), (-math.inf, np.float32), (7.0, np.float64), (0.02, np.float32)],
)
def test_scores_that_cannot_be(tmp_path: Path, store: Any, value: float, dtype: Any) -> None:
    key, mask = row(1)[0], np.array([False, True, True])
    put(store, 1)
    forged(tmp_path, key, mask, np.array([-0.5, value], dtype))
    with pytest.warns(
        UserWarning, match=r"does not fit its sequence \(3 tokens, scores in \[-inf, 0.01\]\).* Delete the file"
    ):
        known, values = store.read([key], [3], -math.inf, 0.01)
    assert not known.any()
    assert not values.any()
    forged(tmp_path, key, mask, np.array([-0.5, 0.0], dtype))
    assert store.read([key], [3], -math.inf, 0.01)[1].tolist() == [0, -0.5, 0]


@pytest.mark.parametrize(
    ("mask", "number"),
    [
        ("011", 1),  # fewer scores than tokens
        ("010", 2),  # more
        ("000", 0),  # none
        ("01110", 3),  # of a longer sequence
        ("1", 1),  # of a shorter one
        ("011", 9),  # more scores than the sequence is long
    ],
)
def test_a_record_that_does_not_fit_its_mask_or_sequence(tmp_path: Path, store: Any, mask: str, number: int) -> None:
    put(store, 1)
    forged(tmp_path, row(1)[0], np.array([*map(int, mask)], bool), np.full(number, -0.5, np.float32))
    with pytest.warns(UserWarning, match="holds a (damaged )?record"):
        known, values = store.read([row(1)[0]], [3])
    assert not known.any()
    assert values.tolist() == [0.0] * 3
    put(store, 1)
    assert has(store, 1), "computed again, it takes the place of the damaged one"


def test_columns_of_another_record_and_a_length_beyond_them(tmp_path: Path, store: Any) -> None:
    put(store, 1, 2)
    with sqlite3.connect(tmp_path / FILE) as file:
        others = file.execute("SELECT mask, scores, digest FROM scores WHERE key = ?", (row(2)[0],)).fetchone()
    huge, raw = load()._HEAD.pack(2**40, 4) + b"\x60", bytes(8)
    for columns in (others, (huge, raw, load()._digest(row(1)[0], huge, raw))):
        replaced(tmp_path, row(1)[0], *columns)
        reader = ScoreStore(tmp_path)
        with pytest.warns(UserWarning, match="holds a damaged record"):
            assert not has(reader, 1)
        assert has(reader, 2)


def test_no_flipped_bit_yields_a_wrong_score(tmp_path: Path, store: Any) -> None:
    put(store, *range(20))
    store.close()
    path, rng, lost = tmp_path / FILE, np.random.default_rng(0), 0
    good = path.read_bytes()
    for at in rng.choice(len(good) * 8, 150, replace=False).tolist():
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = ScoreStore(tmp_path)
            lost += not all([has(reader, number) for number in range(20)])  # `has` checks the scores
            reader.close()
    assert lost > 30
