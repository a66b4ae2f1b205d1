"""A script written for torchrl changes only its import: same names, arguments, defaults, error texts, and numbers."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.testing import assert_close
from torchrl.data.llm import History
from torchrl.envs.llm.transforms import kl as torchrl_kl
from torchrl.modules.llm.policies import ChatHistory

import torchrl_llm_kl as ours
from closeness import assert_near
from torchrl_llm_kl.estimators import FixedKLCoefficient
from toy_models import FORWARD
from toy_rollouts import make_model, make_scoring_wrapper
from toy_tokenizer import CHATML, build_tokenizer

NAMES = ["RetrieveLogProb", "KLComputation", "RetrieveKL", "KLRewardTransform"]
ADDED = {
    "RetrieveLogProb": {"temperature", "scope", "adapters", "history_key", "dtype", "memory", "deterministic"}
    | {"reference", "exact_kl_key", "entropy_key", "moments_key", "top_k", "top_k_key", "use_ray_service"}
    | {"context", "sampler_log_probs_key", "sampling", "kept_key", "routing_key", "record_routing"}
    | {"service_backend", "service_backend_options"},
    "KLComputation": {
        "estimator",
        "old_log_probs_key",
        "reward_placement",
        "reward_key",
        "exact_kl_key",
        "charged_key",
    },
    "RetrieveKL": {"estimator", "old_log_probs_key", "reward_key", "reward_placement", "entropy_key"}
    | {"moments_key", "temperature", "scope", "adapters", "ref_adapters", "dtype", "memory", "deterministic"}
    | {"context", "gen_context", "sampler_log_probs_key", "sampling", "kept_key"}
    | {"routing_key", "record_routing", "ref_routing_key", "charged_key", "service_backend", "service_backend_options"},
    "KLRewardTransform": {"estimator", "temperature", "reward_placement", "scope", "dtype", "memory", "deterministic"}
    | {"sampling", "kept_key", "service_backend", "service_backend_options"},
}


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(cls.__init__).parameters)
    del found["self"]
    return found


# ------------------------------------------------------------------ constructor arguments


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_torchrl_has_its_kind_place_and_default(name: str) -> None:
    """Except ``**kwargs``, whose arguments are explicit here; new arguments are keyword-only."""
    theirs, here = parameters(getattr(torchrl_kl, name)), parameters(getattr(ours, name))
    assert set(here) - set(theirs) == ADDED[name]
    assert all(here[n].kind is inspect.Parameter.KEYWORD_ONLY for n in ADDED[name])
    theirs.pop("kwargs", None)
    assert {n: (p.kind, p.default) for n, p in theirs.items()} == {
        n: (p.kind, p.default) for n, p in here.items() if n not in ADDED[name]
    }
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    orders = [[n for n, p in each.items() if p.kind is positional] for each in (theirs, here)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"])
def test_every_argument_of_the_metaclass_of_torchrl(name: str) -> None:
    """``service_backend=`` and its like are in no signature there: the metaclass takes them, of the classes with models."""
    theirs = inspect.signature(type(torchrl_kl.RetrieveKL).__call__).parameters
    here = parameters(getattr(ours, name))
    taken = {n: p.default for n, p in theirs.items() if p.kind is p.KEYWORD_ONLY}
    assert "use_ray_service" in taken
    assert taken == {n: here[n].default for n in taken}
    assert issubclass(type(getattr(ours, name)), type(torchrl_kl.RetrieveKL))


def test_defaults_of_the_new_arguments() -> None:
    expected = {
        "estimator": "k1",
        "temperature": 1.0,
        "reward_placement": "last",
        "scope": "turn",
        "memory": 256 * 2**20,
    }
    for name in NAMES:
        for argument, p in parameters(getattr(ours, name)).items():
            if argument in expected:
                assert p.default == expected[argument], (name, argument)


# ------------------------------------------------------------------ attributes


@pytest.fixture(scope="module")
def make_wrapper(tokenizer: Any, policy_model: Any) -> Callable[..., Any]:
    def make(key: str = "log_probs", **kwargs: Any) -> Any:
        options = {"pad_output": True, "input_mode": "history", "log_probs_key": key, **kwargs}
        return make_scoring_wrapper(policy_model, tokenizer, **options)

    return make


# The coefficient is a module here (it may adapt); the settings of a tokenizer that torchrl stores and never reads are
# no attributes here.
ATTRIBUTES = {
    "RetrieveLogProb": "in_keys out_keys log_probs_full_key assistant_only detach",
    "KLComputation": "in_keys out_keys gen_log_probs_full_key ref_log_probs_full_key kl_key add_to_reward padding_side",
    "KLRewardTransform": "in_keys out_keys log_prob_full_key add_to_reward assistant_only pad_output tokenizer",
}


def constructed(module: Any, name: str, make_wrapper: Callable[..., Any], **kwargs: Any) -> Any:
    cls = getattr(module, name)
    if name == "KLComputation":
        return cls(**kwargs)
    if name == "KLRewardTransform":
        return cls(make_wrapper(input_mode="tokens"), **kwargs)
    if name == "RetrieveKL":
        return cls(make_wrapper("gen_log_probs"), make_wrapper("ref_log_probs"), **kwargs)
    return cls(make_wrapper("ref_log_probs"), **kwargs)


def test_retrieve_kl_holds_the_three_that_torchrl_holds(make_wrapper: Callable[..., Any]) -> None:
    theirs, here = (constructed(module, "RetrieveKL", make_wrapper) for module in (torchrl_kl, ours))
    assert [type(t).__name__ for t in here.transforms] == [type(t).__name__ for t in theirs.transforms]
    for their, our in zip(theirs.transforms, here.transforms, strict=True):
        for attribute in ATTRIBUTES[type(our).__name__].split():
            assert getattr(our, attribute) == getattr(their, attribute), attribute


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in ATTRIBUTES),
        ("RetrieveLogProb", {"log_probs_full_key": ("mine", "full"), "assistant_only": False, "detach": False}),
        ("KLComputation", {"kl_key": ("a", "kl"), "add_to_reward": False, "padding_side": "right"}),
        ("KLComputation", {"gen_log_probs_full_key": ("g", "full"), "ref_log_probs_full_key": ("r", "full")}),
        ("KLRewardTransform", {"out_keys": ["reward_kl"], "log_prob_key": ("mine", "full"), "add_to_reward": False}),
        ("KLRewardTransform", {"in_keys": ["score"], "out_keys": ["r", "k", "l"], "assistant_only": False}),
    ],
)
def test_attributes_follow_the_arguments(name: str, kwargs: Any, make_wrapper: Callable[..., Any]) -> None:
    theirs, here = (constructed(module, name, make_wrapper, **kwargs) for module in (torchrl_kl, ours))
    for attribute in ATTRIBUTES[name].split():
        assert getattr(here, attribute) == getattr(theirs, attribute), attribute


def test_the_coefficient_has_the_same_value(make_wrapper: Callable[..., Any]) -> None:
    for value in (0.25, torch.tensor(0.25)):
        assert constructed(torchrl_kl, "KLComputation", make_wrapper, coeff=value).coeff == value
        here = constructed(ours, "KLComputation", make_wrapper, coeff=value).coeff
        assert isinstance(here, FixedKLCoefficient)
        assert here() == 0.25
        theirs = constructed(torchrl_kl, "KLRewardTransform", make_wrapper, coef=value)
        assert constructed(ours, "KLRewardTransform", make_wrapper, coef=value).coef() == theirs.coef


# ------------------------------------------------------------------ errors at construction


def stub(**attributes: Any) -> Any:
    """As much of a wrapper as the checks of a constructor look at."""
    defaults = {"generate": False, "return_log_probs": True, "pad_output": True, "input_mode": "history"}
    defaults |= {"log_probs_key": "log_probs", "in_keys": [("history", "full")]}
    return SimpleNamespace(**{**defaults, **attributes})


def stub_module(**attributes: Any) -> Any:
    """A module as the attribute: torchrl registers it before the check."""
    module = torch.nn.Identity()
    vars(module).update(vars(stub(**attributes)))
    return module


GEN, REF = {"log_probs_key": "gen_log_probs"}, {"log_probs_key": "ref_log_probs"}
TOKENS = {"input_mode": "tokens", "in_keys": [("tokens", "full")]}
BAD: dict[str, tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "no log-probs": ("RetrieveLogProb", lambda: ((stub(return_log_probs=False),), {})),
    "generates": ("RetrieveLogProb", lambda: ((stub(generate=True),), {})),
    "gen and factory": ("RetrieveKL", lambda: ((stub(**GEN), stub(**REF)), {"gen_model_factory": stub})),
    "ref and factory": ("RetrieveKL", lambda: ((stub(**GEN), stub(**REF)), {"ref_model_factory": stub})),
    "deferred gen, ref and factory": ("RetrieveKL", lambda: ((), {"ref_model": stub(), "ref_model_factory": stub})),
    "padding differs": ("RetrieveKL", lambda: ((stub(**GEN, pad_output=False), stub(**REF)), {})),
    "gen without log-probs": ("RetrieveKL", lambda: ((stub(**GEN, return_log_probs=False), stub(**REF)), {})),
    "gen generates": ("RetrieveKL", lambda: ((stub(**GEN, generate=True), stub(**REF)), {})),
    "ref without log-probs": ("RetrieveKL", lambda: ((stub(**GEN), stub(**REF, return_log_probs=False)), {})),
    "ref generates": ("RetrieveKL", lambda: ((stub(**GEN), stub(**REF, generate=True)), {})),
    "one key for both": ("RetrieveKL", lambda: ((stub(), stub()), {})),
    "no gen": ("RetrieveKL", lambda: ((None, stub(**REF)), {})),
    "no ref": ("RetrieveKL", lambda: ((stub(**GEN), None), {})),
    "model and factory": ("KLRewardTransform", lambda: ((stub(**TOKENS),), {"ref_model_factory": stub})),
    "neither": ("KLRewardTransform", lambda: ((), {})),
    "number of out_keys": ("KLRewardTransform", lambda: ((stub(**TOKENS),), {"out_keys": ["a", "b"]})),
    "number of in_keys": ("KLRewardTransform", lambda: ((stub(**TOKENS),), {"in_keys": ["a", "b"]})),
    "no in_keys": ("KLRewardTransform", lambda: ((stub(**TOKENS),), {"in_keys": []})),
    "reference generates": ("KLRewardTransform", lambda: ((stub(**TOKENS, generate=True),), {})),
    "reference reads history": ("KLRewardTransform", lambda: ((stub_module(),), {})),
}


#: What to pass instead, which torchrl does not say.
ADVICE = {"no ref": "'base'", "no gen": "'from_collector'", "neither": "model"}


@pytest.mark.parametrize("case", list(BAD))
def test_errors_at_construction_have_the_same_text(case: str) -> None:
    name, make = BAD[case]
    args, kwargs = make()
    with pytest.raises(ValueError) as theirs:
        getattr(torchrl_kl, name)(*args, **kwargs)
    with pytest.raises(ValueError) as here:
        getattr(ours, name)(*args, **kwargs)
    assert str(theirs.value) in str(here.value)
    if case in ADVICE:
        assert re.search(rf"pass the (policy|reference).*{ADVICE[case]}", str(here.value), re.DOTALL)


def test_keys_that_are_no_keys_are_refused_by_both(make_wrapper: Callable[..., Any]) -> None:
    texts = []
    for module in (torchrl_kl, ours):
        with pytest.raises(RuntimeError, match="key should be a Sequence<NestedKey>") as error:  # of tensordict
            constructed(module, "KLRewardTransform", make_wrapper, in_keys=[1])
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_defect_16_factory_beside_the_default_gen_model(make_wrapper: Callable[..., Any]) -> None:
    """The plain transforms of both accept it; torchrl's Ray variant does not."""
    for module in (torchrl_kl, ours):
        made = module.RetrieveKL(
            gen_model_factory=lambda: make_wrapper("gen_log_probs"),
            ref_model_factory=lambda: make_wrapper("ref_log_probs"),
        )
        assert made[0].model.log_probs_key == "gen_log_probs"
        assert made[1].model.log_probs_key == "ref_log_probs"


@pytest.mark.parametrize("name", ["RetrieveLogProb", "RetrieveKL"])
def test_a_key_without_full_warns_in_both(name: str, make_wrapper: Callable[..., Any]) -> None:
    argument = "log_probs_full_key" if name == "RetrieveLogProb" else "gen_log_probs_full_key"
    messages = []
    for module in (torchrl_kl, ours):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            constructed(module, name, make_wrapper, **{argument: "mine"})
        messages.append([str(w.message) for w in caught if "does not end with 'full'" in str(w.message)])
    assert messages[0] == messages[1]
    assert len(messages[0]) == 1


@pytest.mark.parametrize("argument", ["gen_log_probs_full_key", "ref_log_probs_full_key"])
def test_from_collector_refuses_a_key_without_full_at_construction(
    argument: str, make_wrapper: Callable[..., Any]
) -> None:
    """The text of torchrl, which gets there only when its first step starts."""
    text = (
        f"The {argument} mine is not a tuple or does not end with 'full'. This may cause issues with the KL computation. "
        "Please use a tuple with the log_probs_key and 'full' as the last element."
    )
    with pytest.raises(ValueError) as error:
        ours.RetrieveKL("from_collector", make_wrapper("ref_log_probs"), **{argument: "mine"})
    assert text in str(error.value)


# What torchrl refuses and this package allows, each with the reason.


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_assistant_only_is_allowed_in_every_input_mode(mode: str, make_wrapper: Callable[..., Any]) -> None:
    """torchrl finds the assistant only through a history; here a rollout's own bookkeeping tells."""
    with pytest.raises(ValueError, match="must have `input_mode='history'` when `assistant_only=True`"):
        torchrl_kl.RetrieveLogProb(make_wrapper(input_mode=mode))
    assert ours.RetrieveLogProb(make_wrapper(input_mode=mode)).assistant_only


def test_a_plain_transformers_model_is_allowed(policy_model: Any) -> None:
    """Its method ``generate`` reads as ``generate=True`` to torchrl."""
    with pytest.raises((ValueError, AttributeError)):
        torchrl_kl.RetrieveLogProb(policy_model)
    assert ours.RetrieveLogProb(policy_model).log_probs_full_key == ("log_probs", "full")


# ------------------------------------------------------------------ numbers: KLComputation


GEN_ROWS = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25, -4.0])]
REF_ROWS = [torch.tensor([-1.5, -1.0, -0.75]), torch.tensor([-2.25, -3.0])]
KEYS: list[Any] = [("log_probs", "full"), ("ref_log_probs", "full"), "reward"]
REWARD_ROWS = [torch.tensor([[0.1], [0.2], [3.0]]), torch.tensor([[-1.0], [0.7]])]


def nest(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([row.clone() for row in rows], layout=torch.strided)


def kl_data(form: str, gen: list[torch.Tensor] = GEN_ROWS, ref: list[torch.Tensor] = REF_ROWS) -> TensorDictBase:
    columns = [gen, ref, REWARD_ROWS]
    if form == "lazy":
        return TensorDict(
            next=lazy_stack([TensorDict(dict(zip(KEYS, r, strict=True))) for r in zip(*columns, strict=True)]),
            batch_size=[2],
        )
    if form == "nested":
        columns = [nest(rows) for rows in columns]
    else:
        columns = [torch.stack([row[:2] for row in rows]) for rows in columns]
    return TensorDict(next=TensorDict(dict(zip(KEYS, columns, strict=True)), batch_size=[2]), batch_size=[2])


def rows_of(td: TensorDictBase, key: Any) -> list[torch.Tensor]:
    value = td.get(key, as_list=True)
    return list(value) if isinstance(value, list) else list(value.unbind())


def test_kl_and_token_rewards_agree() -> None:
    """Rows of a lazy stack are the one form in which torchrl adds its KL to a reward at all.

    A reward for each token is in its place already: no placement changes it.
    """
    theirs = torchrl_kl.KLComputation(coeff=0.3)(kl_data("lazy"))["next"]
    for form, placement in itertools.product(("lazy", "nested"), ("last", "broadcast")):
        here = ours.KLComputation(coeff=0.3, reward_placement=placement)(kl_data(form))["next"]
        for key in ("kl_penalty", "reward"):
            assert_near(rows_of(here, key), rows_of(theirs, key), size=5)
    for form in ("dense", "lazy"):
        theirs = torchrl_kl.KLComputation(add_to_reward=False)(kl_data(form))["next"]
        here = ours.KLComputation(add_to_reward=False)(kl_data(form))["next"]
        for key in ("kl_penalty", "reward"):
            assert_near(rows_of(here, key), rows_of(theirs, key), size=5)


@pytest.mark.parametrize("form", ["dense", "nested"])
def test_defect_28_rewards_that_torchrl_cannot_add_to(form: str) -> None:
    """A dense KL becomes nested in torchrl, and a nested one has no shape: both raise; here the form stays."""
    with pytest.raises(RuntimeError, match=r"Expected both self and other to be nested|doesn't support sizes"):
        torchrl_kl.KLComputation(coeff=0.3)(kl_data(form))
    here = ours.KLComputation(coeff=0.3)(kl_data(form))["next"]
    # reward - 0.3 * (gen - ref)
    expected = [[-0.05, 0.5, 2.925], [-1.6, 1.0]]
    for row, want in zip(here["reward"].unbind(), expected, strict=True):
        assert_close(row.squeeze(-1), torch.tensor(want)[: len(row)])
    assert here["kl_penalty"].is_nested == here["reward"].is_nested == (form == "nested")


def test_nan_before_the_scored_tokens_counts_as_no_kl_in_both() -> None:
    rows = [row.clone() for row in REF_ROWS]
    rows[0][0] = torch.nan
    newer = version("torchrl") != "0.14.0"  # which has NaN there
    for module in (torchrl_kl, ours) if newer else (ours,):
        kl = module.KLComputation(add_to_reward=False)(kl_data("lazy", ref=rows))["next"]
        assert [row.tolist() for row in rows_of(kl, "kl_penalty")] == [[0.0, -1.0, 0.25], [2.0, -1.0]]


# ------------------------------------------------------------------ numbers: scoring a history


MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT = MARKED.replace(
    "+ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}", "}}{% endgeneration %}{{ '<|im_end|>\n' }}"
)
FIRST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes!"}]
SECOND = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "no no"}]
CHATS = [FIRST, [*SECOND, {"role": "user", "content": "no?"}, {"role": "assistant", "content": "ok"}]]


class Histories:
    """Models over a tokenizer with one template, and conversations to score."""

    def __init__(self, template: str) -> None:
        self.tokenizer = build_tokenizer(template, pad_token="<|pad|>")
        self.models = {"gen_log_probs": make_model(self.tokenizer, 0), "ref_log_probs": make_model(self.tokenizer, 1)}
        self.template = template

    def wrapper(self, key: str, *, pad_output: bool = True) -> Any:
        options = {"input_mode": "history", "log_probs_key": key, "chat_template": self.template}
        return make_scoring_wrapper(self.models[key], self.tokenizer, pad_output=pad_output, **options)

    def ids(self) -> list[list[int]]:
        return self.tokenizer.apply_chat_template(CHATS, return_dict=True)["input_ids"]

    @staticmethod
    def data() -> TensorDictBase:
        return TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=(2,))


@pytest.fixture(scope="module")
def marked() -> Histories:
    return Histories(MARKED)


@pytest.mark.parametrize("assistant_only", [False, True])
def test_log_probs_of_a_padded_history_agree(marked: Histories, assistant_only: bool) -> None:
    found = []
    for module in (torchrl_kl, ours):
        transform = module.RetrieveLogProb(
            marked.wrapper("ref_log_probs"), tokenizer=marked.tokenizer, assistant_only=assistant_only
        )
        found.append(transform(marked.data())["ref_log_probs", "full"].detach())
    theirs, here = found
    # Left-padded in both. torchrl gives the padding and the first token log-probs of its own; ours are 0.
    lengths = [len(ids) for ids in marked.ids()]
    real = torch.zeros(2, max(lengths), dtype=torch.bool)
    for row, length in zip(real, lengths, strict=True):
        row[len(row) - length + 1 :] = True
    assert theirs.shape == here.shape == real.shape
    assert_near(here[real], theirs[real], **FORWARD)
    assert (here[~real] == 0).all()
    assert int((here != 0).sum()) == (5 + 6 + 3 if assistant_only else int(real.sum()))


def test_defect_12_end_of_turn_is_counted_where_the_template_leaves_it_out() -> None:
    """The one token of each turn in which the numbers differ: the policy must emit it, so it is scored."""
    lab = Histories(MARKED_CONTENT)
    found = []
    for module in (torchrl_kl, ours):
        transform = module.RetrieveLogProb(lab.wrapper("ref_log_probs"), tokenizer=lab.tokenizer)
        found.append(transform(lab.data())["ref_log_probs", "full"].detach())
    theirs, here = found
    more = (here != 0) & (theirs == 0)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in lab.ids()], batch_first=True, padding_side="left")
    assert ids[more].tolist() == [lab.tokenizer.convert_tokens_to_ids("<|im_end|>")] * 3
    assert_near(here[~more], theirs[~more], **FORWARD)


def test_defect_10_a_template_without_marks_is_kept() -> None:
    """torchrl swaps in ChatML for it; the rendering here is the tokenizer's own, with the same numbers on ChatML."""
    lab = Histories(CHATML)
    marked = Histories(MARKED)
    here = ours.RetrieveLogProb(lab.wrapper("ref_log_probs"))(lab.data())["ref_log_probs", "full"]
    theirs = torchrl_kl.RetrieveLogProb(marked.wrapper("ref_log_probs"), tokenizer=marked.tokenizer)(marked.data())
    assert_near(here, theirs["ref_log_probs", "full"].detach(), **FORWARD)
