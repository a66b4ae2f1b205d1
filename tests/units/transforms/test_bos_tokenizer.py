"""Rollouts with a tokenizer that adds BOS. torchrl's wrapper would pad prompts with BOS and store it as tokens."""

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near
from torchrl_llm_kl import RetrieveKL, RetrieveLogProb, make_algorithm
from toy_models import FORWARD
from toy_rollouts import flat, make_env, make_model, make_policy, plain_log_probs, steps
from toy_tokenizer import build_bos_tokenizer

WRAPPED = pytest.mark.parametrize("pad_output", [True, False], ids=["padded", "nested"])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_bos_tokenizer()


@pytest.fixture(scope="module")
def models(tokenizer: Any) -> list[Any]:
    made = [make_model(tokenizer, seed) for seed in (0, 1)]
    for model in made:
        model.config.bos_token_id = tokenizer.bos_token_id
    return made


def check(batch: TensorDictBase, model: Any, tokenizer: Any, key: Any) -> int:
    """Compare each response with a plain forward over its own prompt. Returns the number of different prompt lengths."""
    lengths = set()
    for step in steps(batch):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": step["query"]}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        response = step["tokens", "response"]
        response = response[response != tokenizer.pad_token_id]
        want = plain_log_probs(model, torch.cat([response.new_tensor(prompt), response]))[len(prompt) :]
        got = step[key][step[key] != 0]
        assert_near(got, want, **FORWARD)
        lengths.add(len(prompt))
    return len(lengths)


@WRAPPED
def test_a_collector_pads_with_the_padding_token(tokenizer: Any, models: list[Any], pad_output: bool) -> None:
    """The transform repairs the collector's policy before its first answer."""
    policy = make_policy(models[0], tokenizer, pad_output=pad_output)
    assert policy.padding_value == tokenizer.bos_token_id, "torchrl pads with the padding token: remove the repair"
    env = make_env(tokenizer, RetrieveKL("from_collector", models[1], add_to_reward=False))
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=4)
    for batch in collector:
        assert check(batch, models[0], tokenizer, ("next", "log_probs", "full")) > 1
        assert check(batch, models[1], tokenizer, ("next", "ref_log_probs", "full")) > 1
    collector.shutdown()


@WRAPPED
def test_the_policy_of_an_algorithm_pads_with_the_padding_token(
    tokenizer: Any, models: list[Any], pad_output: bool
) -> None:
    policy = make_policy(models[0], tokenizer, pad_output=pad_output)
    grpo = make_algorithm("grpo", policy, reference=models[1], group_size=2, kl_loss_coeff=0.01)
    batch = flat(make_env(tokenizer, group=2, envs=4).rollout(1, policy))
    assert check(grpo.prepare(batch), models[1], tokenizer, ("next", "ref_log_probs", "full")) > 1
    assert bool(grpo.loss(grpo.prepare(batch)).total_loss.isfinite())


@WRAPPED
@pytest.mark.parametrize("place", ["called", "buffer"])
def test_prompts_that_were_padded_with_bos_are_refused(
    tokenizer: Any, models: list[Any], pad_output: bool, place: str
) -> None:
    """No transform could repair the wrapper before it sampled."""
    batch = flat(make_env(tokenizer, envs=4).rollout(1, make_policy(models[0], tokenizer, pad_output=pad_output)))
    transform = RetrieveLogProb(models[1])
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    buffer.append_transform(transform, invert=True)
    with pytest.raises(ValueError, match=r"policy\.padding_value = tokenizer\.pad_token_id before sampling"):
        {"called": transform, "buffer": buffer.extend}[place](batch)


def test_unknown_bos_before_a_sequence_is_named(tokenizer: Any, models: list[Any]) -> None:
    """The model has no tokenizer and does not state its BOS, so only the comparison with the prompt finds it."""
    batch = flat(make_env(tokenizer, envs=4).rollout(1, make_policy(models[0], tokenizer, pad_output=False)))
    with pytest.raises(ValueError, match=r"but with token 2\. .*policy\.padding_value"):
        RetrieveLogProb(make_model(tokenizer, seed=1))(batch)
    tokens = TensorDict(prompt=torch.tensor([[2, 264]]), full=torch.tensor([[2, 2, 264, 7]]), batch_size=[1])
    padded = TensorDict(tokens=tokens, batch_size=[1])
    with pytest.raises(
        ValueError, match=r"position 1: .*but with token 2\. torchrl's wrapper pads with .*policy\.padding_value"
    ):
        RetrieveLogProb(make_model(tokenizer, seed=1))(padded)


def test_text_gets_the_bos_that_the_tokenizer_adds(tokenizer: Any, models: list[Any]) -> None:
    """As torchrl's wrapper tokenises it. A text that begins with BOS gets no second one."""
    for prompt in ("a b", "<bos>a b"):
        batch = TensorDict(text=TensorDict(prompt=[prompt], full=[prompt + " c"]), batch_size=[1])
        out = RetrieveLogProb(models[0], tokenizer=tokenizer)(batch)
        want = plain_log_probs(models[0], torch.tensor([2, 261, 260, 262, 260, 263]))  # <bos> a _ b _ c
        want[:4] = 0
        assert_near(out["log_probs", "full"][0], want, **FORWARD)


def last_scores(models: list[Any], first: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, TensorDictBase]:
    """The scores of the last token of two rows with these beginnings, as found and as expected, and the data."""
    ids = torch.tensor([[*row, 264 + i, 266 + i] for i, row in enumerate(first)])
    batch = TensorDict.from_dict({"tokens": {"prompt": ids[:, :-1], "full": ids}}, batch_size=[2])
    want = torch.stack([plain_log_probs(models[0], row) for row in ids])[:, -1]
    return RetrieveLogProb(models[0])(batch)["log_probs", "full"][:, -1], want, batch


def test_prompts_that_all_begin_with_two_bos_are_scored(models: list[Any]) -> None:
    """A template and a tokenizer may each add one BOS. Three are padding."""
    found, want, batch = last_scores(models, [[2, 2, 264], [2, 2, 267]])
    assert_near(found, want, **FORWARD)
    batch["tokens", "full"][:, 2] = batch["tokens", "prompt"][:, 2] = 2
    with pytest.raises(ValueError, match="begins with 3 beginning-of-text tokens"):
        RetrieveLogProb(models[0])(batch)


def test_a_prompt_that_was_cut_on_the_left_lacks_bos(models: list[Any]) -> None:
    """It is scored as it is, with a warning, because a single BOS before only some prompts may be padding."""
    with pytest.warns(UserWarning, match="begins with 1 beginning-of-text tokens .id 2., and the fewest .* are 0"):
        found, want, _ = last_scores(models, [[2, 270], [271, 272]])
    assert_near(found, want, **FORWARD)


def test_an_answer_may_begin_with_bos(models: list[Any]) -> None:
    """GPT-2's BOS also ends answers, so an empty answer has one directly after the prompt's."""
    rows = [[2, 5, 6, 2], [2, 2], [2, 7, 2]]
    batch = lazy_stack(
        [TensorDict(tokens=TensorDict(prompt=torch.tensor([2]), full=torch.tensor(row))) for row in rows]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = RetrieveLogProb(models[0])(batch).get(("log_probs", "full"), as_list=True)
    for row, got in zip(rows, found, strict=True):
        assert_near(got, plain_log_probs(models[0], torch.tensor(row)), **FORWARD)


@pytest.mark.parametrize("adds", [True, False])
def test_text_follows_the_tokenizer_arguments_of_a_wrapper(tokenizer: Any, models: list[Any], adds: bool) -> None:
    """``add_special_tokens=False`` of a wrapper that only scores text leaves BOS out, as in torchrl's own forward."""
    given = {"add_special_tokens": adds}
    wrapper = TransformersWrapper(
        models[0], tokenizer=tokenizer, input_mode="text", generate=False, tokenizer_kwargs=given, return_log_probs=True
    )
    batch = TensorDict(text=TensorDict(prompt=["a b"], full=["a b c"]), batch_size=[1])
    found = RetrieveLogProb(wrapper)(batch)["log_probs", "full"][0]
    ids = [2, 261, 260, 262, 260, 263] if adds else [261, 260, 262, 260, 263]  # <bos> a _ b _ c
    want = plain_log_probs(models[0], torch.tensor(ids))
    want[: 3 + adds] = 0
    assert_near(found, want, **FORWARD)
