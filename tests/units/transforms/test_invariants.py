"""What must hold whatever the numbers are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch.testing import assert_close

from closeness import assert_near
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD
from toy_rollouts import OUTCOMES, collect, make_policy, make_scoring_wrapper, response_log_probs, steps


def retrieve_kl(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool, **kwargs: Any) -> RetrieveKL:
    return RetrieveKL(
        make_scoring_wrapper(policy_model, tokenizer, pad_output=padded, log_probs_key="log_probs"),
        make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs"),
        **kwargs,
    )


def assistant_tokens(step: TensorDictBase) -> int:
    return int(step["masks", "all_attention_mask"][len(step["tokens", "prompt"]) :].sum())


def test_each_assistant_token_is_charged_once_in_an_episode(
    tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    transform = retrieve_kl(tokenizer, policy_model, ref_model, padded)
    rollout = collect(tokenizer, policy, transform, envs=3, turns=3)
    for episode in rollout.unbind(0):
        charged = sum(int((step["next", "kl_penalty"] != 0).sum()) for step in episode.unbind(0))
        assert charged == sum(assistant_tokens(step) for step in episode.unbind(0)) > 0


def test_scope_full_charges_earlier_turns_again(
    tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    """By hand: turn 2 of an episode charges the content and the end token of turn 1 as in its own prompt."""
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    rollout = collect(
        tokenizer, policy, retrieve_kl(tokenizer, policy_model, ref_model, padded, scope="full"), envs=2, turns=2
    )
    opening, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.eos_token_id
    for episode in rollout.unbind(0):
        _, second = episode.unbind(0)
        ids, attention = second["tokens", "full"], second["masks", "all_attention_mask"]
        real = ids[attention].tolist()
        starts = [i + len(opening) for i in range(len(real)) if real[i : i + len(opening)] == opening]
        first_turn = range(starts[0], real.index(end, starts[0]) + 1)
        want = torch.zeros(len(real), dtype=torch.bool)
        want[list(first_turn)] = True
        want[starts[1] :] = True
        assert_close((second["next", "kl_penalty"][attention] != 0), want)


@pytest.mark.parametrize("placement", ["last", "broadcast"])
def test_summed_token_reward(placement: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    transform = retrieve_kl(tokenizer, policy_model, ref_model, padded, coeff=0.7, reward_placement=placement)
    for i, episode in enumerate(collect(tokenizer, policy, transform, envs=3, turns=2).unbind(0)):
        for step in episode.unbind(0):
            tokens = int(step["masks", "all_attention_mask"].sum()) if placement == "broadcast" else 1
            want = OUTCOMES[i] * tokens - 0.7 * step["next", "kl_penalty"].sum()
            assert_close(step["next", "reward"].sum(), want)


def test_kl_of_a_model_with_itself_is_exactly_zero(tokenizer: Any, policy_model: Any, padded: bool) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    rollout = collect(tokenizer, policy, retrieve_kl(tokenizer, policy_model, policy_model, padded), envs=3, turns=2)
    for step in steps(rollout):
        assert (step["next", "kl_penalty"] == 0).all()
        assert (step["next", "log_probs", "full"] != 0).any()


def test_padded_and_nested_agree(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """One set of samples, padded and cut to their lengths."""
    padded = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=True), envs=3)
    nested = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False), envs=3)
    for data, is_padded in ((padded, True), (nested, False)):
        retrieve_kl(tokenizer, policy_model, ref_model, is_padded)(data)
    for a, b in zip(steps(padded), steps(nested), strict=True):
        real = a["masks", "all_attention_mask"]
        assert_close(a["tokens", "full"][real], b["tokens", "full"])
        assert_near(a["next", "kl_penalty"][real], b["next", "kl_penalty"], **FORWARD)
        assert_near(a["next", "reward"][real], b["next", "reward"], **FORWARD)


def test_the_policy_and_the_arguments_are_untouched(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    wrapper = make_scoring_wrapper(policy_model, tokenizer, pad_output=False, log_probs_key="log_probs")
    before = {k: v for k, v in vars(wrapper).items() if not k.startswith("_")}
    copies = {k: v.copy() for k, v in before.items() if isinstance(v, (dict, list))}
    weights = {k: v.clone() for k, v in policy_model.state_dict().items()}
    kwargs = {"padding": False}
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
    transform = RetrieveKL(wrapper, ref, tokenizer_kwargs=kwargs)
    transform(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False)))
    assert kwargs == {"padding": False}
    assert all(vars(wrapper)[k] is v for k, v in before.items())
    assert all(vars(wrapper)[k] == v for k, v in copies.items())
    assert all(torch.equal(v, weights[k]) for k, v in policy_model.state_dict().items())


def test_detach_decides_about_the_graph(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    data = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=padded), envs=2)
    attached = retrieve_kl(tokenizer, policy_model, ref_model, padded, detach=False)(data.copy())
    total = sum(step["next", "log_probs", "full"].sum() for step in steps(attached))
    (grad,) = torch.autograd.grad(total, policy_model.get_output_embeddings().weight)
    want = torch.zeros_like(grad)
    for step in steps(data):
        ids = step["tokens", "full"][step["masks", "all_attention_mask"]]
        response = assistant_tokens(step)
        log_probs = policy_model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        picked = log_probs[:-1].gather(-1, ids[1:, None])[-response:].sum()
        want += torch.autograd.grad(picked, policy_model.get_output_embeddings().weight)[0]
    assert_close(grad, want, atol=1e-4, rtol=1e-4)
    detached = retrieve_kl(tokenizer, policy_model, ref_model, padded)(data)
    for step in steps(detached):
        assert not any(v.requires_grad for v in step["next"].values(True, True) if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_holds_for_both_models(
    temperature: float, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    data = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=padded), envs=2)
    retrieve_kl(tokenizer, policy_model, ref_model, padded, temperature=temperature)(data)
    for step in steps(data):
        attention = step["masks", "all_attention_mask"]
        ids, prompt = step["tokens", "full"][attention], int(attention[: len(step["tokens", "prompt"])].sum())
        for model, key in ((policy_model, "log_probs"), (ref_model, "ref_log_probs")):
            with torch.no_grad():
                log_probs = (model(input_ids=ids[None]).logits[0].float() / temperature).log_softmax(-1)
            want = log_probs[:-1].gather(-1, ids[1:, None])[prompt - 1 :, 0]
            assert_near(step["next", key, "full"][attention][prompt:], want, **FORWARD)


def test_a_transform_survives_a_state_dict_and_a_copy(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    import copy

    data = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False), envs=2)
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
    first = RetrieveLogProb(ref)
    again = copy.deepcopy(first)
    again.load_state_dict(first.state_dict())
    first(data)
    want = [step["next", "ref_log_probs", "full"].clone() for step in steps(data)]
    again(data)
    for step, value in zip(steps(data), want, strict=True):
        assert_close(step["next", "ref_log_probs", "full"], value)
        assert_near(value, response_log_probs(ref_model, step), **FORWARD)


def test_coefficient_is_a_buffer_of_the_legacy_class(tokenizer: Any, ref_model: Any) -> None:
    transform = KLRewardTransform(make_scoring_wrapper(ref_model, tokenizer, pad_output=False), coef=0.25)
    assert float(transform.coef()) == 0.25
    assert any(name.startswith("coef") for name in transform.state_dict())
