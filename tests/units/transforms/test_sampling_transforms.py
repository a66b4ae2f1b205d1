"""Sampling settings in transforms, losses and algorithms: warnings, scores, and the replay of a record."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torch.testing import assert_close
from transformers import LogitsProcessorList

from closeness import assert_near
from refused import warned
from torchrl_llm_kl import LogProbScorer, PolicyLoss, Sampling, ScoreOptions, make_algorithm
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.scoring import truncate, warn_of_chatml
from torchrl_llm_kl.transforms import RecordKept, RetrieveKL, RetrieveLogProb
from toy_models import OUTPUTS, tiny_model
from toy_rollouts import make_policy, steps
from toy_tokenizer import build_tokenizer

SAMPLING = Sampling(0.8, top_p=0.8)
PROMPTS = torch.tensor([[3, 4, 5, 6], [0, 7, 8, 9], [3, 4, 5, 6]])
REAL = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])


def recorded(model: nn.Module, record: RecordKept | None = None) -> tuple[TensorDictBase, torch.Tensor]:
    """Answers of ``generate`` and their log-probs. The record of kept tokens is written unless ``record`` is passed."""
    torch.manual_seed(0)
    model.generation_config.pad_token_id = 0
    own = record or RecordKept(SAMPLING)
    how = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([own])}
    out = model.generate(input_ids=PROMPTS, attention_mask=REAL, **OUTPUTS, **how)
    full = out.sequences
    sampler = torch.stack(out.scores, 1).double().log_softmax(-1).gather(-1, full[:, 4:, None]).squeeze(-1)
    real = torch.cat([REAL, torch.ones(3, 6, dtype=torch.long)], 1).bool()
    mask = torch.arange(10).expand(3, 10) >= 4
    masks = TensorDict(all_attention_mask=real, all_assistant_mask=mask, batch_size=[3])
    td = TensorDict(tokens=TensorDict(full=full, prompt=PROMPTS, batch_size=[3]), masks=masks, batch_size=[3])
    return (td if record else own.write(td)), sampler


def score(model: nn.Module, td: TensorDictBase, sampling: Sampling = SAMPLING) -> torch.Tensor:
    return RetrieveLogProb(model, options=ScoreOptions(sampling))(td.clone())["log_probs", "full"]


def test_a_replay_gives_the_samplers_log_probs() -> None:
    """Generate with top-p, record, and score by replay. Without the replay, ratios are off by the kept mass."""
    model = tiny_model().double()
    td, sampler = recorded(model)
    assert td["kept", "ids"].dtype == td["kept", "counts"].dtype == torch.int32
    assert (td["kept", "counts"][:, :4] == 0).all()
    assert (td["kept", "counts"][:, 4:] > 0).all()
    found, whole = score(model, td)[:, 4:], score(model, td, Sampling(0.8))[:, 4:]
    assert_near(found, sampler, dtype=torch.float32, size=16)
    assert float((whole - found).exp().mean()) < 0.97


def test_a_record_outlives_the_policy() -> None:
    """Another model would keep other tokens. Over the record its log-probs are finite and equal those by hand."""
    later, (td, _) = tiny_model(seed=5).double(), recorded(tiny_model().double())
    found = score(later, td)
    for row, step in enumerate(td.unbind(0)):
        ids = step["tokens", "full"][step["masks", "all_attention_mask"]]
        counts = step["kept", "counts"][4:].tolist()
        kept = torch.as_tensor(step["kept", "ids"])[: sum(counts)].long().split(counts)
        log_p = later(input_ids=ids[None]).logits[0, -7:-1] / 0.8
        parts = zip(log_p, kept, ids[-6:], strict=True)
        want = torch.cat([values[among].log_softmax(-1)[among == token] for values, among, token in parts])
        assert_near(found[row, 4:], want, dtype=torch.float32, size=16)


def unpadded(row: TensorDictBase) -> TensorDictBase:
    real = row["masks", "all_attention_mask"]
    return TensorDict(
        advantage=row["advantage"],
        tokens=TensorDict(full=row["tokens", "full"][real], prompt=row["tokens", "prompt"][real[:4]]),
        kept=TensorDict(counts=row["kept", "counts"][real], ids=torch.as_tensor(row["kept", "ids"])),
        next=TensorDict(log_probs=TensorDict(full=row["next", "log_probs", "full"][real])),
    )


def test_a_loss_replays(padded: bool) -> None:
    """On policy every ratio is 1 to 1e-5 in every layout, also without a record."""
    model = tiny_model().double()
    td, sampler = recorded(model)
    td["next"] = TensorDict({("log_probs", "full"): torch.cat([torch.zeros(3, 4), sampler.float()], 1)}, [3])
    td["advantage"] = torch.tensor([[1.0], [-1.0], [0.5]])
    if not padded:
        td = lazy_stack([unpadded(row) for row in td.unbind(0)])
    for data in (td, td.exclude("kept")):
        out = PolicyLoss(model, "ppo", options=ScoreOptions(SAMPLING))(data)
        ratios = torch.stack([out["ratio_min"], out["ratio_max"]])
        assert_close(ratios, torch.ones(2), rtol=0, atol=1e-5, check_dtype=False)
        out.total_loss.backward()
    assert PolicyLoss(model, "ppo", options=ScoreOptions(Sampling(0.8)))(td)["ratio_max"] < 1.0


def test_kl_to_the_reference() -> None:
    """``reference="kept"`` scores both models over the tokens that the policy keeps, in a transform and in a loss."""
    model, ref = tiny_model().double(), tiny_model(seed=1).double()
    td, _ = recorded(model)
    both = Sampling(0.8, top_p=0.8, reference="kept")
    want = score(ref, td)
    for estimator in ("k1", "exact"):
        out = RetrieveKL(model, ref, estimator=estimator, options=ScoreOptions(both))(td.clone())
        assert_close(out["ref_log_probs", "full"], want)
        same = RetrieveKL(model, model, estimator=estimator, options=ScoreOptions(both))(td.clone())
        assert float(same["kl_penalty"].abs().max()) < 1e-5
    whole = RetrieveKL(model, ref, options=ScoreOptions(SAMPLING))(td.clone())
    assert_close(whole["ref_log_probs", "full"], score(ref, td, Sampling(0.8)))
    assert (whole["ref_log_probs", "full"][:, 4:] < want[:, 4:] + 1e-6).all()
    td["advantage"] = torch.ones(3, 1)
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.1, "k2")], reference=ref, options=ScoreOptions(both))
    found = loss(td)["kl_to_ref"]
    d = (want - score(model, td))[:, 4:]
    assert_close(found, (d.exp() - 1 - d).mean(), atol=1e-5, rtol=1e-5, check_dtype=False)


def test_torchrl_wrapper(lab: Any) -> None:
    """A torchrl policy with a recording processor, for answers of several lengths."""
    record, policy = RecordKept(Sampling(top_k=3)), lab.policy(True)
    policy.generate_kwargs |= {"top_k": lab.gen_model.config.vocab_size, "logits_processor": [record]}
    torch.manual_seed(0)
    data = record.write(policy(lab.env().reset()))
    for step in steps(RetrieveLogProb(lab.gen_model, options=ScoreOptions(record.sampling))(data)):
        log_probs, counts = step["log_probs", "full"], step["kept", "counts"]
        assert int(counts.sum()) <= len(step["kept", "ids"])
        assert counts.max() == 3
        assert (log_probs[counts > 0] > torch.tensor(1e-4).log()).all()
        assert (log_probs[counts == 0] == 0).all()


def test_records_of_other_calls_are_refused() -> None:
    model, record = tiny_model().double(), RecordKept(SAMPLING)
    first, _ = recorded(model, RecordKept(SAMPLING))
    with pytest.raises(ValueError, match="the record has 0 sequences"):
        record.write(first)
    recorded(model, record)
    other, _ = recorded(tiny_model(seed=9).double(), record)
    with pytest.raises(ValueError, match="not among the"):
        record.write(first)
    td = record.write(other)
    td["kept", "ids"] = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"has 2 ids for sequence 0, .*'counts'"):
        score(model, td)


def warnings_of_50(call: Any) -> int:
    """Count the warnings about a top k of 50. There must be no other warning about the sampler."""
    found = warned(call, "sampler ")[1]
    assert all(text.startswith("sampler uses top_k=50, scorer top_k=0") for text in found), found
    return len(found)


def test_warned_once(lab: Any, ref_model: nn.Module) -> None:
    plain = lab.policy(True)  # without its own top-k: transformers' default of 50 applies
    scoring, other = (plain.get_new_version(generate=False, log_probs_key=key) for key in ("log_probs", "r"))
    for build in (
        partial(RetrieveLogProb, scoring),
        partial(RetrieveKL, scoring, other),
        partial(PolicyLoss, plain),
        partial(make_algorithm, "grpo", plain, reference=ref_model, group_size=2),
    ):
        assert warnings_of_50(build) == 1
        assert warnings_of_50(partial(build, options=ScoreOptions(Sampling(top_k=50)))) == 0
    # From a collector the policy is known at the first step; a teacher may be followed on any answers.
    env = lab.env(RetrieveKL("from_collector", ref_model))
    assert warnings_of_50(partial(lab.batches, env, 2, 4, policy=plain)) == 1
    assert warnings_of_50(partial(make_algorithm, "gkd", plain, reference=ref_model)) == 0
    assert warnings_of_50(partial(PolicyLoss, plain, "sft")) == 0  # trains on data that no policy samples
    assert warnings_of_50(partial(make_algorithm, "on_policy_distill", plain, reference=ref_model)) == 1


def test_a_model_without_a_wrapper_is_compared_with_the_policy_of_the_collector(lab: Any, ref_model: nn.Module) -> None:
    """As in the guides, the algorithm gets the model and the collector a wrapper of it."""
    grpo = partial(make_algorithm, "grpo", lab.gen_model, reference=ref_model, group_size=2)
    teacher = make_algorithm("gkd", lab.gen_model, reference=ref_model, top_k=2)
    for parts, expected in ((grpo(), 1), (grpo(options=ScoreOptions(Sampling(top_k=50))), 0), (teacher, 0)):
        assert warnings_of_50(partial(lab.batches, lab.env(parts.kl_transform), 2, 4)) == expected
    warm = lab.policy(True)
    warm.generate_kwargs |= {"top_k": lab.gen_model.config.vocab_size, "temperature": 0.7}
    (text,) = warned(partial(lab.batches, lab.env(grpo().kl_transform), 2, 4, policy=warm), "sampler ")[1]
    assert text.startswith("sampler uses temperature=0.7, scorer temperature=1.")


def test_a_base_model_on_chatml_is_warned_of(lab: Any) -> None:
    """torchrl renders ChatML for a tokenizer without its markers, unless the model has its own template."""
    strange, known = build_tokenizer(None, (), eos_token="</s>"), build_tokenizer(None)
    template = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    own = build_tokenizer(template, (), eos_token="</s>")
    for tokenizer, options, expected in (
        (strange, {}, 1),
        (known, {}, 0),
        (own, {}, 0),
        (strange, {"chat_template": template}, 0),
        (strange, {"input_mode": "text"}, 0),
    ):
        policy = make_policy(lab.gen_model, tokenizer, pad_output=True, **options)
        found = warned(partial(warn_of_chatml, policy), "as ChatML")[1]
        assert len(found) == expected, options
    text = "renders the conversations of this policy as ChatML, but '<|im_start|>' is not a token of its tokenizer"
    env, policy = lab.env(RetrieveLogProb(lab.gen_model)), make_policy(lab.gen_model, strange, pad_output=True)
    assert text in warned(partial(lab.batches, env, policy=policy), "as ChatML")[1][0]


def test_settings_follow(ref_model: nn.Module, policy_model: nn.Module) -> None:
    transform = RetrieveKL(policy_model, ref_model, options=ScoreOptions(SAMPLING))
    given = Sampling(0.9, top_k=4)
    for options, policy in (
        (transform.options, SAMPLING),
        (transform.options.but(temperature=0.5), Sampling(0.5, top_p=0.8)),
        (transform.options.but(sampling=given), given),
        (transform.options.but(sampling=given).but(sampling=None), Sampling(0.9)),
    ):
        transform.options = options
        for again in (transform, copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
            found = [part.scorer.options.sampling for part in again.transforms[:2]]
            own = [policy, Sampling(policy.temperature)]
            assert found == own == [again.options.sampling, again[1].options.sampling]
    with pytest.raises(ValueError, match="two temperatures"):
        transform.options.but(temperature=0.5, sampling=SAMPLING)


def test_generate_kwargs_sample_from_the_scored_distribution(policy_model: nn.Module) -> None:
    """The arguments override a generation config that would change the distribution."""
    policy = copy.deepcopy(policy_model)
    truncated: Any = {"top_k": 7, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.3, "typical_p": 0.9}
    policy.generation_config.update(do_sample=True, **truncated)
    for scored in (Sampling(), Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01)):
        # 0 would be refused by the constructor of torchrl's wrapper, and the whole vocabulary would be sorted for each token.
        assert scored.generate_kwargs()["top_k"] == (scored.top_k or None)
        kwargs = scored.generate_kwargs(max_new_tokens=3)
        assert kwargs["max_new_tokens"] == 3
        drawn = policy.generate(PROMPTS[:1], **OUTPUTS, **kwargs)
        for logits, processed in zip(drawn.logits, drawn.scores, strict=True):
            kept = truncate(logits, scored)
            assert torch.equal(processed.isneginf(), kept.isneginf())
            assert_close(processed.log_softmax(-1), kept.log_softmax(-1), atol=1e-5, rtol=0)


def test_make_algorithm(ref_model: nn.Module, policy_model: nn.Module) -> None:
    two: Any = {"reference": ref_model, "group_size": 2, "options": ScoreOptions(SAMPLING)}
    parts = make_algorithm("grpo", policy_model, **two)
    assert parts.loss.sampling == SAMPLING
    assert [part.scorer.options.sampling for part in parts.kl_transform.transforms[:2]] == [SAMPLING, Sampling(0.8)]
    exact = make_algorithm("grpo", policy_model, **two, kl_loss="exact")
    assert exact.loss._scorers.of_reference().options.sampling == Sampling(0.8)
    scorer = LogProbScorer(policy_model, sampling=SAMPLING)
    assert make_algorithm("grpo", scorer, group_size=2, kl_loss="none").loss.sampling == SAMPLING
    with pytest.raises(ValueError, match="actor is a scorer with its own settings"):
        make_algorithm("grpo", scorer, group_size=2, kl_loss="none", options=ScoreOptions(Sampling(top_k=3)))
    of_loss = {"options": two.pop("options")}
    with pytest.raises(TypeError, match="multiple values for keyword argument 'options'"):
        make_algorithm("grpo", policy_model, **two, loss_args=of_loss)
