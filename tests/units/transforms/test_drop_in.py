"""A torchrl script needs only another import: names, arguments, defaults, error texts and numbers are the same."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchrl
from tensordict import TensorDict, TensorDictBase
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torchrl.envs.llm.transforms import kl as torchrl_kl

import torchrl_llm_kl as ours
from closeness import assert_near
from layouts import lay_out
from refused import warned
from template_pairs import LOOP, PROMPT, assistant, marked, user
from torchrl_llm_kl.estimators import FixedKLCoefficient
from toy_models import FORWARD
from toy_rollouts import histories, make_model, make_scoring_wrapper, rows_of
from toy_tokenizer import CHATML, build_tokenizer

NAMES = ["RetrieveLogProb", "KLComputation", "RetrieveKL", "KLRewardTransform"]


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(cls.__init__).parameters)
    del found["self"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_torchrl_has_its_kind_place_and_default(name: str) -> None:
    """``**kwargs`` is explicit here, and new arguments are keyword-only. torchrl's metaclass takes ``service_backend=``."""
    theirs, here = parameters(getattr(torchrl_kl, name)), parameters(getattr(ours, name))
    theirs.pop("kwargs", None)
    assert all(p.kind is p.KEYWORD_ONLY for n, p in here.items() if n not in theirs)
    of_both = {n: (p.kind, p.default) for n, p in here.items() if n in theirs}
    assert of_both == {n: (p.kind, p.default) for n, p in theirs.items()}
    orders = [[n for n, p in each.items() if p.kind is p.POSITIONAL_OR_KEYWORD] for each in (theirs, here)]
    assert orders[0] == orders[1]
    ours_alone = {"estimator": "k1", "reward_placement": "last", "scope": "turn", "options": None, "extras": ()}
    if name == "KLComputation":
        of_kl = dict.fromkeys(("old_log_probs_key", "charged_key")) | {"reward_key": "reward"}
        ours_alone = {"estimator": "k1", "reward_placement": "last", **of_kl}
    service = {"service_backend", "service_backend_options", "use_ray_service"}
    new = {n: p.default for n, p in here.items() if n not in theirs and n not in service}
    assert new == {n: ours_alone[n] for n in new}
    if name != "KLComputation":
        call = inspect.signature(type(torchrl_kl.RetrieveKL).__call__).parameters
        taken = {n: p.default for n, p in call.items() if p.kind is p.KEYWORD_ONLY}
        assert "use_ray_service" in taken
        assert taken == {n: here[n].default for n in taken}
        assert issubclass(type(getattr(ours, name)), type(torchrl_kl.RetrieveKL))


@pytest.fixture(scope="module")
def make_wrapper(tokenizer: Any, policy_model: Any) -> Callable[..., Any]:
    def make(key: str = "log_probs", **kwargs: Any) -> Any:
        options = {"pad_output": True, "input_mode": "history", "log_probs_key": key, **kwargs}
        return make_scoring_wrapper(policy_model, tokenizer, **options)

    return make


# The coefficient is a module here. Tokenizer settings that torchrl stores but never reads are not attributes here.
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


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in NAMES),
        ("RetrieveLogProb", {"log_probs_full_key": ("mine", "full"), "assistant_only": False, "detach": False}),
        ("KLComputation", {"kl_key": ("a", "kl"), "add_to_reward": False, "padding_side": "right", "coeff": 0.25}),
        ("KLComputation", {"gen_log_probs_full_key": ("g", "full"), "ref_log_probs_full_key": ("r", "full")}),
        ("KLComputation", {"coeff": torch.tensor(0.25)}),
        ("KLRewardTransform", {"out_keys": ["reward_kl"], "log_prob_key": ("mine", "full"), "coef": 0.25}),
        ("KLRewardTransform", {"in_keys": ["score"], "out_keys": ["r", "k", "l"], "assistant_only": False}),
        ("KLRewardTransform", {"add_to_reward": False, "coef": torch.tensor(0.25)}),
    ],
)
def test_attributes_follow_the_arguments(name: str, kwargs: Any, make_wrapper: Callable[..., Any]) -> None:
    """``RetrieveKL`` composes the same three transforms as torchrl's."""
    pair = [constructed(module, name, make_wrapper, **kwargs) for module in (torchrl_kl, ours)]
    parts = [list(each.transforms) if name == "RetrieveKL" else [each] for each in pair]
    for their, our in zip(*parts, strict=True):
        assert type(our).__name__ == type(their).__name__
        for attribute in ATTRIBUTES[type(our).__name__].split():
            assert getattr(our, attribute) == getattr(their, attribute), attribute
        for attribute in kwargs.keys() & {"coeff", "coef"}:
            assert isinstance(getattr(our, attribute), FixedKLCoefficient)
            assert getattr(our, attribute)() == getattr(their, attribute) == 0.25


def stub(**attributes: Any) -> Any:
    """A module with the attributes of a wrapper that constructors check. torchrl registers it as a submodule first."""
    module = torch.nn.Identity()
    defaults = {"generate": False, "return_log_probs": True, "pad_output": True, "input_mode": "history"}
    defaults |= {"log_probs_key": "log_probs", "in_keys": [("history", "full")]}
    vars(module).update({**defaults, **attributes})
    return module


GEN, REF = {"log_probs_key": "gen_log_probs"}, {"log_probs_key": "ref_log_probs"}
TOKENS = {"input_mode": "tokens", "in_keys": [("tokens", "full")]}
BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "no log-probs": ("RetrieveLogProb", (stub(return_log_probs=False),), {}),
    "generates": ("RetrieveLogProb", (stub(generate=True),), {}),
    "gen and factory": ("RetrieveKL", (stub(**GEN), stub(**REF)), {"gen_model_factory": stub}),
    "ref and factory": ("RetrieveKL", (stub(**GEN), stub(**REF)), {"ref_model_factory": stub}),
    "deferred gen, ref and factory": ("RetrieveKL", (), {"ref_model": stub(), "ref_model_factory": stub}),
    "padding differs": ("RetrieveKL", (stub(**GEN, pad_output=False), stub(**REF)), {}),
    "gen without log-probs": ("RetrieveKL", (stub(**GEN, return_log_probs=False), stub(**REF)), {}),
    "gen generates": ("RetrieveKL", (stub(**GEN, generate=True), stub(**REF)), {}),
    "ref without log-probs": ("RetrieveKL", (stub(**GEN), stub(**REF, return_log_probs=False)), {}),
    "ref generates": ("RetrieveKL", (stub(**GEN), stub(**REF, generate=True)), {}),
    "one key for both": ("RetrieveKL", (stub(), stub()), {}),
    "no gen": ("RetrieveKL", (None, stub(**REF)), {}),
    "no ref": ("RetrieveKL", (stub(**GEN), None), {}),
    "model and factory": ("KLRewardTransform", (stub(**TOKENS),), {"ref_model_factory": stub}),
    "neither": ("KLRewardTransform", (), {}),
    "number of out_keys": ("KLRewardTransform", (stub(**TOKENS),), {"out_keys": ["a", "b"]}),
    "number of in_keys": ("KLRewardTransform", (stub(**TOKENS),), {"in_keys": ["a", "b"]}),
    "no in_keys": ("KLRewardTransform", (stub(**TOKENS),), {"in_keys": []}),
    "in_keys that are none": ("KLRewardTransform", (stub(**TOKENS),), {"in_keys": [1]}),
    "reference generates": ("KLRewardTransform", (stub(**TOKENS, generate=True),), {}),
    "reference reads history": ("KLRewardTransform", (stub(),), {}),
}


#: The advice on what to pass, which torchrl's message lacks.
ADVICE = {"no ref": "'base'", "no gen": "'from_collector'", "neither": "model"}


@pytest.mark.parametrize("case", list(BAD))
def test_errors_at_construction_have_the_same_text(case: str) -> None:
    name, args, kwargs = BAD[case]
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        getattr(torchrl_kl, name)(*args, **kwargs)
    with pytest.raises(theirs.type) as here:
        getattr(ours, name)(*args, **kwargs)
    assert str(theirs.value) in str(here.value)
    if case in ADVICE:
        assert re.search(rf"pass the (policy|reference).*{ADVICE[case]}", str(here.value), re.DOTALL)


def test_defect_16_factory_beside_the_default_gen_model(make_wrapper: Callable[..., Any]) -> None:
    """Both libraries accept it. torchrl's Ray variant does not."""
    for module in (torchrl_kl, ours):
        factories = (partial(make_wrapper, f"{model}_log_probs") for model in ("gen", "ref"))
        made = module.RetrieveKL(**dict(zip(("gen_model_factory", "ref_model_factory"), factories, strict=True)))
        assert made[0].model.log_probs_key == "gen_log_probs"
        assert made[1].model.log_probs_key == "ref_log_probs"


def test_a_key_without_full(make_wrapper: Callable[..., Any]) -> None:
    """Both warn with one text. From a collector it is an error at construction here, and at the first step in torchrl."""
    for name, argument in (("RetrieveLogProb", "log_probs_full_key"), ("RetrieveKL", "gen_log_probs_full_key")):
        make = partial(constructed, name=name, make_wrapper=make_wrapper, **{argument: "mine"})
        theirs, here = (warned(partial(make, module), "not end with 'full'")[1] for module in (torchrl_kl, ours))
        assert theirs == here
        assert len(theirs) == 1
    for argument in ("gen_log_probs_full_key", "ref_log_probs_full_key"):
        with pytest.raises(
            ValueError, match=rf"^The {argument} mine is not a tuple or does not end with 'full'\..* element"
        ):
            ours.RetrieveKL("from_collector", make_wrapper("ref_log_probs"), **{argument: "mine"})


# ------------------------------------------------------------------ numbers: KLComputation
GEN_ROWS = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25, -4.0])]
REF_ROWS = [torch.tensor([-1.5, -1.0, -0.75]), torch.tensor([-2.25, -3.0])]
REWARDS = [torch.tensor([[0.1], [0.2], [3.0]]), torch.tensor([[-1.0], [0.7]])]


def kl_data(form: str) -> TensorDictBase:
    """Dense data holds the first two tokens of each sequence."""
    entries: dict[Any, Any] = {("log_probs", "full"): GEN_ROWS, ("ref_log_probs", "full"): REF_ROWS, "reward": REWARDS}
    if form == "dense":
        entries = {key: torch.stack([row[:2] for row in rows]) for key, rows in entries.items()}
    return TensorDict(next=lay_out(form, entries, [[0] * 3, [0] * 2]), batch_size=[2])


def test_kl_and_token_rewards_agree() -> None:
    """torchrl can add its KL to a reward only in a lazy stack. No placement moves a reward per token."""
    charged, alone = {"coeff": 0.3}, {"add_to_reward": False}
    for form, theirs, settings in [("lazy", "lazy", charged), ("nested", "lazy", charged), ("dense", "dense", alone)]:
        want = torchrl_kl.KLComputation(**settings)(kl_data(theirs))["next"]
        for placement in ("last", "broadcast"):
            here = ours.KLComputation(**settings, reward_placement=placement)(kl_data(form))["next"]
            for key in ("kl_penalty", "reward"):
                assert_near(rows_of(here, key), rows_of(want, key), size=5)


@pytest.mark.parametrize("form", ["dense", "nested"])
def test_defect_28_rewards_that_torchrl_cannot_add_to(form: str) -> None:
    """torchrl raises, because its dense KL becomes nested and a nested one has no shape. Here the layout is kept."""
    with pytest.raises(RuntimeError, match=r"Expected both self and other to be nested|doesn't support sizes"):
        torchrl_kl.KLComputation(coeff=0.3)(kl_data(form))
    here = ours.KLComputation(coeff=0.3)(kl_data(form))["next"]
    # reward - 0.3 * (gen - ref)
    expected = [[-0.05, 0.5, 2.925], [-1.6, 1.0]]
    for row, want in zip(here["reward"].unbind(), expected, strict=True):
        assert_close(row.squeeze(-1), torch.tensor(want)[: len(row)])
    assert here["kl_penalty"].is_nested == here["reward"].is_nested == (form == "nested")


def test_nan_before_the_scored_tokens_counts_as_no_kl_in_both() -> None:
    """torchrl 0.14.0 has NaN there."""
    for module in (torchrl_kl, ours) if torchrl.__version__ != "0.14.0" else (ours,):
        data = kl_data("lazy")
        data["next"][0]["ref_log_probs", "full"] = torch.tensor([torch.nan, -1.0, -0.75])
        kl = module.KLComputation(add_to_reward=False)(data)["next"]
        assert [row.tolist() for row in rows_of(kl, "kl_penalty")] == [[0.0, -1.0, 0.25], [2.0, -1.0]]


# ------------------------------------------------------------------ numbers: scoring a history
END = "{{ m.content }}<|im_end|>"
TEMPLATE = LOOP.replace(END + "\n", END + "{{ '\n' }}") + PROMPT  # a line break after a block is dropped
MARKED, MARKED_CONTENT = marked(TEMPLATE, END), marked(TEMPLATE, "{{ m.content }}")
CHATS = [[user("hi"), assistant("yes!")], [user("what?"), assistant("no no"), user("no?"), assistant("ok")]]


class Histories:
    """A model over a tokenizer with one template, and its scores of conversations."""

    def __init__(self, template: str) -> None:
        self.tokenizer, self.template = build_tokenizer(template, pad_token="<|pad|>"), template
        self.model = make_model(self.tokenizer, 1)

    def ids(self) -> list[torch.Tensor]:
        return [torch.tensor(ids) for ids in self.tokenizer.apply_chat_template(CHATS, return_dict=True)["input_ids"]]

    def score(self, module: Any, **kwargs: Any) -> torch.Tensor:
        options = {"pad_output": True, "input_mode": "history", "chat_template": self.template}
        transform = module.RetrieveLogProb(make_scoring_wrapper(self.model, self.tokenizer, **options), **kwargs)
        return transform(histories(full=CHATS))["log_probs", "full"].detach()

    def scores(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Torchrl's and ours."""
        return tuple(self.score(module, tokenizer=self.tokenizer, **kwargs) for module in (torchrl_kl, ours))  # type: ignore[return-value]


@pytest.mark.parametrize("assistant_only", [False, True])
def test_log_probs_of_a_padded_history_agree(assistant_only: bool) -> None:
    lab = Histories(MARKED)
    theirs, here = lab.scores(assistant_only=assistant_only)
    # Both are padded on the left. torchrl's padding and first token have log-probs, ours have 0.
    real = pad_sequence([torch.arange(len(ids)) > 0 for ids in lab.ids()], batch_first=True, padding_side="left")
    assert theirs.shape == here.shape == real.shape
    assert_near(here[real], theirs[real], **FORWARD)
    assert (here[~real] == 0).all()
    assert int((here != 0).sum()) == (5 + 6 + 3 if assistant_only else int(real.sum()))


def test_defect_12_end_of_turn_is_counted_where_the_template_leaves_it_out() -> None:
    """The numbers differ only at the end-of-turn token, which is scored here because the policy must emit it."""
    lab = Histories(MARKED_CONTENT)
    theirs, here = lab.scores()
    more = (here != 0) & (theirs == 0)
    ids = pad_sequence(lab.ids(), batch_first=True, padding_side="left")
    assert ids[more].tolist() == [lab.tokenizer.convert_tokens_to_ids("<|im_end|>")] * 3
    assert_near(here[~more], theirs[~more], **FORWARD)


def test_defect_10_a_template_without_marks_is_kept() -> None:
    """torchrl replaces such a template by ChatML. Here it is kept, and the numbers agree for ChatML itself."""
    theirs, _ = Histories(MARKED).scores()
    assert_near(Histories(CHATML).score(ours), theirs, **FORWARD)
