"""The gradient of a weight that embedding and head share: its values, and the memory that its parts take."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from closeness import assert_near
from scoring_reference import conversation, plain_log_probs
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import BACKWARD, tiny_model

DENSE = "aten.embedding_dense_backward.default"


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def tied(name: str = "qwen2") -> Any:
    model = tiny_model(name, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return model.requires_grad_(True)


def expected(model: nn.Module, rows: list[Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the plain model's log-probs."""
    plain = copy.deepcopy(model)
    (plain_log_probs(plain, Ragged.from_list(rows)) * weight).sum().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
@pytest.mark.parametrize("settings", [{}, {"tokens_per_batch": 24}, {"share_prefixes": False}])
def test_the_gradient_is_that_of_the_plain_model(name: str, settings: dict[str, Any]) -> None:
    """In one pack, in several, and in padded rows. A second backward of the same graph adds it again."""
    model, rows = tied(name), conversation()
    values = LogProbScorer(model, **settings).score(Ragged.from_list(rows), grad=True).values
    weight = torch.sin(torch.arange(len(values), dtype=torch.float32))
    want = expected(model, rows, weight)
    with Operators() as seen:
        (values * weight).sum().backward(retain_graph=True)
    assert DENSE not in seen.names
    assert_near({name: x.grad for name, x in model.named_parameters() if x.grad is not None}, want, **BACKWARD)
    (values * weight).sum().backward()
    embedding = model.get_input_embeddings().weight
    key = next(name for name, x in model.named_parameters() if x is embedding)
    assert_near(embedding.grad, 2 * want[key], **BACKWARD)
    del values
    assert not embedding._backward_hooks, "the end of the graph removes the hooks"


def test_grad_without_accumulation() -> None:
    model, rows = tied(), conversation()
    embedding = model.get_input_embeddings().weight
    values = LogProbScorer(model).score(Ragged.from_list(rows), grad=True).values
    (found,) = torch.autograd.grad(values.sum(), [embedding])
    want = expected(model, rows, torch.ones(len(values)))
    assert_near(found, want["model.embed_tokens.weight"], **BACKWARD)
    assert embedding.grad is None


def test_the_row_of_padding_has_no_gradient_as_an_input() -> None:
    """As in ``torch.nn.Embedding``. The head's part of the row stays."""
    model, rows = tied(), [torch.tensor([3, 1, 4, 1, 5])]
    model.get_input_embeddings().padding_idx = 1
    LogProbScorer(model).score(Ragged.from_list(rows), grad=True).values.sum().backward()
    want = expected(model, rows, torch.ones(5))
    assert_near(model.get_input_embeddings().weight.grad, want["model.embed_tokens.weight"], **BACKWARD)


def test_a_hook_of_the_user_sees_the_whole_gradient() -> None:
    model, rows, seen = tied(), conversation(), []
    weight = model.get_input_embeddings().weight
    weight.register_hook(partial(lambda own, grad: own.append(grad.clone()), seen))
    values = LogProbScorer(model).score(Ragged.from_list(rows), grad=True).values
    values.sum().backward()
    assert_near(seen[0], weight.grad, **BACKWARD)
    assert_near(seen[0], expected(model, rows, torch.ones(len(values)))["model.embed_tokens.weight"], **BACKWARD)


def test_other_losses_of_the_weight_add_up() -> None:
    """A penalty on the weight itself, whose gradient is expanded, and a second forward in one graph."""
    model, rows = tied(), conversation()
    weight, scorer = model.get_input_embeddings().weight, LogProbScorer(model)
    one, two = (scorer.score(Ragged.from_list(part), grad=True).values for part in (rows[:4], rows[4:]))
    (one.sum() + two.sum() + 0.5 * weight.sum()).backward()
    parts = [
        expected(model, part, torch.ones(len(x)))["model.embed_tokens.weight"]
        for part, x in ((rows[:4], one), (rows[4:], two))
    ]
    assert_near(weight.grad, parts[0] + parts[1] + 0.5, **BACKWARD)


def test_frozen_and_untied_weights_are_looked_up_as_usual() -> None:
    for model in (tied().requires_grad_(False), tiny_model("qwen2", tie_word_embeddings=False).requires_grad_(True)):
        model.get_decoder().norm.weight.requires_grad_(True)
        values = LogProbScorer(model).score(Ragged.from_list(conversation()), grad=True).values
        assert not model.get_input_embeddings().weight._backward_hooks
        values.sum().backward()


def test_second_derivatives_are_those_of_the_plain_model() -> None:
    """On the path of the model's own logits, whose head has second derivatives."""
    model, rows = tied(), [torch.tensor([3, 7, 4, 7, 5, 9, 2, 6])]
    model.set_attn_implementation("eager")  # torch's fused attention has no second derivative
    plain = copy.deepcopy(model)
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    values = LogProbScorer(model, share_prefixes=False).score(Ragged.from_list(rows), grad=True).values
    gradients, products = [], []
    for each, total in ((model, values.sum()), (plain, plain_log_probs(plain, Ragged.from_list(rows)).sum())):
        weight = each.get_input_embeddings().weight
        (gradient,) = torch.autograd.grad(total, [weight], create_graph=True)
        gradients.append(gradient.detach())
        direction = torch.sin(torch.arange(weight.numel(), dtype=torch.float32)).view_as(weight)
        products.append(torch.autograd.grad((gradient * direction).sum(), [weight])[0])
    assert_near(*gradients, **BACKWARD)
    largest = products[1].abs().max()
    assert largest > 1
    assert (products[0] - products[1]).abs().max() < 1e-4 * largest


def test_an_error_in_the_forward_restores_the_embedding() -> None:
    model = tied()
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LogProbScorer(model, probe=False).score(Ragged.from_list(conversation()), grad=True)
    handle.remove()
    assert "forward" not in vars(embedding)
    wrapped = embedding.forward = partial(embedding.forward)  # as hooks of accelerate do
    LogProbScorer(model, probe=False).score(Ragged.from_list(conversation()), grad=True).values.sum().backward()
    assert embedding.forward is wrapped
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_checkpoint_around_the_body() -> None:
    """Its recomputed forward saves the same tensors."""
    model, rows = tied(), [torch.tensor([3, 1, 4, 1, 5])]
    want = expected(model, rows, torch.ones(5))
    body, forward = model.get_decoder(), model.get_decoder().forward
    body.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    LogProbScorer(model, probe=False, share_prefixes=False).score(
        Ragged.from_list(rows), grad=True
    ).values.sum().backward()
    assert_near(model.get_input_embeddings().weight.grad, want["model.embed_tokens.weight"], **BACKWARD)
