"""The mask of scored tokens: from the prompt, a given mask, a chat template, or text."""

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.policies import Text

from closeness import assert_near
from template_pairs import LOOP, PROMPT, assistant, marked, user
from torchrl_llm_kl import RetrieveLogProb
from toy_models import FORWARD
from toy_rollouts import histories, make_scoring_wrapper, plain_log_probs
from toy_tokenizer import CHATML, build_tokenizer

MARKED = marked(LOOP, "{{ m.content }}<|im_end|>") + PROMPT
CHATS = [[user("Answer yes or no"), assistant("yes"), user("sure?"), assistant("no")], [user("a"), assistant("b")]]
SAID = [["yes<|im_end|>", "no<|im_end|>"], ["b<|im_end|>"]]
SPLIT = "{{ m.content[:1] }}{% endgeneration %}{% generation %}{{ m.content[1:] }}"
TWO_MARKS = MARKED.replace("{{ m.content }}", SPLIT, 1)


def scored_texts(tokenizer: Any, ids: list[int], log_probs: torch.Tensor) -> list[str]:
    """The text of each run of scored tokens."""
    marked = "".join("x" if value else " " for value in log_probs.tolist())
    assert len(ids) == len(marked)
    return [tokenizer.decode(ids[run.start() : run.end()]) for run in re.finditer("x+", marked)]


def run(data: TensorDictBase, model: Any, tokenizer: Any, padded: bool, mode: str = "history", **kwargs: Any) -> Any:
    wrapper = make_scoring_wrapper(model, tokenizer, pad_output=padded, input_mode=mode)
    return list(RetrieveLogProb(wrapper, **kwargs)(data).get(("log_probs", "full"), as_list=True))


@pytest.mark.parametrize("template", [CHATML, MARKED, TWO_MARKS], ids=["plain", "marked", "two marks a turn"])
def test_history_on_the_models_own_template(template: str, padded: bool, ref_model: Any) -> None:
    """A whole conversation, and one beside its prompt, as in an env whose policy stores no tokens."""
    tokenizer = build_tokenizer(template, pad_token="<|pad|>")
    whole, turns = {"full": CHATS}, {"full": CHATS, "prompt": [chat[:-1] for chat in CHATS]}
    for fields, settings, expected in (
        (whole, {}, SAID),
        (turns, {"scope": "turn"}, [said[-1:] for said in SAID]),
        (turns, {"scope": "full"}, SAID),
        (whole, {"assistant_only": False}, None),
    ):
        rows = run(histories(**fields), ref_model, tokenizer, padded=padded, **settings)
        for i, (chat, found) in enumerate(zip(CHATS, rows, strict=True)):
            ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
            found = found[len(found) - len(ids) :]
            if expected is None:  # all but first tokens
                assert (found != 0).tolist() == [at > 0 for at in range(len(ids))]
            else:
                assert scored_texts(tokenizer, ids, found) == expected[i]
            want = plain_log_probs(ref_model, torch.tensor(ids))
            assert_near(found, torch.where(found != 0, want, 0.0), **FORWARD)


SILENT = "{% for m in messages %}{% if m['content'] %}" + CHATML[CHATML.index("{{") :].replace("message", "m").replace(
    "{% endfor %}", "{% endif %}{% endfor %}", 1
)
CHAT = CHATS[0]


@pytest.mark.parametrize(
    ("template", "full", "message"),
    [
        (SILENT, [*CHAT[:3], {**CHAT[3], "content": ""}], "the chat template renders nothing of the response"),
        (CHATML, CHAT[2:], "the conversation does not start with its prompt"),
    ],
)
def test_a_response_that_cannot_be_located_is_refused(
    template: str, full: list[Any], message: str, ref_model: Any
) -> None:
    tokenizer = build_tokenizer(template, pad_token="<|pad|>")
    with pytest.raises(ValueError, match=f"sequence 0: {message}"):
        run(histories(full=[full], prompt=[CHAT[:3]]), ref_model, tokenizer, padded=True)


def texts(**fields: list[str]) -> TensorDictBase:
    return TensorDict(text=Text(**fields, batch_size=2), batch_size=[2])


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
def test_text_without_a_known_author_is_refused(scope: Any, tokenizer: Any, ref_model: Any) -> None:
    fields = {"full": ["a b", "c d"], **({"prompt": ["a", "c"]} if scope == "full" else {})}
    with pytest.raises(ValueError, match=r"cannot tell which part of .* the assistant wrote"):
        run(texts(**fields), ref_model, tokenizer, padded=False, mode="text", scope=scope)


def tokens(mask: Any = None, **fields: list[list[int]]) -> TensorDictBase:
    data = TensorDict({("tokens", k): torch.tensor(v) for k, v in fields.items()}, [2])
    return data if mask is None else data.set(("masks", "all_assistant_mask"), torch.tensor(mask, dtype=torch.bool))


FULL = [[3, 4, 5, 6], [7, 8, 9, 10]]
GIVEN, PROMPTS = [[0, 1, 0, 1], [0, 0, 1, 0]], [[3, 4], [7, 8]]


@pytest.mark.parametrize(
    ("data", "scope", "want"),
    [
        (tokens(full=FULL, prompt=PROMPTS), "turn", [[0, 0, 1, 1]] * 2),
        (tokens(GIVEN, full=FULL), "turn", GIVEN),
        (tokens(GIVEN, full=FULL, prompt=PROMPTS), "turn", [[0, 0, 0, 1], [0, 0, 1, 0]]),
        (tokens(GIVEN, full=FULL, prompt=PROMPTS), "full", GIVEN),
        (tokens([[1, 1, 0, 0]] * 2, full=FULL), "turn", [[0, 1, 0, 0]] * 2),
    ],
    ids=["prompt", "given mask", "given mask and prompt", "given mask, every turn", "never the first token"],
)
def test_sampled_tokens(data: TensorDictBase, scope: Any, want: list[Any], ref_model: Any) -> None:
    found = RetrieveLogProb(ref_model, scope=scope)(data)["log_probs", "full"]
    plain = torch.stack([plain_log_probs(ref_model, torch.tensor(ids)) for ids in FULL])
    assert_near(found, plain * torch.tensor(want), **FORWARD)


@pytest.mark.parametrize(
    ("data", "scope", "message"),
    [
        (tokens(full=FULL, prompt=PROMPTS), "full", r"scope='full' needs .*all_assistant_mask"),
        (tokens([[0, 1, 1], [0, 1, 0]], full=FULL), "turn", r"rows of \[4, 4\], found \[3, 3\]"),
        (tokens([GIVEN[0], [0, 0, 0, 0]], full=FULL), "turn", "sequence 1: .* is False everywhere"),
    ],
)
def test_ambiguous_masks_are_refused(data: TensorDictBase, scope: Any, message: str, ref_model: Any) -> None:
    """test_bad_input.py of the transforms has more cases."""
    with pytest.raises(ValueError, match=message):
        RetrieveLogProb(ref_model, scope=scope)(data)


def test_a_history_that_renders_to_the_tokens_gives_the_mask(tokenizer: Any, ref_model: Any) -> None:
    """Supervised data holds whole conversations as tokens, and the history identifies the turns."""
    ids = tokenizer.apply_chat_template(CHATS[1], tokenize=True, return_dict=True)["input_ids"]
    data = histories(full=[CHATS[1]] * 2).set(("tokens", "full"), torch.tensor([ids, ids]))
    found = RetrieveLogProb(make_scoring_wrapper(ref_model, tokenizer, pad_output=False))(data)["log_probs", "full"]
    assert [scored_texts(tokenizer, ids, row) for row in found] == [["b<|im_end|>"]] * 2
