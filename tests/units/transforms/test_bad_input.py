"""Input that cannot be used: the error names what was found and the change to make, and the data is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from layouts import joined, lay_out
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import make_model, make_policy, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

FORMS = ["padded", "nested", "lazy"]
SCORING = ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"]
PROMPTS, RESPONSES = [[7, 8, 9], [10, 11]], [[20, 21], [30, 31, 32, 33]]
GEN = [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0, -0.5, -1.5, -2.5]]
REF = [[0.0, 0.0, 0.0, -2.0, -1.0], [0.0, 0.0, -1.0, -0.75, -1.25, -4.5]]
FULL, PROMPT = ("tokens", "full"), ("tokens", "prompt")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
GEN_KEY, REF_KEY, REWARD = ("log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "reward")
SAMPLED, OLD = ("log_probs", "response"), ("old", "full")
CORRECTED = {"estimator": "corrected_k3", "old_log_probs_key": OLD}


def columns_of() -> dict[Any, Any]:
    """Tokens, masks, log-probs of both models and an outcome: rows of two sequences."""
    return {
        FULL: [torch.tensor(row) for row in joined(PROMPTS, RESPONSES)],
        PROMPT: [torch.tensor(row) for row in PROMPTS],
        ATTENTION: [torch.ones(n, dtype=torch.bool) for n in (5, 6)],
        GEN_KEY: [torch.tensor(row) for row in GEN],
        REF_KEY: [torch.tensor(row) for row in REF],
        REWARD: torch.tensor([[1.0], [-1.0]]),
    }


def build(form: str, columns: dict[Any, Any]) -> TensorDictBase:
    return lay_out(form, columns, PROMPTS, RESPONSES)


def histories() -> TensorDictBase:
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]] * 2
    return TensorDict(history=ChatHistory(full=History.from_chats(chats)), batch_size=[2])


def everything(td: TensorDictBase) -> dict[Any, Any]:
    """All keys, and copies of all leaves, also of "next" and of each element of a lazy stack."""
    if hasattr(td, "tensordicts"):
        return {i: everything(sub) for i, sub in enumerate(td.tensordicts)}
    rows = {key: td.get(key) for key in td.keys(True)}
    return {
        key: [row.clone() for row in (value.unbind() if value.is_nested else [value])]
        if isinstance(value, Tensor)
        else type(value).__name__
        for key, value in rows.items()
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.isclose(b, 0, 0, True).all())
    return a == b


@contextmanager
def assert_refused(error: type[Exception], data: TensorDictBase, *mentions: str) -> Iterator[None]:
    """``error`` is raised, its text holds all ``mentions``, and ``data`` stays as it is."""
    before, batch = everything(data), data.batch_size
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    missing = [mention for mention in mentions if mention not in text]
    assert not missing, f"expected {missing} in {text!r}"
    assert data.batch_size == batch
    assert same(before, everything(data)), "the data was changed"


class Models:
    """Each transform on the two models."""

    def __init__(self, tokenizer: Any, gen: Any, ref: Any) -> None:
        self.tokenizer, self.gen, self.ref = tokenizer, gen, ref

    def wrappers(self, tokenizer: Any = None, **kwargs: Any) -> dict[str, Any]:
        options = {"pad_output": True, **kwargs}
        return {
            side: make_scoring_wrapper(model, tokenizer or self.tokenizer, log_probs_key=f"{side}_log_probs", **options)
            for side, model in (("gen", self.gen), ("ref", self.ref))
        }

    def make(self, name: str, *, gen: Any = None, ref: Any = None, **kwargs: Any) -> Any:
        gen, ref = gen or self.gen, ref or self.ref
        if name == "RetrieveLogProb":
            return RetrieveLogProb(ref, **kwargs)
        if name == "RetrieveKL":
            return RetrieveKL(gen, ref, **kwargs)
        return KLRewardTransform(ref, **kwargs) if name == "KLRewardTransform" else KLComputation(**kwargs)


@pytest.fixture(scope="module")
def models(tokenizer: Any, policy_model: Any, ref_model: Any) -> Models:
    return Models(tokenizer, policy_model, ref_model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_the_data_of_these_tests_is_good(models: Models, name: str, form: str) -> None:
    """Without this the tests of bad input could pass for another reason."""
    data = models.make(name)(build(form, columns_of()))
    key = ("next", "log_probs", "full") if name == "RetrieveLogProb" else ("next", "kl_penalty")
    assert data.get(key, as_list=True) is not None


# ------------------------------------------------------------------ one entry is bad


class Refusal(NamedTuple):
    """A change of the columns; what is said of it, in parts; and the transforms and layouts that say it."""

    change: Callable[[dict[Any, Any]], Any]
    text: str
    names: str = "KLComputation"
    forms: str = "nested"
    error: type[Exception] = ValueError
    settings: dict[str, Any] = {}  # noqa: RUF012


def without(*keys: Any) -> Callable[[dict[Any, Any]], Any]:
    return lambda columns: [columns.pop(key) for key in keys]


def put(key: Any, rows: Any) -> Callable[[dict[Any, Any]], Any]:
    return lambda columns: columns.update({key: rows})


def sampled(*rows: list[float]) -> Callable[[dict[Any, Any]], Any]:
    """Log-probs of the response alone, as a policy stores them."""
    return lambda columns: columns.update({GEN_KEY: None, SAMPLED: [torch.tensor(row) for row in rows]})


def number(key: Any, at: int, value: float, source: Any = None) -> Callable[[dict[Any, Any]], Any]:
    """A value of the second row of an entry, of one that is a copy of ``source``."""

    def change(columns: dict[Any, Any]) -> None:
        rows = columns[key] = [row.clone() for row in columns[source or key]]
        rows[1][at] = value

    return change


def longer(key: Any) -> Callable[[dict[Any, Any]], Any]:
    return lambda columns: columns[key].__setitem__(1, torch.cat([columns[key][1], torch.tensor([-9.0])]))


def flags(*lengths: int) -> list[Tensor]:
    return [torch.ones(n, dtype=torch.bool) for n in lengths]


NOTHING = without()
WEIGHTS = "check the model's weights"
REWARD_KL = "KLRewardTransform"
REFUSED: dict[str, Refusal] = {
    # keys
    "no tokens": Refusal(
        without(FULL, PROMPT),
        "('tokens', 'full') … found … masks.all_attention_mask … Run the policy first … input_key",
        " ".join(SCORING),
        error=KeyError,
    ),
    "no log-probs of the policy": Refusal(
        without(GEN_KEY),
        "Log-probs not found. Expected keys: ('log_probs', 'full'), ('ref_log_probs', 'full') … Found:  … tokens.full"
        " … Missing: ('log_probs', 'full') … in 'next':  … reward … Put RetrieveLogProb before",
        forms="padded lazy",
    ),
    "no log-probs of the reference": Refusal(
        without(REF_KEY), "Missing: ('ref_log_probs', 'full') … Found:  … tokens.full … in 'next': "
    ),
    "the policy's under another key": Refusal(
        NOTHING,
        "Missing: ('mine', 'full') … Found: log_probs.full … give the keys that hold them",
        settings={"gen_log_probs_full_key": ("mine", "full")},
    ),
    "the reference's under another key": Refusal(
        NOTHING,
        "Missing: ('mine', 'full') … Found: log_probs.full",
        settings={"ref_log_probs_full_key": ("mine", "full")},
    ),
    "another key of two": Refusal(
        NOTHING,
        "('mine', 'full') … found … tokens.full … return_log_probs=True … RetrieveKL",
        REWARD_KL,
        error=KeyError,
        settings={"log_prob_key": ("mine", "full")},
    ),
    "another key": Refusal(
        NOTHING, "'mine' … found … tokens.full", REWARD_KL, "lazy", KeyError, {"log_prob_key": "mine"}
    ),
    "no old log-probs": Refusal(
        NOTHING, "Missing: ('old', 'full') … Found: log_probs.full … give the keys", settings=CORRECTED
    ),
    # tokens
    "numbers that are no ids": Refusal(
        lambda columns: columns.update({FULL: [row.float() for row in columns[FULL]]}),
        "integer token ids … ('tokens', 'full') … torch.float32",
        "RetrieveLogProb",
        "padded nested lazy",
        TypeError,
    ),
    "an id outside the vocabulary": Refusal(
        number(FULL, 4, 9999),
        "token id 9999 at sequence 1, position 4 … tokenizer of this model",
        "RetrieveKL",
        "padded nested lazy",
    ),
    "a prompt that is too long": Refusal(
        put(PROMPT, [torch.tensor([7, 8, 9]), torch.ones(9, dtype=torch.long)]),
        "sequence 1 … has 9 tokens … 6 … pass both from the same step",
        "RetrieveLogProb",
        "lazy",
    ),
    "a prompt of another sequence": Refusal(
        put(PROMPT, [torch.tensor([7, 8, 9]), torch.tensor([10, 99])]),
        "sequence 1, position 1 … does not start with ('tokens', 'prompt') … pad token",
        REWARD_KL,
    ),
    # lengths
    "a longer row of the policy": Refusal(
        longer(GEN_KEY),
        "Sample 1 has different shapes … shape=torch.Size([7]) … shape=torch.Size([6]) … From position 6 on"
        " … score the same tokens",
        forms="nested lazy",
    ),
    "a longer row of the reference": Refusal(
        longer(REF_KEY), "shape=torch.Size([6]) … shape=torch.Size([7]) … From position 6 on"
    ),
    "wider padding of the reference": Refusal(
        put(REF_KEY, torch.zeros(2, 8)),
        "Sample 0 has different shapes … shape=torch.Size([7]) … shape=torch.Size([8]) … From position 7 on",
        forms="padded",
    ),
    "a nested row that is shorter than a padded one": Refusal(
        put(REF_KEY, torch.nested.as_nested_tensor([torch.zeros(5), torch.zeros(5)])),
        "Sample 1 … torch.Size([6]) … torch.Size([5]) … From position 5 on",
        forms="padded",
    ),
    "old log-probs that are too long": Refusal(
        put(OLD, [torch.zeros(5), torch.zeros(7)]), "('old', 'full') … 7 … 6 … same tokens", settings=CORRECTED
    ),
    "old log-probs that are too narrow": Refusal(
        put(OLD, torch.zeros(2, 6)), "('old', 'full') … 6 … 7 … same tokens", forms="padded", settings=CORRECTED
    ),
    # The same total, each number at the wrong token.
    "old log-probs that only add up": Refusal(
        put(OLD, [torch.zeros(6), torch.zeros(5)]),
        "('old', 'full') … Sample 0 … 6 … 5",
        forms="nested lazy",
        settings=CORRECTED,
    ),
    "log-probs of the policy of another length": Refusal(
        longer(GEN_KEY), "Sample … torch.Size([7]) … torch.Size([6]) … score the same tokens", REWARD_KL
    ),
    "more sampled log-probs than tokens": Refusal(
        sampled([-1.0] * 2, [-1.0] * 9),
        "sequence 1 has 9 log-probs … ('log_probs', 'response') … but 6 tokens",
        REWARD_KL,
        "lazy",
    ),
    "an attention mask of another length": Refusal(
        put(ATTENTION, flags(5, 4)),
        "('masks', 'all_attention_mask') … sequence 1 … 4 … 6",
        "RetrieveLogProb",
        "nested lazy",
    ),
    "an assistant mask of another length": Refusal(
        put(ASSISTANT, flags(5, 4)), "('masks', 'all_assistant_mask') … [5, 4] … [5, 6]", "RetrieveKL", "nested lazy"
    ),
    "token rewards of another length": Refusal(
        put(REWARD, [torch.ones(5, 1), torch.ones(4, 1)]),
        "The rewards have shape [5, 4] … [5, 6] … [*B, T, 1]",
        "RetrieveKL KLRewardTransform KLComputation",
        "lazy",
    ),
    "token rewards of another width": Refusal(
        put(REWARD, torch.ones(2, 5, 1)),
        "The rewards have shape (2, 5, 1) … [7, 7] … [*B, T, 1]",
        forms="padded",
    ),
    "no mask and no prompt": Refusal(
        without(PROMPT),
        "cannot tell … ('tokens', 'prompt') … ('masks', 'all_assistant_mask') … Add one of them … assistant_only=False",
        "RetrieveKL",
        "lazy",
    ),
    # numbers
    "sampled log-probs that are not finite": Refusal(
        sampled([-1.0, -2.0], [-1.0, -2.0, torch.nan, -4.0]),
        f"the policy under ('log_probs', 'response') … is nan at sequence 1, position 4 … {WEIGHTS}",
        REWARD_KL,
        "padded lazy",
    ),
    "a first sampled log-prob that is not finite": Refusal(
        sampled([-1.0, -2.0], [torch.nan, -2.0, -3.0, -4.0]),
        "('log_probs', 'response') … is nan at sequence 1, position 2",
        REWARD_KL,
    ),
    # A sequence may begin with NaN ("not scored"), not with infinity.
    "an infinite first log-prob": Refusal(
        number(GEN_KEY, 0, -torch.inf), "the policy … is -inf at sequence 1, position 0"
    ),
    "old log-probs that are not finite": Refusal(
        number(OLD, 3, torch.nan, GEN_KEY),
        "('old', 'full') … is nan at sequence 1, position 3",
        forms="nested lazy",
        settings=CORRECTED,
    ),
}
for _bad in (torch.nan, torch.inf, -torch.inf):
    _at, _policy = f"is {_bad} at sequence 1, position", "the policy under ('log_probs', 'full')"
    REFUSED |= {
        f"the policy's log-probs hold {_bad}": Refusal(
            number(GEN_KEY, 4, _bad), f"{_policy} … {_at} 4 … {WEIGHTS}", forms="padded nested lazy"
        ),
        f"the reference's log-probs hold {_bad}": Refusal(
            number(REF_KEY, 4, _bad), f"the reference under ('ref_log_probs', 'full') … {_at} 4"
        ),
        f"the rewarded policy's log-probs hold {_bad}": Refusal(
            number(GEN_KEY, 2, _bad), f"{_policy} … {_at} 2 … {WEIGHTS}", REWARD_KL, "padded"
        ),
    }


@pytest.mark.parametrize(
    ("case", "name", "form"),
    [
        pytest.param(case, name, form, id=f"{title}-{name}-{form}")
        for title, case in REFUSED.items()
        for name in case.names.split()
        for form in case.forms.split()
    ],
)
def test_refused(models: Models, case: Refusal, name: str, form: str) -> None:
    columns = columns_of()
    case.change(columns)
    data = build(form, {key: rows for key, rows in columns.items() if rows is not None})
    with assert_refused(case.error, data, *case.text.split(" … ")):
        models.make(name, **case.settings)(data)


@pytest.mark.parametrize("name", SCORING)
def test_tokens_under_another_key(models: Models, name: str) -> None:
    data = build("padded", columns_of())
    with assert_refused(KeyError, data, "('ids', 'full')", "found", "tokens.full", "input_key"):
        models.make(name, **models.wrappers(input_key=("ids", "full")))(data)


def test_tensors_where_something_else_belongs(models: Models) -> None:
    data = TensorDict(tokens=torch.tensor([[1, 2, 3]]), reward=torch.ones(1, 1), batch_size=[1])
    for name in SCORING:
        with assert_refused(TypeError, data, "'tokens'", "('tokens', 'full')", "Tensor"):
            models.make(name)(data)
    data = TensorDict(history=TensorDict(full=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
    for name in SCORING[:2]:
        with assert_refused(TypeError, data, "expected a torchrl History", "('history', 'full')", "Tensor"):
            models.make(name, **models.wrappers(input_mode="history"))(data)


EMPTY: list[tuple[str, str, Callable[[], TensorDictBase]]] = [
    ("RetrieveLogProb", "(0,)", lambda: build("padded", columns_of())[:0]),
    ("RetrieveKL", "(0,)", lambda: build("lazy", columns_of())[:0]),
    ("KLRewardTransform", "(0, 2)", lambda: lazy_stack([build("lazy", columns_of())])[:0]),
    ("KLComputation", "(1, 0)", lambda: lazy_stack([build("padded", columns_of())])[:, :0]),
    ("KLComputation", "(0,)", lambda: build("padded", columns_of())[:0]),
]


@pytest.mark.parametrize(("name", "size", "make"), EMPTY)
def test_an_empty_batch(models: Models, name: str, size: str, make: Callable[[], TensorDictBase]) -> None:
    data = make()
    with assert_refused(ValueError, data, f"the batch is empty: a TensorDict of batch size {size} holds", "drop it"):
        models.make(name)(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["KLRewardTransform", "KLComputation"])
def test_defect_37_padding_may_hold_anything(models: Models, name: str, bad: float) -> None:
    data = build("padded", columns_of())
    for key in (GEN_KEY, REF_KEY):
        data[key][0, 5:] = bad
        data[key][1, 0] = bad
    found = models.make(name)(data)["next"]
    assert found["reward"].isfinite().all()
    kl = found["kl_penalty"].reshape(2, 7)
    assert (kl[0, 5:] == 0).all()
    assert kl[1, 0] == 0


@pytest.mark.parametrize(("name", "with_prompt"), [(SCORING[0], True), (SCORING[1], False), (SCORING[2], True)])
def test_a_mask_without_assistant_tokens(models: Models, name: str, with_prompt: bool) -> None:
    columns = columns_of()
    columns[ASSISTANT] = [torch.tensor([0, 0, 0, 1, 1]).bool(), torch.zeros(6).bool()]
    if not with_prompt:
        del columns[PROMPT]
    data = build("padded", columns)
    found = "sequence 1", "('masks', 'all_assistant_mask')", repr(CHATML[:60])
    with assert_refused(ValueError, data, *found, "False everywhere", "Remove the mask", "assistant_only=False"):
        models.make(name, **models.wrappers(chat_template=CHATML))(data)


# ------------------------------------------------------------------ the models do not fit


class Forbids(nn.Module):
    """A model that gives one token no probability."""

    def __init__(self, model: Any, token: int) -> None:
        super().__init__()
        self.model, self.token = model, token

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        logits = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        ).logits.clone()
        logits[..., self.token] = -torch.inf
        return (logits,)


@pytest.mark.parametrize(("name", "form"), list(zip(SCORING, FORMS, strict=True)))
def test_models_that_give_no_finite_log_prob(models: Models, name: str, form: str) -> None:
    with pytest.warns(UserWarning, match="full forward"):
        transform = models.make(name, ref=Forbids(models.ref, 32))
    data = build(form, columns_of())
    with assert_refused(ValueError, data, "log-prob is -inf at sequence 1, position 4 (token 32)", "Mask the token"):
        transform(data)


def test_longer_than_the_models_positions(models: Models) -> None:
    short = make_model(models.tokenizer, seed=1)
    short.config.max_position_embeddings = 5
    for name, form in zip(SCORING, FORMS, strict=True):
        data = build(form, columns_of())
        mentions = "sequence 1 has 6 tokens", "allows 5 positions", "truncate", "longer context"
        with assert_refused(ValueError, data, *mentions):
            models.make(name, ref=short)(data)


def test_models_that_generate(models: Models) -> None:
    policy = make_policy(models.gen, models.tokenizer, pad_output=True)
    for make, what in (
        (RetrieveLogProb, "The model must have `generate=False`"),
        (KLRewardTransform, "configured to generate text"),
        (lambda model: RetrieveKL(model, nn.Identity()), "The generation model must have `generate=False`"),
        (lambda model: RetrieveKL("from_collector", model), "The reference model must have `generate=False`"),
    ):
        with pytest.raises(ValueError, match=what):
            make(policy)


def test_pad_output_mismatch(models: Models) -> None:
    for one, other in ((True, False), (False, True)):
        gen, ref = models.wrappers(pad_output=one)["gen"], models.wrappers(pad_output=other)["ref"]
        found = f"pad_output mismatch: gen_model.pad_output={one}, ref_model.pad_output={other}. Both models must"
        with pytest.raises(ValueError, match=found):
            RetrieveKL(gen, ref)


SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")


@pytest.mark.parametrize("pad_output", [True, False])
def test_two_templates(models: Models, pad_output: bool) -> None:
    options = {"input_mode": "history", "pad_output": pad_output}
    gen = models.wrappers(chat_template=CHATML, **options)["gen"]
    ref = models.wrappers(chat_template=SHOUTING, **options)["ref"]
    data = histories()
    small, capital = (models.tokenizer.convert_tokens_to_ids(c) for c in "hH")
    # "<|im_start|>", "u", "s", "e", "r", "\n", then "hi" or "HI"
    found = "sequence 0, position 6", f"[{small}, ", f"[{capital}, "
    with assert_refused(ValueError, data, "different tokens", *found, "same tokenizer and chat template"):
        RetrieveKL(gen, ref)(data)


def test_two_tokenizers(models: Models) -> None:
    other = build_tokenizer(pad_token="<|pad|>", merges=[("h", "i")])
    options = {"pad_output": True, "input_mode": "history", "log_probs_key": "ref_log_probs"}
    ref = make_scoring_wrapper(make_model(other, seed=1), other, **options)
    data = histories()
    # "<|im_start|>" has another id where a merge comes before it
    with assert_refused(ValueError, data, "sequence 0, position 0", "258", "259", "same tokenizer"):
        RetrieveKL(models.wrappers(input_mode="history")["gen"], ref)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_no_template_and_no_tokenizer(models: Models, name: str) -> None:
    data, bare = histories(), build_tokenizer(None, pad_token="<|pad|>")
    with assert_refused(ValueError, data, "toy", "chat template", "chat_template"):
        models.make(name, **models.wrappers(bare, input_mode="history"))(data)
    without = models.wrappers(input_mode="history")
    for wrapper in without.values():
        wrapper.tokenizer = None
    with assert_refused(ValueError, data, "tokenizer=None", "Pass `tokenizer=`"):
        models.make(name, **without)(data)
