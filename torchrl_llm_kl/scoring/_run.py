"""Run one model, or two side by side, over a request."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchrl_llm_kl.scoring._device import send
from torchrl_llm_kl.scoring._fingerprint import fingerprint
from torchrl_llm_kl.scoring._memory import ConversationMemory
from torchrl_llm_kl.scoring._mode import Mode
from torchrl_llm_kl.scoring._model import frequency_switches
from torchrl_llm_kl.scoring._packed import PackedPass
from torchrl_llm_kl.scoring._padded import PaddedPass, Route, padded_batches
from torchrl_llm_kl.scoring._recall import Recall
from torchrl_llm_kl.scoring._request import Request
from torchrl_llm_kl.scoring._states import Readings, States, Wanted, join, join_states, read
from torchrl_llm_kl.scoring._tree import PrefixTree

__all__ = ["Runner", "run"]

_SMALLEST_PACK = 16


@dataclass
class Runner:
    """A model, and how to run it.

    Args:
        model: a causal language model.
        route: which way.
        device: where it is.
        temperature: divides its logits.
        adapters: False for the base model under PEFT adapters.
        dtype: of the body, by autocast.
        packs: whether it may go without padding.
        tokens_per_batch: the most tokens in one forward; becomes less when memory runs out.
        head_chunk: positions whose whole logits are held at once.
        memory: of conversations that go on.
    """

    model: nn.Module
    route: Route
    device: torch.device
    temperature: float
    adapters: bool
    dtype: torch.dtype | None
    packs: bool
    tokens_per_batch: int
    head_chunk: int
    memory: ConversationMemory

    def mode(self, grad: bool) -> Mode:
        """The state it is run in."""
        return Mode(grad, self.adapters, self.dtype)

    def can_pack(self, grad: bool) -> bool:
        """Whether this call may go without padding."""
        return self.packs and not frequency_switches(self.model) and not (grad and _layers_vary(self.model))


def _layers_vary(model: nn.Module) -> bool:
    """Whether layers run again in the backward, when nobody knows the pack any more, or are left out at random."""
    return any(
        getattr(module, "gradient_checkpointing", False) or (module.training and getattr(module, "layerdrop", 0))
        for module in model.modules()
    )


def run(
    runners: list[Runner], request: Request, wanted: Wanted, *, grad: bool, remember: bool
) -> tuple[Tensor, Readings]:
    """Read what is wanted at every token to score.

    Args:
        runners: the model, and a reference if a KL is wanted, which never has gradient.
        request: what to score.
        wanted: what to read.
        grad: keep the graph.
        remember: use and fill the memories.

    Returns:
        Flat elements ``[K]`` on the CPU, and what was read there, on the model's device.
    """
    if any(frequency_switches(runner.model) for runner in runners):
        request = request.uncut()
    packed = all(runner.can_pack(grad and i == 0) for i, runner in enumerate(runners))
    tree = PrefixTree.build(request.tokens, request.forward_lengths) if packed else None
    while True:
        try:
            recalls = None
            if tree is not None and remember and not grad and all(runner.memory.limit for runner in runners):
                recalls = _recalls(runners, request, tree, wanted)
            passes = _passes(runners, request, tree, recalls, grad)
            return _collect(passes, runners[0], request, wanted, recalls, grad)
        except torch.OutOfMemoryError:
            least = _SMALLEST_PACK if packed else int(request.forward_lengths.max())
            if _budget(runners) <= least:
                raise  # nothing smaller would do
        _halve_budget(runners)


def _budget(runners: list[Runner]) -> int:
    return min(runner.tokens_per_batch for runner in runners)


def _halve_budget(runners: list[Runner]) -> None:
    """After an out-of-memory error: smaller micro-batches, for this call and all later ones."""
    budget = _budget(runners) // 2
    for runner in runners:
        runner.tokens_per_batch = budget
    warnings.warn(
        f"out of memory: LogProbScorer goes on with tokens_per_batch={budget}. Set it to that or less to spare the attempt.",
        stacklevel=2,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _recalls(runners: list[Runner], request: Request, tree: PrefixTree, wanted: Wanted) -> list[Recall]:
    """What each model remembers, cut down to what both do, so that they run side by side."""
    recalls = []
    for runner in runners:
        runner.memory.be(fingerprint(runner.model), runner.temperature, runner.adapters, runner.dtype)
        recalls.append(Recall(runner.memory, request, tree, values=wanted == Wanted()))
    known = [min(both) for both in zip(*(recall.known for recall in recalls), strict=True)]
    for recall in recalls:
        recall.known = known
    return recalls


def _passes(
    runners: list[Runner], request: Request, tree: PrefixTree | None, recalls: list[Recall] | None, grad: bool
) -> list[PackedPass] | list[PaddedPass]:
    budget = _budget(runners)
    if tree is not None:
        return [
            PackedPass(
                runner.model,
                runner.mode(grad and i == 0),
                request,
                tree,
                tokens_per_batch=budget,
                temperature=runner.temperature,
                device=runner.device,
                recall=None if recalls is None else recalls[i],
            )
            for i, runner in enumerate(runners)
        ]
    batches = padded_batches(request.forward_lengths, budget, *(runner.model for runner in runners))
    return [
        PaddedPass(
            runner.model,
            runner.mode(grad and i == 0),
            runner.route,
            request,
            batches,
            temperature=runner.temperature,
            device=runner.device,
        )
        for i, runner in enumerate(runners)
    ]


def _collect(
    passes: list[PackedPass] | list[PaddedPass],
    runner: Runner,
    request: Request,
    wanted: Wanted,
    recalls: list[Recall] | None,
    grad: bool,
) -> tuple[Tensor, Readings]:
    elements: list[Tensor] = []
    parts: list[Readings] = []
    held: list[tuple[Tensor, list[States]]] = []
    for index, some in enumerate(passes[0].elements):
        states = [each.run(index) for each in passes]
        if some.numel() == 0:
            continue
        elements.append(some)
        targets = send(request.tokens.values[some], runner.device)
        if grad and all(each.head is not None for each in states):
            # The graph holds hidden states anyway: one head call for all makes one gradient of its weight, not many.
            held.append((targets, states))
        else:
            parts.append(_read(targets, states, wanted, runner, grad))
    if held:
        columns = zip(*(states for _, states in held), strict=True)
        targets = torch.cat([targets for targets, _ in held])
        parts.append(_read(targets, [join_states(column) for column in columns], wanted, runner, grad))
    found = join(parts) if parts else _nothing(wanted, runner.device)
    element = torch.cat([torch.zeros(0, dtype=torch.long), *elements])
    if recalls is None:
        return element, found
    for recall, log_probs in zip(recalls, (found.log_prob, found.ref_log_prob), strict=False):
        assert log_probs is not None
        recall.finish(request, element, log_probs.cpu())
    known = recalls[0].element
    if known.numel():
        log_prob = torch.cat([found.log_prob, recalls[0].values.to(runner.device)])
        found, element = found._replace(log_prob=log_prob), torch.cat([element, known])
    return element, found


def _read(targets: Tensor, states: list[States], wanted: Wanted, runner: Runner, grad: bool) -> Readings:
    """Of the model's states, and the reference's if there are any."""
    with nullcontext() if grad else torch.no_grad():
        return read(states[0], targets, wanted, *states[1:], chunk=runner.head_chunk, recompute=grad)


def _nothing(wanted: Wanted, device: torch.device) -> Readings:
    """Readings at no position."""
    none = torch.zeros(0, device=device)
    pair = none if wanted.kl else None
    top = torch.zeros(0, wanted.top_k, device=device) if wanted.top_k else None
    return Readings(
        none,
        none if wanted.entropy else None,
        pair,
        pair,
        None if top is None else top.long(),
        top,
        none if wanted.top_k else None,
    )
