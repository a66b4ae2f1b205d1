"""Recorded routing in transforms, losses and algorithms: which entries are read and written, and that all replay alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.envs import check_env_specs

from closeness import assert_near
from layouts import tokens
from torchrl_llm_kl import LogProbScorer, PolicyLoss, Ragged, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import MissingEntryError, ResponseTokens, read_routing
from toy_models import FORWARD, tiny_model
from toy_rollouts import flat, make_env, make_model, make_policy, make_scoring_wrapper, steps

# Two left-padded prompts, and answers of several lengths that are padded on the right.
FULL = torch.tensor([[0, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 0, 0], [0, 3, 4, 11, 12, 13, 0]])
REAL = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0]]).bool()
PROMPT = 3
SCORED = REAL & (torch.arange(7) >= PROMPT)
ADVANTAGE = torch.tensor([[1.0], [-1.0], [0.5]])
KEY = "routed_experts"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("mixtral")


@pytest.fixture(scope="module")
def later(model: nn.Module) -> nn.Module:
    """A policy whose routers moved."""
    other: Any = copy.deepcopy(model)
    for layer in other.model.layers:
        noise = torch.randn(layer.mlp.gate.weight.shape, generator=torch.Generator().manual_seed(1))
        layer.mlp.gate.weight.data += 0.5 * noise
    return other


def rows_of(values: Tensor) -> list[Tensor]:
    """The values of each sequence at its tokens, without padding."""
    return [row[real] for row, real in zip(values, REAL, strict=True)]


SEQUENCES = [
    [row[keep].tolist() for row, keep in zip(FULL[:, part], REAL[:, part], strict=True)]
    for part in (slice(PROMPT), slice(PROMPT, None))
]
TOKENS = Ragged.from_list(rows_of(FULL))
MASK = torch.cat(rows_of(SCORED))


def make_data(layout: str, **entries: Tensor) -> TensorDictBase:
    """The answers in a layout, with further entries ``[3, 7, *F]``."""
    columns = {"masks__all_attention_mask": REAL, "masks__all_assistant_mask": SCORED, **entries}
    rows = {name: rows_of(value) for name, value in columns.items()}
    return tokens(layout, *SEQUENCES, **rows, advantage=ADVANTAGE)


def random_record(layers: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, 7, layers, 6, generator=generator).argsort(-1)[..., :2]


def replayed(model: nn.Module, record: Tensor) -> Ragged:
    """The log-probs under a record ``[3, 7, L, k]``."""
    return LogProbScorer(model).score(TOKENS, MASK, routing=rows_of(record))


def scored(td: TensorDictBase, *key: str) -> Tensor:
    """The values of an entry at the scored tokens, in any layout."""
    key = key or ("log_probs", "full")
    if isinstance(td, TensorDict) and not td[key].is_nested:
        return td[key][SCORED]
    return torch.cat([torch.as_tensor(row[key]) for row in td.unbind(0)])[MASK]


LAYOUTS = ["padded", "nested", "lazy"]


# ------------------------------------------------------------------ transforms


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_is_replayed(layout: str, model: nn.Module) -> None:
    record = random_record()
    td = make_data(layout, routed_experts=record.to(torch.int16))
    found = RetrieveLogProb(model, routing_key=KEY)(td)
    assert_near(scored(found), replayed(model, record).values[MASK], **FORWARD)
    own = RetrieveLogProb(model)(make_data(layout))
    assert float((scored(own) - scored(found)).abs().max()) > 0.1
    without = RetrieveLogProb(model, routing_key=KEY)(make_data(layout))  # nothing was recorded
    assert torch.equal(scored(without), scored(own))


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_first_scoring_is_recorded(layout: str, model: nn.Module, later: nn.Module) -> None:
    """Later scorings use its experts; their own record is the same."""
    first = RetrieveLogProb(model, routing_key=KEY, record_routing=True)
    td = first(make_data(layout))
    want = LogProbScorer(model).evaluate(TOKENS, MASK, record_routing=True).routing
    assert want is not None
    parts = [torch.as_tensor(td[i][KEY])[REAL[i]] if layout == "padded" else td[i][KEY] for i in range(3)]
    assert torch.equal(torch.cat(parts), want.values)
    assert parts[0].dtype == torch.int8
    before = [part.clone() for part in parts]
    again = RetrieveLogProb(later, routing_key=KEY, record_routing=True)(td)
    expected = LogProbScorer(later).score(TOKENS, MASK, routing=want)
    assert_near(scored(again), expected.values[MASK], **FORWARD)
    parts = [again[i][KEY][REAL[i]] if layout == "padded" else again[i][KEY] for i in range(3)]
    assert all(map(torch.equal, parts, before))


def test_in_an_env(tokenizer: Any) -> None:
    """Each turn is recorded anew, and replayed outside."""
    policy_model = make_model(tokenizer, 0, "deepseek_v3")
    transform = RetrieveLogProb(policy_model, routing_key=KEY, record_routing=True)
    policy = make_policy(policy_model, tokenizer, pad_output=True)
    env = make_env(tokenizer, transform, turns=2)
    torch.manual_seed(0)
    td = env.rollout(2, policy)
    scorer = LogProbScorer(policy_model)
    for step in steps(td):
        ids, record = step["tokens", "full"], step["next", KEY]
        assert record.shape == (len(ids), 2, 2)
        assert record.dtype == torch.int8
        real = step["masks", "all_attention_mask"]
        want = scorer.evaluate([ids[real]], record_routing=True).routing
        assert want is not None
        recorded = record[real]
        assert torch.equal(recorded[:-1], want.values[:-1])
    found = RetrieveLogProb(policy_model, routing_key=KEY)(flat(td))
    for row, step in zip(found.unbind(0), steps(td), strict=True):
        want = step["next", "log_probs", "full"]
        assert_near(row["next", "log_probs", "full"], want, **FORWARD)


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
def test_specs_of_a_record(tokenizer: Any) -> None:
    wrapper = make_scoring_wrapper(make_model(tokenizer, 0, "mixtral"), tokenizer, pad_output=False, input_mode="text")
    transform = RetrieveLogProb(wrapper, routing_key=KEY, record_routing=True)
    env = make_env(tokenizer, transform, turns=2, input_mode="text")
    check_env_specs(env)
    assert env.observation_spec[KEY].shape == (2, -1, 3, 2)
    assert env.observation_spec[KEY].dtype == torch.int8


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_kl(estimator: str, model: nn.Module, later: nn.Module) -> None:
    """The policy replays; the reference routes by itself, or has an entry of its own."""
    record, other = random_record(), random_record().flip(-2)
    td = make_data("padded", routed_experts=record, of_reference=other)
    found = RetrieveKL(later, model, estimator=estimator)(td.clone())
    assert_near(scored(found), replayed(later, record).values[MASK], **FORWARD)
    own = LogProbScorer(model).score(TOKENS, MASK).values[MASK]
    assert_near(scored(found, "ref_log_probs", "full"), own, **FORWARD)
    found = RetrieveKL(later, model, estimator=estimator, ref_routing_key="of_reference")(td.clone())
    assert_near(scored(found, "ref_log_probs", "full"), replayed(model, other).values[MASK], **FORWARD)
    same = RetrieveKL(later, later, estimator=estimator, ref_routing_key=KEY)(td.clone())
    assert_near(same["kl_penalty"], torch.zeros_like(same["kl_penalty"]), **FORWARD)
    off = RetrieveKL(later, model, estimator=estimator, routing_key=None)(td.clone())
    assert_near(scored(off), LogProbScorer(later).score(TOKENS, MASK).values[MASK], **FORWARD)
    recorded = RetrieveKL(later, model, estimator=estimator, record_routing=True)(make_data("padded"))
    assert recorded[KEY].shape == (3, 7, 3, 2)
    assert recorded[KEY].dtype == torch.int8


# ------------------------------------------------------------------ layouts of a record


def forms(record: Tensor) -> dict[str, TensorDictBase]:
    """Data with the same record in forms of engines and of hand."""
    whole, response = rows_of(record), [row[SCORED[i]] for i, row in enumerate(record)]
    found = {
        "without the last token": [row[:-1] for row in whole],
        "response": response,
        "response without the last token": [row[:-1] for row in response],
        "uint8": [row.to(torch.uint8) for row in whole],
    }
    entries = {
        "padded, without the last slot": record[:, :-1],
        "padded response": record[:, PROMPT:],
        "padded response without the last slot": record[:, PROMPT:-1],
        "nested beside padded tokens": torch.nested.as_nested_tensor(whole, layout=torch.strided),
    }
    out = {name: tokens("lazy", *SEQUENCES, routed_experts=rows) for name, rows in found.items()}
    out |= {name: make_data("padded").set(KEY, value) for name, value in entries.items()}
    return {**out, "in next": make_data("padded").set("next", TensorDict({KEY: record}, batch_size=[3]))}


@pytest.mark.parametrize("name", list(forms(random_record())))
def test_forms_of_a_record(name: str) -> None:
    record = random_record()
    td = forms(record)[name]
    found = read_routing(td, KEY, TOKENS_OF[td.batch_dims > 0 and isinstance(td, TensorDict)], MASK)
    assert found is not None
    want, positions = torch.cat(rows_of(record)), TOKENS.positions
    if "response" in name:
        want = torch.where(MASK[:, None, None], want, -1)
    if "without" in name and "slot" not in name:
        last = positions == TOKENS.lengths[TOKENS.sequence_ids] - 1
        want = torch.where(last[:, None, None], -1, want)
    if "slot" in name:  # the last slot is a token of the first answer alone
        want[6 - 1] = -1
    assert torch.equal(found.long(), want)


TOKENS_OF = {True: Ragged.from_padded(FULL, mask=REAL), False: TOKENS}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (torch.zeros(3, 7, 3, 2), r"integers \[layers, experts\] for each token, found \[3, 2\] of torch.float32"),
        (torch.zeros(3, 7, 3).long(), r"for each token, found \[3\] of torch.int64"),
        (torch.zeros(3, 5, 3, 2).long(), "length of the tokens, all rows.*sequence 0 has 5 rows and 7 tokens"),
        (torch.zeros(3, 9, 3, 2).long(), "sequence 0 has 9 rows and 7 tokens"),
    ],
)
def test_records_of_other_shapes(entry: Tensor, message: str, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        RetrieveLogProb(model, routing_key=KEY)(make_data("padded").set(KEY, entry))


# ------------------------------------------------------------------ losses


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_loss_replays(layout: str, model: nn.Module, later: nn.Module) -> None:
    """The first ratio is 1; log-probs and gradients of a later policy are those of the recorded experts."""
    td = RetrieveLogProb(model, routing_key=KEY, record_routing=True)(make_data(layout))
    out = PolicyLoss(model, "ppo")(td)
    assert_near(torch.stack([out["ratio_min"], out["ratio_max"]]), torch.ones(2), **FORWARD)
    loss = PolicyLoss(later, "gpg")
    out = loss(td)
    record = LogProbScorer(model).evaluate(TOKENS, MASK, record_routing=True).routing
    log_prob = LogProbScorer(later).score(TOKENS, MASK, routing=record, grad=True).values
    want = -(ADVANTAGE[TOKENS.sequence_ids, 0] * log_prob)[MASK].mean()
    assert_near(out.total_loss, want, **FORWARD)
    unforced = PolicyLoss(later, "gpg")(td.exclude(KEY)).total_loss
    assert float((unforced - want).detach().abs()) > 1e-3
    routers = [layer.mlp.gate.weight for layer in later.model.layers]  # type: ignore[union-attr]
    found, expected = (torch.autograd.grad(x, routers) for x in (out.total_loss, want))
    for a, b in zip(found, expected, strict=True):
        assert float(b.abs().max()) > 1e-4
        assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_reference_in_the_loss_routes_by_itself(model: nn.Module, later: nn.Module) -> None:
    record = random_record()
    td = make_data("padded", routed_experts=record)
    for estimator in ("k2", "exact"):
        loss = PolicyLoss(later, "gpg", terms=[KLToReference(0.1, estimator)], reference=model)
        d = LogProbScorer(model).score(TOKENS, MASK).values[MASK] - replayed(later, record).values[MASK]
        assert_close(loss(td)["kl_to_ref"], (d.exp() - 1 - d).mean(), atol=1e-4, rtol=1e-4)


def test_half_the_temperature_is_replayed_too(later: nn.Module) -> None:
    """WPO's weights take the policy's log-probs at half the temperature."""
    record = torch.cat(rows_of(random_record()))
    response = ResponseTokens(TOKENS, MASK)
    loss = PolicyLoss(later, "dpo", weighting="aligned")
    found = loss._score(response, {"mask": response.mask}, routing=record)["sharp_log_prob"]
    want = LogProbScorer(later, temperature=0.5).score(TOKENS, MASK, routing=record)
    assert_near(found, response.gather(want.values), **FORWARD)


def test_a_loss_with_another_key(model: nn.Module) -> None:
    record = random_record()
    loss = PolicyLoss(model, "gpg")
    want = loss(make_data("padded", routed_experts=record)).total_loss
    loss.set_keys(routed_experts="mine")
    assert_close(loss(make_data("padded", mine=record)).total_loss, want)
    with pytest.raises(MissingEntryError, match="a replay of routing: expected 'mine'"):
        loss(make_data("padded", routed_experts=record))


def test_make_algorithm(model: nn.Module, later: nn.Module) -> None:
    """Old log-probs and the loss replay the sampler's record, so that the first ratio is 1; the reference does not."""
    record = random_record()
    for kl in ("none", "k3"):
        reference = {} if kl == "none" else {"reference": model}
        parts = make_algorithm("reinforce_plus_plus", later, kl_reward="none", kl_loss=kl, **reference)
        td = make_data("padded", routed_experts=record)
        td["next"] = TensorDict(reward=torch.tensor([[1.0], [0.0], [0.5]]), batch_size=[3])
        batch = parts.prepare(td)
        assert_near(scored(batch, "next", "log_probs", "full"), replayed(later, record).values[MASK], **FORWARD)
        out = parts.loss(batch)
        assert_near(torch.stack([out["ratio_min"], out["ratio_max"]]), torch.ones(2), **FORWARD)
        if kl != "none":
            own = LogProbScorer(model).score(TOKENS, MASK).values[MASK]
            assert_near(scored(batch, "next", "ref_log_probs", "full"), own, **FORWARD)


# ------------------------------------------------------------------ refused


def test_settings_that_are_refused(model: nn.Module) -> None:
    dense = tiny_model()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM is dense"):
        RetrieveLogProb(dense, routing_key=KEY, record_routing=True)
    with pytest.raises(ValueError, match="needs a place for the record: pass routing_key="):
        RetrieveLogProb(model, record_routing=True)
    with pytest.raises(ValueError, match="pass a transformers model or a wrapper of one, got 'from_collector'"):
        RetrieveLogProb("from_collector", routing_key=KEY, record_routing=True)
    td = make_data("padded", routed_experts=random_record())
    for score in (RetrieveLogProb(dense, routing_key=KEY), PolicyLoss(dense, "gpg")):
        with pytest.raises(ValueError, match="Qwen2ForCausalLM is dense"):
            score(td)
    td["other"] = FULL[:, :PROMPT]
    with pytest.raises(ValueError, match="experts were recorded for the sampled prompt"):
        RetrieveLogProb(model, routing_key=KEY, context="other")(td)


def test_settings_follow(model: nn.Module, later: nn.Module) -> None:
    transform = RetrieveKL(later, model)
    assert (transform.routing_key, transform.record_routing, transform.ref_routing_key) == (KEY, False, None)
    transform.record_routing = True
    assert KEY in transform[0].out_keys
    transform.ref_routing_key = "mine"
    assert transform[1].routing_key == "mine"
