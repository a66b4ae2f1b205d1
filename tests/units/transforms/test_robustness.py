"""Situations in which a score could go wrong without anyone noticing, and what must hold whatever the numbers are."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD, tiny_model
from toy_rollouts import (
    collect,
    flat,
    make_env,
    make_model,
    make_policy,
    make_scoring_wrapper,
    plain_log_probs,
    response_log_probs,
    steps,
)
from toy_tokenizer import CHATML, build_tokenizer

GROUP = [torch.cat([torch.arange(30), torch.tensor(tail)]) for tail in ([40, 41, 42], [50, 51], [60, 61, 62, 63])]


def check_group(scorer: LogProbScorer, model: Any) -> None:
    for row, found in zip(GROUP, scorer.score(Ragged.from_list(GROUP)).to_list(), strict=True):
        assert_near(found, plain_log_probs(model, row), **FORWARD)


def test_a_policy_in_training_with_gradient_checkpointing() -> None:
    """transformers drops keys and values there: shared prefixes would be lost."""
    model = tiny_model("llama")
    scorer = LogProbScorer(model)
    model.gradient_checkpointing_enable()
    model.train()
    found = scorer.score(Ragged.from_list(GROUP)).to_list()
    assert model.training
    model.eval()
    for row, log_probs in zip(GROUP, found, strict=True):
        assert_near(log_probs, plain_log_probs(model, row), **FORWARD)


def test_kl_with_itself_is_zero_in_training_mode_with_dropout(tokenizer: Any) -> None:
    model = make_model(tokenizer, seed=0, family="gpt2", resid_pdrop=0.3)
    data = collect(tokenizer, make_policy(model, tokenizer, pad_output=False))
    model.train()
    for step in steps(RetrieveKL(model, model)(data)):
        assert (step["next", "kl_penalty"] == 0).all()
        assert (step["next", "log_probs", "full"] != 0).any()


def test_threads_with_adapters_on_and_off_take_turns() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2")
    before = copy.deepcopy(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config).eval()
    wanted = {True: [plain_log_probs(model, r) for r in GROUP], False: [plain_log_probs(before, r) for r in GROUP]}
    worst = {True: 0.0, False: 0.0}

    def run(adapters: bool) -> None:
        scorer = LogProbScorer(model, adapters=adapters)
        for _ in range(8):
            found = scorer.score(Ragged.from_list(GROUP)).to_list()
            worst[adapters] = max(
                worst[adapters], *(float((a - b).abs().max()) for a, b in zip(found, wanted[adapters], strict=True))
            )

    threads = [threading.Thread(target=run, args=(adapters,)) for adapters in (True, False, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst.values()) < 5e-5, "an adapter more or less is worth nats"
    assert_close(plain_log_probs(model, GROUP[0]), wanted[True][0])


def test_a_second_collector_brings_its_own_policy(tokenizer: Any, ref: Any) -> None:
    env = make_env(tokenizer, RetrieveKL("from_collector", ref))
    for seed in (0, 5):
        model = make_model(tokenizer, seed=seed)
        policy = make_policy(model, tokenizer, pad_output=False)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
        for step in steps(next(iter(collector))):
            assert_near(step["next", "log_probs", "full"], response_log_probs(model, step), **FORWARD)


def test_changes_after_construction_count(tokenizer: Any, policy: Any, ref: Any, policy_model: Any) -> None:
    data = collect(tokenizer, policy)
    transform = RetrieveLogProb(ref, log_probs_full_key=("log_probs", "full"))
    ref.model = policy_model
    for step in steps(transform(data)):
        assert_near(step["next", "log_probs", "full"], response_log_probs(policy_model, step), **FORWARD)
    cold = transform(data.copy())[0, 0]["next", "log_probs", "full"].clone()
    transform.temperature = 3.0
    assert (transform(data)[0, 0]["next", "log_probs", "full"] - cold).abs().max() > 0.1


def test_scope_full_charges_earlier_turns_again(tokenizer: Any, policy: Any, gen: Any, ref: Any) -> None:
    """By hand: turn 2 of an episode charges the content and the end token of turn 1 as in its own prompt."""
    rollout = collect(tokenizer, policy, RetrieveKL(gen, ref, scope="full"), envs=2, turns=2)
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


def test_the_policy_and_the_arguments_are_untouched(
    tokenizer: Any, policy: Any, gen: Any, ref: Any, policy_model: Any
) -> None:
    before = {k: v for k, v in vars(gen).items() if not k.startswith("_")}
    copies = {k: v.copy() for k, v in before.items() if isinstance(v, (dict, list))}
    weights = {k: v.clone() for k, v in policy_model.state_dict().items()}
    kwargs = {"padding": False}
    RetrieveKL(gen, ref, tokenizer_kwargs=kwargs)(collect(tokenizer, policy))
    assert kwargs == {"padding": False}
    assert all(vars(gen)[k] is v for k, v in before.items())
    assert all(vars(gen)[k] == v for k, v in copies.items())
    assert all(torch.equal(v, weights[k]) for k, v in policy_model.state_dict().items())


def test_temperature_holds_for_both_models(
    tokenizer: Any, policy: Any, gen: Any, ref: Any, policy_model: Any, ref_model: Any
) -> None:
    data = RetrieveKL(gen, ref, temperature=0.5)(collect(tokenizer, policy))
    for step in steps(data):
        ids, prompt = step["tokens", "full"], len(step["tokens", "prompt"])
        for model, key in ((policy_model, "log_probs"), (ref_model, "ref_log_probs")):
            with torch.no_grad():
                log_probs = (model(input_ids=ids[None]).logits[0].float() / 0.5).log_softmax(-1)
            want = log_probs[:-1].gather(-1, ids[1:, None])[prompt - 1 :, 0]
            assert_near(step["next", key, "full"][prompt:], want, **FORWARD)


TWO_MARKS = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'][:1] }}{% endgeneration %}"
    "{% generation %}{{ message['content'][1:] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "two"},
]


def turn_scored(template: str, full: list[Any], prompt: list[Any], model: Any) -> str:
    tokenizer = build_tokenizer(template, pad_token="<|pad|>")
    chat = ChatHistory(full=History.from_chats([full]), prompt=History.from_chats([prompt]), batch_size=1)
    wrapper = make_scoring_wrapper(model, tokenizer, pad_output=True, input_mode="history")
    found = RetrieveLogProb(wrapper)(TensorDict(history=chat, batch_size=[1]))["log_probs", "full"][0]
    ids = tokenizer.apply_chat_template(full, tokenize=True, return_dict=True)["input_ids"]
    return tokenizer.decode([i for i, value in zip(ids, found.tolist(), strict=True) if value != 0])


@pytest.mark.parametrize("template", [CHATML, TWO_MARKS], ids=["plain", "two marks a turn"])
def test_a_turn_is_its_own_whatever_the_template_marks(template: str, ref_model: Any) -> None:
    assert turn_scored(template, CHAT, CHAT[:3], ref_model) == "two<|im_end|>"


def test_a_response_that_is_not_rendered_is_an_error(ref_model: Any) -> None:
    silent = "{% for m in messages %}{% if m['content'] %}" + CHATML[CHATML.index("{{") :].replace(
        "message", "m"
    ).replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    empty = [*CHAT[:3], {"role": "assistant", "content": ""}]
    with pytest.raises(ValueError, match=r"sequence 0: the chat template renders nothing of the response ''"):
        turn_scored(silent, empty, CHAT[:3], ref_model)


def test_a_prompt_that_the_conversation_does_not_start_with_is_an_error(ref_model: Any) -> None:
    with pytest.raises(ValueError, match=r"sequence 0: the full conversation does not start with its prompt"):
        turn_scored(CHATML, CHAT[2:], CHAT[:3], ref_model)


@pytest.mark.parametrize("repetitive", [False, True])
def test_a_prompt_without_padding_beside_a_padded_sequence(repetitive: bool, ref_model: Any) -> None:
    """The prompt's own three tokens, the sequence with six pads before them."""
    real = torch.full((9,), 7) if repetitive else torch.arange(10, 19)
    full = torch.cat([torch.zeros(6, dtype=torch.long), real])[None]
    data = TensorDict({("tokens", "full"): full, ("tokens", "prompt"): real[None, :3]}, [1])
    data["masks", "all_attention_mask"] = torch.arange(15)[None] >= 6
    found = RetrieveLogProb(ref_model)(data)["log_probs", "full"][0]
    assert (found != 0).tolist() == [False] * 9 + [True] * 6
    assert_near(found[9:], plain_log_probs(ref_model, real)[3:], **FORWARD)


def test_a_locked_stack_is_not_written(tokenizer: Any, policy: Any, ref_model: Any) -> None:
    data = flat(collect(tokenizer, policy)).lock_()
    with pytest.raises(RuntimeError, match="locked"):
        RetrieveLogProb(ref_model)(data)


def test_corrected_k3_reads_the_log_probs_at_sampling_time(
    tokenizer: Any, policy: Any, gen: Any, ref: Any, policy_model: Any, ref_model: Any
) -> None:
    """By hand: ``min(pi / pi_old, 2) * (ratio - 1 - log ratio)`` with a sampler that was 0.3 nats away."""
    data = flat(collect(tokenizer, policy))
    for step in data.tensordicts:
        step["sampled", "full"] = response_log_probs(policy_model, step) - 0.3
    transform = RetrieveKL(gen, ref, estimator="corrected_k3", old_log_probs_key=("sampled", "full"))
    for step in steps(transform(data)):
        d = response_log_probs(ref_model, step) - response_log_probs(policy_model, step)
        want = torch.where(d == 0, 0.0, torch.tensor(0.3).exp() * (d.exp() - 1 - d))
        assert_close(step["next", "kl_penalty"], want, atol=1e-4, rtol=1e-3)


def test_prompt_tuning_takes_the_full_forward() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(tiny_model("qwen2"), config).eval()
    with pytest.warns(UserWarning, match="full forward"):
        scorer = LogProbScorer(tuned)
    row = GROUP[0]
    with torch.no_grad():
        logits = tuned(input_ids=row[None]).logits[0, -len(row) :].log_softmax(-1)
    want = logits[:-1].gather(-1, row[1:, None])[:, 0]
    assert_near(scorer.score(Ragged.from_list([row])).values[1:], want, **FORWARD)


def test_longrope_never_mixes_lengths_on_both_sides_of_its_switch() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=64, head_dim=8)
    rows = [torch.arange(10), torch.arange(40), torch.cat([torch.arange(30), torch.tensor([3, 5])])]
    for row, found in zip(rows, LogProbScorer(model).score(Ragged.from_list(rows)).to_list(), strict=True):
        assert_near(found, plain_log_probs(model, row), **FORWARD)
