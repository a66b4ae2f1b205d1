"""Samplers in transforms, losses and algorithms: what they warn of, what they score, and the replay of a record."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from transformers import LogitsProcessorList

from closeness import assert_near
from torchrl_llm_kl import (
    LogProbScorer,
    PolicyLoss,
    RecordKept,
    RetrieveKL,
    RetrieveLogProb,
    SamplerMismatchWarning,
    Sampling,
    make_algorithm,
)
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.scoring import truncate
from toy_models import tiny_model
from toy_rollouts import make_env, make_policy, steps

SAMPLING = Sampling(0.8, top_p=0.8)
PROMPTS = torch.tensor([[3, 4, 5, 6], [0, 7, 8, 9], [3, 4, 5, 6]])
REAL = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])


def generated(model: nn.Module, record: RecordKept, *, seed: int = 0) -> tuple[TensorDictBase, torch.Tensor]:
    """Answers of transformers' own ``generate``, left-padded prompts first, and their log-probs under the sampler."""
    torch.manual_seed(seed)
    model.generation_config.pad_token_id = 0
    out = model.generate(
        input_ids=PROMPTS,
        attention_mask=REAL,
        max_new_tokens=6,
        do_sample=True,
        top_k=0,
        logits_processor=LogitsProcessorList([record]),
        output_scores=True,
        return_dict_in_generate=True,
    )
    full = out.sequences
    sampler = torch.stack(out.scores, 1).double().log_softmax(-1).gather(-1, full[:, 4:, None]).squeeze(-1)
    real = torch.cat([REAL, torch.ones(3, 6, dtype=torch.long)], 1).bool()
    mask = torch.arange(10).expand(3, 10) >= 4
    td = TensorDict(
        tokens=TensorDict(full=full, prompt=PROMPTS, batch_size=[3]),
        masks=TensorDict(all_attention_mask=real, all_assistant_mask=mask, batch_size=[3]),
        batch_size=[3],
    )
    return td, sampler


# ------------------------------------------------------------------ record and replay


def test_a_replay_is_what_was_sampled() -> None:
    """Generate with top-p, record, score by replay; and the ratio of whole distributions is off by the mass that is kept."""
    model = tiny_model().double()
    record = RecordKept(SAMPLING)
    td, sampler = generated(model, record)
    td = record.write(td)
    assert td["kept", "ids"].dtype == td["kept", "counts"].dtype == torch.int32
    assert (td["kept", "counts"][:, :4] == 0).all()
    assert (td["kept", "counts"][:, 4:] > 0).all()
    found = RetrieveLogProb(model, sampling=SAMPLING)(td)["log_probs", "full"][:, 4:]
    assert_near(found, sampler, dtype=torch.float32, size=16)
    whole = RetrieveLogProb(model, temperature=0.8)(td.exclude("log_probs"))["log_probs", "full"][:, 4:]
    assert float((whole - found).exp().mean()) < 0.97


def test_a_record_outlives_the_policy() -> None:
    """Another model keeps other tokens; replayed over the record its log-probs are finite, and right by hand."""
    record, later = RecordKept(SAMPLING), tiny_model(seed=5).double()
    td, _ = generated(tiny_model().double(), record)
    td = record.write(td)
    found = RetrieveLogProb(later, sampling=SAMPLING)(td)["log_probs", "full"]
    for row in range(3):
        ids = td["tokens", "full"][row][td["masks", "all_attention_mask"][row]]
        begin = int((~td["masks", "all_attention_mask"][row]).sum())
        log_p = later(input_ids=ids[None]).logits[0] / 0.8
        at = 0
        for column in range(4, 10):
            count = int(td["kept", "counts"][row, column])
            kept = torch.as_tensor(td["kept", "ids"][row])[at : at + count].long()
            at += count
            want = log_p[column - begin - 1, kept].log_softmax(-1)[kept == ids[column - begin]]
            assert_near(found[row, column], want[0], dtype=torch.float32, size=16)


def unpadded(row: TensorDictBase) -> TensorDictBase:
    real = row["masks", "all_attention_mask"]
    counts, ids = row["kept", "counts"][real], torch.as_tensor(row["kept", "ids"])
    return TensorDict(
        advantage=row["advantage"],
        tokens=TensorDict(full=row["tokens", "full"][real], prompt=row["tokens", "prompt"][real[:4]]),
        kept=TensorDict(counts=counts, ids=ids),
        next=TensorDict(log_probs=TensorDict(full=row["next", "log_probs", "full"][real])),
    )


def test_a_loss_replays(padded: bool) -> None:
    """On policy every ratio is 1 to 1e-5, in every layout; without the record of another policy's too."""
    model, record = tiny_model().double(), RecordKept(SAMPLING)
    td, sampler = generated(model, record)
    td = record.write(td)
    td["next"] = TensorDict(
        log_probs=TensorDict(full=torch.cat([torch.zeros(3, 4), sampler.float()], 1)), batch_size=[3]
    )
    td["advantage"] = torch.tensor([[1.0], [-1.0], [0.5]])
    if not padded:
        td = lazy_stack([unpadded(row) for row in td.unbind(0)])
    for data in (td, td.exclude("kept")):
        out = PolicyLoss(model, "ppo", sampling=SAMPLING)(data)
        assert_close(
            (out["ratio_min"], out["ratio_max"]), (torch.tensor(1.0),) * 2, rtol=0, atol=1e-5, check_dtype=False
        )
        out.total_loss.backward()
    assert PolicyLoss(model, "ppo", temperature=0.8)(td)["ratio_max"] < 1.0


def test_kl_to_the_reference() -> None:
    """``"kept"``: log-probs of both over what the policy keeps, by replay, in a transform and in a loss."""
    model, ref, record = tiny_model().double(), tiny_model(seed=1).double(), RecordKept(SAMPLING)
    td, _ = generated(model, record)
    td = record.write(td)
    both = Sampling(0.8, top_p=0.8, reference="kept")
    want = RetrieveLogProb(ref, sampling=SAMPLING)(td.clone())["log_probs", "full"]
    for estimator in ("k1", "exact"):
        out = RetrieveKL(model, ref, sampling=both, estimator=estimator)(td.clone())
        assert_close(out["ref_log_probs", "full"], want)
        same = RetrieveKL(model, model, sampling=both, estimator=estimator)(td.clone())
        assert float(same["kl_penalty"].abs().max()) < 1e-5
    whole = RetrieveKL(model, ref, sampling=SAMPLING)(td.clone())
    assert_close(whole["ref_log_probs", "full"], RetrieveLogProb(ref, temperature=0.8)(td.clone())["log_probs", "full"])
    assert (whole["ref_log_probs", "full"][:, 4:] < want[:, 4:] + 1e-6).all()
    td["advantage"] = torch.ones(3, 1)
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.1, "k2")], reference=ref, sampling=both)
    found = loss(td)["kl_to_ref"]
    d = (want - RetrieveLogProb(model, sampling=SAMPLING)(td.clone())["log_probs", "full"])[:, 4:]
    assert_close(found, (d.exp() - 1 - d).mean(), atol=1e-5, rtol=1e-5, check_dtype=False)


def test_torchrl_wrapper(tokenizer: Any, policy_model: nn.Module) -> None:
    """A policy of torchrl that records, in a history with answers of several lengths."""
    record = RecordKept(Sampling(top_k=3))
    policy = make_policy(policy_model, tokenizer, pad_output=True)
    policy.generate_kwargs |= {"top_k": policy_model.config.vocab_size, "logits_processor": [record]}
    torch.manual_seed(0)
    data = policy(make_env(tokenizer).reset())
    data = record.write(data)
    scored = RetrieveLogProb(policy_model, sampling=record.sampling)(data)
    for step in steps(scored):
        log_probs, counts = step["log_probs", "full"], step["kept", "counts"]
        assert int(counts.sum()) <= len(step["kept", "ids"])
        assert counts.max() == 3
        assert (log_probs[counts > 0] > torch.tensor(1e-4).log()).all()
        assert (log_probs[counts == 0] == 0).all()


def test_records_of_other_calls_are_refused() -> None:
    model, record = tiny_model().double(), RecordKept(SAMPLING)
    with pytest.raises(ValueError, match="the record is of 0 sequences"):
        record.write(generated(model, RecordKept(SAMPLING))[0])
    first, _ = generated(model, record)
    other, _ = generated(tiny_model(seed=9).double(), record, seed=3)
    with pytest.raises(ValueError, match="not among the"):
        record.write(first)
    td = record.write(other)
    td["kept", "ids"] = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"holds 2 ids for sequence 0.* add up to"):
        RetrieveLogProb(model, sampling=SAMPLING)(td)
    with pytest.raises(TypeError, match="must be a Sampling"):
        RecordKept({"top_p": 0.8})  # type: ignore[arg-type]


# ------------------------------------------------------------------ the sampler is known


def default_policy(model: nn.Module, tokenizer: Any, **settings: Any) -> Any:
    policy = make_policy(model, tokenizer, pad_output=True)
    policy.generate_kwargs |= settings
    return policy


@pytest.fixture
def plain(policy_model: nn.Module, tokenizer: Any) -> Any:
    """A wrapper without a top-k of its own: transformers' default of 50 applies."""
    return default_policy(policy_model, tokenizer)


def test_warned_once(plain: Any, policy_model: nn.Module, ref_model: nn.Module) -> None:
    scoring = plain.get_new_version(generate=False)
    builds = {
        "RetrieveLogProb": lambda **kwargs: RetrieveLogProb(scoring, **kwargs),
        "RetrieveKL": lambda **kwargs: RetrieveKL(
            scoring, plain.get_new_version(generate=False, log_probs_key="r"), **kwargs
        ),
        "PolicyLoss": lambda **kwargs: PolicyLoss(plain, **kwargs),
        "make_algorithm": lambda **kwargs: make_algorithm("grpo", plain, reference=ref_model, group_size=2, **kwargs),
    }
    for name, build in builds.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build()
        found = [w for w in caught if issubclass(w.category, SamplerMismatchWarning)]
        assert len(found) == 1, name
        assert str(found[0].message).startswith("sampler uses top_k=50, scorer does not"), name
        with warnings.catch_warnings():
            warnings.simplefilter("error", SamplerMismatchWarning)
            build(sampling=Sampling(top_k=50))


def test_a_teacher_may_be_followed_on_any_answers(plain: Any, ref_model: nn.Module) -> None:
    """No ratio and no KL of sampled tokens is involved, and `sampling=` would be refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplerMismatchWarning)
        make_algorithm("gkd", plain, reference=ref_model)
    with pytest.warns(SamplerMismatchWarning, match="sampler uses top_k=50"):
        make_algorithm("on_policy_distill", plain, reference=ref_model)


def test_what_is_warned_of(policy_model: nn.Module, tokenizer: Any) -> None:
    """And what is not: no truncation, the same one in the scorer, no policy that samples, a greedy one's log-probs."""
    every, make = policy_model.config.vocab_size, partial(default_policy, policy_model, tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplerMismatchWarning)
        PolicyLoss(make(top_k=every))
        PolicyLoss(make(top_k=20, temperature=0.7), sampling=Sampling(0.7, top_k=20))
        PolicyLoss(make(), "sft")  # trains on data that no policy samples
        RetrieveLogProb(make(do_sample=False).get_new_version(generate=False))
        PolicyLoss(policy_model)
    with pytest.warns(SamplerMismatchWarning, match="sampler uses temperature=0.7, scorer temperature=1"):
        PolicyLoss(make(temperature=0.7, top_k=every))
    with pytest.warns(SamplerMismatchWarning, match="sampler is greedy"):
        PolicyLoss(make(do_sample=False))


def test_from_collector(plain: Any, tokenizer: Any, ref_model: nn.Module) -> None:
    """The policy is known at the first step, and warned of once."""
    env = make_env(tokenizer, RetrieveKL("from_collector", ref_model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in LLMCollector(env, policy=plain, dialog_turns_per_batch=2, total_dialog_turns=4):
            pass
    assert sum(issubclass(w.category, SamplerMismatchWarning) for w in caught) == 1


# ------------------------------------------------------------------ settings


def test_settings_follow(ref_model: nn.Module, policy_model: nn.Module) -> None:
    transform = RetrieveKL(policy_model, ref_model, sampling=SAMPLING)
    assert (transform.temperature, transform[1].temperature, transform[1].sampling) == (0.8, 0.8, None)
    transform.temperature = 0.5
    assert transform.sampling == Sampling(0.5, top_p=0.8)
    transform.sampling = Sampling(0.9, top_k=4)
    assert (transform[0].scorer.sampling, transform[1].scorer.sampling) == (Sampling(0.9, top_k=4), Sampling(0.9))
    transform.sampling = None
    assert transform[0].scorer.sampling == Sampling(0.9)
    with pytest.raises(ValueError, match="two temperatures"):
        RetrieveKL(policy_model, ref_model, temperature=0.5, sampling=SAMPLING)
    for again in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert (again.temperature, again.sampling) == (0.9, None)


def test_generate_kwargs_sample_from_what_is_scored(policy_model: nn.Module) -> None:
    """They override a configuration that would change the distribution."""
    policy = copy.deepcopy(policy_model)
    policy.generation_config.update(
        do_sample=True, top_k=7, top_p=0.5, min_p=0.2, repetition_penalty=1.3, typical_p=0.9
    )
    for scored in (Sampling(), Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01)):
        kwargs = scored.generate_kwargs(policy, max_new_tokens=3)
        assert kwargs["max_new_tokens"] == 3
        outputs = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        drawn = policy.generate(PROMPTS[:1], **outputs, **kwargs)
        for logits, processed in zip(drawn.logits, drawn.scores, strict=True):
            kept = truncate(logits, scored)
            assert torch.equal(processed.isneginf(), kept.isneginf())
            assert_close(processed.log_softmax(-1), kept.log_softmax(-1), atol=1e-5, rtol=0)


def test_make_algorithm(ref_model: nn.Module, policy_model: nn.Module) -> None:
    parts = make_algorithm("grpo", policy_model, reference=ref_model, group_size=2, sampling=SAMPLING)
    assert parts.loss.sampling == SAMPLING
    assert (parts.kl_transform[0].scorer.sampling, parts.kl_transform[1].scorer.sampling) == (SAMPLING, Sampling(0.8))
    exact = make_algorithm("grpo", policy_model, reference=ref_model, group_size=2, sampling=SAMPLING, kl_loss="exact")
    assert exact.loss._reference_scorer.sampling == Sampling(0.8)
    scorer = LogProbScorer(policy_model, sampling=SAMPLING)
    assert make_algorithm("grpo", scorer, group_size=2, kl_loss="none").loss.sampling == SAMPLING
    with pytest.raises(ValueError, match="actor is a scorer with Sampling"):
        make_algorithm("grpo", scorer, group_size=2, kl_loss="none", sampling=Sampling(top_k=3))
    with pytest.raises(TypeError, match="pass sampling= to make_algorithm"):
        make_algorithm("grpo", policy_model, reference=ref_model, group_size=2, loss_args={"sampling": SAMPLING})
