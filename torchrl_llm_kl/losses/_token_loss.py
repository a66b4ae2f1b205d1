"""The base of the loss modules (trained tokens, summation of terms, per-row denominators) and the loss of a critic."""

from __future__ import annotations

import secrets
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, overload

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives.common import LossModule

from torchrl_llm_kl._numerics import (
    Scalar,
    check_choice,
    check_is_scalar,
    check_not_a_name,
    check_range,
    masked_mean,
    to_host,
)
from torchrl_llm_kl._private import register_tree
from torchrl_llm_kl._registry import did_you_mean
from torchrl_llm_kl.losses._arithmetic import (
    AGGREGATIONS,
    Aggregation,
    aggregate,
    aggregate_each,
    checked,
    clamp,
    count,
)
from torchrl_llm_kl.losses._metrics import merge_metrics
from torchrl_llm_kl.losses._objective import LossTerm, Terms
from torchrl_llm_kl.losses._parts import Part, device_of
from torchrl_llm_kl.losses._ranks import compare_ranks
from torchrl_llm_kl.ragged import own_leaves
from torchrl_llm_kl.rollouts import (
    TOKENS_FULL,
    Located,
    MaskingStrategy,
    ResponseTokens,
    TokenReader,
    find_key,
    is_distributed,
    per_token,
    read_denominators,
    require_key,
    sub_key,
    with_a_row,
    write_denominators,
)
from torchrl_llm_kl.scoring import is_zero3

if TYPE_CHECKING:
    from tensordict.utils import IndexType
    from torch.distributed import ProcessGroup

_ADDED_UP = ("mean", "nanmean", "nansum", "sum")


class LossOutput(TensorDict):
    """The output of a loss module: a TensorDict of ``loss_<term>`` entries and metrics.

    In a plain TensorDict, ``reduce=True`` adds metrics to losses. Here it returns :attr:`total_loss`, so the line
    ``loss(batch).mean(reduce=True)`` of torchrl's recipes trains only on the losses.

    Example:
        >>> out = LossOutput(loss_objective=torch.tensor(2.0), loss_entropy=torch.tensor(-0.5), ESS=torch.tensor(1.0))
        >>> out.total_loss, out["total_loss"], out.mean(reduce=True)
        (tensor(1.5000), tensor(1.5000), tensor(1.5000))
        >>> out.std(reduce=True)
        Traceback (most recent call last):
        ...
        TypeError: std(reduce=True) would mix losses and metrics: use out.total_loss.
    """

    @property
    def total_loss(self) -> Tensor:
        """The sum of all ``loss_<term>`` entries, with graph.

        Raises:
            RuntimeError: without such an entry.
            ValueError: for a loss per token (aggregation ``"none"``). It has padding, so reduce it with a mask.
        """
        losses = {key: value for key, value in self.items() if isinstance(key, str) and key.startswith("loss_")}
        for key, value in losses.items():
            if value.is_nested or value.shape != self.batch_size:
                raise ValueError(f"{key} has one value per token, also for padding: reduce it with a mask.")
        return torch.stack(list(losses.values())).sum(0)

    def get(self, key: NestedKey, *args: Any, **kwargs: Any) -> Any:
        return self.total_loss if isinstance(key, str) and key == "total_loss" else super().get(key, *args, **kwargs)

    def __getitem__(self, index: IndexType) -> Any:
        return self.total_loss if isinstance(index, str) and index == "total_loss" else super().__getitem__(index)

    def _cast_reduction(self, *, reduction_name: str, further_reduce: bool, **kwargs: Any) -> Any:
        # All reductions of a TensorDict end here.
        td: TensorDict = super()
        if further_reduce:
            if reduction_name not in _ADDED_UP:
                raise TypeError(f"{reduction_name}(reduce=True) would mix losses and metrics: use out.total_loss.")
            td = TensorDict({"total_loss": self.total_loss}, batch_size=self.batch_size)
        return td._cast_reduction(reduction_name=reduction_name, further_reduce=further_reduce, **kwargs)


# TensorDict is registered in the same way. DDP finds the tensors of an output through this registry.
register_tree(
    LossOutput,
    lambda out: (list(out.values()), (list(out.keys()), out.batch_size)),
    lambda values, context: LossOutput(dict(zip(context[0], values, strict=True)), batch_size=context[1]),
)
# Optional entries that change the loss.
_OPTIONAL = ("loss_mask", "expert_mask", "selected", "sampler_log_prob", "pair_id", "chosen", "routed_experts")


class TokenLoss(LossModule):
    """Base of :class:`~torchrl_llm_kl.losses.PolicyLoss` and :class:`~torchrl_llm_kl.losses.ValueLoss`.

    A subclass defines the two abstract members below, and a ``forward`` that ends with :meth:`_output`.
    """

    _functional = False

    if TYPE_CHECKING:  # tensordict's dispatch takes a TensorDict, or its entries as keywords

        @overload
        def __call__(self, tensordict: TensorDictBase) -> LossOutput: ...
        @overload
        def __call__(self, **entries: object) -> tuple[Tensor, ...]: ...
        def __call__(self, *args: object, **kwargs: object) -> LossOutput | tuple[Tensor, ...]: ...

    def __init__(self, *, aggregation: Aggregation, max_len: int | None, masking_strategy: MaskingStrategy) -> None:
        super().__init__()
        check_choice(AGGREGATIONS, aggregation=aggregation)
        check_choice(get_args(MaskingStrategy), masking_strategy=masking_strategy)
        self.aggregation, self.max_len, self.masking_strategy = aggregation, max_len, masking_strategy

    def _check_max_len(self, modes: Collection[Aggregation]) -> None:
        """Raise a ValueError if an aggregation divides by a missing ``max_len``, or if none divides by the given one."""
        divides, mode = "seq-mean-token-sum-norm" in modes, "aggregation='seq-mean-token-sum-norm'"
        if divides and self.max_len is None:
            raise ValueError(f"{mode} divides by the longest response that is sampled: pass max_len=.")
        if self.max_len is not None and not divides:
            raise ValueError(f"max_len={self.max_len} has no effect: leave it out, or pass {mode}.")

    @property
    def functional(self) -> bool:
        """Whether the actor's parameters are kept apart from its module."""
        return self._functional

    @property
    def _reader(self) -> TokenReader:
        actor = getattr(self, "actor_network", None)
        return TokenReader.of(actor, self.tensor_keys.tokens, self.masking_strategy)

    @property
    @abstractmethod
    def _data_keys(self) -> Sequence[NestedKey]:
        """Required entries other than the tokens."""

    @abstractmethod
    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        """The terms with their masks and arbitrary values. Runs no model."""

    def _expose(self, named: Mapping[str, tuple[Part[object], str]]) -> None:
        """Make hyper-parameters of parts attributes of the loss. ``named``: attribute -> (part, name in the part)."""
        self.__dict__["_exposed"] = dict(named)  # not through __setattr__, which reads it

    def __getattr__(self, name: str) -> Any:
        exposed = self.__dict__.get("_exposed", {})
        if name not in exposed:
            return super().__getattr__(name)
        part, own = exposed[name]
        return part.stored[own]

    def __setattr__(self, name: str, value: object) -> None:
        exposed = self.__dict__.get("_exposed", {})
        if name in exposed:
            part, own = exposed[name]
            part.put(own, value)
            return
        # Setting a misspelt hyper-parameter would silently have no effect.
        number = isinstance(value, (int, float, Tensor)) and not name.startswith("_") and not hasattr(self, name)
        if number and did_you_mean(name, exposed):
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set.{did_you_mean(name, exposed)}")
        super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the module. FSDP2 passes ``remove_duplicate``, which torchrl's losses do not accept."""
        return nn.Module.named_parameters(self, prefix, recurse, remove_duplicate)

    def _is_set(self, name: str) -> bool:
        """Whether the user changed the key of an optional entry that changes the loss."""
        return name in _OPTIONAL and vars(self.tensor_keys)[name] != getattr(self._AcceptedKeys, name)

    @property
    def tensor_keys(self) -> Any:
        """The keys of entries. Change them with ``set_keys``."""
        return self._tensor_keys

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        # torchrl calls this after `set_keys`. This loss has no value estimator, but its in_keys change.
        self.in_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that the loss requires."""
        given = self.__dict__.get("_in_keys")
        if given is not None:
            return given
        return list(dict.fromkeys([self.tensor_keys.tokens, *self._reader.in_keys, *self._data_keys]))

    @in_keys.setter
    def in_keys(self, values: Sequence[NestedKey] | None) -> None:
        self.__dict__["_in_keys"] = None if values is None else list(values)

    # ------------------------------------------------------------------ tokens in, terms out

    def _read_tokens(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Located, Located | None]:
        """The data with its batch dimensions, its tokens with a mask of the trained ones, and with a mask of the responses.

        The masking strategy and ``loss_mask`` choose the trained tokens. ``loss_mask`` does not move the start of responses.
        The third is None for a strategy without responses.
        """
        if is_zero3(self):
            name = type(self).__name__
            advice = f"wrap the model, {name}(deepspeed.initialize(model=model, ...)[0]), or use ZeRO-2"
            raise ValueError(f"DeepSpeed's ZeRO-3 does not see the tensors that {name} returns: {advice}.")
        reader = self._reader
        td = reader.with_batch_dims(with_a_row(tensordict))
        located = reader.locate(td)
        key, advice = self.tensor_keys.loss_mask, "Add the entry, or say where it is with set_keys(loss_mask=...)."
        if self._is_set("loss_mask"):
            require_key(td, key, "loss_mask was set to another key", advice)
        key = find_key(td, key)
        responses = None if self.masking_strategy == "generic" else located
        if key is not None:
            value = per_token(td, key, located.tokens, None if responses is None else responses.host_mask, fill=0)
            located = located.within(as_mask(to_host(value)[0], key))
        return td, located, responses

    def _output(
        self, td: TensorDictBase, response: ResponseTokens, terms: Sequence[LossTerm], metrics: Mapping[str, Tensor]
    ) -> LossOutput:
        """Sum each term to ``loss_<name>``, and add all metrics without graph."""
        summed = [(term.name, self._mode(term)) for term in terms if self._mode(term) != "none"]
        denominators = read_denominators(td, self.tensor_keys.denominators, summed)
        if response.is_empty and denominators is None:
            warnings.warn("the mask is empty: no token is trained and the loss is 0.", stacklevel=3)
        # Terms with one mask and one aggregation are summed by one kernel.
        groups: dict[tuple[int, Aggregation], list[LossTerm]] = {}
        for term in terms:
            groups.setdefault((id(term.mask), self._mode(term)), []).append(term)
        values: dict[str, Tensor] = {}
        for (_, mode), group in groups.items():
            mask, names, each = group[0].mask, [term.name for term in group], [term.value for term in group]
            if mode == "none":
                sums: Iterable[Tensor] = (aggregate(value, mask, mode) for value in each)
            elif denominators is None:
                sums = aggregate_each(each, mask, mode, self._denominator(group[0]))
            else:
                sums = aggregate_each(each, mask, mode, torch.stack([denominators[name] for name in names]))
            values |= dict(zip(names, sums, strict=True))
        out: dict[str, object] = {}
        for term in terms:
            value = values[term.name]
            if isinstance(term.weight, Tensor) or term.weight != 1:  # a product with 1 would cost a kernel
                value = term.weight * value
            out[f"loss_{term.name}"] = response.restore(value) if self._mode(term) == "none" else value
        return LossOutput(out | {name: value.detach() for name, value in merge_metrics(terms, metrics).items()})

    def _mode(self, term: LossTerm) -> Aggregation:
        return term.aggregation or self.aggregation

    def _denominator(self, term: LossTerm) -> Tensor:
        mode = self._mode(term)
        if mode == "seq-mean-token-sum-norm" and self.max_len is not None and term.mask.shape[-1] > self.max_len:
            sequence = f"a sequence has {term.mask.shape[-1]} trained tokens"
            raise ValueError(f"max_len={self.max_len}, but {sequence}: pass the sampler's limit for all turns.")
        return count(term.mask, mode, max_len=self.max_len if mode == "seq-mean-token-sum-norm" else None)

    def count(
        self,
        tensordict: TensorDictBase,
        *,
        process_group: ProcessGroup | None = None,
        all_ranks: bool | None = None,
        ranks_average: bool = True,
    ) -> TensorDictBase:
        """Store the denominators of a whole batch with each row, so that the losses of its parts add up to its loss.

        Afterwards, index, split or shuffle the batch in any way, and add up the gradients of the parts. This runs no model.

        Args:
            tensordict: the batch of an optimiser step, or this rank's share of it.

        Keyword Args:
            process_group: the ranks that share the step.
            all_ranks: count over all ranks. By default True if ``torch.distributed`` is initialised.
            ranks_average: True if the gradients of ranks are averaged, as DDP and FSDP do. False if they are summed.

        Returns:
            ``tensordict`` with a new entry ``denominators`` (``set_keys``), ``[*B]`` float64 for each term. It also holds an id
            of the batch, so that mixing rows of separately counted batches is refused.

        Raises:
            ValueError: if ``all_ranks`` is True and ``torch.distributed`` is not initialised.
        """
        td = self._reader.with_batch_dims(with_a_row(tensordict))
        with torch.no_grad():
            terms = self._mask_terms(td)
            counts = torch.stack([self._denominator(term).double() for term in terms])  # exact up to 2**53
            # torch's generators are not used, because that would change their state. All ranks get the same id below.
            batch_id = counts.new_tensor(secrets.randbits(32))
        if is_distributed() if all_ranks is None else all_ranks:
            counts = torch.cat([counts, batch_id.unsqueeze(0)])
            torch.distributed.all_reduce(counts, group=process_group)
            counts, batch_id = counts[:-1], counts[-1]
            if ranks_average:  # each rank's loss enters the gradient with a factor of 1 / ranks
                counts = counts / torch.distributed.get_world_size(process_group)
        key = self.tensor_keys.denominators
        own_leaves(tensordict, sub_key(key, "any"))  # do not write into the storage of a replay buffer
        modes: list[tuple[str, str]] = [(term.name, self._mode(term)) for term in terms]
        write_denominators(tensordict, key, dict(zip(modes, counts.unbind(), strict=True)), batch_id)
        return tensordict

    def check_ranks(
        self, *parts: TensorDictBase, process_group: ProcessGroup | None = None, tolerance: float = 0.02
    ) -> None:
        """Check that all ranks train one model with the gradient of the whole batch.

        Use it in the first step of a new script. Call it on every rank, after the last ``backward()`` of the step and before
        the gradient is clipped. It compares parameters, buffers and gradients to the last bit. If the parts of the step are
        given, it also computes the gradient of the whole batch, with one more forward and backward, and explains how the
        script's gradient differs. Typical reasons are ranks that sum gradients when :meth:`count` assumes an average, or the
        reverse, a further division such as by Accelerate's ``gradient_accumulation_steps``, and parts that were not counted.
        It changes nothing, not even the random state.

        Args:
            parts: all micro-batches of this rank in this step, as passed to the loss, in any order. Without parts, only the
                ranks are compared. Without ``torch.distributed``, the parts of this process are checked.

        Keyword Args:
            process_group: the ranks that share the step.
            tolerance: the largest difference of the two gradients, relative to the norm of the right one. Autocast and
                dropout need more than rounding errors do.

        Raises:
            RuntimeError: if something differs. The message names the difference and the remedy. Also if no parameter has a
                gradient, or if ``WORLD_SIZE`` is set but ``torch.distributed`` is not initialised.
            ValueError: if parameters are sharded, or with aggregation ``"none"``.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_llm_kl.losses import ValueLoss
            >>> from torchrl_llm_kl.scoring import TokenCritic
            >>> from transformers import Qwen2Config, Qwen2Model
            >>> loss = ValueLoss(TokenCritic(Qwen2Model(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
            ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))))
            >>> tokens = TensorDict(prompt=torch.tensor([[3], [4]]), full=torch.tensor([[3, 5], [4, 6]]), batch_size=[2])
            >>> batch = loss.count(TensorDict(tokens=tokens, value_target=torch.ones(2, 2), batch_size=[2]))
            >>> for part in batch.split(1):
            ...     (loss(part)["loss_critic"] / 2).backward()  # counted, so the 2 is wrong
            >>> loss.check_ranks(*batch.split(1))
            Traceback (most recent call last):
                ...
            RuntimeError: the gradient is 0.5 times the batch's ... it was also divided by 2, the number of parts. ...
        """
        compare_ranks(self, parts, process_group, tolerance)


def as_mask(value: Tensor, key: NestedKey) -> Tensor:
    """Convert a mask to bool. Numbers must be 0 or 1, which is checked on the host. A mask cannot weight tokens."""
    if value.dtype != torch.bool and not bool(((value == 0) | (value == 1)).all()):
        raise ValueError(f"{key!r} is a mask: expected only 1 and 0. To weigh tokens, scale the advantage.")
    return value.bool()


def with_graph(value: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return ``value``. If it has no graph because the mask is empty, add a gradient of 0 for each trained parameter."""
    if value.requires_grad or not torch.is_grad_enabled():
        return value
    # One element of each parameter is enough for autograd. where instead of a product: a parameter may be infinite.
    ends = [p.reshape(-1)[:1] for p in parameters if p.requires_grad and p.numel()]
    zeros = [torch.where(torch.zeros_like(end, dtype=torch.bool), end, 0).sum().float() for end in ends]
    return value + torch.stack(zeros).sum().to(value.device) if zeros else value


# ------------------------------------------------------------------ the critic


@dataclass(frozen=True, eq=False)
class ValueInputs:
    """The tensors that the loss of a critic reads, ``[*B, T]`` each, in the unit of the reward.

    Args:
        value: the critic's current value of each token's prefix, with graph.
        mask: the trained tokens, bool.
        value_target: the return, detached.
        old_value: the critic's value when the advantages were computed, detached. None if it is not stored.

    Raises:
        ValueError: if shapes differ.
        TypeError: if the mask is not boolean.
    """

    value: Tensor
    mask: Tensor
    value_target: Tensor
    old_value: Tensor | None = None

    def __post_init__(self) -> None:
        named = {"value": self.value, "value_target": self.value_target.detach()}
        if self.old_value is not None:
            named["old_value"] = self.old_value.detach()
        vars(self).update(zip(named, checked(self.mask, **named), strict=True))


def value_error(inputs: ValueInputs, *, clip_value: Scalar | None = 0.2, coeff: Scalar = 1.0) -> Terms:
    r"""Half the squared error of a critic, clipped as PPO's: ``max((v - R)^2, (clip(v, v_old +- clip_value) - R)^2) / 2``.

    It has the gradient of ``(v - R)^2 / 2``, but 0 where the value has moved by more than ``clip_value`` from the old value
    towards its target.

    Args:
        inputs: values and targets.

    Keyword Args:
        clip_value: the largest unclipped change of a value, in the unit of the reward. Without ``old_value``, or with None,
            nothing is clipped.
        coeff: weight of the term, dimensionless.

    Returns:
        One term, ``critic``, with the metrics ``value_clip_fraction``, ``value_mean`` and ``explained_variance``, which is 1
        minus the variance of the error divided by the variance of the target.

    Raises:
        ValueError: if ``clip_value`` is negative.

    Example:
        >>> one = torch.ones(1, 1)
        >>> inputs = ValueInputs(0.5 * one, one == 1, value_target=one, old_value=0 * one)
        >>> value_error(inputs, clip_value=0.2)[0].value  # (0.2 - 1)^2 / 2
        tensor([[0.3200]])

    Source: Schulman et al., baselines ``ppo2`` (2017).
    """
    check_is_scalar(clip_value=clip_value, coeff=coeff)
    check_range(low=0.0, clip_value=clip_value)
    value, mask, target, old = inputs.value, inputs.mask, inputs.value_target, inputs.old_value
    error = (value - target).square()
    clipped = torch.zeros_like(mask)
    if old is not None and clip_value is not None:
        bounded = (old + clamp(value - old, -clip_value, clip_value) - target).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    with torch.no_grad():
        residual, spread = (x - masked_mean(x, mask) for x in (target - value, target))
        variance = masked_mean(spread.square(), mask).clamp(min=1e-12)  # equal targets have a variance of 0
        metrics = {
            "value_clip_fraction": masked_mean(clipped.float(), mask),
            "value_mean": masked_mean(value, mask),
            "explained_variance": 1 - masked_mean(residual.square(), mask) / variance,
        }
    return (LossTerm("critic", error / 2, mask, weight=coeff, metrics=metrics),)


class _ValueError(Part[Terms]):
    """:func:`value_error` with its hyper-parameters."""

    def dummy(self, hyper: Mapping[str, object]) -> ValueInputs:
        zero = torch.zeros(1, 1, device=device_of(self))
        return ValueInputs(zero, zero == 0, zero, zero)


class ValueLoss(TokenLoss):
    """The loss of a critic of token values, for PPO: :func:`~torchrl_llm_kl.losses.value_error` on a TensorDict.

    Args:
        critic: a :class:`~torchrl_llm_kl.scoring.TokenCritic`, or a module ``(tokens, mask) -> values`` of
            :class:`~torchrl_llm_kl.Ragged`.

    Keyword Args:
        clip_value, coeff: see :func:`~torchrl_llm_kl.losses.value_error`. They are buffers, and ``loss.clip_value = 0.1``
            changes one in place.
        aggregation, max_len, masking_strategy: see :class:`~torchrl_llm_kl.losses.PolicyLoss`.

    Keys (``set_keys``): ``tokens``, ``value_target`` (written by the ``gae`` advantage), ``value`` (optional, the old values
    written by :class:`~torchrl_llm_kl.RetrieveValue`), ``loss_mask``, ``denominators``. An entry is also found on the other
    side of ``"next"``.

    Outputs:
        A :class:`~torchrl_llm_kl.losses.LossOutput`: ``loss_critic`` and the metrics ``value_clip_fraction``,
        ``value_mean``, ``explained_variance``.

    Example:
        >>> from tensordict import TensorDict
        >>> class Constant(nn.Module):
        ...     def forward(self, tokens, mask):
        ...         return tokens.like(torch.where(mask, 0.5, 0.0))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, value_target=torch.tensor([[0.0, 0.0, 1.5]]), batch_size=[1])
        >>> ValueLoss(Constant())(data)["loss_critic"]
        tensor(0.5000)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        tokens: NestedKey = TOKENS_FULL
        value: NestedKey = ("next", "state_value")
        value_target: NestedKey = "value_target"
        loss_mask: NestedKey = "loss_mask"
        denominators: NestedKey = "value_denominators"

    critic_network: nn.Module

    def __init__(
        self,
        critic: nn.Module,
        *,
        clip_value: float | None = 0.2,
        coeff: float = 1.0,
        aggregation: Aggregation = "token-mean",
        max_len: int | None = None,
        masking_strategy: MaskingStrategy = "sft",
    ) -> None:
        check_not_a_name(critic=critic)
        super().__init__(aggregation=aggregation, max_len=max_len, masking_strategy=masking_strategy)
        self._check_max_len([aggregation])
        self.critic_network = critic
        self.error = _ValueError(value_error, clip_value=clip_value, coeff=coeff)
        self._expose({name: (self.error, name) for name in self.error.stored})
        self.out_keys = ["loss_critic", "value_clip_fraction", "value_mean", "explained_variance"]

    @property
    def _data_keys(self) -> Sequence[NestedKey]:
        return [self.tensor_keys.value_target]

    def _mask_terms(self, td: TensorDictBase) -> Sequence[LossTerm]:
        mask = self._read_tokens(td)[1].response.mask
        return [LossTerm("critic", mask.float(), mask)]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> LossOutput:
        """The loss of a batch or a micro-batch. See the class."""
        td, located, responses = self._read_tokens(tensordict)
        response, tokens, within = located.response, located.tokens, None if responses is None else responses.host_mask
        advice = "Add the entry, or say where it is with set_keys(value_target=...)."
        target = require_key(td, self.tensor_keys.value_target, "ValueLoss needs value_target", advice)
        keys = {"value_target": target, "old_value": find_key(td, self.tensor_keys.value)}
        places = {name: key for name, key in keys.items() if key is not None}
        data = {name: response.gather(per_token(td, key, tokens, within).detach()) for name, key in places.items()}
        response.check_finite({f"{name} ({places[name]!r})": value for name, value in data.items()})
        value = response.gather(self.critic_network(tokens, located.mask).values)
        value = with_graph(value, self.critic_network.parameters())
        return self._output(td, response, self.error.run(ValueInputs(value, response.mask, **data)), {})
