"""Defects of torchrl 0.14.1's KL transforms that do not occur here, by their numbers, and other silent errors.

Other files: test_places.py has 5, 7d, 9 and 25 to 27, test_declared.py has 6 and 7a to 7c, test_bad_input.py has 13, 15 and 37.
"""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase

from closeness import assert_near
from group_rollouts import scored
from template_pairs import assistant, user
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import BACKWARD, FORWARD, with_lora
from toy_rollouts import flat, histories, make_model, make_policy, plain_log_probs, response_log_probs, steps
from toy_tokenizer import CHATML, build_tokenizer

FULL = ("log_probs", "full")


def assert_response(found: torch.Tensor, model: Any, step: TensorDictBase) -> None:
    assert_near(found, response_log_probs(model, step), **FORWARD)


def test_defect_07e_results_are_detached_and_num_samples_works(lab: Any) -> None:
    gen, ref = lab.wrapped()
    data = lab.policy(num_samples=2)(lab.env().reset())
    assert data.shape == (2, 2)
    for step in steps(RetrieveKL(gen, ref)(data)):
        want = response_log_probs(gen.model, step) - response_log_probs(ref.model, step)
        assert_near(step["kl_penalty"], want, **FORWARD)
        assert not step["kl_penalty"].requires_grad


def test_defect_08_the_sampled_tokens_are_scored(lab: Any) -> None:
    """The rollout's history renders to other tokens, with a newline after the end token. The sampled ones are scored."""
    how = {"tokenizer": lab.tokenizer, "chat_template": CHATML, "tokenize": True, "return_dict": True}
    for step in steps(lab.collect(RetrieveLogProb(lab.wrapped(input_mode="history")[1]))):
        rendered = step["history"].full.apply_chat_template(**how, add_generation_prompt=False)
        assert rendered["input_ids"].shape != step["tokens", "full"].shape
        assert_response(step["next", "ref_log_probs", "full"], lab.ref_model, step)


@pytest.mark.parametrize("reward", [None, (2,), (2, 1), (2, 1, 1)])
def test_defect_14_kl_reward_transform_without_an_env(lab: Any, reward: Any) -> None:
    (gen, ref), assistant_only = lab.wrapped(), reward in (None, (2, 1))
    data = lab.collect(RetrieveLogProb(gen, assistant_only=assistant_only))[:, 0]
    data["next"].del_("reward")
    if reward is not None:
        data["next", "reward"] = torch.ones(reward)
    for step in steps(KLRewardTransform(ref, coef=0.5, assistant_only=assistant_only)(data)):
        ids, prompt = step["tokens", "full"], len(step["tokens", "prompt"])
        kl = plain_log_probs(gen.model, ids) - plain_log_probs(ref.model, ids)
        kl[: prompt if assistant_only else 1] = 0
        assert_near(step["next", "kl_penalty"][:, 0], kl, **FORWARD)
        want = -0.5 * kl
        want[-1] += 0.0 if reward is None else 1.0
        assert_near(step["next", "reward"][:, 0], want, **FORWARD)


def test_defect_14_ragged_masks_and_rewards(lab: Any) -> None:
    gen, ref = lab.wrapped()
    data = lab.collect(RetrieveLogProb(gen))[:, 0]
    for step in steps(data):
        at = torch.arange(len(step["tokens", "full"]))
        step["masks", "all_assistant_mask"], step["next", "reward"] = at >= len(at) - 2, at.float().unsqueeze(-1)
    for step in steps(KLRewardTransform(ref)(data)):
        kl = (response_log_probs(gen.model, step) - response_log_probs(ref.model, step)).unsqueeze(-1)
        kl[:-2] = 0
        assert_near(step["next", "kl_penalty"], kl, **FORWARD)
        assert_near(step["next", "reward"], torch.arange(float(len(kl))).unsqueeze(-1) - kl, **FORWARD)


def test_defect_29_detach_decides_about_the_graph(lab: Any) -> None:
    """With ``detach=False`` the policy has the gradient of a plain forward. The reference never has one."""
    data, policy_model = lab.collect(pad_output=True), lab.gen_model
    want = sum(row.sum() for row in scored(policy_model, data))
    attached = RetrieveKL(*lab.wrapped(True), detach=False)(data.copy())
    total = sum(step["next", "log_probs", "full"].sum() for step in steps(attached))
    weight = policy_model.get_output_embeddings().weight
    (found,), (expected,) = (torch.autograd.grad(value, weight, retain_graph=True) for value in (total, want))
    assert_near(found, expected, **BACKWARD)
    for step in steps(attached):
        assert step["next", "kl_penalty"].requires_grad
        assert not step["next", "ref_log_probs", "full"].requires_grad
    for step in steps(RetrieveKL(*lab.wrapped(True), detach=True)(data)):
        assert not any(v.requires_grad for v in step["next"].values(True, True) if isinstance(v, torch.Tensor))


CHATS = [[user("hi"), assistant("hello")], [user("what is it?"), assistant("a longer answer")]]


def test_defect_30_every_argument_has_an_effect(lab: Any) -> None:
    """``tokenizer``, ``tokenizer_kwargs``, ``history_key`` and ``padding_side`` for data without tokens."""

    def score(*, padded: bool = False, name: str = "history", kind: Any = RetrieveLogProb, **kwargs: Any) -> Any:
        wrappers = lab.wrapped(padded, input_mode="history")
        data = histories(full=CHATS).rename_key_("history", name)
        return kind(*wrappers[: 1 + (kind is RetrieveKL)], **kwargs)(data).get(FULL, as_list=True)

    own, end = score(), "'<|im_end|>' + '\n'"
    longer = build_tokenizer(CHATML.replace(end, "'<|im_end|>' + '\n\n'"), pad_token="<|pad|>")
    assert [len(row) for row in score(tokenizer=longer)] == [len(row) + 2 for row in own]
    kwargs = {"chat_template": CHATML.replace(end, "'<|im_end|>'")}
    before = dict(kwargs)
    assert [len(row) for row in score(tokenizer_kwargs=kwargs)] == [len(row) - 2 for row in own]
    assert kwargs == before
    assert_near(score(name="chat", history_key="chat", kind=RetrieveKL), own, **FORWARD)
    for side in ("left", "right"):
        found, short = score(padded=True, padding_side=side)[0], len(own[0])
        scores, padding = (found[-short:], found[:-short]) if side == "left" else (found[:short], found[short:])
        assert_near(scores, own[0], **FORWARD)
        assert not padding.any()


def first_steps(lab: Any, model: Any, env: EnvBase) -> list[TensorDictBase]:
    """The steps of a collector with this policy."""
    (batch,) = lab.batches(env, policy=make_policy(model, lab.tokenizer, pad_output=False))
    return list(steps(batch))


def test_defect_31_a_lora_policy_is_its_own_reference(lab: Any) -> None:
    base = make_model(lab.tokenizer, seed=3)
    before, model = copy.deepcopy(base), with_lora(base)
    for step in first_steps(lab, model, lab.env(RetrieveKL("from_collector", "base"))):
        want = response_log_probs(model, step) - response_log_probs(before, step)
        assert want.abs().max() > 0.05
        assert_near(step["next", "kl_penalty"], want, **FORWARD)


def test_defect_32_a_stored_zero_is_not_charged(lab: Any) -> None:
    """torchrl stores 0 for the first generated token. ``KLRewardTransform`` leaves it out, with a warning."""
    buffer = ReplayBuffer(storage=LazyStackStorage(2), batch_size=2)
    buffer.append_transform(KLRewardTransform(lab.wrapped()[1]), invert=True)
    for score in (KLRewardTransform(lab.wrapped()[1]), lambda data: buffer[buffer.extend(data)]):
        with pytest.warns(UserWarning, match=r"exactly 0 for the first generated token of 2 sequences.*RetrieveKL"):
            result = score(flat(lab.collect()))
        for step in steps(result):
            prompt = len(step["tokens", "prompt"])
            kl = step["next", "kl_penalty"][:, 0]
            want = step["log_probs", "response"] - response_log_probs(lab.ref_model, step)[prompt:]
            assert kl[prompt] == 0
            assert_near(kl[prompt + 1 :], want[1:], **FORWARD)


def test_defect_34_a_padding_token_that_ends_turns_is_scored(lab: Any, ref_model: Any) -> None:
    """If pad == eos, the mask decides whether the end token was sampled."""
    eos = lab.tokenizer.eos_token_id
    full = torch.tensor([[eos, 5, 6, 7, eos], [4, 5, 6, eos, eos]])
    data = TensorDict({("tokens", "full"): full, ("tokens", "prompt"): full[:, :3]}, [2])
    data["masks", "all_attention_mask"] = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    found = RetrieveLogProb(lab.wrapped(True)[1])(data)["ref_log_probs", "full"]
    want = torch.zeros(2, 5)
    want[0, 3:] = plain_log_probs(ref_model, full[0, 1:])[2:]
    want[1, 3] = plain_log_probs(ref_model, full[1, :4])[3]
    assert_near(found, want, **FORWARD)


@pytest.mark.parametrize("repetitive", [False, True])
def test_a_prompt_without_padding_beside_a_padded_sequence(repetitive: bool, ref_model: Any) -> None:
    """A prompt of three tokens, and a sequence with six pads before it."""
    real = torch.full((9,), 7) if repetitive else torch.arange(10, 19)
    full = torch.cat([torch.zeros(6, dtype=torch.long), real])[None]
    data = TensorDict({("tokens", "full"): full, ("tokens", "prompt"): real[None, :3]}, [1])
    data["masks", "all_attention_mask"] = torch.arange(15)[None] >= 6
    found = RetrieveLogProb(ref_model)(data)[FULL][0]
    assert (found != 0).tolist() == [False] * 9 + [True] * 6
    assert_near(found[9:], plain_log_probs(ref_model, real)[3:], **FORWARD)


def test_a_second_collector_brings_its_own_policy(lab: Any) -> None:
    env = lab.env(RetrieveKL("from_collector", lab.ref_model))
    for model in (make_model(lab.tokenizer, seed=seed) for seed in (0, 5)):
        for step in first_steps(lab, model, env):
            assert_response(step["next", "log_probs", "full"], model, step)


def test_a_wrappers_model_that_changes_is_the_one_that_is_scored(lab: Any) -> None:
    ref = lab.wrapped()[1]
    transform = RetrieveLogProb(ref)
    ref.model = lab.gen_model
    for step in steps(transform(lab.collect())):
        assert_response(step["next", "ref_log_probs", "full"], lab.gen_model, step)


def test_a_locked_stack_is_not_written(lab: Any) -> None:
    with pytest.raises(RuntimeError, match="locked"):
        RetrieveLogProb(lab.ref_model)(flat(lab.collect()).lock_())
