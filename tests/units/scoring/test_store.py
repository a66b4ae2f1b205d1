"""The store of scores: what comes back, what damage costs, how large it grows. Without torch."""

from __future__ import annotations

import copy
import errno
import math
import os
import pickle
import shutil
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stored_rows import ScoreStore, has, load, put, row, shards


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return ScoreStore(tmp_path)


def write(store: Any, *numbers: int, **options: Any) -> None:
    put(store, *numbers, **options)
    store.flush()


def add(store: Any, *lengths: int) -> tuple[list[bytes], list[np.ndarray], list[np.ndarray]]:
    """Sequences in one call; their keys, masks and scores."""
    keys, masks, values = zip(*(row(i, length) for i, length in enumerate(lengths)), strict=True)
    store.add(list(keys), list(lengths), np.concatenate(masks), np.concatenate(values))
    return list(keys), list(masks), list(values)


@pytest.fixture
def filled(store: Any) -> Any:
    """With one shard of two sequences."""
    write(store, 1, 2)
    return store


def test_several_sequences_of_one_call(tmp_path: Path, store: Any) -> None:
    keys, masks, values = add(store, 5, 2, 300)
    for fresh in (False, True):
        if fresh:
            store.flush()
        reader, order = ScoreStore(tmp_path) if fresh else store, [2, 0, 1]
        known, found = reader.read([keys[i] for i in order] + [b"x" * 16], [300, 5, 2, 4])
        assert np.array_equal(known, np.concatenate([masks[i] for i in order] + [np.zeros(4, bool)]))
        assert np.array_equal(found, np.concatenate([values[i] for i in order] + [np.zeros(4, np.float32)]))
        assert found.dtype == np.float32


def test_files_are_safetensors_and_float64_stays_float64(tmp_path: Path, filled: Any) -> None:
    from safetensors.numpy import load_file

    found = load_file(shards(tmp_path)[0])
    assert set(found) == {"keys", "checks", "lengths", "counts", "masks", "values"}
    assert np.array_equal(found["values"], np.concatenate([row(i)[2][row(i)[1]] for i in (1, 2)]))
    write(filled, 3, dtype=np.float64)
    reader = ScoreStore(tmp_path)
    assert has(reader, 3, dtype=np.float64)
    assert has(reader, 2)
    assert reader.read([row(3)[0]], [50])[1].dtype == np.float64


def test_another_mask_adds_tokens_and_the_first_scores_stay(tmp_path: Path, store: Any) -> None:
    key, first, second = b"k" * 16, np.array([0, 1, 1, 0], bool), np.array([0, 0, 1, 1], bool)
    store.add([key], [4], first, np.array([0, 1, 2, 0], np.float32))
    store.flush()
    store.add([key], [4], second, np.array([0, 0, 7, 3], np.float32))
    for reader in (store, ScoreStore(tmp_path)):
        known, values = reader.read([key], [4])
        assert known.tolist() == [False, True, True, reader is store]
        assert values.tolist() == [0, 1, 2, 3 if reader is store else 0]
    store.flush()
    assert ScoreStore(tmp_path).read([key], [4])[0].tolist() == [False, True, True, True]


def test_a_process_goes_on_reading_its_own_scores_and_sees_those_of_others(tmp_path: Path) -> None:
    """Two processes compute one sequence at once, with different rounding: neither sees its scores change."""
    key, mask = b"12345678" + b"a" * 8, np.array([0, 1], bool)
    stores = [ScoreStore(tmp_path) for _ in range(2)]
    for i, store in enumerate(stores):
        store.add([key], [2], mask, np.array([0, i], np.float32))
    for store in stores:
        store.flush()
    assert [store.read([key], [2])[1].tolist() for store in stores] == [[0, 0], [0, 1]]
    assert not stores[0].read([b"12345678" + b"b" * 8], [2])[0].any(), "another key that begins alike"
    for number in (1, 2, 3):
        put(stores[0], number)
        stores[0].flush()
        assert has(stores[1], number)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_copies_open_the_same_folder(tmp_path: Path, again: Callable[[Any], Any]) -> None:
    store = ScoreStore(tmp_path, max_bytes=10**6, shard_bytes=10**5, flush_after=3)
    write(store, 1)
    twin = again(store)
    assert has(twin, 1)
    assert (twin.max_bytes, twin.shard_bytes, twin.flush_after) == (10**6, 10**5, 3)


def test_wrong_arguments(tmp_path: Path, store: Any) -> None:
    mask = np.ones(3, bool)
    for message, call in [
        ("shard_bytes=20 and max_bytes=10", lambda: ScoreStore(tmp_path, max_bytes=10, shard_bytes=20)),
        ("flush_after must be", lambda: ScoreStore(tmp_path, flush_after=float("nan"))),
        ("a boolean mask and scores of 3 tokens", lambda: store.add([b"k"], [3], mask[:2], np.zeros(3, np.float32))),
        ("float32 or float64, got float16", lambda: store.add([b"k"], [3], mask, np.zeros(3, np.float16))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_full_shard_is_written_and_a_record_that_waited(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, shard_bytes=2000)
    put(store, *range(5))
    assert not shards(tmp_path)
    put(store, *range(5, 20))
    assert shards(tmp_path)
    late = ScoreStore(tmp_path / "late", flush_after=0.0)
    put(late, 1)
    assert len(shards(tmp_path / "late")) == 1


def test_the_size_is_bounded_and_the_least_recently_read_shard_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load(), "_TOUCH_EVERY", 0.0)
    store = ScoreStore(tmp_path, max_bytes=20_000, shard_bytes=4000)
    write(store, 0)
    for number in range(1, 150):
        put(store, number)
        assert store.num_bytes <= 20_000
        time.sleep(0.0002)
        assert has(store, 0), "read again and again"
    store.flush()
    assert has(store, 149)
    assert not has(store, 1)
    assert not has(ScoreStore(tmp_path), 1)


def test_one_call_may_exceed_a_shard_and_one_sequence_the_store(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path, max_bytes=10_000, shard_bytes=1500)
    add(store, *[50] * 20)
    assert len(shards(tmp_path)) > 1
    write(store, 99, length=10_000)
    assert store.num_bytes <= 10_000
    assert not has(store, 99, length=10_000)
    assert has(store, 19)


def test_a_folder_that_was_removed_is_made_again_and_one_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = ScoreStore(folder, flush_after=0.0)
    put(store, 1)
    shutil.rmtree(folder)
    assert not has(store, 1)
    put(store, 2)
    assert has(store, 2)
    store = ScoreStore(folder, flush_after=0.0)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    with pytest.warns(UserWarning, match="cannot be stored.*Check that the folder is writable"):
        put(store, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(store, 2)
        assert not has(store, 1)


def test_drafts_of_killed_writers_are_removed_and_files_of_others_stay(tmp_path: Path) -> None:
    others = {"model.safetensors", "training.tmp", "model.safetensors.tmp"}
    for name in others:
        (tmp_path / name).write_bytes(bytes(5000))
    (tmp_path / "0123.scores.safetensors.tmp").write_bytes(b"half a shard")
    store = ScoreStore(tmp_path, max_bytes=4000, shard_bytes=2000)
    put(store, 0)
    assert not has(ScoreStore(tmp_path), 0)
    for number in range(1, 40):
        write(store, number)
    assert has(store, 39)
    assert not has(store, 0), "the store is full"
    names = {path.name for path in tmp_path.iterdir()}
    assert names > others
    assert {name for name in names if name.endswith(".tmp")} == others - {"model.safetensors"}


def damaged(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = shards(folder)[0]
    path.write_bytes(change(path.read_bytes()))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in the size": lambda data: data[:5],
    "cut in the header": lambda data: data[:40],
    "cut in the records": lambda data: data[:-100],
    "cut by a byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "huge header": lambda data: b"\xff" * 8 + data[8:],
    "no JSON": lambda data: data[:8] + b"#" + data[9:],
    "of another format": lambda data: data.replace(b'"format":"1"', b'"format":"9"'),
    "of another kind": lambda data: data.replace(b'"keys"', b'"kyes"'),
    "zeros": lambda data: bytes(len(data)),
    "one bit: a comma becomes a full stop": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[0.', 1),
    "a list for a header": lambda data: data[:8] + b"[" + data[9:],
    "deep JSON": lambda data: struct.pack("<Q", 200_000) + b"[" * 200_000 + data,
    "an offset below 0": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[-9,', 1),
    "an endless number": lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[1e999,', 1),
    "of another dtype": lambda data: data.replace(b'"F32"', b'"F16"'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_file_is_skipped_with_a_warning(tmp_path: Path, filled: Any, name: str) -> None:
    damaged(tmp_path, CHANGES[name])
    reader = ScoreStore(tmp_path)
    with pytest.warns(UserWarning, match="is damaged and is not read"):
        assert not has(reader, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has(reader, 2)
        write(reader, 1)
        assert has(reader, 1)


def replace_by(kind: str, path: Path) -> None:
    """Something else in place of a shard."""
    data, target = path.read_bytes(), path.with_name("elsewhere")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        target.write_bytes(data)
        path.symlink_to(target)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # names of sockets are short


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "socket"])
@pytest.mark.parametrize("opened", [False, True])
def test_only_regular_files_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: Any, kind: str, opened: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    reader = ScoreStore(tmp_path, max_bytes=4000, shard_bytes=2000)
    assert not opened or has(reader, 1)
    (path,) = shards(tmp_path)
    replace_by(kind, path)
    with pytest.warns(UserWarning, match="is damaged and is not read .*it is no regular file"):
        assert not has(reader, 1)
    assert not has(reader, 2)
    for number in range(20):  # and it is not removed to make room
        write(reader, number)
    assert has(reader, 19)
    assert not has(reader, 3)
    assert path in shards(tmp_path)


def forged(folder: Path, key: bytes, mask: np.ndarray, values: np.ndarray) -> None:
    """A shard with right checksums."""
    damaged(folder, lambda _: load()._encode([load()._Record(key, mask, values)]))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(math.nan, np.float32), (math.inf, np.float64), (-math.inf, np.float32), (7.0, np.float64), (0.02, np.float32)],
)
def test_scores_that_cannot_be(tmp_path: Path, filled: Any, value: float, dtype: Any) -> None:
    key, mask = row(1)[0], np.array([False, True, True])
    forged(tmp_path, key, mask, np.array([-0.5, value], dtype))
    reader = ScoreStore(tmp_path)
    with pytest.warns(UserWarning, match="is damaged and is not read .*expected numbers in"):
        known, values = reader.read([key], [3], -math.inf, 0.01)
    assert not known.any()
    assert not values.any()
    waiting, scores = ScoreStore(tmp_path / "waiting"), np.array([0, -0.5, value], dtype)
    if math.isfinite(value):
        waiting.add([key], [3], mask, scores)
    else:
        with pytest.warns(UserWarning, match="is damaged and is not read"):
            assert not ScoreStore(tmp_path).read([key], [3])[0].any()
        with pytest.raises(ValueError, match="scores must be finite"):
            waiting.add([key], [3], mask, scores)
    assert not waiting.read([key], [3], -math.inf, 0.01)[0].any()
    forged(tmp_path, key, mask, np.array([-0.5, 0.0], dtype))
    assert ScoreStore(tmp_path).read([key], [3], -math.inf, 0.01)[1].tolist() == [0, -0.5, 0]


@pytest.mark.parametrize(
    ("mask", "number"),
    [
        ("011", 1),  # fewer scores than tokens
        ("010", 2),  # more
        ("01110", 3),  # of a longer sequence
        ("1", 1),  # of a shorter one
        ("011", 4),  # more scores than the sequence is long
    ],
)
def test_a_record_that_does_not_fit_its_mask_or_sequence(tmp_path: Path, filled: Any, mask: str, number: int) -> None:
    forged(tmp_path, row(1)[0], np.array([*map(int, mask)], bool), np.full(number, -0.5, np.float32))
    with pytest.warns(UserWarning, match="is damaged and is not read"):
        known, values = ScoreStore(tmp_path).read([row(1)[0]], [3])
    assert not known.any()
    assert values.tolist() == [0.0] * 3


def test_too_many_open_files_are_no_damage(tmp_path: Path, filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores are a miss now, and found later."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    for opened in (False, True):
        reader = ScoreStore(tmp_path)
        assert not opened or has(reader, 1)
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", full)
            with pytest.warns(UserWarning, match="could not be read .*Too many open files.*this time"):
                assert not has(reader, 1)
        assert has(reader, 1)


def test_no_flipped_bit_yields_a_wrong_score(tmp_path: Path, store: Any) -> None:
    write(store, *range(20))
    (path,) = shards(tmp_path)
    good, rng, lost = path.read_bytes(), np.random.default_rng(0), 0
    for at in rng.choice(len(good) * 8, 150, replace=False).tolist():
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = ScoreStore(tmp_path)
            lost += not all([has(reader, number) for number in range(20)])  # `has` checks the scores
    assert lost > 145


def test_a_file_that_is_damaged_or_vanishes_while_it_is_open(tmp_path: Path, filled: Any) -> None:
    reader = ScoreStore(tmp_path)
    assert has(filled, 1)
    assert has(reader, 1)
    damaged(tmp_path, lambda data: data[: len(data) // 2])
    with pytest.warns(UserWarning, match="is damaged"):
        assert not has(filled, 1)
    assert not has(filled, 2)
    shards(tmp_path)[0].unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has(reader, 1), "a miss"
