"""Which tokens are scored: by bookkeeping, by a given mask, by a template, by text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text

from torchrl_llm_kl import RetrieveLogProb
from toy_rollouts import make_model, make_scoring_wrapper, plain_log_probs
from toy_tokenizer import CHATML, build_tokenizer

MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
CHATS = [
    [
        {"role": "user", "content": "Answer yes or no"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "no"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
]
SAID = [["yes<|im_end|>", "no<|im_end|>"], ["b<|im_end|>"]]


def scored_texts(tokenizer: Any, ids: list[int], log_probs: torch.Tensor) -> list[str]:
    """The runs of tokens that were scored, as text."""
    runs, previous = [], False
    for token, value in zip(ids, log_probs.tolist(), strict=True):
        if value != 0:
            runs = [*runs, [token]] if not previous else [*runs[:-1], [*runs[-1], token]]
        previous = value != 0
    return [tokenizer.decode(run) for run in runs]


def histories(**chats: list[Any]) -> TensorDictBase:
    fields = {name: History.from_chats(value) for name, value in chats.items()}
    return TensorDict(history=ChatHistory(**fields, batch_size=len(CHATS)), batch_size=[len(CHATS)])


def run(
    data: TensorDictBase, model: Any, tokenizer: Any, *, padded: bool, mode: str = "history", **kwargs: Any
) -> list[Any]:
    wrapper = make_scoring_wrapper(model, tokenizer, pad_output=padded, input_mode=mode)
    return list(RetrieveLogProb(wrapper, **kwargs)(data).get(("log_probs", "full"), as_list=True))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain template", "marked template"])
def test_history_on_the_models_own_template(template: str, padded: bool, ref_model: Any) -> None:
    tokenizer = build_tokenizer(template, pad_token="<|pad|>")
    rows = run(histories(full=CHATS), ref_model, tokenizer, padded=padded)
    for chat, said, found in zip(CHATS, SAID, rows, strict=True):
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        found = found[len(found) - len(ids) :]
        assert scored_texts(tokenizer, ids, found) == said
        want = plain_log_probs(ref_model, torch.tensor(ids))
        assert (found[found != 0] - want[found != 0]).abs().max() < 2e-5


@pytest.mark.parametrize(("scope", "said"), [("turn", [["no<|im_end|>"], ["b<|im_end|>"]]), ("full", SAID)])
def test_history_with_a_prompt_beside_it(
    scope: Any, said: list[Any], tokenizer: Any, ref_model: Any, padded: bool
) -> None:
    """A step of an env whose policy stores no tokens: the response follows the prompt in the full history."""
    data = histories(full=CHATS, prompt=[chat[:-1] for chat in CHATS])
    for chat, want, found in zip(CHATS, said, run(data, ref_model, tokenizer, padded=padded, scope=scope), strict=True):
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        assert scored_texts(tokenizer, ids, found[len(found) - len(ids) :]) == want


def test_everything_but_first_tokens_without_assistant_only(tokenizer: Any, ref_model: Any, padded: bool) -> None:
    for chat, found in zip(
        CHATS, run(histories(full=CHATS), ref_model, tokenizer, padded=padded, assistant_only=False), strict=True
    ):
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
        found = found[len(found) - len(ids) :]
        assert found[0] == 0
        assert (found[1:] - plain_log_probs(ref_model, torch.tensor(ids))[1:]).abs().max() < 2e-5


def texts(**fields: list[str]) -> TensorDictBase:
    text = Text(**fields, batch_size=2)
    return TensorDict(text=text, batch_size=[2])


def test_text_after_its_prompt(tokenizer: Any, ref_model: Any, padded: bool) -> None:
    full, prompt = ["ask: yes", "a longer question: no!"], ["ask: ", "a longer question: "]
    rows = run(texts(full=full, prompt=prompt), ref_model, tokenizer, padded=padded, mode="text")
    for text, want, found in zip(full, ["yes", "no!"], rows, strict=True):
        ids = tokenizer.encode(text)
        assert scored_texts(tokenizer, ids, found[len(found) - len(ids) :]) == [want]


def test_text_that_does_not_start_with_its_prompt_warns_with_the_position(tokenizer: Any, ref_model: Any) -> None:
    data = texts(full=["ask: yes", "ask; no"], prompt=["ask: ", "ask: "])
    with pytest.warns(UserWarning, match=r"sequence 1: .* differ from character 3 on"):
        rows = run(data, ref_model, tokenizer, padded=False, mode="text")
    assert scored_texts(tokenizer, tokenizer.encode("ask; no"), rows[1]) == ["; no"]


@pytest.mark.parametrize("scope", ["turn", "full"])
def test_text_that_does_not_say_who_wrote_what(scope: Any, tokenizer: Any, ref_model: Any) -> None:
    fields = {"full": ["a b", "c d"], **({"prompt": ["a", "c"]} if scope == "full" else {})}
    with pytest.raises(ValueError, match=r"cannot tell which part of .* the assistant wrote"):
        run(texts(**fields), ref_model, tokenizer, padded=False, mode="text", scope=scope)


def tokens(mask: Any = None, **fields: list[list[int]]) -> TensorDictBase:
    data = TensorDict({("tokens", k): torch.tensor(v) for k, v in fields.items()}, [2])
    return data if mask is None else data.set(("masks", "all_assistant_mask"), torch.tensor(mask, dtype=torch.bool))


FULL = [[3, 4, 5, 6], [7, 8, 9, 10]]


GIVEN, PROMPT = [[0, 1, 0, 1], [0, 0, 1, 0]], [[3, 4], [7, 8]]


@pytest.mark.parametrize(
    ("data", "scope", "want"),
    [
        (tokens(full=FULL, prompt=PROMPT), "turn", [[0, 0, 1, 1]] * 2),
        (tokens(GIVEN, full=FULL), "turn", GIVEN),
        (tokens(GIVEN, full=FULL, prompt=PROMPT), "turn", [[0, 0, 0, 1], [0, 0, 1, 0]]),
        (tokens(GIVEN, full=FULL, prompt=PROMPT), "full", GIVEN),
        (tokens([[1, 1, 0, 0]] * 2, full=FULL), "turn", [[0, 1, 0, 0]] * 2),
    ],
    ids=["prompt", "given mask", "given mask and prompt", "given mask, every turn", "never the first token"],
)
def test_sampled_tokens(data: TensorDictBase, scope: Any, want: list[Any], ref_model: Any) -> None:
    found = RetrieveLogProb(ref_model, scope=scope)(data)["log_probs", "full"]
    assert (found != 0).long().tolist() == want
    for ids, row in zip(FULL, found, strict=True):
        plain = plain_log_probs(ref_model, torch.tensor(ids))
        assert (row[row != 0] - plain[row != 0]).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("data", "scope", "message"),
    [
        (tokens(full=FULL), "turn", r"cannot tell which tokens.*found \('tokens', 'full'\), but neither"),
        (tokens(full=FULL, prompt=[[3, 4], [7, 9]]), "turn", r"sequence 1, position 1: .*does not start with"),
        (tokens(full=FULL, prompt=[[3, 4, 5, 6, 1]] * 2), "turn", r"sequence 0: .* has 5 tokens, more than the 4"),
        (tokens(full=FULL, prompt=[[3, 4], [7, 8]]), "full", r"scope='full' scores .* found neither"),
        (tokens([[0, 1, 0, 1], [0] * 4], full=FULL), "turn", r"sequence 1: .*all_assistant_mask.* False everywhere"),
        (tokens([[0, 1, 1], [0, 1, 0]], full=FULL), "turn", r"found row lengths \[3, 3\], expected \[4, 4\]"),
        (TensorDict({("tokens", "full"): torch.randn(2, 4)}, [2]), "turn", r"integer token ids .* found torch.float32"),
    ],
)
def test_what_cannot_be_told_is_an_error(data: TensorDictBase, scope: Any, message: str, ref_model: Any) -> None:
    before = set(data.keys(True))
    with pytest.raises((ValueError, TypeError), match=message):
        RetrieveLogProb(ref_model, scope=scope)(data)
    assert set(data.keys(True)) == before


def test_tokens_beside_the_history_that_renders_to_them(tokenizer: Any, ref_model: Any) -> None:
    """Supervised data: whole conversations as tokens, the history tells the turns."""
    chats = [CHATS[1], CHATS[1]]
    ids = tokenizer.apply_chat_template(chats[0], tokenize=True, return_dict=True)["input_ids"]
    data = histories(full=chats).set(("tokens", "full"), torch.tensor([ids, ids]))
    found = RetrieveLogProb(make_scoring_wrapper(ref_model, tokenizer, pad_output=False))(data)["log_probs", "full"]
    assert [scored_texts(tokenizer, ids, row) for row in found] == [["b<|im_end|>"]] * 2


def test_another_family_with_absolute_positions(padded: bool) -> None:
    """GPT-2 in a padded batch: positions count from each sequence's first real token."""
    tokenizer = build_tokenizer(CHATML, pad_token="<|pad|>")
    model = make_model(tokenizer, seed=4, family="gpt2")
    for chat, found in zip(CHATS, run(histories(full=CHATS), model, tokenizer, padded=padded), strict=True):
        ids = torch.tensor(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"])
        found, want = found[len(found) - len(ids) :], plain_log_probs(model, ids)
        assert (found[found != 0] - want[found != 0]).abs().max() < 2e-5
