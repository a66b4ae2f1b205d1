"""Input that cannot be used: the error names what was found and the change to make, and the data is left as it was."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.collectors.llm import LLMCollector

from layouts import joined, lay_out
from template_pairs import assistant, user
from torchrl_llm_kl import (
    KLComputation,
    KLRewardTransform,
    LogProbScorer,
    PolicyLoss,
    RetrieveKL,
    RetrieveLogProb,
)
from torchrl_llm_kl.losses import KLToReference
from toy_models import tiny_model
from toy_rollouts import histories, make_model, make_scoring_pair, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

FORMS = ["padded", "nested", "lazy"]
SCORING = [LOG, BOTH, LEGACY] = ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"]
PARTS, NAN = "KLComputation", float("nan")
PROMPTS, RESPONSES = [[7, 8, 9], [10, 11]], [[20, 21], [30, 31, 32, 33]]
GEN = [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0, -0.5, -1.5, -2.5]]
REF = [[0.0, 0.0, 0.0, -2.0, -1.0], [0.0, 0.0, -1.0, -0.75, -1.25, -4.5]]
FULL, PROMPT = ("tokens", "full"), ("tokens", "prompt")
ATTENTION, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
GEN_KEY, REF_KEY, REWARD = ("log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "reward")
SAMPLED, OLD, EXACT = ("log_probs", "response"), ("old", "full"), ("exact_kl", "full")

Columns = dict[Any, Any]


def columns_of() -> Columns:
    """Tokens, masks, log-probs of both models and an outcome: rows of two sequences."""
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


def build(form: str, columns: Columns | None = None) -> TensorDictBase:
    return lay_out(form, columns_of() if columns is None else columns, PROMPTS, RESPONSES)


def everything(td: TensorDictBase) -> Any:
    """All keys, and the bytes of all leaves, also of "next" and of each element of a lazy stack."""
    if hasattr(td, "tensordicts"):
        return [everything(sub) for sub in td.tensordicts]
    found: Columns = {}
    for key in td.keys(True):
        value = td.get(key, as_list=True)  # tensordict 0.15 stacks no rows of unequal shapes
        rows = value.unbind() if isinstance(value, Tensor) and value.is_nested else value
        rows = rows if isinstance(rows, (list, tuple)) else [rows]
        found[key] = [(x.dtype, x.shape, x.numpy().tobytes()) if isinstance(x, Tensor) else type(x) for x in rows]
    return found


@contextmanager
def assert_refused(error: type[Exception], data: TensorDictBase, text: str) -> Iterator[None]:
    """``error`` is raised, its text holds all parts of ``text``, and ``data`` stays as it is."""
    before, batch = everything(data), data.batch_size
    with pytest.raises(error) as caught:
        yield
    missing = [part for part in text.split(" … ") if part not in str(caught.value)]
    assert not missing, f"expected {missing} in {str(caught.value)!r}"
    assert data.batch_size == batch
    assert before == everything(data), "the data was changed"


def make(name: str, lab: Any, models: Any = None) -> Any:
    """A transform on the two models, or on wrappers of them."""
    gen, ref = models or (lab.gen_model, lab.ref_model)
    return {
        LOG: lambda: RetrieveLogProb(ref),
        BOTH: lambda: RetrieveKL(gen, ref),
        LEGACY: lambda: KLRewardTransform(ref),
        PARTS: KLComputation,
        "other key": lambda: KLComputation(ref_log_probs_full_key=("mine", "full")),
        "legacy key": lambda: KLRewardTransform(ref, log_prob_key=("mine", "full")),
        "exact": lambda: KLComputation(estimator="exact"),
        "corrected": lambda: KLComputation(estimator="corrected_k3", old_log_probs_key=OLD),
    }[name]()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SCORING, PARTS])
def test_the_data_of_these_tests_is_good(lab: Any, name: str, form: str) -> None:
    """Without this the tests of bad input could pass for another reason."""
    data = make(name, lab)(build(form))
    key = ("next", "log_probs", "full") if name == LOG else ("next", "kl_penalty")
    assert data.get(key, as_list=True) is not None


# ------------------------------------------------------------------ one entry is bad
Change = Callable[[Columns], Any]


def without(*keys: Any) -> Change:
    return lambda columns: [columns.pop(key) for key in keys]


def put(key: Any, rows: Any) -> Change:
    return lambda columns: columns.update({key: rows})


def sampled(*rows: list[float]) -> Change:
    """Log-probs of the response alone, as a policy stores them."""
    return lambda columns: columns.update({GEN_KEY: None, SAMPLED: [torch.tensor(row) for row in rows]})


def number(key: Any, at: int, value: float, source: Any = None) -> Change:
    """A value of the second row of an entry, of one that is a copy of ``source``."""

    def change(columns: Columns) -> None:
        rows = columns[key] = [row.clone() for row in columns[source or key]]
        rows[1][at] = value

    return change


def floats(columns: Columns) -> None:
    columns[FULL] = [row.float() for row in columns[FULL]]


def longer(key: Any) -> Change:
    """The second row, of a copy of the policy's log-probs."""
    return lambda columns: columns.update(
        {key: [columns[GEN_KEY][0], torch.cat([columns[GEN_KEY][1], torch.zeros(1)])]}
    )


NO_TOKENS = "found … masks.all_attention_mask … Run the policy first … ('tokens', 'full')"
NO_POLICY = (
    "Log-probs not found. Expected keys: ('log_probs', 'full'), ('ref_log_probs', 'full') … Found:  … tokens.full"
    " … Missing: ('log_probs', 'full') … in 'next':  … reward … Put RetrieveLogProb before"
)
DEFECT_15 = "the policy's log-probs are missing … ('mine', 'full') … tokens.full … return_log_probs=True … RetrieveKL"
NO_MASK = "cannot tell which tokens the assistant produced: add ('tokens', 'prompt') … ('masks', 'all_assistant_mask')"
WRITER = "RetrieveLogProb(policy, extras=[ExactKL(reference)])"
LONGER = "[1].shape=torch.Size([7]), ref_log_probs[1].shape=torch.Size([6]). From position 6 on … score the same tokens"
AT = "at sequence 1, position"
OTHER_PROMPT = put(PROMPT, [torch.tensor([7, 8, 9]), torch.tensor([10, 99])])
LONG_PROMPT = put(PROMPT, [torch.tensor([7, 8, 9]), torch.ones(9, dtype=torch.long)])
NESTED = put(REF_KEY, torch.nested.as_nested_tensor([torch.zeros(5), torch.zeros(5)]))
REWARDS = put(REWARD, [torch.ones(5, 1), torch.ones(4, 1)])
ONLY_ADD_UP = put(OLD, [torch.zeros(6), torch.zeros(5)])  # the same total, each number at the wrong token
#: Transforms, layouts, what is changed, and parts of what is said of it.
REFUSED: list[tuple[str, str, Change, str]] = [
    # keys
    ("/".join(SCORING), "nested", without(FULL, PROMPT), NO_TOKENS),
    (PARTS, "padded lazy", without(GEN_KEY), NO_POLICY),
    (PARTS, "nested", without(REF_KEY), "Missing: ('ref_log_probs', 'full') … Found:  … tokens.full … in 'next': "),
    ("other key", "nested", without(), "Missing: ('mine', 'full') … Found: log_probs.full … the keys that hold them"),
    ("legacy key", "nested", without(), DEFECT_15),
    ("corrected", "nested", without(), "Missing: ('old', 'full') … Found: log_probs.full … give the keys"),
    ("exact", "nested", without(), f"Exact KL not found … {EXACT} … in 'next':  … {WRITER}"),
    ("exact", "padded", put(EXACT, torch.zeros(2)), f"{EXACT} to have a token dimension"),
    # tokens
    (LOG, "padded nested lazy", floats, "integer token ids … ('tokens', 'full') … torch.float32"),
    (BOTH, "padded nested lazy", number(FULL, 4, 9999), f"token id 9999 {AT} 4 … tokenizer of this model"),
    (LOG, "lazy", LONG_PROMPT, "sequence 1 … has 9 tokens, the whole 6"),
    (LEGACY, "nested", OTHER_PROMPT, f"{AT[3:]} 1 … does not start with ('tokens', 'prompt') … pad token"),
    (BOTH, "lazy", without(PROMPT), NO_MASK),
    # lengths
    (PARTS, "nested lazy", longer(GEN_KEY), f"Sample 1 has different shapes … {LONGER}"),
    (LEGACY, "nested", longer(GEN_KEY), "Sample … torch.Size([7]) … torch.Size([6]) … score the same tokens"),
    (PARTS, "padded", put(REF_KEY, torch.zeros(2, 8)), "Sample 0 … Size([7]) … Size([8]) … From position 7 on"),
    (PARTS, "padded", NESTED, "Sample 1 … torch.Size([6]) … torch.Size([5]) … From position 5 on"),
    ("exact", "lazy", longer(EXACT), f"Sample 1 … torch.Size([6]), exact_kl[1] … torch.Size([7]) … {WRITER}"),
    ("corrected", "nested", put(OLD, [torch.zeros(5), torch.zeros(7)]), "('old', 'full') … 7 … 6 … same tokens"),
    ("corrected", "padded", put(OLD, torch.zeros(2, 6)), "('old', 'full') … 6 … 7 … same tokens"),
    ("corrected", "nested lazy", ONLY_ADD_UP, "('old', 'full') … Sample 0 … 6 … 5"),
    (LEGACY, "lazy", sampled([-1.0] * 2, [-1.0] * 9), f"{SAMPLED} must have the length … 1 has 9 values and 6 tokens"),
    (LOG, "nested lazy", put(ATTENTION, flags(5, 4)), f"{ATTENTION} … sequence 1 … 4 … 6"),
    (BOTH, "nested lazy", put(ASSISTANT, flags(5, 4)), f"{ASSISTANT} … rows of [5, 6], found [5, 4]"),
    (f"{BOTH}/{LEGACY}/{PARTS}", "lazy", REWARDS, "The rewards have shape [5, 4] … [5, 6] … [*B, T, 1]"),
    # numbers; a sequence may begin with NaN ("not scored"), not with infinity
    (LEGACY, "padded lazy", sampled([-1.0] * 2, [-1.0, -2.0, NAN, -4.0]), f"policy under {SAMPLED} … nan {AT} 4"),
    (LEGACY, "nested", sampled([-1.0] * 2, [NAN, -2.0, -3.0, -4.0]), f"{SAMPLED} … is nan {AT} 2"),
    (PARTS, "nested", number(GEN_KEY, 0, -torch.inf), f"the policy … is -inf {AT} 0"),
    ("corrected", "nested lazy", number(OLD, 3, NAN, GEN_KEY), f"('old', 'full') … is nan {AT} 3"),
    *(
        (
            "exact",
            "nested lazy jagged",
            number(EXACT, 4, bad, GEN_KEY),
            f"exact KL under {EXACT} is {bad} {AT} 4: … {WRITER}",
        )
        for bad in (NAN, torch.inf, -torch.inf)
    ),
    *(
        (name, "padded nested lazy", number(key, 4, bad), f"the {who} under {key[-2:]} … is {bad} {AT} 4 … weights")
        for bad in (NAN, torch.inf, -torch.inf)
        for name, key, who in ((PARTS, GEN_KEY, "policy"), (PARTS, REF_KEY, "reference"), (LEGACY, GEN_KEY, "policy"))
    ),
]


@pytest.mark.parametrize(
    ("name", "form", "change", "text"),
    [(name, form, *row) for names, forms, *row in REFUSED for name in names.split("/") for form in forms.split()],
    ids=lambda value: {NO_POLICY: "defect_31", DEFECT_15: "defect_15"}.get(value) if isinstance(value, str) else None,
)
def test_refused(lab: Any, name: str, form: str, change: Change, text: str) -> None:
    columns = columns_of()
    change(columns)
    data = build(form, {key: rows for key, rows in columns.items() if rows is not None})
    missing = text is NO_TOKENS or name == "legacy key"
    with assert_refused(KeyError if missing else TypeError if change is floats else ValueError, data, text):
        make(name, lab)(data)


@pytest.mark.parametrize("name", SCORING)
def test_tokens_elsewhere_and_tensors_where_something_else_belongs(lab: Any, name: str) -> None:
    data = build("padded")
    with assert_refused(KeyError, data, "found … tokens.full … ('ids', 'full')"):
        make(name, lab, lab.wrapped(True, input_key=("ids", "full")))(data)
    data = TensorDict(tokens=torch.tensor([[1, 2, 3]]), reward=torch.ones(1, 1), batch_size=[1])
    with assert_refused(TypeError, data, "expected a nested TensorDict under 'tokens' … Tensor"):
        make(name, lab)(data)
    if name != LEGACY:  # which reads no history
        data = TensorDict(history=TensorDict(full=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
        with assert_refused(TypeError, data, "expected a torchrl History … ('history', 'full') … Tensor"):
            make(name, lab, lab.wrapped(True, input_mode="history"))(data)


@pytest.mark.parametrize(
    ("name", "size", "data"),
    [
        (LOG, "(0,)", build("padded")[:0]),
        (BOTH, "(0,)", build("lazy")[:0]),
        (LEGACY, "(0, 2)", lazy_stack([build("lazy")])[:0]),
        (PARTS, "(1, 0)", lazy_stack([build("padded")])[:, :0]),
    ],
)
def test_an_empty_batch(lab: Any, name: str, size: str, data: TensorDictBase) -> None:
    with assert_refused(ValueError, data, f"the batch is empty: a TensorDict of batch size {size} holds … drop it"):
        make(name, lab)(data)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [LEGACY, PARTS])
def test_defect_37_padding_may_hold_anything(lab: Any, name: str, bad: float) -> None:
    data = build("padded")
    for key in (GEN_KEY, REF_KEY):
        data[key][0, 5:] = bad
        data[key][1, 0] = bad
    found = make(name, lab)(data)["next"]
    assert found["reward"].isfinite().all()
    kl = found["kl_penalty"].reshape(2, 7)
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
    text = f"different tokens, first at sequence 0, position 6 … [{small},  … [{capital},  … same tokenizer and chat"
    with assert_refused(ValueError, data, text):
        RetrieveKL(gen, ref)(data)
    other = build_tokenizer(pad_token="<|pad|>", merges=[("h", "i")])
    ref = make_scoring_wrapper(make_model(other, seed=1), other, **options, log_probs_key="ref_log_probs")
    # "<|im_start|>" has another id where a merge comes before it
    with assert_refused(ValueError, data, "sequence 0, position 0 … 258 … 259 … same tokenizer"):
        RetrieveKL(gen, ref)(data)


@pytest.mark.parametrize("name", [LOG, BOTH])
def test_no_template_and_no_tokenizer(lab: Any, name: str) -> None:
    data, bare = histories(full=CHATS), build_tokenizer(None, pad_token="<|pad|>")
    with assert_refused(ValueError, data, "toy … chat template … chat_template"):
        make(name, lab, make_scoring_pair(lab.gen_model, lab.ref_model, bare, input_mode="history"))(data)
    wrappers = lab.wrapped(input_mode="history")
    for wrapper in wrappers:
        wrapper.tokenizer = None
    with assert_refused(ValueError, data, "tokenizer=None … Pass `tokenizer=`"):
        make(name, lab, wrappers)(data)


# ------------------------------------------------------------------ models of other vocabularies


def with_vocabulary(vocab: dict[str, int], model: Any, **settings: Any) -> Any:
    """A wrapper whose tokenizer has these tokens."""
    tokenizer = build_tokenizer(CHATML)
    tokenizer.get_vocab = lambda: vocab
    return make_scoring_wrapper(model, tokenizer, pad_output=False, **settings)


def test_a_reference_of_another_vocabulary_is_refused_for_sampled_estimators() -> None:
    """Whether the policy's or the reference's is larger, by a transform and by a loss; a padded head is accepted."""
    small, padded, large = (tiny_model(vocab_size=size) for size in (1000, 1016, 2000))
    for policy, reference, sizes in ((small, large, (2000, 1000)), (large, small, (1000, 2000))):
        message = "reference has a vocabulary of {} tokens, and the policy one of {}: they differ by more than padding"
        with pytest.raises(ValueError, match=message.format(*sizes)):
            RetrieveKL(policy, reference)
        with pytest.raises(ValueError, match=message.format(*sizes)):
            PolicyLoss(policy, "gpg", reference=LogProbScorer(reference), terms=[KLToReference(0.1, "k2")])
    RetrieveKL(small, padded)(build("nested"))
    PolicyLoss(small, "gpg", reference=padded, terms=[KLToReference(0.1, "k2")])


def test_an_id_that_only_the_policy_has_is_an_error() -> None:
    """Row 0, token 3 is 1010: in the padding of one head, and outside the other."""
    policy, reference = tiny_model(vocab_size=1016), tiny_model(vocab_size=1000)
    columns = columns_of()
    columns[FULL][0][3] = 1010
    with pytest.raises(ValueError, match=r"token id 1010 at sequence 0, position 3 is outside .*vocabulary of 1000"):
        RetrieveKL(policy, reference)(build("nested", columns))


def test_tokenizers_decide_over_sizes() -> None:
    """One that extends the other fits a model of twice the size; other names of the same ids are refused at any size."""
    small, large = tiny_model(vocab_size=1000), tiny_model(vocab_size=2000)
    words = {f"word {i}": i for i in range(1000)}
    extended = words | {f"new {i}": i for i in range(1000, 2000)}
    shifted = {f"word {i}": i + 7 for i in range(993)} | {f"control {i}": i for i in range(7)}
    renamed = {f"reserved {i}" if i > 995 else word: i for word, i in words.items()}
    policy = with_vocabulary(words, small)
    for vocab, model in ((extended, large), (renamed, tiny_model(vocab_size=1000, seed=1))):
        RetrieveKL(policy, with_vocabulary(vocab, model, log_probs_key="ref_log_probs"))(build("nested"))
    message = (
        "give other tokens to 1000 ids: id 0 is 'word 0' for the policy and 'control 0' for the reference. Pass a ref"
    )
    with pytest.raises(ValueError, match=message):
        RetrieveKL(policy, with_vocabulary(shifted, tiny_model(vocab_size=1000), log_probs_key="ref_log_probs"))


def test_the_vocabulary_of_a_collectors_policy_is_compared_at_its_first_step(lab: Any) -> None:
    env, policy = lab.env(RetrieveKL("from_collector", tiny_model(vocab_size=2000))), lab.policy(True)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
    with pytest.raises(ValueError, match="vocabulary of 2000 tokens, and the policy one of"):
        list(collector)
    collector.shutdown()
