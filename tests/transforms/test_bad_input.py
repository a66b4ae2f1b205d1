"""Each kind of bad input: an error that says what was found and what to change, and the data left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.modules.llm.policies import ChatHistory

from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import make_model, make_policy, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

FORMS = ["padded", "nested", "lazy"]
SCORING = ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"]
PROMPTS = [[7, 8, 9], [10, 11]]
RESPONSES = [[20, 21], [30, 31, 32, 33]]
LENGTHS = [5, 6]
GEN = [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0, -0.5, -1.5, -2.5]]
REF = [[0.0, 0.0, 0.0, -2.0, -1.0], [0.0, 0.0, -1.0, -0.75, -1.25, -4.5]]


# ------------------------------------------------------------------ data


def ids(rows: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def full(prompts: list[Tensor], responses: list[Tensor], form: str, fill: Any = 0) -> Any:
    """Whole sequences as torchrl lays them out: padded ones have padding left of the prompt and right of the response."""
    if form != "padded":
        return [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    left = pad_sequence(prompts, batch_first=True, padding_value=fill, padding_side="left")
    return torch.cat([left, pad_sequence(responses, batch_first=True, padding_value=fill)], -1)


def split(rows: Sequence[Sequence[float]]) -> tuple[list[Tensor], list[Tensor]]:
    """At the end of the prompts."""
    pairs = [(row[: len(prompt)], row[len(prompt) :]) for row, prompt in zip(rows, PROMPTS, strict=True)]
    return [torch.tensor(a) for a, _ in pairs], [torch.tensor(b) for _, b in pairs]


def build(form: str, columns: dict[Any, Any]) -> TensorDictBase:
    """A TensorDict of two sequences; a column is a dense tensor or a list of rows."""
    if form == "lazy":
        return lazy_stack([TensorDict({k: rows[i] for k, rows in columns.items()}) for i in range(2)])
    entries = {
        key: torch.nested.as_nested_tensor(list(rows), layout=torch.strided) if isinstance(rows, list) else rows
        for key, rows in columns.items()
    }
    return TensorDict(entries, batch_size=[2])


def columns_of(form: str, gen: Any = GEN, ref: Any = REF) -> dict[Any, Any]:
    """Tokens, masks, log-probs of both models and an outcome, in one form."""
    prompts, responses = ids(PROMPTS), ids(RESPONSES)
    ones = (
        [torch.ones_like(row, dtype=torch.bool) for row in prompts],
        [torch.ones_like(row, dtype=torch.bool) for row in responses],
    )
    prompt = pad_sequence(prompts, batch_first=True, padding_side="left") if form == "padded" else prompts
    return {
        ("tokens", "full"): full(prompts, responses, form),
        ("tokens", "prompt"): prompt,
        ("masks", "all_attention_mask"): full(*ones, form, fill=False),
        ("log_probs", "full"): full(*split(gen), form, fill=0.0),
        ("next", "ref_log_probs", "full"): full(*split(ref), form, fill=0.0),
        ("next", "reward"): torch.tensor([[1.0], [-1.0]]),
    }


def masks(form: str, rows: list[list[int]]) -> Any:
    prompts, responses = split(rows)
    return full([p.bool() for p in prompts], [r.bool() for r in responses], form, fill=False)


# ------------------------------------------------------------------ before and after


def everything(td: TensorDictBase) -> dict[Any, Any]:
    """All keys and copies of all leaves, also of "next" and of each element of a lazy stack."""
    if hasattr(td, "tensordicts"):
        return {i: everything(sub) for i, sub in enumerate(td.tensordicts)}
    found = {}
    for key in td.keys(True):
        value = td.get(key)
        if isinstance(value, Tensor):
            found[key] = [row.clone() for row in value.unbind()] if value.is_nested else value.clone()
        else:
            found[key] = type(value).__name__
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool(a.isclose(b, 0, 0, True).all())
        )
    return a == b


@contextmanager
def refuses(error: type[Exception], data: TensorDictBase, *mentions: str) -> Iterator[None]:
    """``error`` is raised, its text holds all ``mentions``, and ``data`` stays as it is."""
    before, batch = everything(data), data.batch_size
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert isinstance(caught.value, (ValueError, KeyError, TypeError))
    missing = [mention for mention in mentions if mention not in text]
    assert not missing, f"expected {missing} in {text!r}"
    assert data.batch_size == batch
    assert same(before, everything(data)), "the data was changed"


class Models:
    """Each transform on the two models."""

    def __init__(self, tokenizer: Any, gen: Any, ref: Any) -> None:
        self.tokenizer, self.gen, self.ref = tokenizer, gen, ref

    def wrapper(self, model: Any, key: str, **kwargs: Any) -> Any:
        return make_scoring_wrapper(model, self.tokenizer, **{"pad_output": True, "log_probs_key": key, **kwargs})

    def make(self, name: str, *, gen: Any = None, ref: Any = None, **kwargs: Any) -> Transform:
        gen, ref = gen or self.gen, ref or self.ref
        if name == "RetrieveLogProb":
            return RetrieveLogProb(ref, **kwargs)
        if name == "RetrieveKL":
            return RetrieveKL(gen, ref, **kwargs)
        return {"KLRewardTransform": lambda: KLRewardTransform(ref, **kwargs), "KLComputation": KLComputation}[name]()


@pytest.fixture(scope="module")
def models(tokenizer: Any, policy_model: Any, ref_model: Any) -> Models:
    return Models(tokenizer, policy_model, ref_model)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_the_data_of_these_tests_is_good(models: Models, name: str, form: str) -> None:
    """Without this every test below could pass for another reason."""
    data = models.make(name)(build(form, columns_of(form)))
    key = ("next", "log_probs", "full") if name == "RetrieveLogProb" else ("next", "kl_penalty")
    assert data.get(key, as_list=True) is not None


# ------------------------------------------------------------------ missing and wrong keys


@pytest.mark.parametrize("name", SCORING)
def test_no_tokens(models: Models, name: str, form: str) -> None:
    columns = {k: v for k, v in columns_of(form).items() if k[0] != "tokens"}
    data = build(form, columns)
    with refuses(
        KeyError, data, "('tokens', 'full')", "found", "masks.all_attention_mask", "Run the policy first", "input_key"
    ):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_tokens_under_another_key(models: Models, name: str, form: str) -> None:
    gen, ref = (
        models.wrapper(model, key, input_key=("ids", "full"))
        for model, key in ((models.gen, "log_probs"), (models.ref, "ref_log_probs"))
    )
    data = build(form, columns_of(form))
    with refuses(KeyError, data, "('ids', 'full')", "found", "tokens.full", "input_key"):
        models.make(name, gen=gen, ref=ref)(data)


@pytest.mark.parametrize("missing", [("log_probs", "full"), ("next", "ref_log_probs", "full")])
def test_no_log_probs_to_compare(missing: Any, form: str) -> None:
    columns = columns_of(form)
    del columns[missing]
    data = build(form, columns)
    expected = "Log-probs not found. Expected keys: ('log_probs', 'full'), ('ref_log_probs', 'full')"
    found = f"Missing: {missing[-2:]}", "Found: ", "tokens.full", "in 'next': ", "reward"
    with refuses(ValueError, data, expected, *found, "Put RetrieveLogProb before"):
        KLComputation()(data)


@pytest.mark.parametrize("argument", ["gen_log_probs_full_key", "ref_log_probs_full_key"])
def test_log_probs_to_compare_under_another_key(argument: str, form: str) -> None:
    data = build(form, columns_of(form))
    with refuses(
        ValueError, data, "Missing: ('mine', 'full')", "Found: log_probs.full", "give the keys that hold them"
    ):
        KLComputation(**{argument: ("mine", "full")})(data)


@pytest.mark.parametrize("key", [("mine", "full"), "mine"])
def test_no_log_probs_of_the_policy(models: Models, key: Any, form: str) -> None:
    data = build(form, columns_of(form))
    with refuses(KeyError, data, repr(key), "found", "tokens.full", "return_log_probs=True", "RetrieveKL"):
        models.make("KLRewardTransform", log_prob_key=key)(data)


def test_no_old_log_probs(form: str) -> None:
    data = build(form, columns_of(form))
    with refuses(ValueError, data, "Missing: ('old', 'full')", "Found: log_probs.full", "give the keys"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


@pytest.mark.parametrize("name", SCORING)
def test_numbers_that_are_no_token_ids(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    tokens = columns["tokens", "full"]
    columns["tokens", "full"] = tokens.float() if form == "padded" else [row.float() for row in tokens]
    data = build(form, columns)
    with refuses(TypeError, data, "integer token ids", "('tokens', 'full')", "torch.float32"):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_a_tensor_where_a_tensordict_belongs(models: Models, name: str) -> None:
    data = TensorDict(tokens=torch.tensor([[1, 2, 3]]), reward=torch.ones(1, 1), batch_size=[1])
    with refuses(TypeError, data, "'tokens'", "('tokens', 'full')", "Tensor"):
        models.make(name)(data)


# ------------------------------------------------------------------ lengths


def longer(rows: list[list[float]], row: int) -> list[list[float]]:
    return [[*r, -9.0] if i == row else r for i, r in enumerate(rows)]


@pytest.mark.parametrize("side", ["gen", "ref"])
def test_lengths_differ_between_the_models(side: str, form: str) -> None:
    columns = columns_of(form, **{side: longer(GEN if side == "gen" else REF, 1)})
    data = build(form, columns)
    a, b = ((7, 6) if side == "gen" else (6, 7)) if form != "padded" else ((8, 7) if side == "gen" else (7, 8))
    row = 0 if form == "padded" else 1
    shapes = f"Sample {row} has different shapes", f"shape=torch.Size([{a}])", f"shape=torch.Size([{b}])"
    with refuses(ValueError, data, *shapes, f"From position {min(a, b)} on", "score the same tokens"):
        KLComputation()(data)


def test_lengths_differ_between_padded_and_nested() -> None:
    """The mask of the padded entry says that sequence 1 has 6 tokens; the nested one has 5."""
    columns = columns_of("padded")
    columns["next", "ref_log_probs", "full"] = [torch.zeros(5), torch.zeros(5)]
    data = build("padded", columns)
    with refuses(ValueError, data, "Sample 1", "torch.Size([6])", "torch.Size([5])", "From position 5 on"):
        KLComputation()(data)


@pytest.mark.parametrize("longer_by", [1, -1])
def test_old_log_probs_of_another_length(longer_by: int, form: str) -> None:
    columns = columns_of(form)
    gen = columns["log_probs", "full"]
    if form == "padded":
        old = torch.zeros(2, gen.shape[1] + longer_by)
        found, expected = old.shape[1], gen.shape[1]
    else:
        old = [torch.zeros(5), torch.zeros(6 + longer_by)]
        found, expected = 6 + longer_by, 6
    data = build(form, {**columns, ("old", "full"): old})
    with refuses(ValueError, data, "('old', 'full')", str(found), str(expected), "same tokens"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


def test_old_log_probs_that_only_add_up(form: str) -> None:
    """Rows of 6 and 5 where 5 and 6 belong: the same total, each number at the wrong token."""
    if form == "padded":
        pytest.skip("padded rows have one length")
    data = build(form, {**columns_of(form), ("old", "full"): [torch.zeros(6), torch.zeros(5)]})
    with refuses(ValueError, data, "('old', 'full')", "Sample 0", "6", "5"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


def test_log_probs_of_the_policy_of_another_length(models: Models, form: str) -> None:
    data = build(form, columns_of(form, gen=longer(GEN, 1)))
    sizes = ("[8]", "[7]") if form == "padded" else ("[7]", "[6]")
    with refuses(ValueError, data, "Sample", *(f"torch.Size({s})" for s in sizes), "score the same tokens"):
        models.make("KLRewardTransform")(data)


def test_more_sampled_log_probs_than_tokens(models: Models, form: str) -> None:
    columns = columns_of(form)
    del columns["log_probs", "full"]
    response = torch.full((2, 9), -1.0) if form == "padded" else [torch.full((2,), -1.0), torch.full((9,), -1.0)]
    data = build(form, {**columns, ("log_probs", "response"): response})
    row, tokens = (0, 7) if form == "padded" else (1, 6)
    with refuses(
        ValueError, data, f"sequence {row} has 9 log-probs", "('log_probs', 'response')", f"but {tokens} tokens"
    ):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("name", SCORING)
def test_attention_mask_of_another_length(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    wrong = torch.ones(2, 4) if form == "padded" else [torch.ones(5), torch.ones(4)]
    wrong = wrong.bool() if form == "padded" else [row.bool() for row in wrong]
    columns["masks", "all_attention_mask"] = wrong
    data = build(form, columns)
    row, width = (0, 7) if form == "padded" else (1, 6)
    with refuses(ValueError, data, "('masks', 'all_attention_mask')", f"sequence {row}", "4", str(width)):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_assistant_mask_of_another_length(models: Models, name: str, form: str) -> None:
    wrong = torch.ones(2, 4).bool() if form == "padded" else [torch.ones(5).bool(), torch.ones(4).bool()]
    data = build(form, {**columns_of(form), ("masks", "all_assistant_mask"): wrong})
    found, expected = ("[4, 4]", "[7, 7]") if form == "padded" else ("[5, 4]", "[5, 6]")
    with refuses(ValueError, data, "('masks', 'all_assistant_mask')", found, expected):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_prompt_longer_than_the_whole(models: Models, name: str, form: str) -> None:
    prompt = torch.ones(2, 9, dtype=torch.long) if form == "padded" else ids([[7, 8, 9], [1] * 9])
    data = build(form, {**columns_of(form), ("tokens", "prompt"): prompt})
    row, whole = (0, 7) if form == "padded" else (1, 6)
    with refuses(ValueError, data, f"sequence {row}", "has 9 tokens", str(whole), "pass both from the same step"):
        models.make(name)(data)


@pytest.mark.parametrize("name", SCORING)
def test_prompt_of_another_sequence(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    prompt = torch.tensor([[7, 8, 9], [0, 10, 99]]) if form == "padded" else ids([[7, 8, 9], [10, 99]])
    data = build(form, {**columns, ("tokens", "prompt"): prompt})
    where = f"sequence 1, position {2 if form == 'padded' else 1}"
    with refuses(ValueError, data, where, "does not start with ('tokens', 'prompt')", "pad token"):
        models.make(name)(data)


@pytest.mark.parametrize("name", [*SCORING[1:], "KLComputation"])
def test_reward_of_another_length(models: Models, name: str, form: str) -> None:
    if form == "padded":
        reward, found, expected = torch.ones(2, 5, 1), "(2, 5, 1)", "[7, 7]"
    else:
        reward, found, expected = [torch.ones(5, 1), torch.ones(4, 1)], "[5, 4]", "[5, 6]"
    data = build(form, {**columns_of(form), ("next", "reward"): reward})
    with refuses(ValueError, data, f"The rewards have shape {found}", expected, "[*B, T, 1]"):
        models.make(name)(data)


@pytest.mark.parametrize("form", ["nested", "lazy"])
def test_an_outcome_without_a_token_to_carry_it(form: str) -> None:
    rows = [torch.tensor([-1.0]), torch.zeros(0)]
    columns = {("log_probs", "full"): rows, ("ref_log_probs", "full"): rows}
    data = build(form, {**columns, "reward": torch.tensor([1.0, -2.5])})
    with refuses(ValueError, data, "sequence 1 has no token to carry its reward of -2.5", "drop empty sequences"):
        KLComputation()(data)
    out = KLComputation()(build(form, {**columns, "reward": torch.tensor([1.0, 0.0])}))
    assert [row.reshape(-1).tolist() for row in out.get("reward", as_list=True)] == [[1.0], []]


# ------------------------------------------------------------------ different tokens


CHATS = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]] * 2
SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")


def histories() -> TensorDictBase:
    return TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=[2])


@pytest.mark.parametrize("pad_output", [True, False])
def test_two_templates(models: Models, pad_output: bool) -> None:
    options = {"input_mode": "history", "pad_output": pad_output}
    gen = models.wrapper(models.gen, "gen_log_probs", chat_template=CHATML, **options)
    ref = models.wrapper(models.ref, "ref_log_probs", chat_template=SHOUTING, **options)
    data = histories()
    small, capital = (models.tokenizer.convert_tokens_to_ids(c) for c in "hH")
    # "<|im_start|>", "u", "s", "e", "r", "\n", then "hi" or "HI"
    found = "sequence 0, position 6", f"[{small}, ", f"[{capital}, "
    with refuses(ValueError, data, "different tokens", *found, "same tokenizer and chat template"):
        RetrieveKL(gen, ref)(data)


def test_two_tokenizers(models: Models) -> None:
    other = build_tokenizer(pad_token="<|pad|>", merges=[("h", "i")])
    gen = models.wrapper(models.gen, "gen_log_probs", input_mode="history")
    model = make_model(other, seed=1)
    ref = make_scoring_wrapper(model, other, pad_output=True, input_mode="history", log_probs_key="ref_log_probs")
    data = histories()
    # "<|im_start|>" has another id where a merge comes before it
    with refuses(ValueError, data, "sequence 0, position 0", "258", "259", "same tokenizer"):
        RetrieveKL(gen, ref)(data)


# ------------------------------------------------------------------ NaN and infinite log-probs


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["gen", "ref"])
def test_log_probs_to_compare_that_are_not_finite(side: str, bad: float, form: str) -> None:
    rows = [list(row) for row in (GEN if side == "gen" else REF)]
    rows[1][4] = bad
    data = build(form, columns_of(form, **{side: rows}))
    who = "the policy under ('log_probs', 'full')" if side == "gen" else "the reference under ('ref_log_probs', 'full')"
    with refuses(ValueError, data, who, f"is {bad} at sequence 1, position 4", "check the model's weights"):
        KLComputation()(data)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_an_infinite_log_prob_is_no_marker(bad: float, form: str) -> None:
    """A sequence may begin with NaN ("not scored"), not with infinity."""
    data = build(form, columns_of(form, gen=[GEN[0], [bad, *GEN[1][1:]]]))
    with refuses(ValueError, data, "the policy", f"is {bad} at sequence 1, position 0"):
        KLComputation()(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_log_probs_of_the_policy_that_are_not_finite(models: Models, bad: float, form: str) -> None:
    rows = [list(row) for row in GEN]
    rows[1][2] = bad
    data = build(form, columns_of(form, gen=rows))
    where = f"is {bad} at sequence 1, position 2"
    with refuses(ValueError, data, "the policy under ('log_probs', 'full')", where, "check the model's weights"):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 2])
def test_sampled_log_probs_that_are_not_finite(models: Models, bad: float, at: int, form: str) -> None:
    columns = columns_of(form)
    del columns["log_probs", "full"]
    responses = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0, -3.0, -4.0])]
    responses[1][at] = bad
    response = pad_sequence(responses, batch_first=True) if form == "padded" else responses
    data = build(form, {**columns, ("log_probs", "response"): response})
    where = f"is {bad} at sequence 1, position {2 + at}"
    with refuses(ValueError, data, "the policy under ('log_probs', 'response')", where, "check the model's weights"):
        models.make("KLRewardTransform")(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_old_log_probs_that_are_not_finite(bad: float, form: str) -> None:
    rows = [list(row) for row in GEN]
    rows[1][3] = bad
    old = full(*split(rows), form, fill=0.0)
    data = build(form, {**columns_of(form), ("old", "full"): old})
    with refuses(ValueError, data, "('old', 'full')", f"is {bad} at sequence 1, position 3"):
        KLComputation(estimator="corrected_k3", old_log_probs_key=("old", "full"))(data)


@pytest.mark.parametrize("name", SCORING)
def test_models_that_give_no_finite_log_prob(models: Models, name: str, form: str) -> None:
    broken = make_model(models.tokenizer, seed=2, tie_word_embeddings=False)
    forbidden = RESPONSES[1][2]
    bias = torch.zeros(len(models.tokenizer))
    bias[forbidden] = -torch.inf

    class Forbids(torch.nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
            out = broken(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
            return (out.logits + bias,)

    data = build(form, columns_of(form))
    where = f"token {forbidden} at sequence 1, position 4 the log-prob -inf"
    with pytest.warns(UserWarning, match="full forward"):
        transform = models.make(name, ref=Forbids())
    with refuses(ValueError, data, where, "Mask the token away"):
        transform(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["KLRewardTransform", "KLComputation"])
def test_defect_37_padding_may_hold_anything(models: Models, name: str, bad: float) -> None:
    columns = columns_of("padded")
    for key in (("log_probs", "full"), ("next", "ref_log_probs", "full")):
        columns[key][0, 5:] = bad
        columns[key][1, 0] = bad
    found = models.make(name)(build("padded", columns))["next"]
    assert found["reward"].isfinite().all()
    kl = found["kl_penalty"].reshape(2, 7)
    assert (kl[0, 5:] == 0).all()
    assert kl[1, 0] == 0


# ------------------------------------------------------------------ masks that count nothing


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.parametrize("with_prompt", [True, False])
def test_a_mask_without_assistant_tokens(models: Models, name: str, with_prompt: bool, form: str) -> None:
    columns = columns_of(form)
    if not with_prompt:
        del columns["tokens", "prompt"]
    columns["masks", "all_assistant_mask"] = masks(form, [[0, 0, 0, 1, 1], [0] * 6])
    data = build(form, columns)
    wrappers = {
        side: models.wrapper(getattr(models, side), f"{side}_log_probs", chat_template=CHATML)
        for side in ("gen", "ref")
    }
    template = repr(CHATML[:60])
    found = "sequence 1", "('masks', 'all_assistant_mask')", template
    with refuses(ValueError, data, *found, "False everywhere", "Remove the mask", "assistant_only=False"):
        models.make(name, **wrappers)(data)


@pytest.mark.parametrize("name", SCORING)
def test_nothing_says_what_the_assistant_wrote(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    del columns["tokens", "prompt"]
    data = build(form, columns)
    places = "('tokens', 'prompt')", "('masks', 'all_assistant_mask')"
    with refuses(ValueError, data, "cannot tell", *places, "Add one of them", "assistant_only=False"):
        models.make(name)(data)


# ------------------------------------------------------------------ empty batches


EMPTY: dict[str, Callable[[], TensorDictBase]] = {
    "(0,)": lambda: build("padded", columns_of("padded"))[:0],
    "(0,) ": lambda: build("lazy", columns_of("lazy"))[:0],
    "(0, 2)": lambda: lazy_stack([build("lazy", columns_of("lazy"))])[:0],
    "(1, 0)": lambda: lazy_stack([build("padded", columns_of("padded"))])[:, :0],
}


@pytest.mark.parametrize("size", list(EMPTY))
@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_an_empty_batch(models: Models, name: str, size: str) -> None:
    data = EMPTY[size]()
    with refuses(ValueError, data, f"the batch is empty: a TensorDict of batch size {size.strip()} holds", "drop it"):
        models.make(name)(data)


# ------------------------------------------------------------------ too long


@pytest.mark.parametrize("name", SCORING)
def test_longer_than_the_models_positions(models: Models, name: str, form: str) -> None:
    short = make_model(models.tokenizer, seed=1)
    short.config.max_position_embeddings = 5
    data = build(form, columns_of(form))
    with refuses(ValueError, data, "sequence 1 has 6 tokens", "allows 5 positions", "truncate", "longer context"):
        models.make(name, ref=short)(data)


@pytest.mark.parametrize("name", SCORING)
def test_a_token_outside_the_vocabulary(models: Models, name: str, form: str) -> None:
    columns = columns_of(form)
    columns["tokens", "full"][1][4] = 9999
    data = build(form, columns)
    position = 3 if form == "padded" else 4  # sequence 1 has one token of padding before its prompt
    with refuses(ValueError, data, f"token id 9999 at sequence 1, position {position}", "tokenizer of this model"):
        models.make(name)(data)


# ------------------------------------------------------------------ models that do not fit


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (RetrieveLogProb, "The model must have `generate=False`"),
        (KLRewardTransform, "configured to generate text"),
        (lambda model: RetrieveKL(model, torch.nn.Identity()), "The generation model must have `generate=False`"),
        (lambda model: RetrieveKL("from_collector", model), "The reference model must have `generate=False`"),
    ],
    ids=["RetrieveLogProb", "KLRewardTransform", "RetrieveKL gen", "RetrieveKL ref"],
)
def test_models_that_generate(models: Models, padded: bool, make: Callable[..., Any], what: str) -> None:
    policy = make_policy(models.gen, models.tokenizer, pad_output=padded)
    with pytest.raises(ValueError, match=what):
        make(policy)


def test_pad_output_mismatch(models: Models, padded: bool) -> None:
    gen = models.wrapper(models.gen, "gen_log_probs", pad_output=padded)
    ref = models.wrapper(models.ref, "ref_log_probs", pad_output=not padded)
    found = f"pad_output mismatch: gen_model.pad_output={padded}, ref_model.pad_output={not padded}. Both models must"
    with pytest.raises(ValueError, match=found):
        RetrieveKL(gen, ref)


# ------------------------------------------------------------------ no template, no tokenizer


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_a_tokenizer_without_a_template(models: Models, name: str, padded: bool) -> None:
    tokenizer = build_tokenizer(None, pad_token="<|pad|>")
    gen, ref = (
        make_scoring_wrapper(model, tokenizer, pad_output=padded, input_mode="history", log_probs_key=key)
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    data = histories()
    with refuses(ValueError, data, "toy", "chat template", "chat_template"):
        models.make(name, gen=gen, ref=ref)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_no_tokenizer(models: Models, name: str, padded: bool) -> None:
    gen, ref = (
        models.wrapper(model, key, pad_output=padded, input_mode="history")
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    gen.tokenizer = ref.tokenizer = None
    data = histories()
    with refuses(ValueError, data, "tokenizer=None", "Pass `tokenizer=`"):
        models.make(name, gen=gen, ref=ref)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_a_history_that_is_none(models: Models, name: str, padded: bool) -> None:
    gen, ref = (
        models.wrapper(model, key, pad_output=padded, input_mode="history")
        for model, key in ((models.gen, "gen_log_probs"), (models.ref, "ref_log_probs"))
    )
    data = TensorDict(history=TensorDict(full=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
    with refuses(TypeError, data, "expected a torchrl History", "('history', 'full')", "Tensor"):
        models.make(name, gen=gen, ref=ref)(data)
