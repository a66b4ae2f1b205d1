"""What fails in torchrl 0.14.1's KL transforms, row by row of the list of defects, works here.

Defects 5, 9 and 25 to 27 are those of places where a transform runs: test_places.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from closeness import assert_near
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import BACKWARD, FORWARD, tiny_model
from toy_rollouts import (
    collect,
    make_env,
    make_policy,
    make_scoring_wrapper,
    plain_log_probs,
    response_log_probs,
    steps,
)
from toy_tokenizer import CHATML, build_tokenizer

CHATS = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a longer answer"}],
]


def history_data(chats: list[Any] = CHATS) -> TensorDictBase:
    return TensorDict(
        history=ChatHistory(full=History.from_chats(chats), batch_size=len(chats)), batch_size=[len(chats)]
    )


def test_defect_06_sits_in_an_env_and_declares_its_log_probs(tokenizer: Any, ref: Any, policy: Any) -> None:
    env = make_env(tokenizer, RetrieveLogProb(ref))
    assert env.full_observation_spec["ref_log_probs", "full"].shape == (2, -1)
    assert env.full_observation_spec.get("kl_penalty", None) is None
    assert env.rollout(1, policy).shape == (2, 1)


def test_defect_07c_an_outcome_of_one_sums_to_one(tokenizer: Any, gen: Any, policy: Any) -> None:
    transform = RetrieveKL(gen, make_scoring_wrapper(gen.model, tokenizer, pad_output=False, log_probs_key="ref"))
    for step in collect(tokenizer, policy, transform)[0].unbind(0):
        assert step["next", "reward"].sum() == 1.0
        assert step["next", "reward"][-1] == 1.0


def test_defect_07d_turn_two_does_not_charge_turn_one(tokenizer: Any, gen: Any, ref: Any, policy: Any) -> None:
    _, second = collect(tokenizer, policy, RetrieveKL(gen, ref), turns=2)[0].unbind(0)
    kl, prompt = second["next", "kl_penalty"], len(second["tokens", "prompt"])
    assert (kl[:prompt] == 0).all()
    assert (kl[prompt:] != 0).all()


def test_defect_07e_results_are_detached_and_num_samples_works(
    tokenizer: Any, gen: Any, ref: Any, policy_model: Any
) -> None:
    sampler = make_policy(policy_model, tokenizer, pad_output=False, num_samples=2)
    data = sampler(make_env(tokenizer).reset())
    assert data.shape == (2, 2)
    result = RetrieveKL(gen, ref)(data)
    for step in steps(result):
        want = response_log_probs(policy_model, step) - response_log_probs(ref.model, step)
        assert_near(step["kl_penalty"], want, **FORWARD)
        assert not step["kl_penalty"].requires_grad


def test_defect_08_the_sampled_tokens_are_scored(tokenizer: Any, ref_model: Any, policy: Any) -> None:
    """The rollout's history renders to other tokens (a newline after the end token): the sampled ones count."""
    ref = make_scoring_wrapper(
        ref_model, tokenizer, pad_output=False, input_mode="history", log_probs_key="ref_log_probs"
    )
    for step in steps(collect(tokenizer, policy, RetrieveLogProb(ref))):
        rendered = step["history"].full.apply_chat_template(
            tokenizer=tokenizer, chat_template=CHATML, tokenize=True, return_dict=True, add_generation_prompt=False
        )
        assert rendered["input_ids"].shape != step["tokens", "full"].shape
        assert_near(step["next", "ref_log_probs", "full"], response_log_probs(ref_model, step), **FORWARD)


def test_defect_13_different_tokens_under_the_two_models(policy_model: Any, ref_model: Any) -> None:
    first = build_tokenizer(CHATML, pad_token="<|pad|>")
    other = build_tokenizer(CHATML.replace("'\n' + message", "' ' + message"), pad_token="<|pad|>")
    models = [
        make_scoring_wrapper(model, tok, pad_output=False, input_mode="history", log_probs_key=key)
        for model, tok, key in ((policy_model, first, "log_probs"), (ref_model, other, "ref_log_probs"))
    ]
    data = history_data()
    with pytest.raises(ValueError, match=r"different tokens, first at sequence 0, position 5: .*same tokenizer"):
        RetrieveKL(*models)(data)
    assert data.get("kl_penalty", None) is None


@pytest.mark.parametrize(
    ("reward", "assistant_only"), [(None, True), ((2,), False), ((2, 1), True), ((2, 1, 1), False)]
)
def test_defect_14_kl_reward_transform_without_an_env(
    reward: Any, assistant_only: bool, tokenizer: Any, gen: Any, ref: Any, policy: Any
) -> None:
    data = collect(tokenizer, policy, RetrieveLogProb(gen, assistant_only=assistant_only))[:, 0]
    if reward is None:
        data["next"].del_("reward")
    else:
        data["next", "reward"] = torch.ones(reward)
    result = KLRewardTransform(ref, coef=0.5, assistant_only=assistant_only)(data)
    for step in steps(result):
        ids, prompt = step["tokens", "full"], len(step["tokens", "prompt"])
        kl = plain_log_probs(gen.model, ids) - plain_log_probs(ref.model, ids)
        kl[: prompt if assistant_only else 1] = 0
        assert_near(step["next", "kl_penalty"][:, 0], kl, **FORWARD)
        want = -0.5 * kl
        want[-1] += 0.0 if reward is None else 1.0
        assert_near(step["next", "reward"][:, 0], want, **FORWARD)


def test_defect_14_ragged_masks_and_rewards(tokenizer: Any, gen: Any, ref: Any, policy: Any) -> None:
    data = collect(tokenizer, policy, RetrieveLogProb(gen))[:, 0]
    for step in steps(data):
        mask = torch.zeros_like(step["tokens", "full"], dtype=torch.bool)
        mask[-2:] = True
        step["masks", "all_assistant_mask"] = mask
        step["next", "reward"] = torch.arange(float(len(mask))).unsqueeze(-1)
    for step in steps(KLRewardTransform(ref)(data)):
        kl = (response_log_probs(gen.model, step) - response_log_probs(ref.model, step)).unsqueeze(-1)
        kl[:-2] = 0
        assert_near(step["next", "kl_penalty"], kl, **FORWARD)
        assert_near(step["next", "reward"], torch.arange(float(len(kl))).unsqueeze(-1) - kl, **FORWARD)


def test_defect_15_an_error_loses_nothing(tokenizer: Any, ref: Any, policy: Any) -> None:
    data = collect(tokenizer, policy)[:, 0]
    data = data.exclude(("log_probs", "response"))
    with pytest.raises(KeyError, match="policy's log-probs are missing"):
        KLRewardTransform(ref)(data)
    assert data["next", "reward"].shape == (2, 1)


def test_defect_28_no_batch_and_the_layout_of_the_input() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    want = torch.tensor([0.5, -1.0, 0.0])

    def data(convert: Any, batch: list[int]) -> TensorDict:
        return TensorDict(
            {("log_probs", "full"): convert(log_probs[0]), ("ref_log_probs", "full"): convert(log_probs[1])}, batch
        )

    transform = KLComputation(add_to_reward=False)
    assert_close(transform(data(lambda t: t, []))["kl_penalty"], want)
    dense = transform(data(lambda t: t[None], [1]))["kl_penalty"]
    assert not dense.is_nested
    assert_close(dense, want[None])
    for layout in (torch.strided, torch.jagged):
        nested = transform(data(lambda t, layout=layout: torch.nested.as_nested_tensor([t], layout=layout), [1]))[
            "kl_penalty"
        ]
        assert nested.layout == layout
        assert_close(nested.unbind()[0], want)


@pytest.mark.parametrize("padded", [True], indirect=True)
def test_defect_29_detach_decides_about_the_graph(
    tokenizer: Any, wrapped: Any, policy_model: Any, padded: bool
) -> None:
    """Attached, the policy has the gradient of a plain forward; the reference never has one."""
    data = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=padded))
    weight, want = policy_model.get_output_embeddings().weight, 0.0
    for step in steps(data):
        ids = step["tokens", "full"][step["masks", "all_attention_mask"]]
        response = int(step["masks", "all_attention_mask"][len(step["tokens", "prompt"]) :].sum())
        log_probs = policy_model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        want = want + log_probs[:-1].gather(-1, ids[1:, None])[-response:].sum()
    attached = RetrieveKL(*wrapped(padded), detach=False)(data.copy())
    total = sum(step["next", "log_probs", "full"].sum() for step in steps(attached))
    (found,), (expected,) = (torch.autograd.grad(value, weight, retain_graph=True) for value in (total, want))
    assert_near(found, expected, **BACKWARD)
    for step in steps(attached):
        assert step["next", "kl_penalty"].requires_grad
        assert not step["next", "ref_log_probs", "full"].requires_grad
    for step in steps(RetrieveKL(*wrapped(padded), detach=True)(data)):
        assert not any(v.requires_grad for v in step["next"].values(True, True) if isinstance(v, torch.Tensor))


class TestDefect30EveryArgumentHasAnEffect:
    """``tokenizer``, ``tokenizer_kwargs``, ``history_key`` and ``padding_side``, where text must be tokenised."""

    def score(
        self, model: Any, own_tokenizer: Any, data: TensorDictBase, *, padded: bool = False, **kwargs: Any
    ) -> Any:
        wrapper = make_scoring_wrapper(model, own_tokenizer, pad_output=padded, input_mode="history")
        return RetrieveLogProb(wrapper, **kwargs)(data).get(("log_probs", "full"), as_list=True)

    def test_tokenizer(self, tokenizer: Any, ref_model: Any) -> None:
        longer = build_tokenizer(CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>' + '\n\n'"), pad_token="<|pad|>")
        own = self.score(ref_model, tokenizer, history_data())
        other = self.score(ref_model, tokenizer, history_data(), tokenizer=longer)
        assert [len(b) - len(a) for a, b in zip(own, other, strict=True)] == [2, 2]

    def test_tokenizer_kwargs_are_used_and_never_changed(self, tokenizer: Any, ref_model: Any) -> None:
        kwargs = {"chat_template": CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>'")}
        before = dict(kwargs)
        own = self.score(ref_model, tokenizer, history_data())
        other = self.score(ref_model, tokenizer, history_data(), tokenizer_kwargs=kwargs)
        assert [len(b) - len(a) for a, b in zip(own, other, strict=True)] == [-2, -2]
        assert kwargs == before

    def test_history_key(self, tokenizer: Any, ref_model: Any) -> None:
        data = history_data()
        want = self.score(ref_model, tokenizer, data.copy())
        moved = data.rename_key_("history", "chat")
        found = self.score(ref_model, tokenizer, moved, history_key="chat")
        assert_near(found, want, **FORWARD)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_side(self, side: str, tokenizer: Any, ref_model: Any) -> None:
        nested = self.score(ref_model, tokenizer, history_data())
        found = self.score(ref_model, tokenizer, history_data(), padded=True, padding_side=side)
        short, width = len(nested[0]), found.shape[1]
        assert_near(found[0, -short:] if side == "left" else found[0, :short], nested[0], **FORWARD)
        assert (found[0, : width - short] if side == "left" else found[0, short:]).abs().sum() == 0


def test_defect_31_the_missing_key_error_names_the_keys() -> None:
    data = TensorDict({("log_probs", "full"): torch.zeros(1, 2)}, [1])
    with pytest.raises(ValueError, match=r"Log-probs not found\. Expected keys: .*'ref_log_probs'.*Found: .*log_probs"):
        KLComputation()(data)


def test_defect_31_a_lora_policy_is_its_own_reference(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", seed=3, vocab_size=len(tokenizer), max_position_embeddings=512)
    before = copy.deepcopy(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    ).eval()
    policy = make_policy(model, tokenizer, pad_output=False)
    collector = LLMCollector(
        make_env(tokenizer, RetrieveKL("from_collector", "base")),
        policy=policy,
        dialog_turns_per_batch=2,
        total_dialog_turns=2,
    )
    (batch,) = list(collector)
    collector.shutdown()
    for step in steps(batch):
        want = response_log_probs(model, step) - response_log_probs(before, step)
        assert want.abs().max() > 0.05
        assert_near(step["next", "kl_penalty"], want, **FORWARD)


def test_defect_32_the_first_generated_token_has_a_log_prob(tokenizer: Any, gen: Any, policy: Any) -> None:
    for step in steps(collect(tokenizer, policy, RetrieveLogProb(gen))):
        assert step["log_probs", "response"][0] == 0, "as torchrl stores it"
        assert step["next", "log_probs", "full"][len(step["tokens", "prompt"])] < 0


def test_defect_32_a_stored_zero_is_not_charged(tokenizer: Any, ref: Any, policy: Any) -> None:
    """The legacy class on log-probs stored by torchrl's generation: it leaves the first token out, with a warning."""
    data = collect(tokenizer, policy)
    with pytest.warns(UserWarning, match=r"exactly 0 for the first generated token of 2 sequences.*RetrieveKL"):
        result = KLRewardTransform(ref)(data)
    for step in steps(result):
        prompt = len(step["tokens", "prompt"])
        kl = step["next", "kl_penalty"][:, 0]
        want = step["log_probs", "response"] - response_log_probs(ref.model, step)[prompt:]
        assert kl[prompt] == 0
        assert_near(kl[prompt + 1 :], want[1:], **FORWARD)


def test_defect_34_a_padding_token_that_ends_turns_is_scored(tokenizer: Any, ref_model: Any) -> None:
    """pad == eos: the mask marks the end token as sampled, whatever its id."""
    eos = tokenizer.eos_token_id
    tokens = torch.tensor([[eos, 5, 6, 7, eos], [4, 5, 6, eos, eos]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]], dtype=torch.bool)
    data = TensorDict(
        {("tokens", "full"): tokens, ("tokens", "prompt"): tokens[:, :3], ("masks", "all_attention_mask"): attention},
        [2],
    )
    found = RetrieveLogProb(make_scoring_wrapper(ref_model, tokenizer, pad_output=True))(data)["log_probs", "full"]
    want = torch.zeros(2, 5)
    want[0, 3:] = plain_log_probs(ref_model, tokens[0, 1:])[2:]
    want[1, 3] = plain_log_probs(ref_model, tokens[1, :4])[3]
    assert_near(found, want, **FORWARD)


def test_defect_known_dense_reward_with_nested_kl() -> None:
    nested = [torch.nested.as_nested_tensor([torch.full((n,), -v) for n in (2, 3)]) for v in (1.0, 1.5)]
    data = TensorDict(
        {
            ("log_probs", "full"): nested[0],
            ("ref_log_probs", "full"): nested[1],
            "reward": torch.tensor([[[1.0]], [[2.0]]]),
        },
        [2],
    )
    first, second = KLComputation()(data)["reward"].unbind()
    assert_close(first, torch.tensor([[-0.5], [0.5]]))
    assert_close(second, torch.tensor([[-0.5], [-0.5], [1.5]]))
