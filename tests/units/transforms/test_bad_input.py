"""Bad input: the error says what was found and what to change, and the data is unchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from layouts import joined, lay_out
from template_pairs import assistant, user
from torchrl_llm_kl import KLComputation, KLRewardTransform, PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import KLToReference
from toy_models import tiny_model
from toy_rollouts import histories, make_model, make_scoring_pair, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

SCORING = ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"]
NAN = float("nan")
PROMPTS, RESPONSES = [[7, 8, 9], [10, 11]], [[20, 21], [30, 31, 32, 33]]
GEN = [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0, -0.5, -1.5, -2.5]]
REF = [[0.0, 0.0, 0.0, -2.0, -1.0], [0.0, 0.0, -1.0, -0.75, -1.25, -4.5]]
FULL, PROMPT = ("tokens", "full"), ("tokens", "prompt")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
GEN_KEY, REF_KEY, REWARD = ("log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "reward")
SAMPLED, OLD, EXACT = ("log_probs", "response"), ("old", "full"), ("exact_kl", "full")

Columns = dict[Any, Any]


def columns_of() -> Columns:
    """Tokens, masks, log-probs of both models and an outcome, as rows of two sequences."""
    return {
        FULL: [torch.tensor(row) for row in joined(PROMPTS, RESPONSES)],
        PROMPT: [torch.tensor(row) for row in PROMPTS],
        ATTENTION: flags(5, 6),
        GEN_KEY: [torch.tensor(row) for row in GEN],
        REF_KEY: [torch.tensor(row) for row in REF],
        REWARD: torch.tensor([[1.0], [-1.0]]),
    }


def flags(*lengths: int) -> list[Tensor]:
    return [torch.ones(n, dtype=torch.bool) for n in lengths]


def build(layout: str, columns: Columns | None = None) -> TensorDictBase:
    return lay_out(layout, columns_of() if columns is None else columns, PROMPTS, RESPONSES)


def everything(td: TensorDictBase) -> Any:
    """All keys and the bytes of all leaves, also below "next" and in each element of a lazy stack."""
    if hasattr(td, "tensordicts"):
        return [everything(sub) for sub in td.tensordicts]
    content: Columns = {}
    for key in td.keys(True):
        value = td.get(key, as_list=True)  # tensordict 0.15 stacks no rows of unequal shapes
        rows = value.unbind() if isinstance(value, Tensor) and value.is_nested else value
        rows = rows if isinstance(rows, (list, tuple)) else [rows]
        content[key] = [(x.dtype, x.shape, x.numpy().tobytes()) if isinstance(x, Tensor) else type(x) for x in rows]
    return content


@contextmanager
def assert_refused(error: type[Exception], data: TensorDictBase, *parts: str) -> Iterator[None]:
    """``error`` is raised, its message contains all ``parts``, and ``data`` is unchanged."""
    before, batch = everything(data), data.batch_size
    with pytest.raises(error) as caught:
        yield
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"expected {missing} in {str(caught.value)!r}"
    assert data.batch_size == batch
    assert before == everything(data), "the data was changed"


def make(name: str, lab: Any, models: Any = None) -> Any:
    """A transform on the two models, or on wrappers of them."""
    gen, ref = models or (lab.gen_model, lab.ref_model)
    return {
        "RetrieveLogProb": lambda: RetrieveLogProb(ref),
        "RetrieveKL": lambda: RetrieveKL(gen, ref),
        "KLRewardTransform": lambda: KLRewardTransform(ref),
        "KLComputation": KLComputation,
        "legacy key": lambda: KLRewardTransform(ref, log_prob_key=("mine", "full")),
        "exact": lambda: KLComputation(estimator="exact"),
        "corrected": lambda: KLComputation(estimator="corrected_k3", old_log_probs_key=OLD),
    }[name]()


@pytest.mark.parametrize("name", [*SCORING, "KLComputation"])
def test_the_unchanged_data_is_accepted(lab: Any, name: str, layout: str) -> None:
    """A negative control: without it the refusals below could have another cause."""
    data = make(name, lab)(build(layout))
    key = ("next", "log_probs", "full") if name == "RetrieveLogProb" else ("next", "kl_penalty")
    assert data.get(key, as_list=True) is not None


# ------------------------------------------------------------------ one entry is bad
Change = Callable[[Columns], Any]


def without(*keys: Any) -> Change:
    return lambda columns: [columns.pop(key) for key in keys]


def put(key: Any, rows: Any) -> Change:
    return lambda columns: columns.update({key: rows})


def sampled(*rows: list[float]) -> Change:
    """Log-probs of the responses only, as a policy stores them."""
    return lambda columns: [columns.pop(GEN_KEY), columns.update({SAMPLED: [torch.tensor(row) for row in rows]})]


def number(key: Any, at: int, value: float, source: Any = None) -> Change:
    """Set one number in the second row of an entry, which is a copy of ``source`` if that is given."""

    def change(columns: Columns) -> None:
        rows = columns[key] = [row.clone() for row in columns[source or key]]
        rows[1][at] = value

    return change


class Case(NamedTuple):
    """A change that one transform refuses in one layout, and parts of the error's message."""

    transform: str
    layout: str
    change: Change
    message: tuple[str, ...]
    error: type[Exception] = ValueError


FLOATS = put(FULL, [torch.ones(5), torch.ones(6)])
OTHER_PROMPT = put(PROMPT, [torch.tensor([7, 8, 9]), torch.tensor([10, 99])])
LONG_PROMPT = put(PROMPT, [torch.tensor([7, 8, 9]), torch.ones(9, dtype=torch.long)])
LONG_GEN = put(GEN_KEY, [torch.zeros(5), torch.zeros(7)])
SHORT_REF = put(REF_KEY, torch.nested.as_nested_tensor([torch.zeros(5), torch.zeros(5)]))
REWARDS = put(REWARD, [torch.ones(5, 1), torch.ones(4, 1)])
SWAPPED = put(OLD, [torch.zeros(6), torch.zeros(5)])  # the right total, each number at the wrong token
NAN_INSIDE, NAN_FIRST = sampled([-1.0] * 2, [-1.0, -2.0, NAN, -4.0]), sampled([-1.0] * 2, [NAN, -2.0, -3.0, -4.0])
LEGACY = "KLRewardTransform"
#: One case for each kind of guard. A sequence may begin with NaN ("not scored"), not with infinity.
CASES = {
    "no tokens": Case(
        "RetrieveKL", "nested", without(FULL, PROMPT), ("masks.all_attention_mask", "Run the policy"), KeyError
    ),
    "no log-probs": Case(
        "KLComputation",
        "lazy",
        without(GEN_KEY),
        ("Log-probs not found", f"Missing: {GEN_KEY}", "in 'next': ref", "Put "),
    ),
    "no log-probs of the policy": Case(
        "legacy key", "nested", without(), ("are missing: expected ('mine', 'full')", "return_log_probs=True"), KeyError
    ),
    "float tokens": Case(
        "RetrieveLogProb", "padded", FLOATS, (f"integer token ids under {FULL}", "float32"), TypeError
    ),
    "unknown token": Case("RetrieveKL", "lazy", number(FULL, 4, 9999), ("token id 9999 at sequence 1, position 4",)),
    "long prompt": Case("RetrieveLogProb", "lazy", LONG_PROMPT, ("sequence 1", "has 9 tokens, the whole 6")),
    "other prompt": Case(LEGACY, "nested", OTHER_PROMPT, ("sequence 1, position 1", f"does not start with {PROMPT}")),
    "no prompt": Case("RetrieveKL", "lazy", without(PROMPT), ("cannot tell which tokens", f"{PROMPT} or {ASSISTANT}")),
    "long row": Case("KLComputation", "nested", LONG_GEN, ("[1].shape=torch.Size([7])", "From position 6 on")),
    "wide block": Case(
        "KLComputation",
        "padded",
        put(REF_KEY, torch.zeros(2, 8)),
        ("Sample 0", "Size([7])", "Size([8])", "position 7 on"),
    ),
    "short row beside padding": Case("KLComputation", "padded", SHORT_REF, ("Sample 1", "Size([6])", "Size([5])")),
    "swapped rows": Case("corrected", "lazy", SWAPPED, (f"{OLD}", "Sample 0", "Size([5])", "Size([6])")),
    "long response": Case(
        LEGACY, "lazy", sampled([-1.0] * 2, [-1.0] * 9), (f"{SAMPLED} must have", "has 9 values and 6 tokens")
    ),
    "short attention mask": Case(
        "RetrieveLogProb", "nested", put(ATTENTION, flags(5, 4)), (f"{ATTENTION}", "sequence 1")
    ),
    "short assistant mask": Case(
        "RetrieveKL", "lazy", put(ASSISTANT, flags(5, 4)), (f"{ASSISTANT} must have rows of [5, 6], found [5, 4]",)
    ),
    "short rewards": Case(LEGACY, "lazy", REWARDS, ("The rewards have shape [5, 4]", "[5, 6]", "[*B, T, 1]")),
    "nan in a response": Case(
        LEGACY, "padded", NAN_INSIDE, (f"policy under {SAMPLED} is nan at sequence 1, position 4",)
    ),
    "nan in a first token": Case(LEGACY, "nested", NAN_FIRST, (f"{SAMPLED} is nan at sequence 1, position 2",)),
    "inf of a policy": Case(
        LEGACY, "lazy", number(GEN_KEY, 4, torch.inf), (f"{GEN_KEY} is inf at sequence 1, position 4", "weights")
    ),
    "-inf at the beginning": Case(
        "KLComputation", "nested", number(GEN_KEY, 0, -torch.inf), ("the policy", "is -inf at sequence 1, position 0")
    ),
    "nan of a reference": Case(
        "KLComputation", "padded", number(REF_KEY, 4, NAN), ("reference under", "is nan at sequence 1, position 4")
    ),
    "nan of a sampler": Case(
        "corrected", "lazy", number(OLD, 3, NAN, GEN_KEY), (f"{OLD} is nan at sequence 1, position 3",)
    ),
    "inf of an exact KL": Case(
        "exact", "jagged", number(EXACT, 4, torch.inf, GEN_KEY), (f"{EXACT} is inf at sequence 1, position 4",)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(lab: Any, name: str) -> None:
    """Defects 15 and 31 are the cases of missing log-probs."""
    case, columns = CASES[name], columns_of()
    case.change(columns)
    data = build(case.layout, columns)
    with assert_refused(case.error, data, *case.message):
        make(case.transform, lab)(data)


@pytest.mark.parametrize("name", SCORING)
def test_other_token_keys_and_entries_of_the_wrong_type(lab: Any, name: str) -> None:
    data = build("padded")
    with assert_refused(KeyError, data, "found", "tokens.full", "('ids', 'full')"):
        make(name, lab, lab.wrapped(True, input_key=("ids", "full")))(data)
    data = TensorDict(tokens=torch.tensor([[1, 2, 3]]), reward=torch.ones(1, 1), batch_size=[1])
    with assert_refused(TypeError, data, "expected a nested TensorDict under 'tokens'", "Tensor"):
        make(name, lab)(data)
    if name != "KLRewardTransform":  # which reads no history
        data = TensorDict(history=TensorDict(full=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
        with assert_refused(TypeError, data, "expected a torchrl History", "('history', 'full')", "Tensor"):
            make(name, lab, lab.wrapped(True, input_mode="history"))(data)


@pytest.mark.parametrize(
    ("name", "size", "data"),
    [
        ("RetrieveLogProb", "(0,)", build("padded")[:0]),
        ("RetrieveKL", "(0,)", build("lazy")[:0]),
        ("KLComputation", "(1, 0)", lazy_stack([build("padded")])[:, :0]),
    ],
)
def test_an_empty_batch(lab: Any, name: str, size: str, data: TensorDictBase) -> None:
    with assert_refused(ValueError, data, f"the batch is empty: its batch size is {size}. Drop it"):
        make(name, lab)(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["KLRewardTransform", "KLComputation"])
def test_defect_37_padding_may_hold_anything(lab: Any, name: str, bad: float) -> None:
    data = build("padded")
    for key in (GEN_KEY, REF_KEY):
        data[key][0, 5:] = bad
        data[key][1, 0] = bad
    result = make(name, lab)(data)["next"]
    assert result["reward"].isfinite().all()
    kl = result["kl_penalty"].reshape(2, 7)
    assert (kl[0, 5:] == 0).all()
    assert kl[1, 0] == 0


CHATS = [[user("hi"), assistant("yes")]] * 2
SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")


def test_defect_13_two_templates_and_two_tokenizers(lab: Any) -> None:
    options: Any = {"input_mode": "history", "pad_output": False}
    (gen, _), (_, ref) = (lab.wrapped(chat_template=template, **options) for template in (CHATML, SHOUTING))
    data = histories(full=CHATS)
    small, capital = (lab.tokenizer.convert_tokens_to_ids(c) for c in "hH")
    # "<|im_start|>", "u", "s", "e", "r", "\n", then "hi" or "HI"
    message = "different tokens, first at sequence 0, position 6", f"[{small},", f"[{capital},"
    with assert_refused(ValueError, data, *message):
        RetrieveKL(gen, ref)(data)
    other = build_tokenizer(pad_token="<|pad|>", merges=[("h", "i")])
    ref = make_scoring_wrapper(make_model(other, seed=1), other, **options, log_probs_key="ref_log_probs")
    # "<|im_start|>" has another id where a merge comes before it
    with assert_refused(ValueError, data, "sequence 0, position 0", "258", "259", "same tokenizer"):
        RetrieveKL(gen, ref)(data)


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_missing_templates_and_tokenizers(lab: Any, name: str) -> None:
    data, bare = histories(full=CHATS), build_tokenizer(None, pad_token="<|pad|>")
    with assert_refused(ValueError, data, "toy", "chat template", "chat_template"):
        make(name, lab, make_scoring_pair(lab.gen_model, lab.ref_model, bare, input_mode="history"))(data)
    wrappers = lab.wrapped(input_mode="history")
    for wrapper in wrappers:
        wrapper.tokenizer = None
    with assert_refused(ValueError, data, "pass `tokenizer=` to the transform"):
        make(name, lab, wrappers)(data)


# ------------------------------------------------------------------ models of other vocabularies
def with_vocabulary(vocab: dict[str, int], key: str = "ref_log_probs") -> Any:
    """A wrapper of a model of this size, whose tokenizer has these tokens."""
    tokenizer, model = build_tokenizer(CHATML), tiny_model(vocab_size=max(vocab.values()) + 1, seed=1)
    tokenizer.get_vocab = lambda: vocab
    return make_scoring_wrapper(model, tokenizer, pad_output=False, log_probs_key=key)


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    """By a transform and by a loss, whichever vocabulary is larger. A padded head is accepted."""
    small, padded, large = (tiny_model(vocab_size=size) for size in (1000, 1016, 2000))
    terms = [KLToReference(0.1, "k2")]
    for policy, reference, sizes in ((small, large, (2000, 1000)), (large, small, (1000, 2000))):
        message = "reference has a vocabulary of {} tokens, and the policy one of {}: they differ by more than padding"
        with pytest.raises(ValueError, match=message.format(*sizes)):
            RetrieveKL(policy, reference)
        with pytest.raises(ValueError, match=message.format(*sizes)):
            PolicyLoss(policy, "gpg", reference=reference, terms=terms)
    RetrieveKL(small, padded)(build("nested"))
    PolicyLoss(small, "gpg", reference=padded, terms=terms)


def test_tokenizers_take_precedence_over_vocabulary_sizes() -> None:
    """A tokenizer that extends the other fits a model of twice the size. Other names of the same ids are refused."""
    words = {f"word {i}": i for i in range(1000)}
    policy = with_vocabulary(words, "log_probs")
    renamed = {f"reserved {i}" if i > 995 else word: i for word, i in words.items()}
    for vocab in (words | {f"new {i}": i for i in range(1000, 2000)}, renamed):
        RetrieveKL(policy, with_vocabulary(vocab))(build("nested"))
    shifted = {f"word {i}": i + 7 for i in range(993)} | {f"control {i}": i for i in range(7)}
    message = "to 1000 ids: id 0 is 'word 0' for the policy and 'control 0' for the reference. Pass a ref"
    with pytest.raises(ValueError, match=message):
        RetrieveKL(policy, with_vocabulary(shifted))


def test_the_vocabulary_of_a_collectors_policy_is_compared_at_its_first_step(lab: Any) -> None:
    env = lab.env(RetrieveKL("from_collector", tiny_model(vocab_size=2000)))
    with pytest.raises(ValueError, match="vocabulary of 2000 tokens, and the policy one of"):
        lab.batches(env)
