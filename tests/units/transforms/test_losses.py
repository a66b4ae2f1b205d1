"""torchrl's losses and ``PolicyLoss`` on entries of the transforms, as docs/recipes.md and docs/torchrl.md describe."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.testing import assert_close
from torchrl.envs import Transform
from torchrl.modules.llm.policies import Text
from torchrl.objectives.llm import DAPO, DistillationLoss, GRPOLoss, SFTLoss

from closeness import assert_near
from group_rollouts import assert_ratios, of_response, plain_loss, response, scored, without_graph
from layouts import at_responses, joined, tokens
from refused import warned
from template_pairs import assistant, user
from torchrl_llm_kl import KLComputation, KLRewardTransform, PolicyLoss, RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.losses import Correction, EntropyBonus, KLToReference, KLToSampler, LossInputs
from torchrl_llm_kl.masks import render_conversations
from toy_models import FORWARD
from toy_rollouts import OUTCOMES, collect, flat, histories, make_scoring_wrapper, plain_log_probs, steps

ADVANTAGES = (1.0, -0.5, 2.0, 0.25)
KL_COEFF, REWARD_COEFF = 0.7, 0.3
RESPONSE_LENGTHS = [3, 6, 1, 2]
ROLLOUTS: dict[tuple[bool, bool], TensorDictBase] = {}  # the tests share them


def k3_values(sampled: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    """Schulman's k3, ``ratio - 1 - log ratio``, for tokens from ``sampled``, one tensor for each sequence."""
    return [(o - s).exp() - 1 - (o - s) for s, o in zip(sampled, other, strict=True)]


def mean_of_means(rows: list[Tensor]) -> Tensor:
    """Over tokens, then over sequences."""
    return sum(row.sum() / len(row) for row in rows) / len(rows)


def close(found: Tensor, want: Tensor | float, *, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Equal up to the rounding of float32 forwards that are batched differently."""
    assert_close(found.detach(), torch.as_tensor(want).detach(), rtol=rtol, atol=atol)


def close_gradients(loss: Tensor, want: Tensor, model: nn.Module) -> None:
    """Every parameter has the same gradient in ``loss`` and ``want``, and it is not zero."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found, expected = (torch.autograd.grad(x, parameters, retain_graph=True) for x in (loss, want))
    for name, gradient, wanted in zip(names, found, expected, strict=True):
        size = wanted.abs().max().item()
        assert size > 0, f"{name} has no part in the loss: the oracle tests nothing there"
        assert_close(gradient, wanted, rtol=0, atol=1e-3 * size, msg=lambda m, name=name: f"{name}: {m}")


class Moved:
    """A copy of the policy, optionally moved since the rollouts, and its losses."""

    def __init__(self, lab: Any, padded: bool, noise: float) -> None:
        self.lab, self.padded, self.model = lab, padded, copy.deepcopy(lab.gen_model)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.data.add_(noise * torch.randn(parameter.shape, generator=generator))

    def rollouts(self, combined: bool) -> TensorDictBase:
        """Four rollouts of different lengths, scored in the env by ``RetrieveKL`` (``combined``) or its parts.

        The assistant mask is added, because torchrl's rollouts leave it empty.
        """
        policy, (gen, ref) = self.lab.policy(self.padded), self.lab.wrapped(self.padded)
        policy.generate_kwargs["eos_token_id"] = [self.lab.tokenizer.eos_token_id, *range(0, 256, 5)]  # some stop early
        transforms: list[Transform] = [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation(coeff=REWARD_COEFF)]
        if combined:
            transforms = [RetrieveKL(gen, ref, coeff=REWARD_COEFF)]
        data = flat(collect(self.lab.tokenizer, policy, *transforms, envs=4))
        assert [len(response(step)) for step in steps(data)] == RESPONSE_LENGTHS
        for step in data.unbind(0):
            mask = step["masks", "all_attention_mask"].clone()
            mask[: len(step["tokens", "prompt"])] = False
            step["masks", "all_assistant_mask"] = mask
        return data

    def data(self, *, combined: bool = True) -> TensorDictBase:
        if (kind := (self.padded, combined)) not in ROLLOUTS:
            ROLLOUTS[kind] = self.rollouts(combined)
        return ROLLOUTS[kind].clone().set("advantage", torch.tensor(ADVANTAGES).reshape(4, 1, 1))

    def wrapper(self, **kwargs: Any) -> Any:
        return make_scoring_wrapper(self.model, self.lab.tokenizer, pad_output=self.padded, **kwargs)

    def grpo(self, kind: type[GRPOLoss] = GRPOLoss, **kwargs: Any) -> GRPOLoss:
        loss = kind(self.wrapper(), **{"masking_strategy": "sft", "entropy_bonus": False, **kwargs})
        loss.set_keys(sample_log_prob=("next", "log_probs", "full"))
        return loss

    def plain(self, data: TensorDictBase) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of the responses, with their graph, and under the reference."""
        return scored(self.model, data), without_graph(self.lab.ref_model, data)

    def slots(self) -> int:
        """The number of positions over which torchrl averages a KL: rows times the longest sequence, with padding."""
        return 4 * max(len(step["tokens", "full"]) for step in steps(self.data()))

    def sampled(self) -> Tensor:
        """The sampler's log-probs of all sampled tokens."""
        return torch.cat([of_response(step, step["next", "log_probs", "full"]) for step in steps(self.data())])

    def same(self, theirs: Tensor, ours: Tensor, factor: float = 1.0) -> None:
        """``factor`` times torchrl's value is ours, and so is the gradient."""
        close(ours, factor * theirs, atol=1e-5)
        close_gradients(ours, factor * theirs, self.model)


@pytest.fixture
def moved(lab: Any, padded: bool) -> Moved:
    return Moved(lab, padded, 0.02)


@pytest.fixture
def nested(lab: Any) -> Moved:
    return Moved(lab, False, 0.02)


@pytest.mark.parametrize(
    ("padded", "strategy", "combined"), [(True, "sft", True), (False, "rlhf", False)], indirect=["padded"]
)
def test_on_policy_with_kl_in_the_loss(lab: Any, padded: bool, strategy: str, combined: bool) -> None:
    """The ratio is 1, so the objective is the mean of ``-advantage`` over responses of 3, 6, 1 and 2 tokens."""
    on_policy = Moved(lab, padded, noise=0.0)
    data = on_policy.data(combined=combined)
    log_probs, ref = on_policy.plain(data)
    kl = torch.cat(k3_values(log_probs, ref)).sum() / on_policy.slots()  # that the tokens line up shows in the sum
    surrogate = -sum(a * row.sum() for a, row in zip(ADVANTAGES, log_probs, strict=True)) / 12

    out = on_policy.grpo(masking_strategy=strategy, kl_to_ref_coeff=KL_COEFF)(data)
    close(out.loss_objective, -(1.0 * 3 - 0.5 * 6 + 2.0 * 1 + 0.25 * 2) / 12)
    close(out.clip_fraction, 0.0)
    close(out.kl_to_ref, kl)
    close(out.loss_kl_to_ref, KL_COEFF * kl)
    close_gradients(out.loss_objective + out.loss_kl_to_ref, surrogate + KL_COEFF * kl, on_policy.model)


THEIRS = pytest.mark.xfail(strict=True, reason="GRPOLoss.forward pads `advantage` on the right, all else on the left")


@pytest.mark.parametrize(
    ("padded", "as_it_is"),
    [(True, True), (False, False), pytest.param(False, True, marks=THEIRS)],
    indirect=["padded"],
)
def test_the_reward_of_each_token_as_its_advantage(lab: Any, padded: bool, as_it_is: bool) -> None:
    """``-coeff * KL``, with the outcome on the last token. Unpadded rewards must be padded on the left."""
    on_policy = Moved(lab, padded, noise=0.0)
    data = on_policy.data()
    width = max(len(step["next", "reward"]) for step in data.unbind(0))
    for step in data.unbind(0):
        reward = step["next", "reward"]
        step["advantage"] = reward if as_it_is else pad(reward, (0, 0, width - len(reward), 0))
    log_probs, ref = on_policy.plain(data)
    rewards = [-REWARD_COEFF * (gen.detach() - other) for gen, other in zip(log_probs, ref, strict=True)]
    for reward, outcome in zip(rewards, OUTCOMES, strict=True):
        reward[-1] += outcome
    surrogate = -sum((reward * row).sum() for reward, row in zip(rewards, log_probs, strict=True)) / 12

    out = on_policy.grpo()(data)
    close(out.loss_objective, -sum(reward.sum() for reward in rewards) / 12)
    close_gradients(out.loss_objective, surrogate, on_policy.model)


@pytest.mark.parametrize(
    ("padded", "strategy", "input_mode"),
    [(True, "sft", "history"), (False, "rlhf", "text"), (True, "rlhf", "tokens"), (False, "sft", "history")],
    indirect=["padded"],
)
def test_wrappers_as_actors(moved: Moved, strategy: Any, input_mode: str) -> None:
    """The sampled tokens are trained, whatever input a wrapper reads."""
    data, lab, clip = moved.data(), moved.lab, {"clip_low": 0.1, "clip_high": 0.3}
    actor = make_scoring_wrapper(moved.model, lab.tokenizer, pad_output=False, input_mode=input_mode)
    loss = PolicyLoss(actor, "ppo", **clip, terms=[KLToReference(KL_COEFF)], masking_strategy=strategy)(data)
    old, ref = (without_graph(model, data) for model in (lab.gen_model, lab.ref_model))
    want = plain_loss(moved.model, data, old, ref, kl_coeff=KL_COEFF, clip=(0.1, 0.3))
    close(loss["loss_objective"] + loss["loss_kl_to_ref"], want)


def check_sft(moved: Moved, theirs: SFTLoss, data: TensorDictBase, answers: TensorDictBase, slots: int) -> Tensor:
    """The mean over the tokens of each answer, then over answers. torchrl averages its KL over all positions."""
    log_probs, ref = moved.plain(answers)
    want, kl = -mean_of_means(log_probs), torch.cat(k3_values(log_probs, ref)).sum() / slots
    out = theirs(data)
    close(out.loss_sft, want)
    close(out.kl_to_ref, kl)
    close(out.loss_kl_to_ref, KL_COEFF * kl)
    close_gradients(out.loss_sft + out.loss_kl_to_ref, want + KL_COEFF * kl, moved.model)
    return want


def test_sft(moved: Moved) -> None:
    data, theirs = moved.data(), SFTLoss(moved.wrapper(), kl_to_ref_coeff=KL_COEFF)
    theirs.set_keys(history="tokens")
    want = check_sft(moved, theirs, data, data, sum(len(step["tokens", "full"]) for step in steps(data)))
    ours = PolicyLoss(moved.model, "sft", aggregation="seq-mean-token-mean")(data)["loss_objective"]
    close(ours, want)
    close_gradients(ours, want, moved.model)


def test_sft_on_conversations(lab: Any) -> None:
    """Three conversations with masks and without tokens. Each answer ends with the end-of-turn token and a newline."""
    moved, encode = Moved(lab, True, 0.02), lab.tokenizer.encode
    pairs = [("hi", "yo"), ("hello there", "good day to you"), ("why?", "because")]
    chats = [[user(question), assistant(answer)] for question, answer in pairs]
    data = histories(full=chats, prompt=[chat[:1] for chat in chats], response=[chat[1:] for chat in chats])
    data = lazy_stack(list(data.unbind(0)))
    masks = [rendered.assistant_mask for rendered in render_conversations(lab.tokenizer, chats)]
    width = max(map(len, masks))
    for row, mask in zip(data.unbind(0), masks, strict=True):
        row["masks", "all_assistant_mask"] = pad(mask, (width - len(mask), 0))
        row["masks", "all_attention_mask"] = pad(torch.ones_like(mask), (width - len(mask), 0))
    data = RetrieveLogProb(lab.wrapped(True, input_mode="history")[1])(data)
    theirs = SFTLoss(moved.wrapper(input_mode="history"), kl_to_ref_coeff=KL_COEFF)
    theirs.set_keys(ref_log_prob=("ref_log_probs", "full"))
    before = [encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q, _ in pairs]
    after = [encode(f"{answer}<|im_end|>") for _, answer in pairs]
    attended = [[True] * len(row) for row in joined(before, after)]
    answers = tokens("lazy", before, after, masks__all_attention_mask=attended)
    check_sft(moved, theirs, data, answers, 3 * (max(map(len, attended)) + 1))


def test_reverse_distillation(moved: Moved) -> None:
    """Distillation toward the reference, on the student's own tokens."""
    data, loss = moved.data(), DistillationLoss(moved.wrapper())
    loss.set_keys(history="tokens", teacher_log_prob=("next", "ref_log_probs", "full"))
    want, out = mean_of_means(k3_values(*moved.plain(data))), loss(data)
    close(out.loss_distill, want)
    close(out.kl_to_teacher, want)
    close_gradients(out.loss_distill, want, moved.model)


# ------------------------------------------------------------------ what each setting of GRPOLoss is here
UNCLIPPED = {"clip_ratio_c": None}


@pytest.mark.parametrize(
    ("kind", "settings", "ours"),
    [
        (GRPOLoss, {"clip_epsilon": 0.1}, {"clip_low": 0.1, "clip_high": 0.1, **UNCLIPPED}),
        (GRPOLoss, {"clip_epsilon": (0.1, 0.3)}, {"clip_low": 0.1, "clip_high": 0.3, **UNCLIPPED}),
        (GRPOLoss, {"aggregation": "prompt_mean"}, {"aggregation": "seq-mean-token-mean", **UNCLIPPED}),
        (DAPO, {"clip_epsilon": (0.2, 0.28)}, {"objective": "dapo"}),
    ],
    ids=str,
)
def test_objective(nested: Moved, kind: type[GRPOLoss], settings: Any, ours: Any) -> None:
    theirs = nested.grpo(kind, **settings)(nested.data())
    assert theirs.clip_fraction > 0
    found = PolicyLoss(nested.model, **{"objective": "ppo", **ours})(nested.data())["loss_objective"]
    nested.same(theirs.loss_objective.squeeze(), found)


def test_per_token(nested: Moved) -> None:
    """``aggregation="none"`` of both libraries, at the sampled tokens."""
    theirs = nested.grpo(aggregation="none")(nested.data()).loss_objective.squeeze(-1)
    ours = PolicyLoss(nested.model, "ppo", aggregation="none", **UNCLIPPED)(nested.data())["loss_objective"]
    for length, found, want in zip(RESPONSE_LENGTHS, ours, theirs, strict=True):
        values = [x for x in found.flatten().tolist() if x != 0][-length:]
        close(torch.tensor(values), want[want != 0], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "term", "name", "ours"),
    [
        ({"kl_to_ref_coeff": 0.3}, KLToReference(0.3, "k3"), "loss_kl_to_ref", "loss_kl_to_ref"),
        ({"kl_to_inference_coeff": 0.3}, KLToSampler(0.3, "k3"), "loss_kl_to_inference", "loss_kl_to_sampler"),
        ({"entropy_bonus": True, "entropy_coeff": 0.2}, EntropyBonus(0.2), "loss_entropy", "loss_entropy"),
    ],
)
def test_terms(nested: Moved, settings: Any, term: Any, name: str, ours: str) -> None:
    """torchrl's KLs are k3, averaged also over prompts and padding. ``kl_approx`` is k1 of KL(sampler || policy)."""
    theirs = nested.grpo(**settings)(nested.data())
    found = PolicyLoss(nested.model, "ppo", terms=[term])(nested.data())
    more = 1.0 if name == "loss_entropy" else nested.slots() / 12
    nested.same(getattr(theirs, name).squeeze(), found[ours], more)
    if name == "loss_kl_to_ref":
        close(found["kl_to_ref"], more * theirs.kl_to_ref, atol=1e-5)
    if name == "loss_kl_to_inference":
        old_less_new = nested.sampled() - torch.cat(without_graph(nested.model, nested.data()))
        close(more * theirs.kl_approx, old_less_new.mean(), rtol=1e-3, atol=1e-5)
        close(found["kl_to_sampler"], ((-old_less_new).exp() - 1 + old_less_new).mean(), rtol=1e-3, atol=1e-5)


def kl_mask(inputs: LossInputs, threshold: float = 0.1) -> Any:
    """torchrl's ``kl_mask_threshold``: 0 for tokens whose k2 to the sampler exceeds it."""
    k2 = inputs.log_ratio.detach() ** 2 / 2
    return (k2 <= threshold).to(k2), {}


def test_kl_mask_threshold(nested: Moved) -> None:
    """Expressed as a correction. The masked tokens stay in the denominator."""
    distances = (torch.cat(without_graph(nested.model, nested.data())) - nested.sampled()).square().sort().values / 2
    threshold = float(distances[5:7].mean())  # half of the 12 are kept
    theirs = nested.grpo(kl_mask_threshold=threshold)(nested.data()).loss_objective.squeeze()
    corrections = [Correction(kl_mask, threshold=threshold)]
    ours = PolicyLoss(nested.model, "ppo", corrections=corrections, **UNCLIPPED)(nested.data())["loss_objective"]
    nested.same(theirs, ours, 6 / 12)


# ------------------------------------------------------------------ PolicyLoss on what generating wrappers store
TEXTS = ["hi there, you", "a much longer prompt, please answer"]
SHIFT = 0.3


def prompts(tokenizer: Any, input_mode: str) -> TensorDictBase:
    if input_mode == "history":
        return histories(prompt=[[user(text)] for text in TEXTS])
    if input_mode == "text":
        return TensorDict(text=Text(prompt=TEXTS, batch_size=[2]), batch_size=[2])
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    return lazy_stack([TensorDict(tokens=TensorDict(prompt=row)) for row in rows])


@pytest.mark.parametrize(
    ("padded", "input_mode", "num_samples", "side"),
    [
        (True, "history", None, "root"),
        (False, "history", 2, "next"),
        (True, "text", 2, "root"),
        (False, "text", None, "next"),
        (True, "tokens", None, "next"),
        (False, "tokens", 2, "root"),
    ],
    indirect=["padded"],
)
def test_every_layout_of_a_transformers_wrapper(lab, padded, input_mode, num_samples, side):
    """On policy every ratio is 1. The first token of each response is left out, because the wrapper never scores it."""
    torch.manual_seed(1)
    options = {} if num_samples is None else {"num_samples": num_samples}
    wrapper = lab.policy(padded, input_mode=input_mode, return_log_probs=True, **options)
    data = wrapper(prompts(lab.tokenizer, input_mode))
    assert data.get(("log_probs", "full"), None) is None
    count = 0  # response tokens but the first of each
    for row in steps(data):
        count += int(row["masks", "all_attention_mask"][-len(row["tokens", "response"]) :].sum()) - 1
    data.set("advantage", torch.ones(*data.batch_size, 1))
    if side == "next":
        data.set("next", data.select("log_probs"))
        del data["log_probs"]
    with pytest.warns(UserWarning, match="'response'.* holds exactly 0 for the first generated token"):
        out = PolicyLoss(lab.gen_model)(data)
    assert out["num_tokens"] == count > 0
    assert_ratios(out)


# ------------------------------------------------------------------ engines' layouts, by hand
PROMPTS, RESPONSES = [[7, 8, 9], [5]], [[11, 12], [13, 14, 15]]
WHOLE = [torch.tensor(row) for row in joined(PROMPTS, RESPONSES)]
ADVANTAGE = torch.tensor([[1.0], [-2.0]])


def stored(model: nn.Module, layout: str, where: str, shift: float = SHIFT) -> TensorDictBase:
    """Old log-probs of responses, ``shift`` below the model's. Padding holds the padding token, as in vLLM's wrapper."""
    old = [plain_log_probs(model, row)[len(p) :] - shift for row, p in zip(WHOLE, PROMPTS, strict=True)]
    key = "log_probs__response" if where == "root" else "next__log_probs__response"
    return tokens(layout, PROMPTS, RESPONSES, fill=151643.0, advantage=ADVANTAGE, **{key: old})


@pytest.mark.parametrize(
    ("layout", "where"), [("padded", "root"), ("nested", "next"), ("lazy", "root"), ("lazy", "next")]
)
def test_values_and_gradients(policy_model: nn.Module, layout: str, where: str) -> None:
    """Every ratio is exp(0.3) = 1.35: clipped at 1.1 for the two tokens of advantage 1, not for the three of -2."""
    loss = PolicyLoss(policy_model, "ppo", clip_low=0.2, clip_high=0.1, clip_ratio_c=None)
    value = loss(stored(policy_model, layout, where))["loss_objective"]
    ratio = torch.tensor(SHIFT).exp()
    assert_near(value.detach(), (2 * -1.1 + 3 * 2 * ratio) / 5, terms=64, size=1)
    log_probs = policy_model(input_ids=WHOLE[1][None]).logits[0, :-1].float().log_softmax(-1)
    want = log_probs.gather(-1, WHOLE[1][1:, None]).sum() * 2 * ratio / 5
    (got,), (expected,) = (torch.autograd.grad(x, policy_model.lm_head.weight) for x in (value, want))
    assert_near(got, expected, terms=64 * 64, size=1)


def test_full_wins_over_response(policy_model: nn.Module) -> None:
    data = stored(policy_model, "nested", "root", shift=9.0)
    full = [plain_log_probs(policy_model, row) for row in WHOLE]
    data.set(("log_probs", "full"), torch.nested.as_nested_tensor(full))
    assert_near(PolicyLoss(policy_model)(data)["ratio_max"], torch.tensor(1.0), **FORWARD)


NO_SCORES = "returned no scores of prompts"


def without_prompt_scores(model: nn.Module, layout: str, filled_in: float = 0.0) -> TensorDictBase:
    """0 for the whole prompt, as SGLang's wrapper stores it (vLLM: NaN). The assistant wrote its last tokens."""
    masks = [torch.arange(len(p) + len(r)) >= max(len(p) - 2, 1) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    pairs = zip(WHOLE, PROMPTS, strict=True)
    rows = [plain_log_probs(model, row).where(torch.arange(len(row)) >= len(p), filled_in) for row, p in pairs]
    entries = {"masks__all_assistant_mask": masks, "log_probs__full": rows}
    return tokens(layout, PROMPTS, RESPONSES, advantage=ADVANTAGE, **entries)


@pytest.mark.parametrize("filled_in", [0.0, math.nan])
@pytest.mark.parametrize(
    ("layout", "strategy", "left_out"), [("padded", "rlhf", 2), ("lazy", "generic", 2), ("lazy", "sft", 0)]
)
def test_prompts_without_scores_are_left_out(policy_model, layout, strategy, left_out, filled_in):
    """These are tokens 1 and 2 of the first prompt. Their ratios would be exp(log_prob), below 1."""
    data = without_prompt_scores(policy_model, layout, filled_in)
    loss = PolicyLoss(policy_model, masking_strategy=strategy)
    out, found = warned(lambda: loss(data), NO_SCORES)
    assert [f"the first {left_out} tokens of prompts" in text for text in found] == [True] * bool(left_out)
    assert out["num_tokens"] == 5
    assert_ratios(out)


def test_log_probs_of_responses_of_one_token_are_not_those_of_the_prompt(policy_model):
    """The ratio of each response is exp(0.3). A prompt token with the response's log-prob would have another ratio."""
    prompts, responses = [[7, 8, 9], [5, 6, 13]], [[11], [14]]
    old = [plain_log_probs(policy_model, torch.tensor(row))[3:] - SHIFT for row in joined(prompts, responses)]
    entries = {"masks__all_assistant_mask": [[False, True, False, True]] * 2, "log_probs__response": old}
    data = tokens("padded", prompts, responses, advantage=ADVANTAGE, **entries)
    loss = PolicyLoss(policy_model, masking_strategy="generic")
    out, found = warned(lambda: loss(data), NO_SCORES)
    assert ["the first 4 tokens of prompts" in text for text in found] == [True]
    assert out["num_tokens"] == 2
    assert_ratios(out, math.exp(SHIFT))
    with pytest.raises(ValueError, match=r"'response'\) must have the length of the tokens: sequence 0 has 1 values"):
        PolicyLoss(policy_model, masking_strategy="rlhf")(data)  # which trains on token 1 too


@pytest.mark.parametrize("strategy", ["rlhf", "generic"])
def test_nan_after_the_first_score_is_an_error(policy_model, strategy):
    """Also in a sequence of only NaN, whose response was not scored."""
    rows = [[math.nan, math.nan, -1.0, math.nan, -1.0], [math.nan] * 4]
    for row, position in ((0, 3), (1, 2)):
        data = without_prompt_scores(policy_model, "lazy", math.nan)
        data[row]["log_probs", "full"][:] = torch.tensor(rows[row])
        loss = PolicyLoss(policy_model, masking_strategy=strategy)
        with pytest.raises(ValueError, match=f"nan at sequence {row}, position {position}"):
            warned(lambda: loss(data), NO_SCORES)  # noqa: B023


@pytest.mark.parametrize("filled_in", [0.0, math.nan])
@pytest.mark.parametrize(
    ("layout", "settings"), [("padded", {"scope": "full"}), ("lazy", {"assistant_only": False}), ("padded", {})]
)
def test_the_kl_of_prompts_without_scores_is_0(policy_model, ref_model, layout, settings, filled_in):
    data = without_prompt_scores(policy_model, layout, filled_in)
    transform = KLRewardTransform(ref_model, **settings)
    own = [plain_log_probs(policy_model, row) for row in WHOLE]
    if layout == "lazy":  # a response may begin with a token that is certain
        own[1][1] = data[1]["log_probs", "full"][1] = 0.0
    out, found = warned(lambda: transform(data), NO_SCORES)
    assert ["the first 2 tokens of prompts" in text for text in found] == [True] * bool(settings)
    kl = [gen - plain_log_probs(ref_model, row) for gen, row in zip(own, WHOLE, strict=True)]
    want = [row[len(prompt) :, None] for row, prompt in zip(kl, PROMPTS, strict=True)]
    assert_near(at_responses(out, "kl_penalty", PROMPTS, RESPONSES), want, **FORWARD)
