"""Recurrent and convolutional models: each answer continues from the state after its prompt."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpointed import enable, in_own_code, wrap
from closeness import assert_near
from scoring_reference import plain_log_probs, random_sequences
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.scoring._forks import ForkedPass, plan_steps
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._tree import PrefixTree
from toy_models import BACKWARD, FORKED_FAMILIES, FORWARD, UNFORKED_FAMILIES, VOCAB_SIZE, stateful_model

ANSWERS = (9, 1, 4, 7)
WHOLE: dict[str, Any] = {"terms": BACKWARD["terms"], "size": 256.0}  # the largest gradients of these losses


def answers(*lengths: int, prompt: int = 40, seed: int = 0) -> list[Tensor]:
    first, *rest = random_sequences(prompt, *lengths, seed=seed).to_list()
    return [torch.cat([first, each]) for each in rest]


def group(seed: int = 0) -> Ragged:
    """Answers to two prompts, two continuations of one answer, and a sequence without a prompt."""
    one, two = answers(*ANSWERS, seed=seed), answers(3, 2, prompt=35, seed=seed + 1)
    late = [torch.cat([one[0], each]) for each in random_sequences(2, 3, seed=seed + 2).to_list()]
    (last,) = random_sequences(6, seed=seed + 3).to_list()
    return Ragged.from_list([one[1], two[0], *late, one[2], last, two[1], one[3]])


def counted(model: Any, run: Callable[[], Any]) -> tuple[Any, int]:
    """The result and the number of embedded tokens."""
    seen: list[int] = []
    with model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel())):
        return run(), sum(seen)


def gradients(model: nn.Module, log_probs: Tensor) -> Tensor:
    """The gradients of all parameters that have one. The gradient of a gate sums over all later tokens in float32."""
    model.zero_grad()
    log_probs.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FORKED_FAMILIES)
def test_against_plain_forwards_of_one_row(family: str) -> None:
    model, batch = stateful_model(family), group()
    scorer = LogProbScorer(model)
    assert scorer.shares_prefixes
    request = ScoreRequest.of(batch, batch.positions >= 30)
    found, tokens = counted(model, lambda: scorer.run(request, ScoreOptions(grad=True)).log_prob.values)
    tree = PrefixTree.build(batch, request.forward_lengths, min_shared=32)
    padding = sum(len(step.nodes) * step.width for step in plan_steps(tree, 1024)) - tree.num_tokens
    assert tokens == tree.num_tokens + padding < batch.lengths.sum() // 2 + padding
    want = plain_log_probs(model, batch, batch.positions >= 30)
    assert_near(found, want, **FORWARD)
    assert_near(gradients(model, found), gradients(model, want), **WHOLE)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("family", FORKED_FAMILIES)
def test_no_deprecated_name_of_transformers_is_used(family: str) -> None:
    model = stateful_model(family)
    scorer = LogProbScorer(model)
    assert scorer.shares_prefixes
    scorer.score(group(), remember=True)


@pytest.mark.parametrize("family", [x for x in FORKED_FAMILIES if x not in ("qwen3_next", "granitemoehybrid")])
def test_no_state_leaks_between_sequences(family: str) -> None:
    """A sequence has the same bits when only the tokens of other sequences change, since the shapes stay the same."""
    scorer, rows = LogProbScorer(stateful_model(family)), answers(*ANSWERS)
    want = scorer.score(rows).to_list()[2]
    others = [torch.cat([row[:40], (row[40:] + 1) % VOCAB_SIZE]) for row in rows]
    assert torch.equal(scorer.score([*others[:2], rows[2], others[3]]).to_list()[2], want)


@pytest.mark.parametrize("family", FORKED_FAMILIES)
def test_the_probe_notices_a_lost_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a kind of state is set to 0 where sequences part, the probe refuses to fork."""
    from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

    layer: Any = LinearAttentionCacheLayerMixin.__subclasses__()[0]
    update = layer.update_conv_state

    def convolved(self: Any, states: Tensor, state_idx: int = 0, **options: Any) -> Any:
        if self.has_previous_state[state_idx]:
            self.conv_states[state_idx].zero_()
        return update(self, states, state_idx, **options)

    def recurrent(self: Any, index: int, state_idx: int = 0) -> Tensor | None:
        held = self.layers[index]
        return torch.zeros_like(held.recurrent_states[state_idx]) if held.has_previous_state[state_idx] else None

    broken: list[Any] = [(layer, "update_conv_state", convolved), (DynamicCache, "get_recurrent_state", recurrent)]
    for change in broken[: 1 if family == "lfm2" else 2]:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            with pytest.warns(UserWarning, match="state"):
                assert not LogProbScorer(stateful_model(family)).shares_prefixes


@pytest.mark.parametrize("family", UNFORKED_FAMILIES)
def test_families_without_a_reusable_state_warn(family: str) -> None:
    model, batch = stateful_model(family), Ragged.from_list(answers(*ANSWERS))
    with pytest.warns(UserWarning, match="forwards a prompt again with each answer"):
        scorer = LogProbScorer(model)
    assert_near(scorer.score(batch).values, plain_log_probs(model, batch).detach(), **FORWARD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LogProbScorer(model, share_prefixes=False)


@pytest.mark.parametrize(("place", "shared"), [(enable, True), (wrap, False), (in_own_code, False)])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
def test_checkpoints(place: Any, shared: bool, reentrant: bool) -> None:
    """A step replaces transformers' checkpoints. Other checkpoints would advance a state twice, so nothing is shared."""
    model, batch = stateful_model("qwen3_5_text"), group()
    mask = batch.positions >= 30
    expected = gradients(model, plain_log_probs(model, batch, mask))
    model.train()
    place(model, reentrant)
    scorer = LogProbScorer(model)
    with nullcontext() if shared else pytest.warns(UserWarning, match="can share no prefixes"):
        found, tokens = counted(model, lambda: scorer.evaluate(batch, mask, grad=True).log_prob.values)
    assert (tokens < batch.lengths.sum()) == shared
    # Some processors choose other kernels for a whole forward, whose sums differ by a little more.
    assert_near(gradients(model, found), expected, terms=WHOLE["terms"], size=2 * WHOLE["size"])


def test_nodes_longer_than_the_budget_and_batches_of_answers() -> None:
    model, batch = stateful_model("lfm2"), group()
    found = LogProbScorer(model, tokens_per_batch=10).score(batch).values
    assert_near(found, plain_log_probs(model, batch).detach(), **FORWARD)


def test_single_tokens_after_a_prompt_have_gradients() -> None:
    """The kernels of generation would overwrite a state that the graph holds."""
    model, batch = stateful_model("falcon_h1"), Ragged.from_list(answers(2, 1, 2))
    expected = gradients(model, plain_log_probs(model, batch))
    assert_near(gradients(model, LogProbScorer(model).score(batch, grad=True).values), expected, **WHOLE)


def test_states_are_held_no_longer_than_needed() -> None:
    model, batch = stateful_model("lfm2"), group()
    scorer = LogProbScorer(model)
    request = ScoreRequest.of(batch)
    tree = PrefixTree.build(batch, request.forward_lengths, min_shared=32)
    forks = ForkedPass(scorer._setup(torch.device("cpu"), ScoreOptions()), request, tree, 1024)
    held = []
    for i in range(len(forks.steps)):
        forks.run(i)
        held.append(len(forks._states))
    assert (max(held), held[-1]) == (1, 0)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "mamba2", "lfm2"])
@pytest.mark.parametrize("kl", [False, True])
def test_the_turns_of_a_conversation_continue_from_the_last_state(family: str, kl: bool) -> None:
    """With a reference, log-probs are not cached, so only the tokens of the new turn are scored."""
    model = stateful_model(family)
    scorer, plain = LogProbScorer(model), LogProbScorer(model)
    other = LogProbScorer(stateful_model(family, seed=1)) if kl else None
    rows, seen, before = answers(5, 5, 9, 1), list[int](), [1] * 4
    for turn in ((7, 7, 1, 3), (2, 4, 6, 1), (1, 1, 1, 1)):
        batch = Ragged.from_list(rows)
        mask = torch.cat([torch.arange(len(row)) >= (n if kl else 1) for row, n in zip(rows, before, strict=True)])
        found, tokens = counted(model, partial(scorer.evaluate, batch, mask, reference=other, remember=True))
        for name, each in plain.evaluate(batch, mask, reference=other).per_token.items():
            assert_near(found.per_token[name].values, each.values, **FORWARD)
        seen.append(tokens)
        more, before = random_sequences(*turn, seed=turn[0]).to_list(), [len(row) for row in rows]
        rows = [torch.cat(pair) for pair in zip(rows, more, strict=True)]
    # The last token is not forwarded before the next turn. A single new token is padded to two, and has no state of use.
    assert seen == [40 + 4 + 4 + 8, 7 + 7 + 2 + 3, 2 + 4 + (1 + 6) + 2]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize(("first", "ends"), [(3, (2, 3)), (2, (2, 3, 4)), (2, (3, 3, 2, 3))])
def test_a_second_turn_beside_other_answers_to_the_prompt(family: str, first: int, ends: tuple[int, ...]) -> None:
    """Every other row continues the answer of the first call. A repeated call is scored from the cache."""
    model = stateful_model(family)
    scorer, (answer,) = LogProbScorer(model), answers(first)
    more = random_sequences(*ends, seed=5).to_list()
    batch = Ragged.from_list([torch.cat([answer[: 40 if i % 2 else None], end]) for i, end in enumerate(more)])
    want = plain_log_probs(model, batch).detach()
    for rows in ([answer], batch, batch):
        found = scorer.score(rows, remember=True).values
    assert_near(found, want, **FORWARD)


@pytest.mark.parametrize("first", [1, 46])
def test_a_rewritten_turn_does_not_continue_from_the_old_state(first: int) -> None:
    """The common tokens end inside a segment, where the cache has no state."""
    model = stateful_model("lfm2")
    scorer, (row, other) = LogProbScorer(model), answers(9, 6)
    anew = torch.cat([row[:44], other[40:]])
    for rows in ([row], [row[:44]], [anew], [row, other], [torch.cat([other, row[:3]]), row]):
        batch = Ragged.from_list(rows)
        mask = batch.positions >= first
        assert_near(scorer.score(batch, mask, remember=True).values, plain_log_probs(model, batch, mask), **FORWARD)


LENGTHS = (3, 20, 5, 11, 16, 7)  # 174 tokens with a prompt of 60 if all were padded to 19


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_answers_of_a_fork_are_hardly_padded(family: str) -> None:
    """Values and gradients in float64. Answers of similar lengths share a step."""
    model = stateful_model(family, dtype=torch.float64, max_position_embeddings=128)
    batch = Ragged.from_list(answers(*LENGTHS, prompt=60))
    mask = batch.positions >= 60
    scorer = LogProbScorer(model)
    tree = PrefixTree.build(batch, ScoreRequest.of(batch, mask).forward_lengths, min_shared=32)
    assert tree.num_tokens == 116
    for grad in (False, True):
        found, tokens = counted(model, partial(scorer.score, batch, mask, grad=grad))
        assert tokens == 126
    logits = [model(input_ids=row[None]).logits[0, :-1] for row in batch.to_list()]
    rows = [x.log_softmax(-1).gather(-1, row[1:, None]) for x, row in zip(logits, batch.to_list(), strict=True)]
    want = torch.cat([torch.cat([row.new_zeros(1, 1), row]) for row in rows]).squeeze(-1) * mask
    # Some kernels of these layers compute in float32.
    assert_near(found.values, want, dtype=torch.float32, **FORWARD)
    assert_near(gradients(model, found.values), gradients(model, want), dtype=torch.float32, **WHOLE)


def test_a_step_must_save_more_than_it_costs() -> None:
    """A tenth of padding is allowed, and so is any padding whose removal saves less than 8 tokens."""

    def steps(*lengths: int, prompt: int = 60, budget: int = 1024) -> list[list[int]]:
        batch = Ragged.from_list(answers(*lengths, prompt=prompt))
        plan = plan_steps(PrefixTree.build(batch, batch.lengths, min_shared=32), budget)
        first, *rest = [[step.width] * len(step.nodes) for step in plan]
        assert first == [prompt]
        return rest

    assert steps(10, 10, 10) == [[10] * 3]
    assert steps(40, 31, 30) == [[40] * 2, [30]] == steps(30, 40, 31)
    assert steps(40, 33) == [[40, 40]]  # 7 tokens of padding
    assert steps(40, 32) == [[40, 40]]  # 8 tokens are less than a tenth of 132
    assert steps(20, 5) == [[20], [5]]
    assert steps(9, 2, prompt=40) == [[9, 9]]
    assert steps(10, 2, prompt=40) == [[10], [2]]
    assert steps(40, 40, 40, budget=80) == [[40, 40], [40]]
