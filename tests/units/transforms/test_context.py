"""The same response tokens after another prompt: against sequences built by hand and the plain model, in float64."""

from __future__ import annotations

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
from torchrl.modules.llm.policies import ChatHistory

from closeness import assert_near
from layouts import LAYOUTS, PROMPTS, RESPONSES, at_responses, tokens
from torchrl_llm_kl import RetrieveKL, RetrieveLogProb, Sampling, make_algorithm
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.masks import history_to_messages, render_conversation
from torchrl_llm_kl.rollouts import InContext, in_context, locate
from toy_models import BACKWARD, tiny_model
from toy_rollouts import collect, flat, make_env, make_model, make_policy, make_scoring_wrapper, steps

FULL = ("log_probs", "full")
HINT_IDS = ("hint", "ids")
EXACTLY = {"atol": 1e-10, "rtol": 0.0}
CONTEXTS = [[20, 21], [22, 23, 24, 25, 26], [27]]
ROWS = list(zip(PROMPTS, CONTEXTS, RESPONSES, strict=True))
CHAT = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]


def wide(seed: int = 0) -> nn.Module:
    return tiny_model(seed=seed).double()


def rollout(layout: str, contexts: list[list[int]] = CONTEXTS, **entries: Any) -> TensorDictBase:
    """Three sequences with ids of other prompts under ("hint", "ids"), which are padded on the left."""
    if layout != "padded":
        return tokens(layout, hint__ids=contexts, **entries)
    rows = [torch.tensor(row) for row in contexts]
    ids, real = (pad_sequence(x, True, padding_side="left") for x in (rows, [torch.ones_like(row) for row in rows]))
    return tokens(layout, hint__ids=ids, hint__attention_mask=real, **entries)


def log_probs_after(model: nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """Of a response after a prompt, from one forward of both; differentiable."""
    ids = torch.tensor([prompt + response])
    log_p = model(input_ids=ids).logits[0].log_softmax(-1)
    return log_p[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


# ------------------------------------------------------------------ ids of the prompts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_of_other_prompts_in_every_layout(layout: str) -> None:
    model, data = wide(), rollout(layout)
    found = RetrieveLogProb(model, context=HINT_IDS)(data)
    for row, context, response in zip(at_responses(found, FULL), CONTEXTS, RESPONSES, strict=True):
        assert_close(row, log_probs_after(model, context, response).detach(), **EXACTLY)
    plain = RetrieveLogProb(model)(rollout(layout))
    for one, other in zip(found.unbind(0), plain.unbind(0), strict=True):
        assert one[FULL].shape == other[FULL].shape == one["tokens", "full"].shape
    for row, other in zip(at_responses(found, FULL), at_responses(plain, FULL), strict=True):
        assert (row - other).abs().min() > 1e-3  # the prompt matters


def test_the_own_prompt_as_context_changes_nothing() -> None:
    model = wide()
    found = RetrieveLogProb(model, context=HINT_IDS)(rollout("padded", PROMPTS))
    expected = RetrieveLogProb(model)(rollout("padded"))
    assert_close(found[FULL], expected[FULL], **EXACTLY)


def test_several_batch_dimensions_and_next() -> None:
    """Two by two rows; the prompts lie below "next"."""
    full = torch.arange(3, 15).reshape(2, 2, 3)
    hints = torch.arange(30, 38).reshape(2, 2, 2)
    data = TensorDict({"tokens": {"full": full, "prompt": full[..., :1].clone()}, "next": {"hint": hints}}, [2, 2])
    model = wide()
    found = RetrieveLogProb(model, context="hint")(data)["next", "log_probs", "full"]
    assert found.shape == (2, 2, 3)
    for i in range(2):
        for j in range(2):
            expected = log_probs_after(model, hints[i, j].tolist(), full[i, j, 1:].tolist())
            assert_close(found[i, j, 1:], expected.detach(), **EXACTLY)


def test_gradients_are_those_of_the_sequences_built_by_hand() -> None:
    model = wide()
    found = RetrieveLogProb(model, context=HINT_IDS, detach=False)(rollout("padded"))
    weight = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).double()
    (found[FULL] * weight).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i, (context, response) in enumerate(zip(CONTEXTS, RESPONSES, strict=True)):
        (log_probs_after(model, context, response) * weight[i, 3 : 3 + len(response)]).sum().backward()
    for name, parameter in model.named_parameters():
        assert_near(got[name], parameter.grad, **BACKWARD)


def test_other_scores_follow() -> None:
    """Entropy and top k by hand, at the places of the response in the data."""
    model = wide()
    found = RetrieveLogProb(model, context=HINT_IDS, entropy_key="entropy", top_k=3)(rollout("padded"))
    assert found["top_k", "ids"].shape == (3, 7, 3)
    for i, (context, response) in enumerate(zip(CONTEXTS, RESPONSES, strict=True)):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([context + response])).logits[0].log_softmax(-1)
        log_p = log_p[len(context) - 1 : -1]
        at = slice(3, 3 + len(response))
        assert_close(found["entropy"][i, at].double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
        assert torch.equal(found["top_k", "ids"][i, at], log_p.topk(3).indices)
        assert not found["entropy"][i, :3].any()
        assert not found["top_k", "ids"][i, :3].any()


def test_a_row_without_a_response() -> None:
    full = torch.tensor([[3, 4, 5], [6, 7, 8]])
    data = TensorDict({"tokens": {"full": full, "prompt": full[:, :2].clone()}, "hint": torch.tensor([[9], [10]])}, [2])
    data["masks", "all_attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    found = RetrieveLogProb(model := wide(), context="hint")(data)[FULL]
    assert_close(found[0, 2:], log_probs_after(model, [9], [5]).detach(), **EXACTLY)
    assert not found[1].any()


def body_tokens(model: Any, run: Callable[[], Any]) -> int:
    """Tokens that go through the body while ``run`` runs."""
    seen = []
    hook = lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel())  # noqa: E731
    handle = model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    run()
    handle.remove()
    return sum(seen)


def test_eight_answers_forward_each_new_prompt_once() -> None:
    """By hand: 12 tokens of each other prompt, and of each answer (5 tokens, no two begin alike) all but the last."""
    answers = torch.arange(40).reshape(8, 5) + 30
    full = torch.cat([torch.tensor([[3, 4, 5]]).expand(8, 3), answers], 1)
    model = tiny_model(seed=0)
    transform = RetrieveLogProb(model, context="hint")
    for prompts in (1, 2):
        hint = torch.arange(12) + torch.arange(8).remainder(prompts)[:, None] * 12
        data = TensorDict({"tokens": {"full": full, "prompt": full[:, :3].clone()}, "hint": hint}, [8])
        assert body_tokens(model, lambda data=data: transform(data)) == 12 * prompts + 8 * 4


# ------------------------------------------------------------------ a function of the conversation

HINT = "The answer is 42."


def with_hint(history: History) -> History:
    """A system message before the conversation."""
    return History.from_chats([[{"role": "system", "content": HINT}, *history_to_messages(history)]])[0]


def as_dicts(history: History) -> list[dict[str, Any]]:
    return [{"role": "system", "content": HINT}, *history_to_messages(history)]


def stacked(history: History) -> History:
    return torch.stack([History(role="system", content=HINT), *history.unbind(0)])


def hinted(tokenizer: Any, question: Any, hint: str = HINT) -> list[int]:
    """The prompt by hand: the hint, the user's first message (or that of a row) and the header of the answer."""
    if not isinstance(question, str):
        question = history_to_messages(question["history", "prompt"])[0]["content"]
    text = f"<|im_start|>system\n{hint}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(text)


def response_of(step: TensorDictBase) -> tuple[int, int]:
    """Where the response begins and ends in the row."""
    real = step["masks", "all_attention_mask"].nonzero().flatten()
    return len(step["tokens", "prompt"]), int(real[-1]) + 1


def with_solution(history: History, row: TensorDictBase) -> Any:
    return [{"role": "system", "content": row["solution"]}, *history_to_messages(history)]


@pytest.mark.parametrize(
    ("padded", "function"),
    [(True, with_hint), (False, as_dicts), (True, stacked), (False, with_solution)],
    indirect=["padded"],
)
def test_another_system_message(tokenizer: Any, policy_model: nn.Module, padded: bool, function: Any) -> None:
    """By a function of the conversation, or of the conversation and its row."""
    data = flat(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=padded), envs=3))
    hints = [f"It is {i}." if function is with_solution else HINT for i in range(3)]
    for step, hint in zip(data.unbind(0), hints, strict=True):
        step["solution"] = hint
    model = make_model(tokenizer, seed=1).double()
    scored = RetrieveLogProb(model, tokenizer=tokenizer, context=function)(data)
    for step, hint in zip(steps(scored), hints, strict=True):
        start, end = response_of(step)
        expected = log_probs_after(model, hinted(tokenizer, step, hint), step["tokens", "full"][start:end].tolist())
        found = step["next", "log_probs", "full"]
        assert found.shape == step["tokens", "full"].shape
        assert_close(found[start:end], expected.detach(), **EXACTLY)
        assert not found[:start].any()
        assert not found[end:].any()


@pytest.mark.parametrize(("padded", "scope"), [(True, "turn"), (False, "full")], indirect=["padded"])
def test_turns_in_an_env(tokenizer: Any, policy_model: nn.Module, padded: bool, scope: Any) -> None:
    """From the first answer on, each turn has the tokens that were sampled; only what comes before is replaced."""
    model = make_model(tokenizer, seed=1)
    transform = RetrieveLogProb(model, tokenizer=tokenizer, context=with_hint, scope=scope)
    data = collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=padded), transform, envs=2, turns=3)
    header = tokenizer.encode("<|im_start|>assistant\n")
    for step in steps(data):
        real, full = step["masks", "all_attention_mask"], step["tokens", "full"]
        ids = full[real].tolist()
        first = next(i for i in range(len(ids)) if ids[i : i + len(header)] == header) + len(header)
        prompt = hinted(tokenizer, step)
        expected = log_probs_after(model, prompt, ids[first:]).detach()
        found = step["next", "log_probs", "full"][real]
        scored = found != 0
        start = len(ids) - int(real[len(step["tokens", "prompt"]) :].sum())
        assert scored[start:].all()
        assert scored[first] == (scope == "full" or first == start)
        assert_close(found[scored], expected[scored[first:]], atol=1e-4, rtol=0)


def test_all_turns_of_a_conversation(tokenizer: Any) -> None:
    """The mask of the data shows the turns; the tokens between them stay."""
    chat = [*CHAT, {"role": "user", "content": "three?"}, {"role": "assistant", "content": "four!"}]
    rendered = render_conversation(tokenizer, chat)
    row = TensorDict(
        tokens=TensorDict(full=rendered.token_ids),
        masks=TensorDict(all_assistant_mask=rendered.assistant_mask),
        history=ChatHistory(full=History.from_chats([chat])[0]),
    )
    model = make_model(tokenizer, seed=1).double()
    found = RetrieveLogProb(model, tokenizer=tokenizer, context=with_hint, scope="full")(lazy_stack([row]))[0][FULL]
    first = int(rendered.assistant_mask.nonzero()[0])
    expected = log_probs_after(model, hinted(tokenizer, "one?"), rendered.token_ids[first:].tolist()).detach()
    mask = rendered.assistant_mask
    assert int(mask.sum()) == len("two") + len("four!") + 2  # bytes, and the end token of each turn
    assert_close(found[mask], expected[mask[first:]], **EXACTLY)
    assert not found[~mask].any()


def test_conversations_without_tokens(tokenizer: Any) -> None:
    """Rendered here: the context's own rendering is cut at the assistant's first token."""
    model = make_model(tokenizer, seed=1).double()
    wrapper = make_scoring_wrapper(model, tokenizer, pad_output=False, input_mode="history")

    def data() -> TensorDictBase:
        return TensorDict(history=ChatHistory(full=History.from_chats([CHAT]), batch_size=[1]), batch_size=[1])

    plain, same = RetrieveLogProb(wrapper)(data()), RetrieveLogProb(wrapper, context=lambda history: history)(data())
    assert_close(same[0][FULL], plain[0][FULL], **EXACTLY)
    found = RetrieveLogProb(wrapper, context=with_hint)(data())[0][FULL]
    response = tokenizer.encode("two<|im_end|>")
    expected = log_probs_after(model, hinted(tokenizer, "one?"), response).detach()
    assert found.shape == plain[0][FULL].shape
    assert_close(found[found != 0], expected, **EXACTLY)
    assert torch.equal(found != 0, plain[0][FULL] != 0)


def test_the_cache_of_an_env(tokenizer: Any, policy_model: nn.Module) -> None:
    """A second turn costs its new tokens: the other prompt is cached too."""
    model = make_model(tokenizer, seed=1)
    transform = RetrieveLogProb(model, tokenizer=tokenizer, context=with_hint)
    policy = make_policy(policy_model, tokenizer, pad_output=False)
    env = make_env(tokenizer, transform, envs=1, turns=2)
    torch.manual_seed(0)
    costs: list[int] = []
    td = env.reset()
    for _ in range(2):
        td = policy(td)
        costs.append(body_tokens(model, lambda td=td: env.step(td)))
        td = env.step_mdp(env.step(td))
    assert 0 < costs[1] < costs[0]


# ------------------------------------------------------------------ RetrieveKL


def test_the_reference_alone_sees_the_context() -> None:
    policy, reference, data = wide(), wide(1), rollout("padded")
    data["next"] = TensorDict(reward=torch.ones(3, 1), batch_size=[3])
    found = RetrieveKL(policy, reference, context=HINT_IDS, coeff=0.5)(data)["next"]
    for i, (prompt, context, response) in enumerate(ROWS):
        at = slice(3, 3 + len(response))
        gen = log_probs_after(policy, prompt, response).detach()
        ref = log_probs_after(reference, context, response).detach()
        assert_close(found["log_probs", "full"][i, at], gen, **EXACTLY)
        assert_close(found["ref_log_probs", "full"][i, at], ref, **EXACTLY)
        assert_close(found["kl_penalty"][i, at], gen - ref, **EXACTLY)
        assert_near(found["reward"][i].sum(), 1 - 0.5 * (gen - ref).sum(), dtype=torch.float32, terms=4, size=16)


def test_a_context_of_the_policy_and_settings_that_change() -> None:
    model = wide()
    transform = RetrieveKL(model, model, context=HINT_IDS, gen_context=HINT_IDS)
    assert not transform(rollout("padded"))["kl_penalty"].any()  # self-distillation from the same context
    transform.context = None
    found = transform(rollout("padded"))
    expected = RetrieveKL(model, model, context=HINT_IDS)(rollout("padded"))
    assert found["kl_penalty"].any()
    assert_close(found["kl_penalty"], -expected["kl_penalty"], **EXACTLY)
    assert (transform.context, transform.gen_context) == (None, HINT_IDS)
    assert HINT_IDS in transform[0].in_keys
    assert HINT_IDS not in transform[1].in_keys


def test_an_exact_kl_needs_one_context() -> None:
    model, reference = wide(), wide(1)
    both = {"context": HINT_IDS, "gen_context": HINT_IDS}
    found = RetrieveKL(model, reference, estimator="exact", **both)(rollout("padded"))["kl_penalty"]
    for i, (context, response) in enumerate(zip(CONTEXTS, RESPONSES, strict=True)):
        ids = torch.tensor([context + response])
        with torch.no_grad():
            p, q = (m(input_ids=ids).logits[0, len(context) - 1 : -1].log_softmax(-1) for m in (model, reference))
        assert_close(found[i, 3 : 3 + len(response)].double(), (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=0)
    message = (
        r"estimator='exact' runs both models .* their contexts differ: gen_context=None, context=\('hint', 'ids'\)"
    )
    with pytest.raises(ValueError, match=message):
        RetrieveKL(model, reference, estimator="exact", context=HINT_IDS)
    transform = RetrieveKL(model, reference, context=HINT_IDS, sampling=Sampling(top_k=3, reference="kept"))
    with pytest.raises(ValueError, match=r"^Sampling\(reference='kept'\) runs both models .*reference='whole'"):
        transform(rollout("padded"))
    transform = RetrieveKL(model, reference, context=HINT_IDS)
    transform.estimator = "exact"
    with pytest.raises(ValueError, match=message):
        transform(rollout("padded"))


# ------------------------------------------------------------------ what a sampler kept


def recorded(layout: str) -> tuple[TensorDictBase, list[list[list[int]]]]:
    """A rollout with three tokens that could have been drawn at each response token, and those."""
    kept = [[sorted({token, 30, 31 + i}) for i, token in enumerate(row)] for row in RESPONSES]
    before = [len(prompt) if layout == "padded" else 0 for prompt in PROMPTS]  # else of the response alone
    counts = [[0] * n + [3] * len(row) for n, row in zip(before, RESPONSES, strict=True)]
    return rollout(
        layout, kept__counts=counts, kept__ids=[[token for each in row for token in each] for row in kept]
    ), kept


def log_probs_over(model: nn.Module, prompt: list[int], response: list[int], kept: list[list[int]]) -> Tensor:
    """Of a response after a prompt, each token among those that were kept for it."""
    log_p = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.stack(
        [row[ids].log_softmax(-1)[ids.index(token)] for row, ids, token in zip(log_p, kept, response, strict=True)]
    ).detach()


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_record_is_replayed_after_another_prompt(layout: str) -> None:
    """The answer's tokens are the same, and so is what could have been drawn in their place."""
    model, (data, kept) = wide(), recorded(layout)
    found = RetrieveLogProb(model, context=HINT_IDS, sampling=Sampling(top_k=3))(data)
    for row, *parts in zip(at_responses(found, FULL), CONTEXTS, RESPONSES, kept, strict=True):
        assert_close(row, log_probs_over(model, *parts), **EXACTLY)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_both_models_over_a_record_after_another_prompt(estimator: Any) -> None:
    policy, reference, (data, kept) = wide(), wide(1), recorded("padded")
    both: Any = {"context": HINT_IDS, "gen_context": HINT_IDS}
    both |= {"sampling": Sampling(top_k=3, reference="kept")}
    found = RetrieveKL(policy, reference, estimator=estimator, **both)(data)
    for key, model in ((FULL, policy), (("ref_log_probs", "full"), reference)):
        for row, *parts in zip(at_responses(found, key), CONTEXTS, RESPONSES, kept, strict=True):
            assert_close(row, log_probs_over(model, *parts), **EXACTLY)


def test_scores_over_what_a_sampler_keeps_return_to_the_tokens_of_the_data() -> None:
    model, data = wide(), rollout("padded")
    transform = RetrieveLogProb(model, context=HINT_IDS, sampling=Sampling(min_p=1e-9))
    located = transform.locate(data)
    scores = transform.evaluate(transform.in_context(data, located), return_kept=True)
    assert torch.equal(scores.kept.offsets.diff() > 0, located.mask)


# ------------------------------------------------------------------ errors


def conversation(tokenizer: Any, *, history: bool = True) -> TensorDictBase:
    prompt = render_conversation(tokenizer, CHAT[:1], add_generation_prompt=True).token_ids
    full = torch.cat([prompt, torch.tensor(tokenizer.encode("two<|im_end|>"))])
    row = TensorDict(tokens=TensorDict(full=full, prompt=prompt))
    if history:
        row["history"] = ChatHistory(full=History.from_chats([CHAT])[0], prompt=History.from_chats([CHAT[:1]])[0])
    return lazy_stack([row])


def changed(at: int, **message: Any) -> Callable[[History], Any]:
    def function(history: History) -> Any:
        messages = history_to_messages(history)
        messages[at] |= message
        return messages

    return function


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (changed(1, content="six"), ValueError, r"may change the messages before .* 0 was .*'two'.* returned .*'six'"),
        (changed(1, role="user"), ValueError, r"message 0 was .*'two'.* it returned 'no message'"),
        (lambda h: history_to_messages(h)[:1], ValueError, r"message 0 was .*'two'.* it returned 'no message'"),
        (lambda h: [*history_to_messages(h), *CHAT[:1]], ValueError, r"message 1 was 'no message'"),
        (lambda h: history_to_messages(h)[1:], ValueError, "returned no message before the assistant's first one"),
        (lambda h: "a prompt", TypeError, "must return one conversation, .* got str"),
        (lambda h: torch.stack([h, h]), TypeError, r"got History of batch size \(2, 2\)"),
        ("nowhere", KeyError, "the context is missing: expected 'nowhere'"),
    ],
)
def test_contexts_that_are_refused(tokenizer: Any, context: Any, error: type[Exception], message: str) -> None:
    transform = RetrieveLogProb(make_model(tokenizer, seed=1), tokenizer=tokenizer, context=context)
    data = conversation(tokenizer)
    with pytest.raises(error, match=message):
        transform(data)
    assert "log_probs" not in data[0]


def test_a_function_needs_a_conversation_and_a_tokenizer(tokenizer: Any) -> None:
    model = make_model(tokenizer, seed=1)
    with pytest.raises(KeyError, match=r"a context function needs the conversation: expected \('history', 'full'\)"):
        RetrieveLogProb(model, tokenizer=tokenizer, context=with_hint)(conversation(tokenizer, history=False))
    with pytest.raises(ValueError, match="there is no tokenizer to render them"):
        RetrieveLogProb(model, context=with_hint)(conversation(tokenizer))


def test_a_function_cannot_change_the_data(tokenizer: Any) -> None:
    def in_place(history: History) -> History:
        history.content = ["a secret", "two"]
        return history

    data = conversation(tokenizer)
    RetrieveLogProb(make_model(tokenizer, seed=1), tokenizer=tokenizer, context=in_place)(data)
    assert history_to_messages(data[0]["history", "full"])[0]["content"] == "one?"


FULL_IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


@pytest.mark.parametrize(
    ("hint", "settings", "error", "message"),
    [
        (torch.ones(2, 3), {}, TypeError, r"expected token ids under 'hint', one row .* found torch\.float32"),
        (torch.zeros(2, 0).long(), {}, ValueError, "sequence 0: the context has no tokens, and the first response"),
        (FULL_IDS, {"assistant_only": False}, ValueError, r"score include 2 of prompts.* assistant_only=True"),
        (None, {"assistant_only": False}, ValueError, "the data does not show where it ends: found neither"),
        (
            FULL_IDS,
            {"context": 5},
            TypeError,
            r"must be a function History -> History or the key of an entry .*, got 5",
        ),
    ],
)
def test_entries_that_are_refused(hint: Any, settings: Any, error: type[Exception], message: str) -> None:
    prompt = {} if hint is None else {"prompt": FULL_IDS[:, :2].clone()}
    data = TensorDict({"tokens": {"full": FULL_IDS, **prompt}, "hint": FULL_IDS if hint is None else hint}, [2])
    with pytest.raises(error, match=message):
        RetrieveLogProb(wide(), **{"context": "hint", **settings})(data)


def test_a_context_set_later_is_checked() -> None:
    transform = RetrieveLogProb(wide(), context="hint")
    with pytest.raises(TypeError, match="context must be a function"):
        transform.context = ()


def test_a_template_that_renders_the_answer_otherwise(tokenizer: Any) -> None:
    """Without sampled tokens, the answer's own tokens must not depend on what comes before."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if messages[0].role == 'system' else m.content }}<|im_end|>\n{% endfor %}"
    )
    wrapper = make_scoring_wrapper(make_model(tokenizer, seed=1), tokenizer, pad_output=False, input_mode="history")
    data = TensorDict(history=ChatHistory(full=History.from_chats([CHAT]), batch_size=[1]), batch_size=[1])
    transform = RetrieveLogProb(wrapper, context=with_hint, tokenizer_kwargs={"chat_template": template})
    with pytest.raises(ValueError, match="sequence 0: after the context the template renders other tokens"):
        transform(data)


def test_the_function_behind_it() -> None:
    data = rollout("nested")
    located = locate(data)
    moved = in_context(data, located, HINT_IDS)
    assert isinstance(moved, InContext)
    assert [row.tolist() for row in moved.tokens.to_list()] == [c + r for _, c, r in ROWS]
    marks = [[False] * len(c) + [True] * len(r) for _, c, r in ROWS]
    assert [row.tolist() for row in moved.tokens.like(moved.mask).to_list()] == marks
    back = moved.back(moved.tokens)
    assert [row.tolist() for row in back.to_list()] == [[0] * len(p) + r for p, _, r in ROWS]


# ------------------------------------------------------------------ algorithms


def test_the_advantage_of_self_distillation_is_the_teachers_log_prob_less_the_students() -> None:
    model = wide()
    batch = make_algorithm("on_policy_distill", model, reference=model, context=HINT_IDS).prepare(rollout("padded"))
    for (prompt, context, response), found in zip(ROWS, at_responses(batch, "advantage"), strict=True):
        teacher, student = (log_probs_after(model, first, response).detach() for first in (context, prompt))
        assert_near(found.flatten(), teacher - student, dtype=torch.float32, size=16)


@pytest.mark.parametrize(("layout", "name"), [("padded", "gkd"), ("lazy", "on_policy_distill")])
def test_self_distillation_over_the_top_k_of_a_privileged_prompt(layout: str, name: Any) -> None:
    """Entries, loss and gradient of the head against a forward of each prompt and answer."""
    model, k = wide(), 3
    parts = make_algorithm(name, model, reference=model, top_k=k, context=HINT_IDS)
    batch = parts.prepare(rollout(layout))
    entries = [at_responses(batch, ("top_k", entry)) for entry in ("ids", "log_probs", "rest_log_prob")]
    divergences = []
    for i, (prompt, context, response) in enumerate(ROWS):
        q, p = (
            model(input_ids=torch.tensor([first + response])).logits[0, len(first) - 1 : -1].log_softmax(-1)
            for first in (prompt, context)
        )
        p, ids = p.detach().topk(k)
        rest = torch.log1p(-p.exp().sum(-1))
        assert_close(entries[0][i], ids)
        assert_near(entries[1][i], p, dtype=torch.float32, size=16)
        assert_near(entries[2][i], rest, dtype=torch.float32, size=16)
        log_p = torch.cat([p, rest[:, None]], -1)
        listed = q.gather(-1, ids)
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
    with pytest.raises(ValueError, match="context= is the prompt of the reference, and for gpg_like none is scored"):
        make_algorithm(replace(ALGORITHMS["dapo"], name="gpg_like"), model, group_size=2, context="hint")
    with pytest.raises(ValueError, match="for grpo the loss scores it on the data's own prompts"):
        make_algorithm("grpo", model, reference=wide(1).float(), group_size=2, kl_loss="exact", context="hint")
    with pytest.raises(ValueError, match=r"for gkd the loss scores it on the data's own prompts: .* or pass top_k="):
        make_algorithm("gkd", model, reference=tiny_model(seed=1), context="hint")
    parts = make_algorithm("on_policy_distill", model, reference=tiny_model(seed=1), context="hint")
    assert parts.kl_transform.context == "hint"
    assert parts.kl_transform.gen_context is None
