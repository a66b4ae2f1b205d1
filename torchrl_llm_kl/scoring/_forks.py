"""Models with a recurrent state or convolutions: a shared prefix is forwarded once, and each answer continues from its state.

In a pack of several sequences the state of such layers would leak from one sequence into the next. The state after a prefix
is small, and transformers' cache holds it beside the keys and values of attention. It is forked where sequences part.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchrl_llm_kl._numerics import send
from torchrl_llm_kl._private import is_stateful
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.scoring._branches import Cut
from torchrl_llm_kl.scoring._cache import CacheLookup
from torchrl_llm_kl.scoring._checkpoints import CheckpointError, saving, swapped
from torchrl_llm_kl.scoring._model import Setup, body_and_head, call, read_output, text_config
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing
from torchrl_llm_kl.scoring._scores import States, head_states
from torchrl_llm_kl.scoring._tree import PrefixTree

if TYPE_CHECKING:
    from transformers import DynamicCache

#: Tokens from which a prefix is shared. It costs a separate forward, and such layers pad their input to whole chunks.
MIN_SHARED = 32
#: Tokens of a continuation. For a single token transformers runs the kernels of generation, which write to the state in place
#: and have no backward.
MIN_LENGTH = 2
# The share of padding from which a node gets another step, and the tokens that this must save.
_PADDING, _MIN_SAVED = 0.1, 8


def has_state(model: nn.Module) -> bool:
    """Whether layers carry a state from token to token: a recurrent state, or the last inputs of a convolution."""
    kinds = asked(text_config(model), "layer_types", (list, tuple)) or ()
    return is_recurrent(model) or any("attention" not in kind or "linear" in kind for kind in kinds)


def is_recurrent(model: nn.Module) -> bool:
    """Whether layers have a recurrent state, and not only the inputs of a convolution."""
    return any(map(is_stateful, model.modules()))


@dataclass(frozen=True)
class Step:
    """One forward of nodes of a prefix tree that continue the same node, right-padded to the longest."""

    nodes: list[int]  # several only if they are leaves
    past: int  # the step that it continues, -1 at the start of a sequence and after cached tokens
    width: int  # tokens of the longest node; at least MIN_LENGTH unless at the start
    first: int = 0  # number of leading tokens of the node that are cached


def plan_steps(tree: PrefixTree, tokens_per_batch: int, cached: Sequence[int] | None = None) -> list[Step]:
    """Put every node of a tree into a step, after the step that it continues.

    The order is depth first, which holds the fewest states at a time. A step has at most ``tokens_per_batch`` tokens, padding
    included, or a single node. ``cached`` is the number of leading tokens of each node that need no forward, by default 0.
    With ``cached`` a step has no padding, since the state after padding could not be cached. Otherwise the continuations of a
    node share a step, from the longest, until padding exceeds a tenth of the tokens so far. The shorter ones get another
    step if that saves at least 8 tokens. Fewer would not pay for it.

    Example:
        >>> from torchrl_llm_kl.ragged import Ragged
        >>> answers = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [7, 8]]
        >>> tokens = Ragged.from_list([torch.tensor(answer) for answer in answers])
        >>> for step in plan_steps(PrefixTree.build(tokens, tokens.lengths, min_shared=3), 8):
        ...     print(step)
        Step(nodes=[3], past=-1, width=2, first=0)
        Step(nodes=[0], past=-1, width=3, first=0)
        Step(nodes=[1, 2], past=1, width=2, first=0)
    """
    done = [0] * tree.num_nodes if cached is None else cached
    lengths = [length - done[node] for node, length in enumerate(tree.length.tolist())]  # tokens left to forward
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parent.tolist()):
        children.setdefault(parent, []).append(node)
    steps: list[Step] = []
    waiting = [(-1, -1)]  # nodes whose children come next, and the steps that end with them
    while waiting:
        node, past = waiting.pop()
        if node >= 0:
            if lengths[node]:
                steps.append(Step([node], -1 if done[node] else past, lengths[node], done[node]))
            past = len(steps) - 1 if lengths[node] else -1
        nodes = children.get(node, [])  # empty if there is nothing to forward
        leaves = sorted((x for x in nodes if x not in children and lengths[x]), key=lambda x: (done[x], -lengths[x]))
        tokens, padding = lengths[node] if node >= 0 else 0, 0
        while leaves:
            longest, first = lengths[leaves[0]], done[leaves[0]]
            width = max(longest, 1 if node < 0 and not first else MIN_LENGTH)
            most = 1 if first else max(1, min(sum(not done[x] for x in leaves), tokens_per_batch // width))
            rows = 0
            for length in (lengths[x] for x in leaves[:most]):
                gap = longest - length
                saved = gap * (len(leaves) - rows)  # by a step of their own for this node and the shorter ones
                too_much = padding + gap > _PADDING * (tokens + length) and saved >= _MIN_SAVED
                if too_much or (saved and cached is not None):
                    break
                tokens, padding, rows = tokens + length, padding + gap, rows + 1
            steps.append(Step(leaves[:rows], -1 if first else past, width, first))
            leaves = leaves[rows:]
        waiting += [(x, past) for x in reversed(nodes) if x in children]
    return steps


class ForkedPass:
    """Runs one model over the prefix tree of a request, one step at a time."""

    kind: Final = "step"

    def __init__(
        self,
        setup: Setup,
        request: ScoreRequest,
        tree: PrefixTree,
        tokens_per_batch: int,
        lookup: CacheLookup | None = None,
        routing: Routing | None = None,
    ) -> None:
        self.setup, self.routing, self._lookup = setup, routing, lookup
        # A factor on forked recurrent states. The probe changes it to see whether the states have an effect.
        self.recurrence = 1.0
        self._request, self._tree = request, tree
        self.steps = plan_steps(tree, tokens_per_batch, None if lookup is None else lookup.cached)
        number, first = torch.zeros(2, tree.num_nodes, dtype=torch.long)
        for i, step in enumerate(self.steps):
            nodes = torch.tensor(step.nodes)
            number[nodes], first[nodes] = i, torch.arange(len(nodes)) * step.width - step.first
        scored = (request.mask if lookup is None else lookup.scored).nonzero().squeeze(-1)
        node, offset = tree.locate(scored - 1)
        number, order = number[node].sort(stable=True)
        counts = torch.bincount(number, minlength=len(self.steps)).tolist()
        self.elements = list(scored[order].split(counts))  # flat indices of the tokens that each step predicts
        self._slots = list((first[node] + offset)[order].split(counts))
        self._last_use = {step.past: i for i, step in enumerate(self.steps)}
        self._states: dict[int, DynamicCache] = {}  # the state after each step that later steps continue
        self._again = setup.options.grad and checkpoints_layers(setup.model)

    def run(self, index: int) -> States:
        """Hidden states at the positions that predict ``elements[index]``. Steps must run in order."""
        step = self.steps[index]
        nodes, column = torch.tensor(step.nodes)[:, None], torch.arange(step.width) + step.first
        real = column < self._tree.length[nodes]
        source = torch.where(real, self._tree.element[nodes] + column, -1)
        ids = send(torch.where(real, self._request.tokens.values[source], 0), self.setup.device)
        positions = send((self._tree.start[nodes] + column).expand(source.shape).contiguous(), self.setup.device)
        past, keep = self._states.get(step.past), index in self._last_use or self._lookup is not None
        if self._lookup is not None and step.past < 0:
            past = self._lookup.state(step.nodes[0], step.first)
        # A checkpoint calls _forward again in the backward, so _forward sets all of its context itself.
        args = ids, positions, past, keep, source.flatten()
        if self._again:
            hidden, state = checkpoint(self._forward, *args, use_reentrant=False)
        else:
            hidden, state = self._forward(*args)
        if index in self._last_use:
            self._states[index] = state
        if self._lookup is not None and step.width == int(real.sum(-1).amin()):
            for row, node in enumerate(step.nodes):
                own = _state_with(state, partial(_row_of, row))
                self._lookup.insert(node, step.first, step.width, [], own)
        if self._last_use[step.past] == index:
            self._states.pop(step.past, None)
        with self.setup.active():
            return head_states(self.setup, hidden.flatten(0, 1)[send(self._slots[index], self.setup.device)])

    def run_dummy(self) -> States:
        """Forward a dummy token, since all ranks must call sharded layers equally often. Returns no states."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.setup.device)
        hidden, _ = self._forward(ids, ids, None, False, torch.full((1,), -1))
        with self.setup.active():
            return head_states(self.setup, hidden.flatten(0, 1)[:0])

    def cut(self, index: int) -> list[Cut]:
        """Detach the state that later steps continue."""
        cuts: list[Cut] = []

        def detached(_: str, own: Tensor) -> Tensor:
            cuts.append((own, own.detach().requires_grad_(own.requires_grad)))
            return cuts[-1][1]

        if index in self._states:
            self._states[index] = _state_with(self._states[index], detached)
        return cuts

    def readers(self, index: int) -> set[int]:
        """The steps that continue a step."""
        return {i for i, step in enumerate(self.steps) if step.past == index}

    def elsewhere(self, element: Tensor) -> int:
        """How many of the positions on which ``element [1]`` depends are in earlier steps."""
        return int(self._tree.start[self._tree.locate(element)[0]])

    def _forward(
        self, ids: Tensor, positions: Tensor, past: DynamicCache | None, keep: bool, source: Tensor
    ) -> tuple[Tensor, DynamicCache | None]:
        """Hidden states ``[b, T, H]`` of tokens that continue ``past``, and the state after them."""
        body = self.setup.inspection.of(body_and_head)[0]
        options: dict[str, object] = {"position_ids": positions, "use_cache": False}
        state = None
        routing = self.routing.forward(source, self.setup.device) if self.routing else nullcontext()
        with self.setup.active(), routing, _layers_in_one(body) if self._again else nullcontext():
            if keep or past is not None:
                empty = _cache_type()(config=text_config(self.setup.model)) if past is None else past
                state = _fork(empty, len(ids), self.recurrence)
                options |= {"use_cache": True, cache_argument(body): state}
            # A causal model needs no mask, since the padding is on the right.
            return read_output(call(body, ids, **options), "last_hidden_state"), state if keep else None


# ---------------------------------------------------------------------- states


def cache_argument(body: nn.Module) -> str:
    """The name of the cache argument of a body's forward: ``cache`` since transformers 5.24, earlier one of two others."""
    takes = inspect.signature(body.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in takes), "past_key_values")


@cache
def _cache_type() -> type[DynamicCache]:
    from transformers import DynamicCache

    class ForkedCache(DynamicCache):
        """A cache that never overwrites a recurrent state, since an autograd graph may hold it."""

        saving: tuple[bool, object]

        def update(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            self._check()
            return super().update(*args, **options)

        def update_conv_state(self, *args: Any, **options: Any) -> Tensor:
            self._check()
            return super().update_conv_state(*args, **options)

        def update_recurrent_state(
            self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
        ) -> Tensor:
            self._check()
            held = vars(self.layers[layer_idx])["recurrent_states"]
            if held[state_idx] is not None:
                held[state_idx] = torch.empty_like(recurrent_states)  # the update writes here
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **options)

        def _check(self) -> None:
            """Raise an error inside a checkpoint: its recomputation would advance the state a second time."""
            if saving() != self.saving:
                raise CheckpointError

    return ForkedCache


def _fork(state: DynamicCache, count: int, recurrence: float) -> DynamicCache:
    """A copy of ``state`` for ``count`` sequences that continue it.

    Keys and values may be views, since attention appends to them. Other layers write to their states, so these are copied.
    """

    def each(name: str, value: Tensor) -> Tensor:
        if name in ("keys", "values"):
            return value.expand(count, *value.shape[1:])
        value = value.repeat_interleave(count, 0)
        return value * recurrence if name == "recurrent_states" and recurrence != 1.0 else value

    return _state_with(state, each)


def _row_of(row: int, _: str, value: Tensor) -> Tensor:
    return value[row : row + 1].clone()


def _state_with(state: DynamicCache, change: Callable[[str, Tensor], Tensor]) -> DynamicCache:
    """A copy of a state with ``change`` applied to each tensor, for the attributes in transformers 5.21 to 5.24."""
    out = copy.copy(state)
    out.layers, out.saving = [], saving()  # type: ignore[attr-defined]
    for layer in state.layers:
        own = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.ndim:
                setattr(own, name, change(name, value))
            elif isinstance(value, dict):
                held = {k: change(name, v) if isinstance(v, Tensor) else v for k, v in value.items()}
                setattr(own, name, held)
        out.layers.append(own)
    return out


# ---------------------------------------------------------------------- checkpoints


def checkpoints_layers(model: nn.Module) -> bool:
    """Whether transformers checkpoints the model's layers. It would keep no state then, so a whole step is the checkpoint."""
    return any(asked(module, "gradient_checkpointing", bool) and module.training for module in model.modules())


def _layers_in_one(body: nn.Module) -> AbstractContextManager[None]:
    """Context in which transformers checkpoints no layer. Each layer's setting is restored at the end."""
    layers = [module for module in body.modules() if asked(module, "gradient_checkpointing", bool)]
    return swapped([(layer, "gradient_checkpointing", True, False) for layer in layers])
