"""Log-probs, KL and entropy of sampled answers against float64 forwards of the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from real_model import Answers, RealModel, taken
from torchrl_llm_kl import LogProbScorer, Ragged, Sampling

#: Bounds of a float32 log-prob, nats: 18 layers and a head of 262,144 rows, with logits up to 40.
MEAN, LARGEST = 1e-5, 2e-4


@pytest.fixture(scope="module")
def answers(real: RealModel) -> Answers:
    return real.sampled()


@pytest.fixture(scope="module")
def truth(real: RealModel, answers: Answers) -> Tensor:
    return real.truth(answers)


def test_log_probs_are_nearer_to_float64_than_those_of_a_padded_forward(
    real: RealModel, answers: Answers, truth: Tensor, measured: dict[str, Any]
) -> None:
    mask, (ids, attended) = answers.mask, answers.padded("left")
    ours = LogProbScorer(real.model).score(answers.sequences, mask).values
    with torch.no_grad():
        logits = real.model(input_ids=ids, attention_mask=attended, logits_to_keep=21).logits
    theirs = torch.cat([taken(each[:-1], row) for each, row in zip(logits, answers.rows, strict=True)])
    errors = [(found.double() - truth)[mask].abs() for found in (ours, theirs)]
    ours_mean, theirs_mean = (error.mean().item() for error in errors)
    measured["log-probs, mean and largest distance to float64"] = ", ".join(
        f"{name} {error.mean():.2g} and {error.max():.2g}"
        for name, error in zip(("ours", "a padded forward"), errors, strict=True)
    )
    assert ours_mean < theirs_mean
    assert ours_mean < MEAN
    assert errors[0].max() < LARGEST
    assert (ours[~mask] == 0).all()


def test_exact_kl_and_k3(real: RealModel, answers: Answers, measured: dict[str, Any]) -> None:
    """To a reference whose final norm is 1 % larger, with both sums over the vocabulary in float64."""
    other, mask = real.load(), answers.mask
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01).add_(0.01)
    kls, ratios = [], []
    for (one, row), (two, _) in zip(real.logits(real.model, answers), real.logits(other, answers), strict=True):
        p, q = one.log_softmax(-1), two.log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1))
        ratios.append((taken(two, row) - taken(one, row))[-len(one) :])
    scores = LogProbScorer(real.model).evaluate(answers.sequences, mask, reference=LogProbScorer(other))
    assert scores.kl is not None
    kl, log_ratio = torch.cat(kls), torch.cat(ratios)
    error = (scores.kl.values[mask].double() - kl).abs()
    measured["exact KL, largest distance to float64, of the mean KL"] = f"{error.max():.2g} of {kl.mean():.2g}"
    assert error.max() < 1e-5 < kl.mean()
    assert scores.ref_log_prob is not None
    found = (scores.ref_log_prob.values - scores.log_prob.values)[mask].double()
    assert_close(found.expm1() - found, log_ratio.expm1() - log_ratio, atol=1e-5, rtol=1e-3)


def test_every_layout_gives_the_same_scores(real: RealModel, answers: Answers, truth: Tensor) -> None:
    mask = answers.mask
    found = {"packs of 64": LogProbScorer(real.model, tokens_per_batch=64).score(answers.sequences, mask).values}
    found["separate rows"] = LogProbScorer(real.model, share_prefixes=False).score(answers.sequences, mask).values
    for side in ("left", "right"):
        ids, real_tokens = answers.padded(side)
        scored = torch.zeros_like(real_tokens)
        scored[real_tokens] = mask
        scores = LogProbScorer(real.model).score(ids, scored, attention_mask=real_tokens).restore()
        found[f"padded on the {side}"] = scores[real_tokens]
    nested = torch.nested.nested_tensor(answers.rows, layout=torch.jagged)
    found["nested"] = LogProbScorer(real.model).score(nested, mask).values
    for name, values in found.items():
        assert_close(values.double(), truth, atol=LARGEST, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_a_long_text_across_the_sliding_window(real: RealModel) -> None:
    """900 tokens in packs that end inside and beyond the window of 512, against a plain forward."""
    assert real.model.config.sliding_window == 512
    text = "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in real.questions[:16])
    row = torch.tensor(real.tokenizer(text)["input_ids"][:900])
    answers = Answers([row], [780])
    (logits, _), *_ = real.logits(real.model, answers)
    expected, mask = taken(logits, row), answers.mask
    for tokens in (300, 700, 1024):
        found = LogProbScorer(real.model, tokens_per_batch=tokens).score(answers.sequences, mask).values
        assert_close(found.double(), expected, atol=LARGEST, rtol=0)


def test_a_conversation_of_six_turns_forwards_only_new_tokens(real: RealModel) -> None:
    texts = [row["answer"] for row in real.questions[:6]]
    rows = [torch.tensor(real.tokenizer("\n".join(texts[: turn + 1]))["input_ids"]) for turn in range(6)]
    scorer, forwarded = LogProbScorer(real.model), []
    handle = real.model.model.register_forward_pre_hook(
        lambda _, args, given: forwarded.append(given["input_ids"].numel()), with_kwargs=True
    )
    found = [scorer.score([row], remember=True).values for row in rows]
    handle.remove()
    assert sum(forwarded) < 1.2 * len(rows[-1])  # and not the sum of all turns, which is 3.5 times as long
    with torch.no_grad():
        logits = real.model(input_ids=rows[-1][None]).logits[0, :-1].double()
    for row, values in zip(rows, found, strict=True):
        assert_close(values.double(), taken(logits[: len(row) - 1], row), atol=LARGEST, rtol=0)


def test_deterministic_scores_do_not_depend_on_the_batch(real: RealModel, answers: Answers) -> None:
    scorer = LogProbScorer(real.model, deterministic=True)
    together = scorer.score(answers.sequences, answers.mask).to_list()
    for index in (0, 7):
        one = Answers([answers.rows[index]], [answers.prompts[index]])
        assert torch.equal(scorer.score(one.sequences, one.mask).values, together[index])


def test_a_low_temperature(real: RealModel, measured: dict[str, Any]) -> None:
    """A log-prob is 0 in float32 if the probability of all other tokens is below its resolution."""
    sampling = Sampling(0.3)
    answers = real.sampled(sampling)
    found = LogProbScorer(real.model, sampling=sampling).score(answers.sequences, answers.mask).values
    truth, mask = real.truth(answers, sampling), answers.mask
    assert_close(found.double(), truth, atol=LARGEST / 0.3, rtol=0)
    assert (found <= 0).all()
    zero = (found == 0) & mask
    measured["temperature 0.3: log-probs that are 0 in float32"] = f"{zero.sum()} of {mask.sum()}"
    assert (truth[zero] > -1e-5).all()


def test_bfloat16_adds_noise_without_bias(
    real: RealModel, answers: Answers, truth: Tensor, measured: dict[str, Any]
) -> None:
    mask = answers.mask
    error = (LogProbScorer(real.model, dtype=torch.bfloat16).score(answers.sequences, mask).values.double() - truth)[
        mask
    ]
    rms, whole = error.square().mean().sqrt(), error.view(len(answers.rows), -1).sum(-1).exp()
    measured["bfloat16: root mean square per token, ratios of whole answers"] = (
        f"{rms:.3f}, {whole.min():.2f} to {whole.max():.2f}"
    )
    assert 0.005 < rms < 0.1
    assert error.mean().abs() < 3 * rms / len(error) ** 0.5


def test_sampling_sorts_nothing_and_draws_the_same_tokens(real: RealModel) -> None:
    """``top_k=None`` against 0 and the whole vocabulary, with one random state."""
    given = real.tokenizer(real.prompts[:2], return_tensors="pt", padding=True)
    drawn = []
    for top_k in (None, 0, real.model.config.vocab_size):
        torch.manual_seed(0)
        settings = Sampling().generate_kwargs(max_new_tokens=8) | {"top_k": top_k}
        drawn.append(real.model.generate(**given, **settings))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    config, _ = real.model._prepare_generation_config(None, **Sampling().generate_kwargs())
    names = [type(each).__name__ for each in real.model._get_logits_processor(config, input_ids_seq_length=1)]
    assert "TopKLogitsWarper" not in names


def test_a_row_alone_and_an_empty_one(real: RealModel, answers: Answers, truth: Tensor) -> None:
    """One token has no prefix; an empty row has no score."""
    rows = [answers.rows[0], torch.tensor([2]), torch.tensor([], dtype=torch.long)]
    found = LogProbScorer(real.model).score(Ragged.from_list(rows)).to_list()
    start = answers.prompts[0]
    assert_close(found[0][start:].double(), truth[start : len(rows[0])], atol=LARGEST, rtol=0)
    assert found[1].tolist() == [0.0]
    assert found[2].tolist() == []


def test_llama_cpp_agrees(real: RealModel, answers: Answers, measured: dict[str, Any]) -> None:
    """A second reader of the weights. It multiplies 4- and 6-bit weights with activations of 8 bits, which adds noise."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python, which compiles for five minutes")
    file = real.folder.parent / "gemma-3-270m-q4_k_m.gguf"
    llama = llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False)
    ours, errors = LogProbScorer(real.model).score(answers.sequences, answers.mask).to_list(), []
    for row, start, values in zip(answers.rows, answers.prompts, ours, strict=True):
        llama.reset()
        llama.eval(row.tolist())
        logits = torch.tensor(llama.scores[start - 1 : len(row) - 1])
        errors.append((taken(logits, row) - values)[start:])
    error = torch.cat(errors)
    rms = error.square().mean().sqrt().item()
    measured["llama.cpp, root mean square and mean per token"] = f"{rms:.3f}, {error.mean():.3f}"
    assert rms < 0.15
    assert error.mean().abs() < 0.05
