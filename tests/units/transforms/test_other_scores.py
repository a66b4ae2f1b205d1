"""Scores beside the log-prob of a token: the exact KL, the top k, and scores that are remembered on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import check_env_specs
from torchrl.modules.llm.policies.common import LogProbs

from closeness import assert_near
from layouts import tokens
from torchrl_llm_kl import (
    KLComputation,
    KLRewardTransform,
    LogProbScorer,
    PolicyLoss,
    RememberedModel,
    RetrieveKL,
    RetrieveLogProb,
)
from torchrl_llm_kl.losses import KLToReference
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE, tiny_model
from toy_rollouts import OUTCOMES, collect, flat, make_env, make_model, make_policy, make_scoring_wrapper, steps

# ------------------------------------------------------------------ the exact KL


def exact(model: Any, ref: Any, step: TensorDictBase) -> Tensor:
    """The sum over the vocabulary at each token of the response, 0 on prompt and padding."""
    full, attention = step["tokens", "full"], step["masks", "all_attention_mask"]
    out = torch.zeros(len(full))
    with torch.no_grad():
        p, q = (m(input_ids=full[attention][None]).logits[0, :-1].log_softmax(-1) for m in (model, ref))
    out[attention] = torch.cat([torch.zeros(1), (p.exp() * (p - q)).sum(-1)])
    out[: len(step["tokens", "prompt"])] = 0
    return out


def assert_exact(data: TensorDictBase, model: Any, ref: Any, coeff: float) -> None:
    for i, step in enumerate(steps(data)):
        want = exact(model, ref, step)
        kl, reward = step["next", "kl_penalty"], step["next", "reward"]
        assert_near(kl, want, **FORWARD)
        assert float(want.sum()) > 0.1
        assert_near(reward.sum(), OUTCOMES[i] - coeff * want.sum(), **FORWARD)


@pytest.mark.parametrize(
    ("place", "padded"), [("env", True), ("env", False), ("direct", True), ("on sample", False)], indirect=["padded"]
)
def test_retrieve_kl(wrapped: Any, policy_model: Any, ref_model: Any, tokenizer: Any, padded: bool, place: str) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    transform = RetrieveKL(*wrapped(padded), estimator="exact", coeff=0.3, entropy_key=("entropy", "full"))
    data = flat(collect(tokenizer, policy, *([transform] if place == "env" else [])))
    if place == "direct":
        data = transform(data)
    elif place == "on sample":
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2, transform=transform)
        buffer.extend(data)
        data = buffer[:]
    assert_exact(data, policy_model, ref_model, 0.3)
    for step in steps(data):
        entropy = step["next", "entropy", "full"]
        assert entropy.shape == step["tokens", "full"].shape
        assert float(entropy.sum()) > 0.1


def test_two_transforms_and_an_entry_between_them(
    policy: Any, policy_model: Any, ref_model: Any, tokenizer: Any
) -> None:
    retrieve = [
        RetrieveLogProb(policy_model, reference=ref_model),
        RetrieveLogProb(ref_model, log_probs_full_key=("ref_log_probs", "full")),
    ]
    data = flat(collect(tokenizer, policy, *retrieve, KLComputation(estimator="exact", coeff=0.3)))
    assert_exact(data, policy_model, ref_model, 0.3)


def test_the_policys_own_base_is_the_reference(tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    model = peft.get_peft_model(make_model(tokenizer, seed=0), config).eval()
    policy = make_policy(model, tokenizer, pad_output=False)
    data = flat(collect(tokenizer, policy))
    data = RetrieveKL(model, "base", estimator="exact", coeff=0.3)(data)
    assert_exact(data, model, make_model(tokenizer, seed=0), 0.3)


def test_with_detach_false_the_penalty_has_the_gradient_of_the_kl(policy: Any, ref_model: Any, tokenizer: Any) -> None:
    data = flat(collect(tokenizer, policy))
    model = make_model(tokenizer, seed=0)
    out = RetrieveKL(model, ref_model, estimator="exact", detach=False, add_to_reward=False)(data)
    parameters = list(model.parameters())
    got = torch.autograd.grad(sum(step["next", "kl_penalty"].sum() for step in steps(out)), parameters)
    want = torch.zeros(())
    for step in steps(data):
        row = step["tokens", "full"][step["masks", "all_attention_mask"]]
        p, q = (m(input_ids=row[None]).logits[0, :-1].log_softmax(-1) for m in (model, ref_model))
        kl = (p.exp() * (p - q.detach())).sum(-1)
        response = int(step["masks", "all_attention_mask"][len(step["tokens", "prompt"]) :].sum())
        want = want + kl[-response:].sum()
    for a, b in zip(got, torch.autograd.grad(want, parameters), strict=True):
        assert_near(a, b, **BACKWARD)


def test_what_is_refused(policy: Any, policy_model: Any, ref_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="exact"):  # the legacy transform runs no policy
        KLRewardTransform(ref_model, estimator="exact")
    wider = make_model(tokenizer, seed=1)
    wider.resize_token_embeddings(len(tokenizer) + 8)
    with pytest.raises(ValueError, match="vocabular"):
        RetrieveKL(policy_model, wider, estimator="exact")(flat(collect(tokenizer, policy)))
    for extra in ({"reference": ref_model}, {"exact_kl_key": "x"}, {"nonsense": 1}):
        with pytest.raises(TypeError, match=next(iter(extra))):
            RetrieveKL(policy_model, ref_model, **extra)
    with pytest.raises(ValueError, match=r"exact_kl_key='x' needs the model to compare with: pass reference="):
        RetrieveLogProb(policy_model, exact_kl_key="x")


# ------------------------------------------------------------------ the top k: a teacher for distillation

K = 5
IDS, LOG_PROBS, REST = ("top_k", "ids"), ("top_k", "log_probs"), ("top_k", "rest_log_prob")


def data(seed: int = 0, *, dense: bool = True) -> TensorDictBase:
    """Two rows with prompts of two tokens; ragged rows in a lazy stack."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(VOCAB_SIZE, (2, 6), generator=rng)
    if dense:
        return TensorDict({"tokens": {"full": full, "prompt": full[:, :2].clone()}}, [2])
    rows = (full[0], full[1, :4])
    return lazy_stack([TensorDict({"tokens": {"full": row, "prompt": row[:2]}}) for row in rows])


@torch.no_grad()
def distribution(model: nn.Module, row: Tensor) -> Tensor:
    """Log-probs of all tokens at each position after the first, in float64; ``[T - 1, V]``."""
    wide = tiny_model(seed=0).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return wide(row.unsqueeze(0)).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(("k", "dense"), [(1, True), (K, False), (VOCAB_SIZE, True)])
def test_against_the_whole_distribution(k: int, dense: bool) -> None:
    model = tiny_model(seed=0)
    found = RetrieveLogProb(model, top_k=k)(data(dense=dense))
    for step, given in zip(found.unbind(0), data(dense=dense).unbind(0), strict=True):
        log_p = distribution(model, given["tokens", "full"])[1:]
        expected, ids = log_p.sort(-1, descending=True)
        assert step[IDS].dtype == torch.int64
        assert torch.equal(step[IDS][2:], ids[:, :k])
        assert_close(step[LOG_PROBS][2:], expected[:, :k].float(), atol=1e-4, rtol=0)
        # Exact where one minus a sum of float32 would be 0.
        assert_close(step[REST][2:].double(), expected[:, k:].logsumexp(-1), atol=1e-4, rtol=0, check_dtype=False)
        assert step[REST][2:].isneginf().tolist() == [k == VOCAB_SIZE] * len(ids)
        for key in (IDS, LOG_PROBS, REST):
            assert not step[key][:2].any()
            assert not step[key].requires_grad


def test_nothing_is_written_by_default() -> None:
    assert "top_k" not in RetrieveLogProb(tiny_model(seed=0))(data())
    transform = RetrieveLogProb(tiny_model(seed=0))
    transform.top_k, transform.top_k_key = K, ("teacher", "top")
    found = transform(data())
    assert found["teacher", "top", "ids"].shape == (2, 6, K)
    assert set(transform.out_keys) == {
        ("log_probs", "full"),
        *(("teacher", "top", x) for x in ("ids", "log_probs", "rest_log_prob")),
    }


@pytest.mark.parametrize(("mode", "padded"), [("direct", False), ("env", True)], indirect=["padded"])
def test_specs_and_layouts(mode: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    teacher = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs")
    transform = RetrieveLogProb(teacher, top_k=K)
    env = make_env(tokenizer, transform, envs=2, turns=2)
    spec = env.full_observation_spec
    assert spec[IDS].dtype == torch.int64
    assert spec[LOG_PROBS].dtype == spec[REST].dtype == torch.float32
    assert tuple(spec[LOG_PROBS].shape[1:]) == tuple(spec[IDS].shape[1:]) == (-1, K)
    for step in steps(env.reset()):
        assert [tuple(step[key].shape) for key in (IDS, LOG_PROBS, REST)] == [(0, K), (0, K), (0,)]
        assert step[IDS].dtype == torch.int64
    torch.manual_seed(0)
    rollout = env.rollout(2, make_policy(policy_model, tokenizer, pad_output=padded))
    if mode == "direct":
        rollout = transform.clone()(rollout)
    scorer = LogProbScorer(ref_model)
    for step in steps(rollout):
        full, scored = step["tokens", "full"], step["next", "ref_log_probs", "full"] != 0
        real = step["masks", "all_attention_mask"]
        assert scored.any()
        expected = scorer.evaluate([full[real]], [scored[real]], top_k=K)
        for key, values in zip(
            (IDS, LOG_PROBS, REST), (expected.top_indices, expected.top_log_probs, expected.tail_log_prob), strict=True
        ):
            assert_near(step["next"][key][real], values.values, **FORWARD)
            assert not step["next"][key][~scored].any()


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
def test_check_env_specs(tokenizer: Any, ref_model: Any) -> None:
    teacher = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, input_mode="text")
    check_env_specs(make_env(tokenizer, RetrieveLogProb(teacher, top_k=K), envs=2, turns=2, input_mode="text"))


def test_beside_the_log_probs_of_a_policy() -> None:
    """TorchRL's policies write a tensorclass under ``"log_probs"``, which takes no other entries."""
    rows = data(dense=False)
    for step in rows.tensordicts:
        step["log_probs"] = LogProbs(full=torch.zeros(len(step["tokens", "full"])))
    found = RetrieveLogProb(tiny_model(seed=0), top_k=K)(rows)
    copy = lazy_stack([step.clone() for step in found.unbind(0)]).clone()
    assert copy[1][LOG_PROBS].shape == (4, K)
    assert copy[1]["log_probs", "full"].ne(0).sum() == 2


def test_a_top_k_that_is_refused() -> None:
    for k in (-1, 2.0, True):
        with pytest.raises(ValueError, match="top_k must be a whole number of at least 0"):
            RetrieveLogProb(tiny_model(seed=0), top_k=k)
    with pytest.raises(ValueError, match=r"98.*97"):
        RetrieveLogProb(tiny_model(seed=0), top_k=VOCAB_SIZE + 1)(data())


# ------------------------------------------------------------------ remembered on disk: no forward in the second epoch

ENTRIES = [("next", "ref_log_probs", "full"), ("next", "kl_penalty"), ("next", "reward")]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    calls: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


@pytest.mark.parametrize("padded", [None, True, False], ids=["model", "padded wrapper", "nested wrapper"])
def test_the_second_epoch_over_a_replay_buffer_makes_no_forward(
    tokenizer: Any, policy_model: Any, ref_model: Any, wrapped: Any, padded: bool | None, tmp_path: Path
) -> None:
    gen, ref = (policy_model, ref_model) if padded is None else wrapped(padded)
    data = flat(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=bool(padded)), envs=3))
    buffer = ReplayBuffer(storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=3)
    buffer.extend(data)
    plain = RetrieveKL(gen, ref, coeff=0.3)
    reference = RememberedModel(ref, tmp_path)
    buffer.append_transform(RetrieveKL(gen, reference, coeff=0.3))
    want = {str(step["tokens", "full"].tolist()): step for step in steps(plain(data.clone()))}

    def epoch() -> None:
        for step in steps(buffer.sample()):
            expected = want[str(step["tokens", "full"].tolist())]
            for key in ENTRIES:
                assert_near(step[key], expected[key], **FORWARD)

    epoch()
    assert reference.store.tokens_recalled == 0
    with counted(ref_model) as calls:
        for _ in range(2):
            epoch()
    assert not calls


def test_other_transforms_and_losses_take_it(policy_model: Any, ref_model: Any, tmp_path: Path) -> None:
    full = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(0))
    log_probs, rewards = torch.full((2, 6), -1.0), torch.zeros(2, 1)
    rows = [full[:, :2].tolist(), full[:, 2:].tolist()]
    entries = {"log_probs__full": log_probs, "advantage": torch.ones(2, 6, 1), "next__reward": rewards}
    entries["masks__all_assistant_mask"] = torch.arange(6).expand(2, 6) >= 2

    def data() -> TensorDictBase:
        return tokens("padded", *rows, **entries)

    reference = RememberedModel(ref_model, tmp_path)
    for make, key in (
        (lambda model: RetrieveLogProb(model, entropy_key=("entropy", "full")), ("next", "entropy", "full")),
        (lambda model: KLRewardTransform(model, coef=0.1), ("next", "reward")),
    ):
        assert torch.equal(make(reference)(data())[key], make(ref_model)(data())[key])
    kl = []
    for model in (ref_model, reference, reference):
        loss = PolicyLoss(policy_model, terms=[KLToReference(0.5, "k2")], reference=model)
        kl.append(loss(data())["loss_kl_to_ref"].item())
    assert_near(kl[1], kl[0], dtype=torch.float32, **FORWARD)
    assert kl[1] == kl[2]
    assert reference.store.tokens_recalled > 0
    assert not reference.make_scorer().score(full, attention_mask=torch.ones_like(full)).values.requires_grad


def test_an_exact_kl_is_refused(policy_model: Any, ref_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RememberedModel, remembered on disk, returns log-probs only"):
        RetrieveKL(policy_model, RememberedModel(ref_model, tmp_path), estimator="exact")
