"""Recorded and replayed routing of a mixture of experts, compared with plain models whose routers are patched."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointed import enable, enable_and_wrap, in_own_code, wrap
from closeness import assert_near
from refused import refused
from routed_by_hand import by_hand, perturbed, routers
from scoring_reference import SHARED, FakeBackend, assert_scores, body_tokens, conversation, engine, ids, make_scorer
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import RememberedModel, ScoreRequest
from torchrl_llm_kl.scoring._routing import Routers
from toy_models import EXPERT_FAMILIES, FORWARD, ROUTED_FAMILIES, altered, stateful_model, tiny_model, with_lora

# Layers with a router, of three.
LAYERS = {"mixtral": [0, 1, 2], "qwen3_moe": [0, 1], "gpt_oss": [0, 1, 2], "deepseek_v3": [1, 2]}
EXPERTS, K = 6, 2
SMALL = {"tokens_per_batch": 23}  # shared prompts span several packs
ROWS = conversation()
TOKENS = Ragged.from_list(ROWS)
WEIGHTS = torch.linspace(-1, 2, len(TOKENS.values))
# Two prompts, one of which two share and one continues, in a third of the tokens: for comparisons in float64.
SOME = [ROWS[i] for i in (0, 1, 2, 6)]
SOME_TOKENS = Ragged.from_list(SOME)
KINDS = [*((family, "packed") for family in EXPERT_FAMILIES), ("qwen3_moe", "padded"), ("deepseek_v3", "full")]


def in_float64(family: str) -> nn.Module:
    model: Any = tiny_model(family).double()
    model.set_experts_implementation("eager")  # the default has no float64
    return model


def own_experts(model: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    """The experts ``[T, L, k]`` that the plain model chooses, one sequence at a time."""
    found, seen = list[Tensor](), list[Tensor]()
    handles = [router.register_forward_hook(lambda *args: seen.append(args[2][2])) for router in routers(model)]
    for row in rows:
        seen.clear()
        with torch.no_grad():
            model(input_ids=row[None])
        found.append(torch.stack(seen, 1))
    for handle in handles:
        handle.remove()
    return found


def random_experts(rows: list[Tensor], layers: int, seed: int = 0) -> list[Tensor]:
    """Random experts for each token, layer and slot, all different within a token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(len(row), layers, EXPERTS, generator=generator).argsort(-1)[..., :K] for row in rows]


def gradients(model: nn.Module, *parts: Tensor) -> list[Tensor | None]:
    total = sum((WEIGHTS[: len(part)].to(part.dtype) * part).sum() * (i + 1) for i, part in enumerate(parts))
    return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))


def assert_same(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 0.0) -> None:
    """Gradients are equal up to a share of the parameter's largest one. transformers computes norms in float32 in any model."""
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros(()) if x is None else x for x in (a, b))
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_own_routing_is_recorded_and_replayed_changes_no_bit(family: str, kind: str) -> None:
    model = tiny_model(family)
    scorer = make_scorer(model, kind, **SMALL)
    mask = TOKENS.positions > 0
    mask[TOKENS.sequence_ids == 4] = False  # not forwarded
    found = scorer.evaluate(TOKENS, mask, record_routing=True).routing
    assert found.values.dtype == torch.int8
    for i, (record, want) in enumerate(zip(found.to_list(), own_experts(model, ROWS), strict=True)):
        forwarded = 0 if i == 4 else len(want) - 1
        assert torch.equal(record[:forwarded].sort(-1).values.long(), want[:forwarded].sort(-1).values)
        assert bool((record[forwarded:] == -1).all())
        assert record.shape[1:] == (len(LAYERS[family]), K)

    if kind == "packed":
        assert scorer.shares_prefixes
        assert_scores(scorer, model, ROWS)
    first = scorer.evaluate(TOKENS, entropy=True, record_routing=True, grad=True)
    again = scorer.evaluate(ScoreRequest.of(TOKENS, routing=first.routing), entropy=True, grad=True)
    assert torch.equal(first.log_prob.values, again.log_prob.values)
    assert torch.equal(first.entropy.values, again.entropy.values)
    parts = [(each.log_prob.values, each.entropy.values) for each in (again, first)]
    assert_same(gradients(model, *parts[0]), gradients(model, *parts[1]))
    scorer.options = scorer.options.but(dtype=torch.bfloat16)
    half = scorer.evaluate(TOKENS, record_routing=True)
    assert torch.equal(scorer.score(ScoreRequest.of(TOKENS, routing=half.routing)).values, half.log_prob.values)


@pytest.mark.parametrize("of", ["another sampler", "chance"])
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_replayed_experts_have_the_models_own_weights(family: str, kind: str, of: str) -> None:
    """Replays the routing of A in B, whose routers differ. Each sequence has its own record, so prompts are not shared."""
    sampler = in_float64(family)
    model = perturbed(sampler)
    scorer = make_scorer(model, kind, **SMALL)
    if of == "chance":
        records = random_experts(SOME, len(LAYERS[family]))
    else:
        records = own_experts(sampler, SOME)
        flips = (torch.cat(own_experts(model, SOME)).sort(-1).values != torch.cat(records).sort(-1).values).any(-1)
        assert 0.1 < float(flips.double().mean()) < 1
    found = scorer.evaluate(ScoreRequest.of(SOME_TOKENS, routing=records), entropy=True, grad=True)
    got, want = (found.log_prob.values, found.entropy.values), by_hand(family, model, SOME, records)
    assert float((scorer.score(SOME_TOKENS).values - want[0].detach()).abs().max()) > 0.1
    for a, b in zip(got, want, strict=True):
        assert_near(a.double(), b, size=16, dtype=torch.float32)
    assert_same(gradients(model, *got), gradients(model, *want), 1e-5)


def test_prompts_are_shared_where_they_are_routed_alike() -> None:
    model = tiny_model("mixtral")
    scorer = LogProbScorer(model)
    record = scorer.evaluate(TOKENS, record_routing=True).routing

    def cost(**options: Any) -> int:
        return body_tokens(model, lambda: scorer.score(ScoreRequest.of(TOKENS, **options)))

    assert cost() == cost(routing=record) == SHARED
    assert cost(routing=random_experts(ROWS, 3)) == sum(len(row) - 1 for row in ROWS)
    # The last token of the prompt of the second group, of 18 tokens, in one of its two answers: 17 remain shared.
    values = record.values.clone()
    at = int(TOKENS.offsets[4]) + 17
    values[at, 1] = (values[at, 1] + 1) % EXPERTS
    assert cost(routing=values) == SHARED + 1
    # Recorded for the responses alone, prompts are shared as without a record.
    assert cost(routing=values.masked_fill((TOKENS.positions < 20)[:, None, None], -1)) == SHARED


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_tokens_and_layers_without_a_record(kind: str) -> None:
    """-1 leaves the choice to the router. The router's input depends on the experts of earlier layers."""
    model, rows = in_float64("mixtral"), ROWS[:4]
    tokens = Ragged.from_list(rows)
    records = random_experts(rows, 3)
    for record in records:
        record[:20] = -1
        record[:, 1] = -1
    scorer = make_scorer(model, kind, **SMALL)
    found = scorer.evaluate(ScoreRequest.of(tokens, routing=records), record_routing=True)
    used = found.routing.to_list()
    for record, chosen in zip(records, used, strict=True):
        assert torch.equal(chosen[20:-1, [0, 2]].long(), record[20:-1, [0, 2]])
        assert bool((chosen[:-1] >= 0).all())
        chosen[-1] = torch.tensor([0, 1])  # not forwarded: any will do
    want, _ = by_hand("mixtral", model, rows, used)
    assert_near(found.log_prob.values.double(), want, size=16, dtype=torch.float32)
    # The routers' own choices are what a model chooses with the recorded ones forced alone.
    logits: list[list[Tensor]] = [[], [], []]
    for router, into in zip(routers(model), logits, strict=True):
        router.register_forward_hook(lambda *args, into=into: into.append(args[2][0]))
    by_hand("mixtral", model, rows, used)
    best, chosen = torch.stack([torch.cat(each).topk(2, -1).indices for each in logits], 1), torch.cat(used).long()
    free = torch.cat([F.pad(record[:-1, :, 0] < 0, (0, 0, 0, 1)) for record in records])  # without last tokens
    assert torch.equal(chosen[free].sort(-1).values, best[free].sort(-1).values)


def test_record_formats_of_engines() -> None:
    """vLLM records an array for each sequence, without the last token, with a place for every layer including dense ones."""
    model = tiny_model("deepseek_v3")
    routing = LogProbScorer(model).evaluate(TOKENS, record_routing=True).routing
    records = routing.to_list()
    of_vllm = [np.pad(record[:-1].numpy().astype(np.uint8), ((0, 0), (1, 0), (0, 0))) for record in records]
    scorer = LogProbScorer(perturbed(model))
    expected = scorer.score(ScoreRequest.of(TOKENS, routing=routing)).values
    assert not torch.equal(scorer.score(TOKENS).values, expected)
    for form in [of_vllm, records, routing.values, torch.cat(records).long(), routing.to_nested()]:
        assert torch.equal(scorer.score(ScoreRequest.of(TOKENS, routing=form)).values, expected)
    padded, real = TOKENS.to_padded(side="left"), TOKENS.padding_mask(side="left").long()
    for form in [of_vllm, routing.to_padded(side="left")]:
        assert torch.equal(scorer.score(ScoreRequest.of(padded, attention_mask=real, routing=form)).values, expected)


def test_a_record_has_the_narrowest_dtype() -> None:
    assert Routers.of(tiny_model("mixtral", num_local_experts=128)).dtype == torch.int8
    scorer = LogProbScorer(tiny_model("mixtral", num_local_experts=129))
    first = scorer.evaluate([ROWS[0]], record_routing=True)
    assert first.routing.values.dtype == torch.int16
    assert torch.equal(scorer.score(ScoreRequest.of([ROWS[0]], routing=first.routing)).values, first.log_prob.values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("checkpointed", "reentrant", "share"),
    [(enable, True, True), (wrap, False, True), (enable_and_wrap, True, True), (enable, False, False)],
)
def test_checkpoints_replay(checkpointed: Any, reentrant: bool, share: bool) -> None:
    """The recomputation in the backward replays too, so gradients equal those without checkpoints."""
    records, found = random_experts(ROWS, 3), []
    for change in (False, True):
        model = tiny_model("mixtral").train()
        scorer = LogProbScorer(model, share_prefixes=share, tokens_per_batch=23)
        calls: list[int] = []
        routers(model)[1].register_forward_pre_hook(lambda *_, into=calls: into.append(1))
        weights = list(model.parameters())
        if change:
            checkpointed(model, reentrant)
        scores = scorer.evaluate(ScoreRequest.of(TOKENS, routing=records), record_routing=True, grad=True)
        forwards = len(calls)
        (WEIGHTS * scores.log_prob.values).sum().backward()
        assert (len(calls) > forwards) is change, "layers are computed again in the backward"
        found.append((scores, [weight.grad for weight in weights]))
    (plain, expected), (scores, gradient) = found
    assert torch.equal(scores.log_prob.values, plain.log_prob.values)
    assert torch.equal(scores.routing.values, plain.routing.values)
    assert_same(gradient, expected, 1e-6)
    # A checkpoint in the model's own code is refused.
    model = tiny_model("mixtral").train()
    in_own_code(model, reentrant=False)
    with pytest.raises(ValueError, match="checkpoint in their own code"):
        LogProbScorer(model, share_prefixes=share).score(ScoreRequest.of(TOKENS, routing=records), grad=True)


def test_the_references_own_routing() -> None:
    model = in_float64("mixtral")
    scorer, ref_scorer = LogProbScorer(model, tokens_per_batch=23), LogProbScorer(perturbed(model))
    records, others = random_experts(ROWS, 3, seed=1), random_experts(ROWS, 3, seed=2)
    near: dict[str, Any] = {"size": 16, "dtype": torch.float32}
    for options in ({}, {"ref_routing": others}):
        found = scorer.evaluate(ScoreRequest.of(TOKENS, routing=records, **options), reference=ref_scorer)
        assert_near(found.log_prob.values, scorer.score(ScoreRequest.of(TOKENS, routing=records)).values, **near)
        want = ref_scorer.score(ScoreRequest.of(TOKENS, routing=options.get("ref_routing"))).values
        assert_near(found.ref_log_prob.values, want, **near)
    same = scorer.evaluate(
        ScoreRequest.of(TOKENS, routing=records, ref_routing=records), reference=LogProbScorer(model)
    ).kl.values
    assert_near(same, torch.zeros_like(same), **near)
    with pytest.raises(ValueError, match="ref_routing= needs a reference"):
        scorer.evaluate(ScoreRequest.of(TOKENS, ref_routing=records))


def test_adapters_and_the_base_as_reference() -> None:
    """The policy replays. Its base, the same modules without adapters, routes by itself."""
    plain = tiny_model("mixtral")
    own = LogProbScorer(plain).score(TOKENS).values
    torch.manual_seed(0)
    policy = with_lora(plain, target_modules=["q_proj", "v_proj"])
    scorer, base = LogProbScorer(policy), LogProbScorer(policy, adapters=False)
    first = scorer.evaluate(TOKENS, record_routing=True)
    assert torch.equal(scorer.score(ScoreRequest.of(TOKENS, routing=first.routing)).values, first.log_prob.values)
    records = random_experts(ROWS, 3)
    found = scorer.evaluate(ScoreRequest.of(TOKENS, routing=records), reference=base)
    assert_near(found.ref_log_prob.values, own, **FORWARD)
    assert_near(found.log_prob.values, scorer.score(ScoreRequest.of(TOKENS, routing=records)).values, **FORWARD)
    assert float((found.log_prob.values - first.log_prob.values).abs().max()) > 0.1


def test_a_replay_neither_reads_nor_writes_caches(tmp_path: Any) -> None:
    """The caches hold only scores of the model's own routing."""
    model, records = tiny_model("mixtral"), random_experts(ROWS, 3)
    want = LogProbScorer(model).score(ScoreRequest.of(TOKENS, routing=records)).values
    cached, stored = LogProbScorer(model), RememberedModel(model, tmp_path).make_scorer()
    for scorer, options in ((cached, {"remember": True}), (stored, {})):
        own = scorer.score(TOKENS, **options).values
        assert torch.equal(scorer.score(ScoreRequest.of(TOKENS, routing=records), **options).values, want)
        assert_near(scorer.score(TOKENS, **options).values, own, **FORWARD)
    assert cached.memory.tokens_recalled > 0
    assert stored.evaluate(TOKENS, record_routing=True).routing is not None


def test_nothing_stays_on_the_model_and_another_thread_routes_by_itself() -> None:
    model = tiny_model("mixtral")
    enable(model, reentrant=False)
    scorer, records = LogProbScorer(model), random_experts(ROWS, 3)
    router, found, hidden = routers(model)[0], [], torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    before = [(dict(m.__dict__), len(m._forward_hooks)) for m in model.modules()]
    own, want = scorer.score(TOKENS).values, router(hidden)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(router(hidden)))
        thread.start()
        thread.join()

    with model.model.layers[1].register_forward_hook(meanwhile):
        scorer.score(ScoreRequest.of(TOKENS, routing=records))
    assert all(map(torch.equal, found[0], want))
    last = routers(model)[2]
    with last.register_forward_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        scorer.score(ScoreRequest.of(TOKENS, routing=records))
    assert [(dict(m.__dict__), len(m._forward_hooks)) for m in model.modules()] == before
    assert torch.equal(scorer.score(TOKENS).values, own)


@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_other_families_replay_as_if_their_own_top_k_had_chosen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Includes hybrid families, whose answers continue from the state after their prompt."""
    model = stateful_model(family, experts=True)
    first, *rest = (ids(n, n) for n in (40, 6, 9))
    rows = [torch.cat([first, each]) for each in rest]
    layers = len(Routers.of(model).layers)
    records = random_experts(rows, layers)
    records[1][:40] = records[0][:40]
    scorer = LogProbScorer(model)
    batch, routing = Ragged.from_list(rows), Ragged.from_list(records)
    held, want = list[Tensor](), list[Tensor]()
    tokens = body_tokens(
        model, lambda: held.append(scorer.score(ScoreRequest.of(batch, routing=routing), grad=True).values)
    )
    (found,) = held
    assert tokens == 40 + 5 + 8 + (3 if scorer._route.sharing == "forks" else 0)  # padded to the longest
    plain = torch.topk
    for row, record in zip(rows, records, strict=True):
        places = iter(range(layers))

        def top_k(x: Tensor, k: int, *_: Any, record: Tensor = record, places: Any = places, **more: Any) -> Any:
            if x.shape[1:] != (EXPERTS,):  # groups of experts
                return plain(x, k, *_, **more)
            chosen = record[:, next(places)].long()
            return x.gather(-1, chosen), chosen

        with monkeypatch.context() as patch:
            patch.setattr(torch, "topk", top_k)
            patch.setattr(Tensor, "topk", top_k)
            log_p = model(input_ids=row[None]).logits[0, :-1].log_softmax(-1)
        want.append(F.pad(log_p.gather(-1, row[1:, None])[:, 0], (1, 0)))
    expected = torch.cat(want)
    assert_near(found, expected, **FORWARD)
    assert (found - scorer.score(Ragged.from_list(rows)).values).abs().max() > 0.01
    parameters = [*model.parameters()]
    both = [list(torch.autograd.grad(x.sum(), parameters, allow_unused=True)) for x in (found, expected)]
    assert_same(*both, tolerance=1e-3)


def doubled(_: Any, __: Any, out: Any) -> Any:
    return out[0], 2 * out[1], out[2]


def changed(change: Any) -> Any:
    return lambda: altered("mixtral", change)


REFUSED: dict[str, Any] = {
    "Qwen2ForCausalLM has no router of Mixtral": tiny_model,
    "PhimoeForCausalLM has no router of Mixtral": lambda: tiny_model("phimoe"),
    "routing=.* is not supported by FakeBackend": lambda: FakeBackend(engine(tiny_model("mixtral"))),
    "parts of MixtralForCausalLM are compiled": changed(lambda m: m.model.layers[1].compile(backend="eager")),
    "MixtralTopKRouter of layer 1 was not called": changed(
        lambda m: setattr(m.model.layers[1].mlp, "forward", torch.clone)
    ),
    "MixtralTopKRouter does not weigh experts as": changed(lambda m: routers(m)[1].register_forward_hook(doubled)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(message: str) -> None:
    make = REFUSED[message]
    replayed_only = "weigh experts as" in message
    scorer = LogProbScorer(make(), probe=not replayed_only)
    with pytest.raises(ValueError, match=message):
        scorer.evaluate(ScoreRequest.of(TOKENS, routing=random_experts(ROWS, 3)))
    if not replayed_only:
        with pytest.raises(ValueError, match=message):
            scorer.evaluate(TOKENS, record_routing=True)


def put(row: int, t: int, layer: int, value: list[int]) -> Any:
    def change(records: list[Tensor]) -> list[Tensor]:
        records[row][t, layer] = torch.tensor(value)
        return records

    return change


def replayed(change: Any) -> None:
    LogProbScorer(tiny_model("mixtral"), probe=False).score(
        ScoreRequest.of(TOKENS, routing=change(random_experts(ROWS, 3)))
    )


test_records_that_are_refused = refused(
    replayed,
    (lambda r: [x[:, :2] for x in r], "record has 2 layers of 2 experts, not 3 of 2"),
    (lambda r: [x[..., :1] for x in r], "record has 3 layers of 1 experts"),
    (lambda r: r[:-1], "routing has 7 sequences, the tokens have 8"),
    (lambda r: [*r[:2], r[2][:-2], *r[3:]], r"2 has shape \(39, 3, 2\) .*\(41 or 40, layers, experts\)"),
    (lambda r: torch.cat(r).float(), r"\(196, 3, 2\) of torch.float32: expected integers \(196, layers, experts\)"),
    (put(1, 5, 2, [6, 0]), r"\[6, 0\] at sequence 1, position 5, layer 2: expected 2 different ones from 0 to 5"),
    # Ids that were stored in too narrow a type.
    (put(1, 5, 2, [-56, -100]), r"experts \[-56, -100\] at sequence 1, position 5, layer 2: .* 0 to 5, or only -1"),
    (put(3, 7, 0, [-1, 0]), r"\[-1, 0\] at sequence 3, position 7, layer 0: expected 2 different ones"),
    (put(0, 2, 1, [4, 4]), r"\[4, 4\] at sequence 0, position 2, layer 1: expected 2 different ones"),
)


def test_tokens_that_need_no_forward_are_not_checked() -> None:
    """Engines may record zeros at the last token, which is never forwarded."""
    scorer, want = LogProbScorer(tiny_model("mixtral")), random_experts(ROWS, 3)
    filled = [torch.cat([record[:-1], torch.zeros_like(record[-1:])]) for record in want]
    assert torch.equal(
        scorer.score(ScoreRequest.of(TOKENS, routing=filled)).values,
        scorer.score(ScoreRequest.of(TOKENS, routing=want)).values,
    )
    nothing = torch.zeros_like(TOKENS.positions, dtype=torch.bool)
    found = scorer.evaluate(ScoreRequest.of(TOKENS, nothing, routing=want), record_routing=True)
    assert bool((found.routing.values == -1).all())
    alone = ScoreRequest.of(Ragged.from_list([ids(1, 0)]), routing=[torch.zeros(0, 3, 2, dtype=torch.int8)]).routing
    assert alone.tolist() == [[[-1] * 2] * 3]
