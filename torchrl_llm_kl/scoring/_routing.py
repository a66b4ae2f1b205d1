"""Routing of a mixture of experts: recorded, and replayed in later forwards.

A router computes logits over experts, chooses the best ``k`` and weighs them. A replay fixes only the choice. During a
forward, hooks on the routers replace the chosen experts and compute their weights from the router's own logits, with the
formula of its family. Routers therefore get gradients. A context variable holds the experts of the running forward, and
recomputed checkpoints enter the same context again.

Shapes: ``N`` tokens of a call, ``n`` of a forward, ``L`` layers with a router, ``k`` experts of a token, ``E`` experts.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrl_llm_kl._numerics import is_dtensor, send
from torchrl_llm_kl._private import CHECKPOINTS, deepspeed_groups
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.scoring._checkpoints import ADVICE, Followed, Swap, follow, saving, swapped
from torchrl_llm_kl.scoring._model import is_compiled, locked, text_config
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._wrapping import Ranks, is_fsdp2, unwrapped

# ---------------------------------------------------------------------- the weights of chosen experts, by family

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    class Router(nn.Module):
        """The attributes of transformers' routers."""

        weight: Tensor
        top_k: int
        num_experts: int
        norm_topk_prob: bool
        routed_scaling_factor: float


#: ``(router, logits [n, E], ids [n, k]) -> weights [n, k]``, with the operators and dtypes of transformers' router.
Weights: TypeAlias = "Callable[[Router, Tensor, Tensor], Tensor]"


def _mixtral(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    top = F.softmax(logits.float(), dim=-1).gather(-1, ids)
    return top / top.sum(-1, keepdim=True)


def _qwen3_moe(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    top = F.softmax(logits, dim=-1, dtype=torch.float).gather(-1, ids)
    if asked(router, "norm_topk_prob", bool, True):  # Qwen3.5 lacks the flag and always normalises
        top = top / top.sum(-1, keepdim=True)
    return top.to(logits.dtype)


def _gpt_oss(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    top = logits.gather(-1, ids)
    return F.softmax(top, dim=-1, dtype=top.dtype)


def _granite(router: Router, logits: Tensor, ids: Tensor) -> Tensor:
    return F.softmax(logits.gather(-1, ids), dim=-1).to(router.weight.dtype)


def _deepseek_v3(router: Router, logits: Tensor, ids: Tensor, least: float = 1e-20) -> Tensor:
    # The bias of the scores and the limit to a few groups affect only the choice, not the weights.
    top = logits.sigmoid().gather(-1, ids)
    if router.norm_topk_prob:
        top = top / (top.sum(-1, keepdim=True) + least)
    return top * router.routed_scaling_factor


#: The formula of the routers of each model type, from transformers 5.23.
_FORMULAS: Mapping[str, Weights] = {
    "mixtral": _mixtral,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "olmoe"), _qwen3_moe),
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), _granite),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "nemotron_h"), _deepseek_v3),
    "lfm2_moe": partial(_deepseek_v3, least=1e-6),
}
_KNOWN = (
    "Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, OLMoE, GPT-OSS, Granite-MoE, DeepSeek-V3, GLM-4-MoE, Nemotron-H "
    "and LFM2-MoE of transformers"
)


def _weights_of(module: nn.Module) -> Weights | None:
    """The formula of a router of a known family, else None. Base classes count, since FSDP2 derives a class."""
    for kind in type(module).__mro__:
        package, _, family = kind.__module__.rpartition(".modeling_")
        # The class name and its module identify the family, without an import of the module.
        if re.search(r"Top[Kk]Router$", kind.__name__) and package == f"transformers.models.{family}":
            return _FORMULAS.get(family)
    return None


def _gathers_weights(model: nn.Module) -> bool:
    """Whether each rank computes with whole weights, as in DDP, FSDP, and FSDP2 over one dimension of ranks."""
    meshes = [cast("DTensor", p).device_mesh for p in model.parameters() if is_dtensor(p)]
    deepspeed = any(deepspeed_groups(p) for p in model.parameters())
    sharded = not meshes or any(is_fsdp2(module) for module in model.modules())
    return sharded and not deepspeed and all(mesh.ndim == 1 for mesh in meshes)


# ---------------------------------------------------------------------- the routers of a model


@dataclass(frozen=True, eq=False)
class Routers:
    """The routers of a model, in the order of its layers."""

    model: nn.Module
    modules: tuple[Router, ...]
    weights: tuple[Weights, ...]
    layers: tuple[int, ...]  # the decoder layer of each
    num_layers: int  # decoder layers, with and without a router
    k: int
    num_experts: int

    @classmethod
    def of(cls, model: nn.Module) -> Routers:
        """Find the routers. Raises a ValueError if there are none, or their choice cannot be replaced."""
        named = {name: module for name, module in model.named_modules() if _weights_of(module) is not None}
        name = type(unwrapped(model)).__name__
        if not named:
            raise ValueError(f"{name} has no router of {_KNOWN}: leave out routing= and RoutedExperts().")
        if Ranks([model]).groups and not _gathers_weights(model):
            raise ValueError(f"{name} is tensor parallel or sharded otherwise: replay its routing with DDP or FSDP.")
        if is_compiled(model):
            raise ValueError(
                f"parts of {name} are compiled, and compiled code does not use replayed routing: set up the replay before "
                "torch.compile."
            )
        modules = [cast("Router", module) for module in named.values()]
        layers = [int(numbers[-1]) for numbers in (re.findall(r"(?:^|\.)layers\.(\d+)\.", each) for each in named)]
        # One configuration applies to all layers.
        ((k, num_experts),) = {(module.top_k, module.num_experts) for module in modules}
        num_layers = text_config(model).num_hidden_layers
        weights = [cast(Weights, _weights_of(module)) for module in modules]
        return cls(model, tuple(modules), tuple(weights), tuple(layers), num_layers, k, num_experts)

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds the ids of experts and -1."""
        return torch.int8 if self.num_experts <= 128 else torch.int16

    def read(self, record: Tensor, request: ScoreRequest) -> Tensor:
        """Check a record against this model, and return it as ``[N, L, k]``, with -1 where the router chooses.

        A record of all layers is cut to those with a router.
        """
        layers, slots = record.shape[1:]
        if slots != self.k or layers not in (len(self.layers), self.num_layers):
            raise ValueError(f"the record has {layers} layers of {slots} experts, not {len(self.layers)} of {self.k}.")
        if layers == self.num_layers:
            record = record[:, list(self.layers)]
        tokens = request.tokens
        forwarded = tokens.positions < request.forward_lengths[tokens.sequence_ids]
        self._check(record, forwarded, request)
        record = torch.where(forwarded[:, None, None], record, -1)
        return record.clamp_(min=-1).to(self.dtype)

    def _check(self, record: Tensor, forwarded: Tensor, request: ScoreRequest) -> None:
        missing = record == -1
        twice = torch.zeros(record.shape[:2], dtype=torch.bool)
        for shift in range(1, self.k):
            twice |= (record[..., shift:] == record[..., :-shift]).any(-1)
        wrong = (record >= self.num_experts) | (record < -1) | (missing != missing[..., :1])
        bad = ((wrong.any(-1) | (twice & ~missing[..., 0])) & forwarded[:, None]).nonzero()
        if len(bad):
            element, place = bad[0].tolist()
            raise ValueError(
                f"the record has experts {record[element, place].tolist()} at {request.locate(element)}, layer "
                f"{self.layers[place]}: expected {self.k} different ones from 0 to {self.num_experts - 1}, or only -1 where "
                "nothing was recorded."
            )


def tell_apart(values: Tensor, *records: Tensor | None) -> Tensor:
    """Number the distinct pairs of token and experts, int64 ``[N]``.

    In a tree of these numbers, sequences share a prefix only if they route it alike.

    Example:
        >>> tell_apart(torch.tensor([7, 7, 7]), torch.tensor([[[0]], [[1]], [[0]]])).tolist()
        [0, 1, 0]
    """
    given = [each.flatten(1) for each in records if each is not None]
    if not given or not values.numel():
        return values
    columns = [values.unsqueeze(1), *given]
    parts = [np.ascontiguousarray(column.numpy()).view(np.uint8) for column in columns]
    raw = np.ascontiguousarray(np.concatenate(parts, 1))
    # View each row as one opaque value, so that np.unique compares whole rows.
    whole = raw.view(np.dtype((np.void, raw.shape[1]))).reshape(-1)
    return torch.from_numpy(np.unique(whole, return_inverse=True)[1].reshape(-1)).long()


# ---------------------------------------------------------------------- calls and forwards


@dataclass(frozen=True, eq=False)
class Routing:
    """The replay and the record of one model's routing during a call."""

    routers: Routers
    record: Tensor | None  # the experts to replay, [N, L, k] on the CPU; -1 lets the router choose
    records: bool = False  # whether the call returns the chosen experts
    chosen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # flat elements, and their experts

    @contextmanager
    def forward(self, elements: Tensor, device: torch.device) -> Iterator[None]:
        """Context: a forward of the tokens at flat ``elements [n]``, where -1 is padding."""
        rows = None
        if self.record is not None:
            rows = send(torch.where(elements[:, None, None] < 0, -1, self.record[elements.clamp(min=0)]), device)
        forward = RoutedForward(self.routers, rows, {} if self.records else None)
        with routed(forward):
            yield
        # Fused kernels compute a whole block and skip its router, so neither replay nor record would happen.
        places = range(len(self.routers.modules))
        if missing := set(places) - forward.called:
            place = min(missing)
            name, layer = type(self.routers.modules[place]).__name__, self.routers.layers[place]
            raise ValueError(f"{name} of layer {layer} was not called: load the model without kernels.")
        if forward.chosen is not None:
            experts = torch.stack([forward.chosen[place] for place in places], 1)
            self.chosen.append((elements, experts.to(self.routers.dtype).cpu()))

    def result(self, count: int) -> Tensor:
        """The chosen experts of all ``count`` tokens, ``[N, L, k]``. -1 at tokens without a forward."""
        out = torch.full((count, len(self.routers.modules), self.routers.k), -1, dtype=self.routers.dtype)
        for elements, experts in self.chosen:
            out[elements[elements >= 0]] = experts[elements >= 0]
        return out


def _refusal() -> ValueError:
    return ValueError(
        "layers run in a checkpoint in their own code or of another library, whose recomputation would not replay the record: "
        f"{ADVICE}."
    )


@dataclass(eq=False)
class RoutedForward(Followed):
    """The replay of one forward, and the experts that its routers chose."""

    routers: Routers
    rows: Tensor | None  # [n, L, k], on the device of the forward
    chosen: dict[int, Tensor] | None = None  # [n, k] by the index of the router; None if not recorded
    called: set[int] = field(default_factory=set)
    refusal = staticmethod(_refusal)

    @contextmanager
    def again(self, _: int) -> Iterator[None]:
        """Context: a recomputation of the forward, which replays but records nothing."""
        with locked(self.routers.model), routed(replace(self, chosen=None, called=set())):
            yield

    def route(
        self, place: int, router: Router, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Replace the choice in a router's output by the recorded experts. Returns None without a record."""
        self.check_saving()
        logits, scores, ids = output
        self.called.add(place)
        replaced = None
        if self.rows is not None:
            weigh = self.routers.weights[place]
            _prove(router, weigh, logits, scores, ids)
            rows = self.rows[:, place].long()
            ids = torch.where(rows < 0, ids, rows)
            replaced = logits, weigh(router, logits, ids), ids
        if self.chosen is not None:
            self.chosen[place] = ids.detach()
        return replaced


_PROVEN: weakref.WeakSet[Router] = weakref.WeakSet()


@torch.no_grad()
def _prove(router: Router, weigh: Weights, logits: Tensor, scores: Tensor, ids: Tensor) -> None:
    """Raise a ValueError if the formula does not reproduce the router's weights of its own choice. Checked once."""
    if router in _PROVEN:
        return
    if not torch.allclose(weigh(router, logits, ids), scores, rtol=1e-3, atol=1e-5):
        raise ValueError(f"{type(router).__name__} does not weigh experts as in transformers 5.23: leave routing= out.")
    _PROVEN.add(router)


_ACTIVE: ContextVar[RoutedForward | None] = ContextVar("torchrl_llm_kl_routing", default=None)


@contextmanager
def routed(forward: RoutedForward) -> Iterator[None]:
    """Context: the forward of this thread records and replays its routing, also in recomputed checkpoints."""
    routers = forward.routers
    swaps: list[Swap] = []
    for module in routers.model.modules():
        for name in CHECKPOINTS:
            if name in module.__dict__:
                function = module.__dict__[name]
                swaps.append((module, name, function, partial(follow, function, forward, forward.again)))
    with ExitStack() as stack:
        stack.enter_context(swapped(swaps))
        for place, router in enumerate(routers.modules):
            handle = router.register_forward_hook(partial(_hook, forward, place))
            stack.callback(handle.remove)
        stack.callback(_ACTIVE.reset, _ACTIVE.set(forward))
        forward.saving = saving()
        yield


def _hook(
    forward: RoutedForward, place: int, router: Router, _: object, output: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    # Another thread may run the model at the same time, and must route by itself.
    return forward.route(place, router, output) if _ACTIVE.get() is forward else None
