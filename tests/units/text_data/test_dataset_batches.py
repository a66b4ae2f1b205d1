"""SFT and preference data equal hand-padded tensors in values and gradients. Metadata, skipped and cut rows."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History

from template_pairs import assistant as said, user
from torchrl_llm_kl import RetrieveLogProb, from_completions, from_conversations, from_pairs, make_algorithm
from torchrl_llm_kl.datasets import DataError, Skipped, SkippedRowsWarning
from toy_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(pad_token="<|pad|>")
VOCAB = len(TOKENIZER)
END = "<|im_end|>"


def ids(text: str) -> Tensor:
    return torch.tensor(TOKENIZER(text, add_special_tokens=False).input_ids)


class MeanOfPrefix(nn.Module):
    """A causal model in float64: logits of the mean embedding of the prefix."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, 6, dtype=torch.float64)
        self.head = nn.Linear(6, VOCAB, dtype=torch.float64)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        places = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float64).unsqueeze(-1)
        return (self.head(torch.tanh(self.embedding(input_ids).cumsum(1) / places)),)


def answer_log_probs(model: nn.Module, parts: list[tuple[str, bool]]) -> Tensor:
    """The log-probs of the trained pieces of a text, from one plain forward."""
    pieces = [(ids(text), trained) for text, trained in parts]
    tokens = torch.cat([piece for piece, _ in pieces])
    mask = torch.cat([torch.full_like(piece, trained, dtype=torch.bool) for piece, trained in pieces])
    log_probs = model(input_ids=tokens[None])[0][0, :-1].log_softmax(-1)
    return log_probs.gather(-1, tokens[1:, None])[:, 0][mask[1:]]


def gradients(loss: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def trained(row: TensorDictBase) -> str:
    """The text of the tokens that ``masking_strategy="sft"`` trains."""
    full, prompt = row["tokens", "full"], row["tokens", "prompt"]
    assert torch.equal(full[: len(prompt)], prompt)
    assert row["masks", "all_attention_mask"].all()
    return TOKENIZER.decode(full[row["masks", "all_assistant_mask"] & (torch.arange(len(full)) >= len(prompt))])


CHATS = [
    [user("hi"), said("hello"), user("and?"), said("no")],
    [user("why is that?"), said("because")],
    [{"role": "system", "content": "Be brief."}, user("2 + 2"), said("4")],
]


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


BOT = "<|im_start|>assistant\n"
#: The text of each chat in pieces, each with whether it is trained.
PIECES = [
    [
        *((turn("user", "hi") + BOT, False), ("hello" + END, True)),
        *(("\n" + turn("user", "and?") + BOT, False), ("no" + END, True), ("\n", False)),
    ],
    [(turn("user", "why is that?") + BOT, False), ("because" + END, True), ("\n", False)],
    [(turn("system", "Be brief.") + turn("user", "2 + 2") + BOT, False), ("4" + END, True), ("\n", False)],
]


def by_hand() -> TensorDict:
    """The same conversations, padded by hand."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    rows = [torch.cat([ids(text) for text, _ in row]) for row in PIECES]
    assistant = pad([torch.cat([torch.full((len(ids(text)),), on) for text, on in row]) for row in PIECES])
    attention = pad([torch.ones_like(row, dtype=torch.bool) for row in rows])
    full = pad(rows, padding_value=TOKENIZER.pad_token_id)
    masks = {"all_attention_mask": attention, "all_assistant_mask": assistant}
    return TensorDict({"tokens": {"full": full}, "masks": masks}, batch_size=[3])


def test_sft_equals_plain_torch_and_hand_padded_tensors() -> None:
    model = MeanOfPrefix()
    expected = -torch.cat([answer_log_probs(model, row) for row in PIECES]).mean()
    sft = make_algorithm("sft", model)
    sources = (CHATS, [{"messages": chat} for chat in CHATS], History.from_chats(CHATS))
    for data in (*(from_conversations(source, TOKENIZER) for source in sources), by_hand()):
        found = sft.loss(sft.prepare(data)).total_loss
        assert found.dtype == torch.float64
        assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert_close(gradients(found, model), gradients(expected, model), rtol=1e-10, atol=1e-12)


PAIRS = [
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"},
    {"prompt": "the sky is", "chosen": " blue today", "rejected": " green"},
    {"prompt": "a", "chosen": "b", "rejected": "cd"},
]


def pair_pieces(pair: dict[str, str], part: str) -> list[tuple[str, bool]]:
    return [(pair["prompt"], False), (pair[part] + END, True)]


def test_dpo_equals_plain_torch_and_its_parts_add_up() -> None:
    model, reference, beta = MeanOfPrefix(0), MeanOfPrefix(1), 0.3
    pieces = [pair_pieces(pair, part) for pair in PAIRS for part in ("chosen", "rejected")]
    sums = torch.stack([answer_log_probs(m, piece).sum() for m in (model, reference) for piece in pieces]).view(2, 3, 2)
    margin = beta * ((sums[0, :, 0] - sums[1, :, 0]) - (sums[0, :, 1] - sums[1, :, 1]))
    expected = -margin.sigmoid().log().mean()
    dpo = make_algorithm("dpo", model, reference=reference, objective_args={"beta": beta})
    pairs: Any = from_pairs(PAIRS, TOKENIZER)
    assert pairs.batch_size == (3, 2)
    shuffled = pairs.reshape(-1)[torch.tensor([3, 0, 4, 2, 5, 1])]
    for data in (pairs, pairs.reshape(-1), shuffled):
        out = dpo.loss(dpo.prepare(data))
        assert_close(out.total_loss, expected, rtol=1e-7, atol=0)  # scores of the reference are float32
        assert_close(out["reward_margin"].double(), margin.mean(), rtol=1e-6, atol=1e-7)
        assert_close(gradients(out.total_loss, model), gradients(expected, model), rtol=1e-6, atol=1e-9)
    batch = dpo.prepare(from_pairs(PAIRS, TOKENIZER))
    parts = [dpo.loss(part).total_loss for part in dpo.micro_batches(batch, size=2)]
    assert len(parts) == 3
    assert_close(sum(parts), dpo.loss(batch).total_loss)
    assert [len(part) for part in dpo.minibatches(batch, size=4)] == [4, 2]
    kto = make_algorithm("kto", model, reference=reference, objective_args={"beta": 0.3})
    batch = kto.prepare(from_pairs(PAIRS, TOKENIZER).reshape(-1))
    assert batch["chosen"].tolist() == [True, False] * 3
    assert kto.loss(batch).total_loss.isfinite()


def test_a_replay_buffer_samples_unchanged_rows_and_whole_pairs() -> None:
    model = MeanOfPrefix()
    sft, dpo = make_algorithm("sft", model), make_algorithm("dpo", model, reference=MeanOfPrefix(1))
    data = from_conversations([{"messages": chat, "name": str(i)} for i, chat in enumerate(CHATS)], TOKENIZER)
    transform = RetrieveLogProb(model, assistant_only=False)
    rows = ReplayBuffer(storage=LazyStackStorage(3), batch_size=8, transform=transform)
    rows.extend(data)
    sample = rows.sample()
    for row in sample.unbind(0):
        pieces = [(text, True) for text, _ in PIECES[int(row["metadata", "name"])]]
        assert torch.equal(row["tokens", "full"], torch.cat([ids(text) for text, _ in pieces]))
        plain = answer_log_probs(model, pieces)
        assert_close(row["log_probs", "full"][1:].double(), plain, rtol=1e-5, atol=1e-5)
    assert sft.loss(sft.prepare(sample)).total_loss.isfinite()
    pairs = ReplayBuffer(storage=LazyStackStorage(3), batch_size=5)
    pairs.extend(from_pairs(PAIRS, TOKENIZER))
    sample = pairs.sample()
    assert sample["chosen"].tolist() == [[True, False]] * 5
    assert torch.equal(sample["pair_id"][:, 0], sample["pair_id"][:, 1])
    assert dpo.loss(dpo.prepare(sample.exclude("pair_id", "chosen"))).total_loss.isfinite()


def test_text_ends_with_one_end_token_and_becomes_a_chat_on_request() -> None:
    rows = [{"prompt": "a ", "completion": "b"}, {"prompt": "a ", "completion": f"c{END}"}]
    assert [trained(row) for row in from_completions(rows, TOKENIZER)] == [f"b{END}", f"c{END}"]
    assert [trained(row) for row in from_completions(rows, TOKENIZER, add_eos=False)] == ["b", f"c{END}"]
    bare = build_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match="no eos_token to end an answer with: set it, or pass add_eos=False"):
        from_completions(rows, bare)
    assert len(from_completions(rows[:1], bare, add_eos=False)) == 1
    rows = [{"question": "why?", "answer": "because"}]
    keys = {"prompt_key": "question", "completion_key": "answer"}
    (row,) = from_completions(rows, TOKENIZER, **keys, as_chat=True, system_prompt="Be brief.").unbind(0)
    assert TOKENIZER.decode(row["tokens", "prompt"]) == turn("system", "Be brief.") + turn("user", "why?") + BOT
    assert trained(row) == f"because{END}"
    data = from_conversations(CHATS, TOKENIZER, system_prompt="Be kind.")  # it does not replace one
    texts = [TOKENIZER.decode(row["tokens", "full"]) for row in data]
    assert [text.count("Be kind.") for text in texts] == [1, 1, 0]
    assert "Be brief." in texts[2]


def test_only_the_last_turn_pairs_of_histories_and_tools() -> None:
    data = from_conversations(CHATS[:1], TOKENIZER, turns="last")
    (row,) = from_completions([{"prompt": CHATS[0][:3], "completion": CHATS[0][3:]}], TOKENIZER)
    assert trained(data[0]) == trained(row) == f"no{END}"
    assert torch.equal(row["tokens", "full"], data[0]["tokens", "full"])
    model = MeanOfPrefix()
    for strategy, kept in (("sft", ["no<|im_end|>"]), ("rlhf", ["hello<|im_end|>", "no<|im_end|>"])):
        parts = make_algorithm("sft", model, masking_strategy=strategy)  # "rlhf": also the turns in the prompt
        expected = -answer_log_probs(model, [(text, text in kept) for text, _ in PIECES[0]]).mean()
        assert_close(parts.loss(parts.prepare(data.clone())).total_loss, expected)
    better = History.from_chats([[user("hi"), said("hello")], [user("why?"), said("because")]])
    worse = History.from_chats([[user("hi"), said("go")], [user("why?"), said("no")]])
    data = from_pairs({"chosen": better, "rejected": worse}, TOKENIZER)
    found = [[trained(row) for row in pair] for pair in data]
    assert found == [[f"hello{END}", f"go{END}"], [f"because{END}", f"no{END}"]]
    template = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}" + str(TOKENIZER.chat_template)
    own, other = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("own", "all"))
    rows = [{"messages": CHATS[1], "tools": [own]}, {"messages": CHATS[1]}]
    data = from_conversations(rows, TOKENIZER, tools=[other], chat_template=template)
    assert [TOKENIZER.decode(row["tokens", "full"])[:5] for row in data] == ["[own]", "[all]"]
    assert [trained(row) for row in data] == [f"because{END}"] * 2


def test_other_columns_are_kept() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "b", "level": 3, "score": 1, "easy": True, "name": "x", "tags": ["p", "q"]},
        {"prompt": "c", "completion": "d", "level": 4, "score": 0.5, "easy": False, "name": None, "tags": []},
    ]
    data = from_completions(rows, TOKENIZER)
    numbers = {"level": [3, 4], "score": [1.0, 0.5], "easy": [True, False]}
    assert {name: data["metadata", name].tolist() for name in numbers} == numbers
    texts = {"name": ["x", None], "tags": [["p", "q"], []]}
    assert {name: [row["metadata", name] for row in data] for name in texts} == texts
    assert "metadata" not in from_completions([{"prompt": "a", "completion": "b"}], TOKENIZER)[0]
    # a column of pairs has one type in all of them
    more = ({"level": 1, "weight": 2}, {"level": None, "weight": 0.5})
    pairs = from_pairs([{**row, **columns} for row, columns in zip(PAIRS, more, strict=False)], TOKENIZER)
    assert [[row["metadata", "level"] for row in pair] for pair in pairs] == [[1, 1], [None, None]]
    assert pairs["metadata", "weight"].tolist() == [[2.0, 2.0], [0.5, 0.5]]
    assert pairs[0]["metadata", "weight"].dtype == torch.float32
    # also those that another kind of rows would read
    data = from_conversations([{"messages": CHATS[0], "prompt": "p", "tokens": 5}], TOKENIZER)
    assert (data["metadata", "tokens"].tolist(), data[0]["metadata", "prompt"]) == ([5], "p")
    # a missing number leaves a column of numbers
    rows = [{"prompt": "a", "completion": "b", "score": score} for score in (math.nan, 0.5)]
    assert_close(from_completions(rows, TOKENIZER)["metadata", "score"], torch.tensor([math.nan, 0.5]), equal_nan=True)


#: One usable row, then one for each reason that leaves a row out.
BAD = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "c" * 40}]
BAD += [{"prompt": "a"}, BAD[1]]


def test_rows_are_left_out_with_a_warning_an_error_or_a_count() -> None:
    with pytest.warns(SkippedRowsWarning) as found:
        data = from_completions(BAD, TOKENIZER, max_length=30)
    assert [trained(row) for row in data] == [f"b{END}"]
    (warning,) = [item.message for item in found if isinstance(item.message, SkippedRowsWarning)]
    assert dict(warning.skipped.counts) == {"empty": 2, "too long": 1, "malformed": 1}
    assert "skipped 2, empty: row 2: no text to score; row 5: no text to score" in str(warning)
    assert "skipped 1, too long: row 3: 42 tokens, at most 30" in str(warning)
    assert "skipped 1, malformed: row 4: has the columns prompt" in str(warning)
    assert found[0].filename == __file__
    with pytest.raises(DataError, match=r"^row 2 of the list, empty: no text to score\.$"):
        from_completions(BAD, TOKENIZER, on_skip="raise")
    counts: list[Skipped] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_completions(BAD, TOKENIZER, on_skip=counts.append)
        from_completions(BAD[:1], TOKENIZER, on_skip=counts.append)
        from_completions(BAD[:1], TOKENIZER)
    assert [skipped.total for skipped in counts] == [3, 0]
    with pytest.raises(DataError, match="no row of the list can be used:\nskipped 1, empty: row 1"):
        from_completions([{"prompt": "a", "completion": ""}], TOKENIZER)


def test_long_rows_may_be_cut_and_a_pair_is_left_out_as_a_whole() -> None:
    rows = [{"prompt": "ab", "completion": "cdefgh"}, {"prompt": "abcdef", "completion": "g"}]
    with pytest.warns(SkippedRowsWarning, match="cut 1 at the maximum length") as found:
        data = from_completions(rows, TOKENIZER, max_length=5, too_long="cut")
    assert [TOKENIZER.decode(row["tokens", "full"]) for row in data] == ["abcde"]
    assert trained(data[0]) == "cde"
    assert "row 2: 8 tokens, at most 5" in str(found[0].message)
    (exact,) = from_completions(rows[:1], TOKENIZER, max_length=9, too_long="cut")
    assert trained(exact) == f"cdefgh{END}"
    rows = [PAIRS[0], {**PAIRS[1], "rejected": ""}, {**PAIRS[2], "rejected": PAIRS[2]["chosen"]}]
    with pytest.warns(SkippedRowsWarning) as found:
        data = from_pairs(rows, TOKENIZER)
    assert data.batch_size == (1, 2)
    assert "skipped 1, empty: row 2 (rejected): no text to score" in str(found[0].message)
    assert "skipped 1, equal answers: row 3: both answers have the same tokens" in str(found[0].message)


def test_wrong_layouts_keys_and_settings_are_errors() -> None:
    # Answers as messages need no prompt: a misspelt key would train them without it.
    misspelt = partial(from_pairs, prompt_key="qestion")
    asked = [{"question": [user("a")], "chosen": CHATS[0], "rejected": []}]
    for make, rows, expected in (
        (from_conversations, PAIRS, r"(?s)no row of the list .* row 1: holds preference, expected messages"),
        (from_completions, [{"question": "a"}], "has the columns question; expected `messages`"),
        (misspelt, asked, r"row 1 of the list has no column 'qestion', which prompt_key= names: it has que"),
    ):
        with pytest.raises(DataError, match=expected):
            make(rows, TOKENIZER)
    for settings, error, expected in (
        ({"turns": "first"}, ValueError, "turns"),
        ({"too_long": "drop"}, ValueError, "too_long"),
        ({"max_length": 1}, ValueError, "max_length must be at least 2"),
        ({"max_len": 3}, TypeError, "max_len"),
    ):
        with pytest.raises(error, match=expected):
            from_conversations(CHATS, TOKENIZER, **settings)
