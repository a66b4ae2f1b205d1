"""Divergences to a teacher with another tokenizer, beside TRL's own code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from byte_texts import RandomTeacher, small_tokenizer
from closeness import assert_near
from torchrl_llm_kl.scoring import ByteTeacher, LogProbScorer, ScoreOptions, ScoreRequest
from toy_models import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward")
STUDENT = ("a", "b", "c", "ab", "ca", "abc", "bca")
TEACHER = ("a", "b", "c", "bc", "aa", "ba", "bca", "ca", "cab")


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gold_is_trls(beta: float) -> None:
    """TRL divides by the number of chunks. The value of each chunk stands at its first token here."""
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    names = {
        "crossentropy_weight": 0.0,
        "distillation_weight": 1.0,
        "student_temperature": 1.0,
        "teacher_temperature": 1.0,
    }
    names |= {"skip_student_eos": False, "skip_teacher_eos": False, "token_merge_strategy": "bayesian"}
    names |= {"use_hybrid_loss": True, "hybrid_matched_weight": None, "hybrid_unmatched_weight": None}
    config = SimpleNamespace(beta=beta, use_extended_uld=True, **{f"uld_{name}": x for name, x in names.items()})
    tokenizers = small_tokenizer(*STUDENT), small_tokenizer(*TEACHER)
    trl = gold.ULDLoss(config, *tokenizers)

    student, model, prompt = tiny_model(vocab_size=9).double(), RandomTeacher(10, seed=3), [1, 0]
    scorer = ByteTeacher(model, tokenizers[1], tokenizers[0], method="gold").make_scorer()
    own, theirs = scorer.model.student, scorer.model.bytes
    for answer in ([5, 0, 4, 3, 1, 2], [6, 3, 3, 0, 7]):
        given, other = scorer.model.prompt(prompt), theirs.encode(own.text(answer))
        ids, labels, offsets = [], [], []
        for tokens, before, after in ((own, prompt, answer), (theirs, given, other)):
            row = torch.tensor([[*before, *after]])
            ids.append(row)
            labels.append(torch.where(torch.arange(row.shape[1]) < len(before), -100, row))
            spans = torch.tensor([tokens.spans(row[0].tolist())])
            offsets.append(spans - spans[0, len(before), 0])
        # TRL has no row without a token in its vocabularies.
        logits = student(input_ids=ids[0]).logits[..., :9], model(ids[1])[0]
        want = trl(*logits, *labels, *ids, *offsets)

        direction: Any = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen_shannon")
        request = ScoreRequest.of([[*prompt, *answer]], torch.arange(len(ids[0][0])) >= len(prompt))
        options = ScoreOptions(direction=direction, grad=True)
        scores = scorer.compare(LogProbScorer(student), request, options)
        assert scores.kl is not None
        chunks = int((scores.kl.values != 0).sum())
        got = scores.kl.values.sum() / chunks
        assert_near(got, want, terms=8192, size=1.0)
        ours, others = (torch.autograd.grad(each, [*student.parameters()], retain_graph=True) for each in (got, want))
        for one, two in zip(ours, others, strict=True):
            assert_near(one, two, terms=8192, size=max(1.0, float(two.abs().max())))
