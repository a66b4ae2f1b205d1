"""Runs on a base model: prompts are plain text after one BOS, and an answer ends at one of several tokens or at a text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cli_files import write_jsonl
from closeness import assert_near
from torchrl_llm_kl.masks import PLAIN_TEMPLATE
from torchrl_llm_kl.training import ModelError, Run, chat_tokenizer, make_sampler, read_config, save_policy
from toy_models import FORWARD
from toy_rollouts import make_model, plain_log_probs
from toy_tokenizer import build_bos_tokenizer, build_tokenizer

FEW_SHOT = ["3 + 4 = 7\n5 + 2 =", "1 + 1 ="]
REWARD = "def right(question, answer, metadata):\n    return float(answer[-1:] in metadata['answer'].split())\n"


def few_shot_run(folder: Path, tokenizer: Any, *, ends: Any, end: list[str]) -> Run:
    """A run of two prompts with eight answers of up to six tokens each."""
    model: Any = make_model(tokenizer, 0)
    model.generation_config.eos_token_id = ends
    save_policy(model, tokenizer, folder / "model")
    write_jsonl(
        folder / "prompts.jsonl",
        ({"prompt": text, "answer": " ".join("abcdefghijklmnopqrstuvwxyz")} for text in FEW_SHOT),
    )
    (folder / "rewards.py").write_text(REWARD)
    source = {
        "model": {"name": str(folder / "model"), "template": "plain"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "num_prompts": 2, "group_size": 8, "held_out_share": 0.0},
        "reward": f"{folder / 'rewards.py'}:right",
        "sampler": {"max_new_tokens": 6, "end": end},
        "logging": {"doctor_every": 0},
        "run": {"out": str(folder / "out")},
    }
    return Run(read_config(source))


def byte_ids(text: str) -> list[int]:
    """The ids of the tokenizer that adds BOS: it has only bytes, except for letters and spaces."""
    letters = "▁abcdefghijklmnopqrstuvwxyz"
    return [260 + letters.index(x) if x in letters else 4 + ord(x) for x in text.replace(" ", "▁")]


def kind_of(token: int) -> str:
    """How a token ends an answer: as an end token, with one of the letters, or (empty) not at all."""
    if 196 <= token < 260:  # the bytes from 192 on
        return "end"
    if 260 < token < 287 or 101 <= token < 127:  # the letters, and their bytes
        return "letter"
    return "special" if token >= 287 else ""  # <|im_start|> and <|im_end|> contain letters


def test_a_run_trains_on_the_prompt_s_text_and_the_sampled_tokens(tmp_path: Path) -> None:
    """One BOS, then the prompt, then the answer up to its end: one of many end tokens (the bytes from 192 on), or a letter."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = build_bos_tokenizer(None)
    run = few_shot_run(tmp_path, tokenizer, ends=list(range(196, 260)), end=list(letters))
    torch.manual_seed(0)
    batch = run.sample()
    last = set()
    for row in batch.unbind(0):
        prompt = [2, *byte_ids(row["query"])]
        mask = row["masks", "all_attention_mask"].bool()
        ids = row["tokens", "full"][mask]
        assert ids[: len(prompt)].tolist() == prompt
        answer = ids[len(prompt) :].tolist()
        kinds = [kind_of(token) for token in answer]
        assert not any(kinds[:-1])
        assert kinds[-1] or len(answer) == 6
        last.add(kinds[-1])
        if not 101 <= answer[-1] < 127:  # a byte after an invalid one is not decoded to its letter
            assert row["next", "reward"].sum() == (kinds[-1] == "letter")
        # Scored exactly at the answer's tokens.
        want = plain_log_probs(run.policy, ids)
        want[: len(prompt)] = 0
        for name in ("log_probs", "ref_log_probs"):
            got = row["next", name, "full"]
            assert_near(got[mask], want, **FORWARD)
            assert not got[~mask].any()
    assert last >= {"end", "letter"}
    assert sorted({row["query"] for row in batch.unbind(0)}) == sorted(FEW_SHOT)


def test_end_of_text_may_also_be_bos_and_padding(tmp_path: Path) -> None:
    """As in GPT-2. The tokenizer adds no BOS, so the template's is the only one. A sampled end token is scored."""
    end = "<|endoftext|>"
    tokenizer = build_tokenizer(None, (), eos_token=end, bos_token=end)
    run = few_shot_run(tmp_path, tokenizer, ends=256, end=[])
    with torch.no_grad():
        run.policy.lm_head.weight[:256] = 0.0
        run.policy.lm_head.weight[256] *= 3.0  # likely at some positions
    torch.manual_seed(0)
    ended = []
    for row in run.sample().unbind(0):
        prompt = [256, *tokenizer.encode(row["query"], add_special_tokens=False)]
        ids = row["tokens", "full"][row["masks", "all_attention_mask"].bool()].tolist()
        assert ids[: len(prompt)] == prompt
        answer = ids[len(prompt) :]
        assert 256 not in answer[:-1]
        assert answer[-1] == 256 or len(answer) == 6
        assert row["next", "log_probs", "full"].count_nonzero() == len(answer)
        ended.append(len(answer) < 6)
    assert any(ended)


def test_the_model_folder_keeps_the_template(tmp_path: Path) -> None:
    """The folder renders the run's prompts without a setting."""
    tokenizer = build_bos_tokenizer(None)
    run = few_shot_run(tmp_path, tokenizer, ends=1, end=["\n"])
    save_policy(run.policy, run.tokenizer, tmp_path / "again")
    chat = [{"role": "user", "content": "1 + 1 ="}]
    for again in (chat_tokenizer(str(tmp_path / "again")), PreTrainedTokenizerFast.from_pretrained(tmp_path / "again")):
        ids = again.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ids == [2, *byte_ids("1 + 1 =")]
    assert "chat_template.jinja" not in {path.name for path in (tmp_path / "model").iterdir()}


def test_templates_of_a_run(tmp_path: Path) -> None:
    """The tokenizer's own, plain text, or a file."""
    build_bos_tokenizer("own {{ messages }}").save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text("Q: {{ messages[0].content }}\nA:\n")
    for template, expected in ((None, "own {{ messages }}"), ("plain", PLAIN_TEMPLATE)):
        assert chat_tokenizer(str(tmp_path), template).chat_template == expected
    mine = chat_tokenizer(str(tmp_path), str(tmp_path / "mine.jinja"))
    assert mine.apply_chat_template([{"role": "user", "content": "why?"}], tokenize=False) == "Q: why?\nA:"
    with pytest.raises(ModelError, match=r"model\.template is plane: .*expected plain, or a file with a chat template"):
        chat_tokenizer(str(tmp_path), "plane")


def test_a_tokenizer_without_padding_and_end_is_refused(tmp_path: Path) -> None:
    tokenizer = build_bos_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no padding token: set tokenizer\.pad_token"):
        make_sampler(make_model(tokenizer, 0), tokenizer, max_new_tokens=2)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"neither a padding token nor an end token: .*model\.tokenizer"):
        chat_tokenizer(str(tmp_path))
