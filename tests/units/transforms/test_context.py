"""Response tokens after another prompt, compared in float64 with sequences built by hand and a plain forward."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torchrl.data.llm import History

from closeness import assert_near
from layouts import PROMPTS, RESPONSES, at_responses, tokens
from template_pairs import assistant, user
from torchrl_llm_kl import AfterPrompt, Entropy, RetrieveKL, RetrieveLogProb, TopK, make_algorithm
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.masks import history_to_messages, render_conversation
from torchrl_llm_kl.scoring import Sampling, ScoreOptions
from toy_models import BACKWARD, tiny_model
from toy_rollouts import histories, make_model, make_scoring_wrapper, steps

FULL = ("log_probs", "full")
HINT_IDS = ("hint", "ids")
EXACTLY = {"atol": 1e-10, "rtol": 0.0}
CONTEXTS = [[20, 21], [22, 23, 24, 25, 26], [27]]
ROWS = list(zip(PROMPTS, CONTEXTS, RESPONSES, strict=True))
CHAT = [user("one?"), assistant("two")]


def wide(seed: int = 0) -> nn.Module:
    return tiny_model(seed=seed).double()


def rollout(layout: str, **entries: Any) -> TensorDictBase:
    """Three sequences with the ids of other prompts under ("hint", "ids"). If padded, then on the left."""
    if layout != "padded":
        return tokens(layout, hint__ids=CONTEXTS, **entries)
    rows = [torch.tensor(row) for row in CONTEXTS]
    ids, real = (pad_sequence(x, True, padding_side="left") for x in (rows, [torch.ones_like(row) for row in rows]))
    return tokens(layout, hint__ids=ids, hint__attention_mask=real, **entries)


def distributions(model: nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probs of the whole vocabulary at each response token, from one forward. Differentiable, ``[T, V]``."""
    return model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def log_probs_after(model: nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    return distributions(model, prompt, response).gather(-1, torch.tensor(response)[:, None])[:, 0]


def after(model: nn.Module, prompts: list[list[int]] = CONTEXTS) -> list[Tensor]:
    """The log-probs of each response after its prompt."""
    return [log_probs_after(model, *row).detach() for row in zip(prompts, RESPONSES, strict=True)]


def test_ids_of_other_prompts_in_every_layout(layout: str) -> None:
    model = wide()
    found = at_responses(RetrieveLogProb(model, extras=[AfterPrompt(HINT_IDS)])(rollout(layout)), FULL)
    assert_close(found, after(model), **EXACTLY)
    plain = at_responses(RetrieveLogProb(model)(rollout(layout)), FULL)
    assert (torch.cat(found) - torch.cat(plain)).abs().min() > 1e-3  # the prompt matters


def test_several_batch_dimensions_and_next() -> None:
    """Two by two rows, with the prompts below "next"."""
    full, hints = torch.arange(3, 15).reshape(2, 2, 3), torch.arange(30, 38).reshape(2, 2, 2)
    data = TensorDict({"tokens": {"full": full, "prompt": full[..., :1].clone()}, "next": {"hint": hints}}, [2, 2])
    model = wide()
    found = RetrieveLogProb(model, extras=[AfterPrompt("hint")])(data)["next", "log_probs", "full"]
    rows = zip(hints.reshape(4, 2).tolist(), full.reshape(4, 3)[:, 1:].tolist(), strict=True)
    expected = torch.stack([log_probs_after(model, *row).detach() for row in rows])
    assert_close(found[..., 1:], expected.reshape(2, 2, 2), **EXACTLY)


def test_gradients_equal_those_of_sequences_built_by_hand() -> None:
    model = wide()
    found = RetrieveLogProb(model, detach=False, extras=[AfterPrompt(HINT_IDS)])(rollout("padded"))
    weight = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double()
    rows = enumerate(zip(CONTEXTS, RESPONSES, strict=True))
    want = sum((log_probs_after(model, *row) * weight[i, 3 : 3 + len(row[1])]).sum() for i, row in rows)
    got, expected = (torch.autograd.grad(x, list(model.parameters())) for x in ((found[FULL] * weight).sum(), want))
    assert_near(list(got), list(expected), **BACKWARD)


def test_other_scores_follow() -> None:
    """Entropy and top k by hand, at the response tokens of the data."""
    model = wide()
    found = RetrieveLogProb(model, extras=[Entropy(), TopK(3), AfterPrompt(HINT_IDS)])(rollout("padded"))
    log_p = [distributions(model, *row).detach() for row in zip(CONTEXTS, RESPONSES, strict=True)]
    entropies = [-(row.exp() * row).sum(-1) for row in log_p]
    assert_close(at_responses(found, "entropy"), entropies, atol=1e-5, rtol=0)
    assert_close(at_responses(found, ("top_k", "ids")), [row.topk(3).indices for row in log_p])


def test_a_row_without_a_response() -> None:
    full = torch.tensor([[3, 4, 5], [6, 7, 8]])
    data = TensorDict({"tokens": {"full": full, "prompt": full[:, :2].clone()}, "hint": torch.tensor([[9], [10]])}, [2])
    data["masks", "all_attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    found = RetrieveLogProb(model := wide(), extras=[AfterPrompt("hint")])(data)[FULL]
    assert_close(found[0, 2:], log_probs_after(model, [9], [5]).detach(), **EXACTLY)
    assert not found[1].any()


# ------------------------------------------------------------------ a function of the conversation
HINT = "The answer is 42."


def as_dicts(history: History, hint: str = HINT) -> list[dict[str, Any]]:
    return [{"role": "system", "content": hint}, *history_to_messages(history)]


def with_hint(history: History) -> History:
    """A system message before the conversation."""
    return History.from_chats([as_dicts(history)])[0]


def stacked(history: History) -> History:
    return torch.stack([History(role="system", content=HINT), *history.unbind(0)])


def of_the_row(history: History, row: TensorDictBase) -> Any:
    return as_dicts(history, f"It is {row['query']}.")


def hinted(tokenizer: Any, question: str, hint: str = HINT) -> list[int]:
    """The prompt by hand: the hint, the user's first message and the header of the answer."""
    text = f"<|im_start|>system\n{hint}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text)


@pytest.mark.parametrize(
    ("padded", "scope", "function"),
    [(True, "turn", with_hint), (False, "full", as_dicts), (True, "full", stacked), (False, "turn", of_the_row)],
    indirect=["padded"],
)
def test_another_system_message_in_an_env(lab: Any, padded: bool, scope: Any, function: Any) -> None:
    """Only the tokens before the first answer are replaced. Each turn keeps its sampled tokens."""
    model, tokenizer = make_model(lab.tokenizer, seed=1), lab.tokenizer
    transform = RetrieveLogProb(model, tokenizer=tokenizer, scope=scope, extras=[AfterPrompt(function)])
    header = tokenizer.encode("<|im_start|>assistant\n")
    for step in steps(lab.collect(transform, pad_output=padded, turns=3)):
        real, query = step["masks", "all_attention_mask"], step["query"]
        ids = step["tokens", "full"][real].tolist()
        first = next(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
        hint = f"It is {query}." if function is of_the_row else HINT
        expected = log_probs_after(model, hinted(tokenizer, query, hint), ids[first:]).detach()
        found = step["next", "log_probs", "full"]
        assert not found[~real].any()
        scored = found[real] != 0
        start = len(ids) - int(real[len(step["tokens", "prompt"]) :].sum())
        assert scored[start:].all()
        assert not scored[:first].any()
        assert scored[first] == (scope == "full" or first == start)
        assert_close(found[real][scored], expected[scored[first:]], atol=1e-4, rtol=0)


TEMPLATE = (  # the answer's own tokens depend on what comes before
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | upper if messages[0].role == 'system' else m.content }}<|im_end|>\n{% endfor %}"
)


def test_conversations_without_tokens(tokenizer: Any) -> None:
    """Without tokens, the new conversation is rendered and its prompt is cut at the assistant's first token."""
    model = make_model(tokenizer, seed=1).double()
    wrapper = make_scoring_wrapper(model, tokenizer, pad_output=False, input_mode="history")

    def score(**kwargs: Any) -> Tensor:
        return RetrieveLogProb(wrapper, **kwargs)(histories(full=[CHAT]))[0][FULL]

    plain, found = score(), score(extras=[AfterPrompt(with_hint)])
    assert_close(score(extras=[AfterPrompt(lambda history: history)]), plain, **EXACTLY)
    expected = log_probs_after(model, hinted(tokenizer, "one?"), tokenizer.encode("two<|im_end|>")).detach()
    assert_close(found[found != 0], expected, **EXACTLY)
    assert torch.equal(found != 0, plain != 0)
    with pytest.raises(ValueError, match="sequence 0: after the context the template renders other tokens"):
        score(extras=[AfterPrompt(with_hint)], tokenizer_kwargs={"chat_template": TEMPLATE})


REF = ("ref_log_probs", "full")
BOTH = [AfterPrompt(HINT_IDS), AfterPrompt(HINT_IDS, of="reference")]


def test_a_context_for_only_the_reference() -> None:
    policy, reference, data = wide(), wide(1), rollout("padded")
    data["next"] = TensorDict(reward=torch.ones(3, 1), batch_size=[3])
    found = RetrieveKL(policy, reference, coeff=0.5, extras=[AfterPrompt(HINT_IDS, of="reference")])(data)["next"]
    gen, ref = after(policy, PROMPTS), after(reference)
    kl = [p - q for p, q in zip(gen, ref, strict=True)]
    for key, want in ((FULL, gen), (REF, ref), ("kl_penalty", kl)):
        assert_close(at_responses(found, key), want, **EXACTLY)
    rewards = torch.stack([1 - 0.5 * row.sum() for row in kl])
    assert_near(found["reward"].sum((1, 2)), rewards, dtype=torch.float32, terms=4, size=16)


def test_a_context_for_the_policy_and_changes_of_extras() -> None:
    model = wide()
    transform = RetrieveKL(model, model, extras=[AfterPrompt(HINT_IDS, of="reference"), AfterPrompt(HINT_IDS)])
    assert not transform(rollout("padded"))["kl_penalty"].any()  # self-distillation from the same context
    transform.extras = BOTH[:1]
    found = transform(rollout("padded"))
    expected = RetrieveKL(model, model, extras=[AfterPrompt(HINT_IDS, of="reference")])(rollout("padded"))
    assert found["kl_penalty"].any()
    assert_close(found["kl_penalty"], -expected["kl_penalty"], **EXACTLY)
    assert HINT_IDS in transform[0].in_keys
    assert HINT_IDS not in transform[1].in_keys


def test_an_exact_kl_needs_one_context() -> None:
    model, reference = wide(), wide(1)
    found = RetrieveKL(model, reference, estimator="exact", extras=BOTH)(rollout("padded"))
    both = (model, reference)
    rows = [[distributions(m, *row).detach() for m in both] for row in zip(CONTEXTS, RESPONSES, strict=True)]
    kl = [(p.exp() * (p - q)).sum(-1) for p, q in rows]
    assert_close(at_responses(found, "kl_penalty"), kl, atol=1e-5, rtol=0)
    message = r"estimator='exact' runs both .* the policy has the prompts \[\] and the reference \[\('hint', 'ids'\)\]"
    with pytest.raises(ValueError, match=message):
        RetrieveKL(model, reference, estimator="exact", extras=[AfterPrompt(HINT_IDS, of="reference")])
    kept = ScoreOptions(Sampling(top_k=3, reference="kept"))
    message_of_kept = r"^Sampling\(reference='kept'\) runs both models .*reference='whole'"
    with pytest.raises(ValueError, match=message_of_kept):
        RetrieveKL(model, reference, options=kept, extras=BOTH[1:])
    transform = RetrieveKL(model, reference, extras=BOTH[1:])
    transform.estimator = "exact"
    with pytest.raises(ValueError, match=message):
        transform(rollout("padded"))


def recorded(layout: str) -> tuple[TensorDictBase, list[list[list[int]]]]:
    """A rollout with three kept tokens at each response token, and the kept tokens."""
    kept = [[sorted({token, 30, 31 + i}) for i, token in enumerate(row)] for row in RESPONSES]
    before = [len(prompt) if layout == "padded" else 0 for prompt in PROMPTS]  # else of the response alone
    counts = [[0] * n + [3] * len(row) for n, row in zip(before, RESPONSES, strict=True)]
    ids = [[token for each in row for token in each] for row in kept]
    return rollout(layout, kept__counts=counts, kept__ids=ids), kept


def log_probs_over(model: nn.Module, prompt: list[int], response: list[int], kept: list[list[int]]) -> Tensor:
    """The log-probs of a response, each normalised over the kept tokens."""
    rows = zip(distributions(model, prompt, response).detach(), kept, response, strict=True)
    return torch.stack([log_p[ids].log_softmax(-1)[ids.index(token)] for log_p, ids, token in rows])


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_record_is_replayed_after_another_prompt(layout: str) -> None:
    """The kept tokens of both models move with the response."""
    policy, reference = wide(), wide(1)
    kept_by_both: Any = {"extras": BOTH, "options": ScoreOptions(Sampling(top_k=3, reference="kept"))}
    for transform, models in (
        (RetrieveLogProb(policy, options=ScoreOptions(Sampling(top_k=3)), extras=BOTH[:1]), {FULL: policy}),
        (RetrieveKL(policy, reference, **kept_by_both), {FULL: policy, REF: reference}),
        (RetrieveKL(policy, reference, estimator="exact", **kept_by_both), {FULL: policy, REF: reference}),
    ):
        data, kept = recorded(layout)
        found = transform(data)
        for key, model in models.items():
            want = [log_probs_over(model, *row) for row in zip(CONTEXTS, RESPONSES, kept, strict=True)]
            assert_close(at_responses(found, key), want, **EXACTLY)


def conversation(tokenizer: Any) -> TensorDictBase:
    prompt = render_conversation(tokenizer, CHAT[:1], add_generation_prompt=True).token_ids
    full = torch.cat([prompt, torch.tensor(tokenizer.encode("two<|im_end|>"))])
    row = histories(full=[CHAT], prompt=[CHAT[:1]])[0]
    return lazy_stack([row.set("tokens", TensorDict(full=full, prompt=prompt))])


def changed(at: int, **message: Any) -> Callable[[History], Any]:
    def function(history: History) -> Any:
        messages = history_to_messages(history)
        messages[at] |= message
        return messages

    return function


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (changed(1, content="six"), ValueError, r"changed the answer .*'two'.* to .*'six'"),
        (lambda h: history_to_messages(h)[:1], ValueError, r"changed the answer .*'two'.* to \[\]"),
        ("nowhere", KeyError, "the context is missing: expected 'nowhere'"),
    ],
)
def test_bad_contexts_are_refused(tokenizer: Any, context: Any, error: type[Exception], message: str) -> None:
    transform = RetrieveLogProb(make_model(tokenizer, seed=1), tokenizer=tokenizer, extras=[AfterPrompt(context)])
    data = conversation(tokenizer)
    with pytest.raises(error, match=message):
        transform(data)
    assert "log_probs" not in data[0]


def test_requirements_of_a_context_function(tokenizer: Any) -> None:
    def in_place(history: History) -> History:
        history.content = ["a secret", "two"]
        return history

    model, data = make_model(tokenizer, seed=1), conversation(tokenizer)
    RetrieveLogProb(model, tokenizer=tokenizer, extras=[AfterPrompt(in_place)])(data)
    assert history_to_messages(data[0]["history", "full"])[0]["content"] == "one?"
    with pytest.raises(ValueError, match="rendering needs a tokenizer"):
        RetrieveLogProb(model, extras=[AfterPrompt(with_hint)])(data)
    del data["history"]
    with pytest.raises(KeyError, match=r"a context function needs \('history', 'full'\)"):
        RetrieveLogProb(model, tokenizer=tokenizer, extras=[AfterPrompt(with_hint)])(data)


@pytest.mark.parametrize(
    ("prompt", "hint", "error", "message"),
    [
        (True, torch.ones(2, 3), TypeError, r"expected token ids under 'hint', found torch\.float32"),
        (True, torch.ones(2, 3).long(), ValueError, r"a context replaces the prompt, so set assistant_only=True"),
        (False, torch.ones(2, 3).long(), ValueError, "a context replaces the prompt, whose end is unknown"),
    ],
)
def test_bad_context_entries_are_refused(prompt: bool, hint: Any, error: type[Exception], message: str) -> None:
    full = torch.tensor([[3, 4, 5], [6, 7, 8]])
    entries = {"full": full, "prompt": full[:, :2].clone()} if prompt else {"full": full}
    data = TensorDict({"tokens": entries, "hint": hint}, [2])
    assistant_only = error is TypeError
    with pytest.raises(error, match=message):
        RetrieveLogProb(wide(), extras=[AfterPrompt("hint")], assistant_only=assistant_only)(data)


def test_the_advantage_of_self_distillation() -> None:
    model = wide()
    batch = make_algorithm("on_policy_distill", model, reference=model, context=HINT_IDS).prepare(rollout("padded"))
    want = torch.cat(after(model)) - torch.cat(after(model, PROMPTS))
    assert_near(torch.cat(at_responses(batch, "advantage")).flatten(), want, dtype=torch.float32, size=16)


@pytest.mark.parametrize(("layout", "name"), [("padded", "gkd"), ("lazy", "on_policy_distill")])
def test_self_distillation_over_the_top_k_of_a_privileged_prompt(layout: str, name: Any) -> None:
    """Entries, loss and the head's gradient equal those of a forward for each prompt and answer."""
    model, k = wide(), 3
    parts = make_algorithm(name, model, reference=model, top_k=k, context=HINT_IDS)
    batch = parts.prepare(rollout(layout))
    entries = zip(*(at_responses(batch, ("top_k", x)) for x in ("ids", "log_probs", "rest_log_prob")), strict=True)
    divergences = []
    for (prompt, context, response), entry in zip(ROWS, entries, strict=True):
        q, p = (distributions(model, first, response) for first in (prompt, context))
        p, ids = p.detach().topk(k)
        rest = torch.log1p(-p.exp().sum(-1))
        assert_close(entry[0], ids)
        assert_near(list(entry[1:]), [p, rest], dtype=torch.float32, size=16)
        log_p, listed = torch.cat([p, rest[:, None]], -1), q.gather(-1, ids)
        log_q = torch.cat([listed, torch.log1p(-listed.exp().sum(-1, keepdim=True))], -1)
        if name == "gkd":  # beta of 1/2: the mean KL to the mixture
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            kl = log_p.exp() * (log_p - log_m) / 2 + log_q.exp() * (log_q - log_m) / 2
        else:  # the reverse KL
            kl = log_q.exp() * (log_q - log_p)
        divergences.append(kl.sum(-1))
    expected = torch.cat(divergences).mean()
    with pytest.warns(UserWarning, match="the top k below 'top_k' holds"):
        loss = parts.loss(batch).total_loss
    assert_near(loss, expected, dtype=torch.float32, terms=64, size=1)
    (found,), (wanted,) = (torch.autograd.grad(x, [model.lm_head.weight]) for x in (loss, expected))
    assert_near(found, wanted, dtype=torch.float32, terms=64, size=32)


def test_a_context_of_an_algorithm_without_a_scored_reference() -> None:
    model = tiny_model(seed=0)
    with pytest.raises(ValueError, match="context= has no effect: gpg_like scores no reference before the loss"):
        make_algorithm(replace(ALGORITHMS["dapo"], name="gpg_like"), model, group_size=2, context="hint")
    with pytest.raises(ValueError, match="context= has no effect: grpo"):
        make_algorithm("grpo", model, reference=wide(1).float(), group_size=2, kl_loss="exact", context="hint")
    with pytest.raises(ValueError, match="context= has no effect: gkd"):
        make_algorithm("gkd", model, reference=tiny_model(seed=1), context="hint")
    parts = make_algorithm("on_policy_distill", model, reference=tiny_model(seed=1), context="hint")
    found = [part.extras for part in parts.kl_transform.transforms[:2]]
    assert found == [(), (AfterPrompt("hint", of="reference"),)]
