"""Tests of the demo with pictures: the pictures, the rewards, and a short run."""

from pathlib import Path

import pytest
import torch

for name in ("matplotlib", "omegaconf", "rich"):
    pytest.importorskip(name)
import image_demo as demo  # noqa: E402
from cli_files import read_jsonl  # noqa: E402


def test_pictures_match_their_answers() -> None:
    """The squares are counted in the model's input, by the colour in the middle of each cell."""
    pictures = demo.make_pictures(40, seed=3)
    patches = pictures["images", "pixel_values"]
    assert len({tuple(each.flatten().tolist()) for each in patches}) == 40
    # Cells of 2 x 2 patches; in a patch: channel, frame, y, x. The last pixel of the first patch is in the cell's middle.
    middle = patches.reshape(40, 16, 4, 3, 2, 4, 4)[:, :, 0, :, 0, 3, 3]
    processor = demo.Qwen2VLImageProcessorPil()
    mean, std = (torch.tensor(x) for x in (processor.image_mean, processor.image_std))
    seen = (255 * (middle * std + mean)).round().int()
    for cells, answer in zip(seen.tolist(), pictures["answer"], strict=True):
        counts = [sum(tuple(cell) == colour for cell in cells) for colour in demo.COLOURS.values()]
        assert answer == "red {} green {} blue {}".format(*counts)
    for count, wrong in ((0, 1), (2, 3), (3, 3)):
        assert demo.one_too_many(f"red {count} green 0 blue 1") == f"red {wrong} green 0 blue 1"


def test_rewards_masks_and_groups_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, pictures = demo.build_tokenizer(), demo.make_pictures(2, seed=0)
    model, answers = demo.build_model(tokenizer), pictures["answer"]
    prompt, pad = demo.encode([demo.PROMPT], tokenizer)[0], tokenizer.pad_token_id
    early = [tokenizer.eos_token_id, *[pad] * 6]
    other = demo.encode([f"{answers[0]} {demo.ASSISTANT}"], tokenizer)[0].tolist()  # right, without an end
    right = [demo.encode([f"{answer} {demo.END}"], tokenizer)[0].tolist() for answer in answers]
    rows = torch.stack([torch.cat([prompt, torch.tensor(x)]) for x in (right[0], other, right[0], early)])
    monkeypatch.setattr(model, "generate", lambda **_: rows)
    batch = demo.sample(model, tokenizer, pictures, group_size=2)
    assert answers[0] != answers[1]
    assert batch["next", "reward"].flatten().tolist() == [1, 0, 0, 0]
    assert batch["group"].tolist() == [0, 0, 1, 1]
    assert batch["masks", "all_assistant_mask"].sum(-1).tolist() == [7, 7, 7, 1]
    assert (batch["masks", "all_attention_mask"].sum(-1) - len(prompt)).tolist() == [7, 7, 7, 1]
    assert torch.equal(batch["images", "pixel_values"][2], pictures["images", "pixel_values"][1])


def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run with the same seed gives the same figures, and the files of the first run are kept."""
    monkeypatch.setattr(demo, "COLOURS", {"red": demo.COLOURS["red"]})  # few steps reach some right answers
    sizes = {"pictures": 30, "held_out": 20, "warmup_steps": 20, "steps": 3, "num_pictures": 8, "group_size": 3}
    settings = demo.Settings(**sizes, warmup_lr=1e-2, evaluate_every=2, out=str(tmp_path))
    demo.main(settings)
    demo.main(settings)
    assert "20 held-out pictures" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    folders = tmp_path / "earlier-1", tmp_path
    earlier, rows = (read_jsonl(folder / "metrics.jsonl") for folder in folders)
    assert [row | {"seconds": 0} for row in earlier] == [row | {"seconds": 0} for row in rows]
    assert [row["step"] for folder in folders for row in read_jsonl(folder / "evaluations.jsonl")] == [0, 2, 3] * 2
    assert rows[0]["kl"] == 0 != rows[-1]["kl"]  # policy and reference are one model at first
    assert 0 < rows[0]["reward"] < 1
    assert demo.interval(1.0, 2) == pytest.approx((2 / (2 + 1.96**2), 1.0))
    with pytest.raises(ValueError, match="kl_target is 0: expected more than 0"):
        demo.main(demo.Settings(kl_target=0.0))
