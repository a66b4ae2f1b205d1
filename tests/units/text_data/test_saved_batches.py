"""Batches on disk: round trips, atomic writes, and reading without running code."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_tensorclass, lazy_stack
from torch import Tensor
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History

import toy_rollouts
from cli_files import FULL, Mischief, batch, save
from template_pairs import assistant, user
from torchrl_llm_kl import load_batch, save_batch
from torchrl_llm_kl.datasets import DataError


def plain(a: Any) -> Any:
    """Convert class, structure, layout, dtype and bits to Python values that can be compared."""
    if isinstance(a, Tensor) and a.is_nested:
        return ("nested", a.layout, a.dtype, [plain(row) for row in a.unbind()])
    if isinstance(a, Tensor):
        return (a.layout, a.dtype, a.shape, a.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(a, LazyStackedTensorDict):
        return ("lazy", a.stack_dim, plain(a.tensordicts))
    if is_tensorclass(a):
        return (type(a), a.batch_size, plain(a._tensordict), plain(a._non_tensordict))
    if isinstance(a, TensorDictBase):
        return (type(a), a.batch_size, a.names, {key: plain(a._get_str(key, None)) for key in a.keys()})  # noqa: SIM118
    if isinstance(a, (list, tuple)):
        return (type(a), [plain(x) for x in a])
    return (type(a), plain([*a.items()]) if isinstance(a, dict) else a)


def same(a: Any, b: Any) -> None:
    assert plain(a) == plain(b)


def nested(layout: torch.layout) -> TensorDictBase:
    td = TensorDict(batch_size=[2])
    td["tokens", "full"] = torch.nested.nested_tensor([FULL[0], FULL[1, :3]], layout=layout)
    return td


def of_python() -> TensorDictBase:
    """A batch with text, numbers, lists, a list per row, an empty entry and names of dimensions."""
    td = batch(query=["why?", "how? \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")])
    td.set_non_tensor("about", {"seed": 3, "of": [1.5, None, True, ("a", b"b")], "weights": FULL[:, 1:3]})
    td["empty"] = TensorDict(batch_size=[2])
    td.names = ["answers"]
    return td


def conversations() -> TensorDictBase:
    call = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    chats = [[user("hi"), assistant("hello", tool_calls=call)], [user("why?")]]
    histories = [History.from_chats([chat])[0] for chat in chats]
    return TensorDict(history=lazy_stack(histories), batch_size=[2])


def collected(pad_output: bool) -> TensorDictBase:
    """Answers of different lengths from a collector."""
    tokenizer = toy_rollouts.make_tokenizer()
    policy = toy_rollouts.make_policy(toy_rollouts.make_model(tokenizer, seed=0), tokenizer, pad_output=pad_output)
    env = toy_rollouts.make_env(tokenizer, envs=3)
    (found,) = LLMCollector(env, policy=policy, dialog_turns_per_batch=6, total_dialog_turns=6)
    return found


BATCHES: dict[str, Callable[[], TensorDictBase]] = {
    "padded": lambda: batch(advantage=torch.tensor([1.0, -1.0])).reshape(1, 2),
    "jagged": lambda: nested(torch.jagged),
    "strided nested": lambda: nested(torch.strided),
    "Python values": of_python,
    "conversations": conversations,
    "a collector's": lambda: collected(False),
    "a collector's, padded": lambda: collected(True),
    "a collector's, flat": lambda: collected(False).reshape(-1),
    "one class": lambda: History.from_chats([[user("hi")]]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_the_same_after_a_round_trip(name: str, tmp_path: Path) -> None:
    td = BATCHES[name]()
    save_batch(td, tmp_path / "batch.pt")
    same(td, load_batch(tmp_path / "batch.pt"))


def test_jagged_entries_go_together_and_a_row_is_saved_without_its_neighbours(tmp_path: Path) -> None:
    """Two jagged tensors can be added only if their offsets are the same object, so the file must preserve identity."""
    ids = torch.nested.nested_tensor([FULL[0], FULL[1, :3]], layout=torch.jagged)
    save_batch(TensorDict(a=ids, b=ids * 2, batch_size=[2]), tmp_path / "batch.pt")
    found = load_batch(tmp_path / "batch.pt")
    assert torch.equal((found["a"] + found["b"]).values(), (ids * 3).values())
    save_batch(TensorDict(a=torch.zeros(1000, 1000), batch_size=[1000])[:1], tmp_path / "row.pt")
    assert (tmp_path / "row.pt").stat().st_size < 20_000  # 4 MB as a view


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batch.pt"
    save_batch(batch(), path)

    def full_disk(record: Any, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left on the device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_batch(batch(advantage=torch.ones(2)), path)
    assert [file.name for file in tmp_path.iterdir()] == ["batch.pt"]
    same(batch(), load_batch(path))


def test_an_entry_with_a_python_object_is_named_in_the_error(tmp_path: Path) -> None:
    td = batch()
    td["next"].set_non_tensor("env", Mischief(tmp_path / "hacked"))
    with pytest.raises(TypeError, match=r"\('next', 'env'\) holds a .*Mischief.*batch\.exclude"):
        save_batch(td, tmp_path / "batch.pt")
    assert not list(tmp_path.iterdir())


def test_a_file_can_load_only_trusted_classes_and_pickles_need_trust(tmp_path: Path) -> None:
    save_batch(batch(), tmp_path / "batch.pt")
    record = torch.load(tmp_path / "batch.pt", weights_only=True)
    for name in ("os:system", "torchrl_evil.data:History", "tensordict:TensorDict.fit", "torchrl.data:__doc__"):
        record["batch"]["entries"]["tokens"]["class"] = name
        torch.save(record, tmp_path / "batch.pt")
        with pytest.raises(DataError, match="is damaged"):
            load_batch(tmp_path / "batch.pt")
    torch.save({"format": "torchrl_llm_kl.batch", "version": 2, "batch": {}}, tmp_path / "batch.pt")
    with pytest.raises(DataError, match="has format version 2"):
        load_batch(tmp_path / "batch.pt")
    torch.save({"tokens": FULL, "more": Mischief(tmp_path / "hacked")}, tmp_path / "batch.pt")
    with pytest.raises(DataError, match=r"holds more than tensors.*--trust"):
        load_batch(tmp_path / "batch.pt")
    assert not (tmp_path / "hacked").exists()
    path = save("tensordict", tmp_path / "batch.pt", batch())  # a pickled TensorDict needs trust too
    assert torch.equal(load_batch(path, trust=True)["tokens", "full"], FULL)
    with pytest.raises(DataError, match=r"holds more than tensors.*--trust"):
        load_batch(path)


@pytest.mark.parametrize("kind", ["dict", "state", "memmap"])
def test_files_of_tensors_are_loaded(kind: str, tmp_path: Path) -> None:
    batches = [batch(), batch().reshape(1, 2), *(map(nested, (torch.strided, torch.jagged)) if kind == "dict" else ())]
    for number, td in enumerate(batches):
        found = load_batch(save(kind, tmp_path / f"batch{number}", td))
        assert found.batch_size == td.batch_size
        for key in td.keys(True, True):
            same(torch.as_tensor(found[key]), td[key])


def odd() -> TensorDictBase:
    """A batch with keys that file names must encode, nested and empty tensors, text per row, a lazy stack and conversations."""
    td = conversations().update(batch())
    td["Odd key/%"] = torch.ones(2)
    td["nothing"] = torch.zeros(2, 0)
    td["nest"] = torch.nested.nested_tensor([FULL[0], FULL[1, :3]])
    td["query"] = ["why?", "how?"]
    td["rows"] = lazy_stack([TensorDict(a=torch.zeros(n)) for n in (2, 3)])
    return td


@pytest.mark.parametrize("kind", ["memmap", "archive"])
def test_a_saved_folder_with_all_kinds_of_entries_is_complete(kind: str, tmp_path: Path) -> None:
    td = odd()
    found = load_batch(save(kind, tmp_path / ("batch.tdz" if kind == "archive" else "batch"), td))
    save_batch(found, tmp_path / "again.pt")  # mapped tensors become plain ones
    for each in (found, load_batch(tmp_path / "again.pt")):
        assert set(each.keys()) == set(td.keys())
        assert each["history"][0].content == ["hi", "hello"]
        assert torch.equal(each["Odd key/%"], torch.ones(2))
        assert each["nothing"].shape == (2, 0)
        assert each["query"] == ["why?", "how?"]
        assert [len(row["a"]) for row in each["rows"].unbind(0)] == [2, 3]
        assert torch.equal(each["nest"].unbind(0)[1], FULL[1, :3])


def with_pickle(folder: Path, name: str = "other.pickle") -> Path:
    """A saved folder with a pickled entry. Unpickling it creates the folder "hacked"."""
    save("memmap", folder, batch().set_non_tensor("env", torch.device("cpu")))
    (folder / "env" / "other.pickle").unlink()
    (folder / "env" / name).write_bytes(pickle.dumps({"data": Mischief(folder.parent / "hacked")}))
    return folder


def archive_of(folder: Path) -> Path:
    path = folder.with_suffix(".tdz")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder).as_posix())
    return path


@pytest.mark.parametrize("archived", [False, True])
def test_no_code_of_a_saved_folder_runs(archived: bool, tmp_path: Path) -> None:
    for number, name in enumerate(("other.PICKLE", "Other.Pickle", "other.pickle")):
        path = with_pickle(tmp_path / f"folder{number}", name)
        path = archive_of(path) if archived else path
        with pytest.raises(DataError, match=rf"more than tensors \(env/{name}\).*--trust"):
            load_batch(path)
        assert not (tmp_path / "hacked").exists()
    load_batch(path, trust=True)
    assert (tmp_path / "hacked").exists()


@pytest.mark.parametrize("link", ["env", "env/other.pickle", "next/log_probs"])
def test_no_link_is_followed(link: str, tmp_path: Path) -> None:
    """The linked folder contains a pickled object, which a listing that does not follow links would miss."""
    folder = save("memmap", tmp_path / "folder", batch(env=NonTensorData("a", batch_size=[2])))
    other = with_pickle(tmp_path / "other")
    if (folder / link).is_dir():
        shutil.rmtree(folder / link)
    (folder / link).symlink_to(other / link, target_is_directory=(other / link).is_dir())
    for trust in (False, True):
        with pytest.raises(DataError, match="is a link or a device"):
            load_batch(folder, trust=trust)
    assert not (tmp_path / "hacked").exists()


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    folder = save("memmap", tmp_path / "folder", batch())
    (folder / "tokens" / "meta.json").unlink()
    os.mkfifo(folder / "tokens" / "meta.json")
    os.mkfifo(tmp_path / "batch.pt")
    with pytest.raises(DataError, match="is a link or a device"):
        load_batch(folder)
    with pytest.raises(DataError, match="not a regular file"):
        load_batch(tmp_path / "batch.pt")


def test_a_missing_file_of_a_folder_is_named(tmp_path: Path) -> None:
    whole = save("memmap", tmp_path / "whole", odd())
    parts = ["tokens", "tokens/meta.json", "tokens/full.memmap", "nest.memmap", "nest.shape.memmap", "query"]
    parts += ["Odd%20key%2F%25.memmap", "rows/0", "rows/0/a.memmap", "history/_tensordict", "history/_tensordict/0"]
    for number, missing in enumerate(parts):
        folder = shutil.copytree(whole, tmp_path / f"{number}")
        gone = folder / missing
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        with pytest.raises(DataError, match="is incomplete: it lacks ") as caught:
            load_batch(folder)
        assert missing.replace("Odd%20key%2F%25", "Odd key/%") in str(caught.value)


@pytest.mark.parametrize("archived", [False, True])
def test_a_file_whose_name_has_another_case_is_missing(archived: bool, tmp_path: Path) -> None:
    """tensordict does not read such a file. Without a check the value would be silently missing or None."""
    td = batch().set_non_tensor("env", torch.device("cpu"))
    names = ("env/other.PICKLE", "tokens/Full.memmap", "tokens/full.MEMMAP", "tokens/META.json")
    for number, changed in enumerate(names):
        path, name = save("memmap", tmp_path / f"folder{number}", td), changed.lower()
        (path / name).rename(path / changed)
        path = archive_of(path) if archived else path
        with pytest.raises(DataError, match=f"is incomplete: it lacks {name}"):
            load_batch(path, trust=True)


def test_files_without_a_batch_are_errors(tmp_path: Path) -> None:
    """The content of each file, None for a folder, and a part of the error."""
    for name, content, said in (
        ("tensor.pt", FULL, "holds a Tensor: expected a batch of save_batch, or a dict of entries"),
        ("dict.pt", {}, "holds a dict: expected a batch"),
        ("uneven.pt", {"a": FULL, "b": FULL[:1]}, "different first dimensions"),
        ("empty.pt", "", "cannot be read by torch.load"),
        ("data.jsonl", "{}", "line 1 of .* holds no rollout: it has no columns"),
        ("bad.tdz", "no archive", "is not an archive"),
        ("folder", None, "holds no meta.json"),
    ):
        path = tmp_path / name
        if content is None:
            path.mkdir(exist_ok=True)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
        with pytest.raises(DataError, match=said):
            load_batch(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_batch(tmp_path / "absent.pt")
