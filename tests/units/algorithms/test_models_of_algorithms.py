"""Actors, references and critics in all their forms agree in temperature, precision and tokens, or are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, RetrieveLogProb, Sampling, ScoreOptions
from torchrl_llm_kl.algorithms import make_algorithm
from torchrl_llm_kl.scoring import RememberedModel, TokenCritic
from toy_models import VOCAB_SIZE, tiny_model, with_lora
from toy_rollouts import make_tokenizer

PROMPT = 3


def batch() -> TensorDict:
    full = torch.randint(VOCAB_SIZE, (4, 7), generator=torch.Generator().manual_seed(0))
    full[1::2, :PROMPT] = full[::2, :PROMPT]
    tokens = TensorDict(full=full, prompt=full[:, :PROMPT], batch_size=[4])
    reward = torch.tensor([[1.0], [0.0], [3.0], [-1.0]])
    return TensorDict(tokens=tokens, next=TensorDict(reward=reward, batch_size=[4]), batch_size=[4])


def outcome(actor: Any, **settings: Any) -> TensorDict:
    parts = make_algorithm("grpo", actor, **{"group_size": 2, "kl_loss_coeff": 0.5, **settings})
    return parts.loss(parts.prepare(batch()))


def gradient(out: TensorDict, actor: nn.Module) -> Tensor:
    loss = sum(out[key] for key in set(out.keys()) if key.startswith("loss_"))
    found = torch.autograd.grad(loss, [p for p in actor.parameters() if p.requires_grad], allow_unused=True)
    return torch.cat([x.flatten() for x in found if x is not None])


@pytest.mark.parametrize("kl_loss", ["k2", "exact"])
def test_the_base_model_under_all_its_names(kl_loss: str) -> None:
    actor = with_lora(tiny_model(seed=0))
    expected = outcome(actor, reference=tiny_model(seed=0), kl_loss=kl_loss)
    assert expected["kl_to_ref"].abs() > 0.01
    wanted = gradient(expected, actor)
    for reference in ("base", LogProbScorer(actor, adapters=False)):
        found = outcome(actor, reference=reference, kl_loss=kl_loss)
        torch.testing.assert_close(found["loss_kl_to_ref"], expected["loss_kl_to_ref"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient(found, actor), wanted, rtol=1e-3, atol=1e-4)
    # Only its log-probs are read.
    scored = make_algorithm("dpo", actor, reference="base").prepare(batch())["next", "ref_log_probs", "full"]
    plain = make_algorithm("dpo", actor, reference=tiny_model(seed=0)).prepare(batch())
    torch.testing.assert_close(scored, plain["next", "ref_log_probs", "full"], rtol=1e-4, atol=1e-5)
    assert (RetrieveLogProb(actor)(batch())["next", "log_probs", "full"] - scored).abs().max() > 0.01
    with pytest.raises(ValueError, match="adapters=False of another model than the actor's"):
        outcome(tiny_model(seed=0), reference=LogProbScorer(actor, adapters=False), kl_loss=kl_loss)


def test_the_actor_cannot_be_its_own_reference() -> None:
    actor, lora = tiny_model(seed=0), with_lora(tiny_model(seed=0))
    sharing = tiny_model(seed=1)
    sharing.load_state_dict(actor.state_dict(), assign=True)  # other parameters in the same memory
    wrapper = TransformersWrapper(actor, tokenizer=make_tokenizer(), generate=False, input_mode="tokens")
    for model, reference, how in (
        (actor, actor, "is the actor itself"),
        (actor, LogProbScorer(actor), "is the actor itself"),
        (wrapper, actor, "is the actor itself"),
        (actor, sharing, "holds the actor's own parameters"),
        (lora, lora.get_base_model(), "holds the actor's own parameters"),  # its adapters are active
    ):
        message = f"^reference {how}, so their KL is always 0: pass copy.deepcopy"
        with pytest.raises(ValueError, match=message):
            make_algorithm("grpo", model, reference=reference)
    scorer = LogProbScorer(lora, adapters=False)
    for model, reference in ((actor, copy.deepcopy(actor)), (lora, "base"), (lora, scorer)):
        make_algorithm("grpo", model, reference=reference)
    # A copy with the same frozen weights and other adapters is another model; so is the actor after another prompt.
    other = with_lora(tiny_model(seed=0))
    for name, parameter in lora.named_parameters():
        if not parameter.requires_grad:
            other.get_parameter(name).data = parameter.data
    make_algorithm("grpo", lora, reference=other)
    make_algorithm("on_policy_distill", actor, reference=actor, context=("hint", "ids"))


def test_a_reference_of_another_vocabulary(tmp_path: Path) -> None:
    actor = tiny_model(seed=0)
    for size in (VOCAB_SIZE - 30, 2 * VOCAB_SIZE):
        found = rf"vocabulary of {size} tokens, and the policy one of {VOCAB_SIZE}[.:].*policy's tokenizer"
        other = tiny_model(vocab_size=size)
        for reference in (other, LogProbScorer(other), RememberedModel(other, tmp_path / str(size))):
            for name in ("grpo", "gkd"):
                with pytest.raises(ValueError, match=found):
                    make_algorithm(name, actor, reference=reference)
    padded = tiny_model(vocab_size=VOCAB_SIZE + 1)
    make_algorithm("grpo", actor, reference=padded)
    make_algorithm("gkd", actor, reference=padded, top_k=4)
    # Whole distributions need equal vocabularies.
    for name, settings in (("grpo", {"kl_loss": "exact", "group_size": 2}), ("gkd", {})):
        parts = make_algorithm(name, actor, reference=padded, **settings)
        with pytest.raises(ValueError, match=rf"and {VOCAB_SIZE} tokens, the reference \d+ and {VOCAB_SIZE + 1}"):
            parts.loss(parts.prepare(batch()))


def test_a_reference_with_other_settings_is_refused() -> None:
    half = {"temperature": 0.5, "dtype": torch.bfloat16}
    warm = "reference is a scorer with temperature=2.0, the actor has 0.5"
    narrow = "scorer with dtype=torch.bfloat16, the actor has None"
    for settings, message in (({"temperature": 2.0}, warm), (half, narrow)):
        reference = LogProbScorer(tiny_model(seed=1), **settings)
        for kl_loss in ("k2", "exact"):
            with pytest.raises(ValueError, match=message):
                outcome(tiny_model(seed=0), reference=reference, options=ScoreOptions(Sampling(0.5)), kl_loss=kl_loss)


@pytest.mark.parametrize("as_scorer", [False, True])
def test_old_and_current_log_probs_have_one_precision(as_scorer: bool) -> None:
    model, dtype = tiny_model(seed=0), torch.bfloat16
    actor = LogProbScorer(model, dtype=dtype) if as_scorer else model
    settings: dict[str, Any] = {} if as_scorer else {"options": ScoreOptions(dtype=dtype)}
    out = outcome(actor, reference=LogProbScorer(tiny_model(seed=1), dtype=dtype), **settings)
    assert float(out["ratio_max"]) == pytest.approx(1, abs=1e-3)
    plain = outcome(model, reference=tiny_model(seed=1))
    assert (out["loss_kl_to_ref"] - plain["loss_kl_to_ref"]).abs() > 1e-4  # the difference is this term


def test_wrappers_are_scored_whether_they_generate_or_not() -> None:
    actor, reference = tiny_model(seed=0), tiny_model(seed=1)
    expected = gradient(outcome(actor, reference=reference), actor)
    settings = {"tokenizer": make_tokenizer(), "input_mode": "tokens"}
    for generate in (False, True):
        wrapped, also = (TransformersWrapper(x, generate=generate, **settings) for x in (actor, reference))
        for given in (reference, also):
            assert_near(gradient(outcome(wrapped, reference=given), actor), expected, terms=64 * 64, size=1)


def test_values_belong_to_the_tokens_that_the_losses_count() -> None:
    critic = TokenCritic(tiny_model(seed=2))
    nn.init.constant_(critic.head.bias, 5.0)
    data = batch()
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[:, [0, 2]] = False  # the assistant spoke at 1, inside the prompt, and in its response
    data["masks"] = TensorDict(all_assistant_mask=mask, batch_size=[4])
    for strategy, turns in (("sft", mask & (torch.arange(7) >= PROMPT)), ("rlhf", mask)):
        parts = make_algorithm("ppo", tiny_model(), reference=tiny_model(), critic=critic, masking_strategy=strategy)
        values = parts.prepare(data.clone())["next", "state_value"]
        torch.testing.assert_close(values, 5.0 * turns)
    with pytest.raises(ValueError, match="masking_strategy='generic' needs values of prompts"):
        make_algorithm("ppo", tiny_model(), reference=tiny_model(), critic=critic, masking_strategy="generic")
