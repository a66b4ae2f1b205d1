"""A compiled head and compiled layers give the values and gradients that they have without a graph."""

import torch
from torch.testing import assert_close

from compiled_models import EXACT, compile_layers, pair, train
from head_reference import make_head, make_targets
from scoring_reference import conversation
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.head import linear_log_prob


def test_values_and_gradients_of_a_compiled_head_and_of_compiled_layers() -> None:
    torch.compiler.reset()

    targets = make_targets()

    def run(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear_log_prob(h, w, targets, bias=b, chunk=(3, 40))[0]

    inputs = make_head(1, grad=True)
    found, want = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), run(*inputs)
    assert_close(found, want)
    assert_close(*(torch.autograd.grad(value.square().sum(), inputs) for value in (found, want)))

    plain, compiled = pair(compile_layers, backend="eager", num_hidden_layers=1)
    scorers = [LogProbScorer(model, tokens_per_batch=16) for model in (compiled, plain)]
    assert_close(*(train(scorer, conversation()[:4]) for scorer in scorers), **EXACT)
    torch.compiler.reset()
