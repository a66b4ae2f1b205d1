"""An algorithm bound to its models, and batches that mix rollouts with experts' answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, is_tensor_collection, lazy_stack, unravel_key
from torch import Tensor, nn
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.envs import Compose, Transform

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._schema import Schema
from torchrl_llm_kl.losses import PolicyLoss, ValueLoss
from torchrl_llm_kl.ragged import has_entry, node_of, own_leaves, read_column, read_ragged, write_ragged
from torchrl_llm_kl.rollouts import TOKENS_FULL, find_key, per_sequence, per_token
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue

_LOSS_MASK = "loss_mask"
#: Entry below "next": the KL penalty that was subtracted from each token's reward.
CHARGED = "kl_charged"
# Key of the marks that each row stores. A mark says that an earlier `prepare` scored an entry.
_PREPARED = "prepared"
_VALUES_SCORED = (_PREPARED, "values")
# Children of losses that hold models. They are not part of the algorithm's state.
_NETWORKS = frozenset({"actor_network", "critic_network", "actor_network_params", "target_actor_network_params"})
_DENOMINATORS = ("denominators", "value_denominators")


def _flat(batch: TensorDictBase) -> TensorDictBase:
    """Flatten a batch to one dimension whose rows can be indexed. A batch with nested tensors becomes a stack of rows."""
    batch = batch.reshape(-1) if batch.batch_dims != 1 else batch
    return lazy_stack(list(batch.unbind(0))) if _holds_nested(batch) else batch


def _holds_nested(batch: TensorDictBase) -> bool:
    """Whether an entry is a nested tensor. Lazy stacks count as not nested, since their rows can be indexed."""
    batch = node_of(batch)
    if isinstance(batch, LazyStackedTensorDict):
        return False
    return any(
        value.is_nested if isinstance(value, Tensor) else is_tensor_collection(value) and _holds_nested(value)
        for value in batch.values()
    )


@dataclass(frozen=True, eq=False)
class AlgorithmParts:
    """An algorithm bound to its models. :func:`make_algorithm` returns it.

    Args:
        algorithm: the preset with its overrides.
        schema: the entries of the data before :meth:`prepare`.
        loss: the policy's loss.
        kl_transform: scores the policy, the reference or both, as the loss, the advantage or the reward requires. If the
            algorithm has a ``kl_reward``, the transform also subtracts the KL from the reward. None if nothing requires
            scores. Append the transform to the env or the collector if the policy is updated between sampling and training.
            Otherwise :meth:`prepare` applies it.
        value_transform: writes the critic's values. None without a critic.
        advantage: writes the advantage. None if the objective needs none.
        selection: masks out the answers that are not trained on. None to train on all answers.
        critic_loss: the critic's loss. None without a critic.
    """

    algorithm: Algorithm
    schema: Schema
    loss: PolicyLoss
    kl_transform: RetrieveKL | RetrieveLogProb | None = None
    value_transform: RetrieveValue | None = None
    advantage: Advantage | None = None
    selection: KeepBest | None = None
    critic_loss: ValueLoss | None = None

    @property
    def transforms(self) -> list[Transform]:
        """The transforms that are not None, in the order in which :meth:`prepare` applies them."""
        parts = (self.kl_transform, self.value_transform, self.advantage, self.selection)
        return [part for part in parts if part is not None]

    @property
    def losses(self) -> list[PolicyLoss | ValueLoss]:
        """The policy's loss and, if there is one, the critic's."""
        return [self.loss] if self.critic_loss is None else [self.loss, self.critic_loss]

    def prepare(self, batch: TensorDictBase, *, count: bool = False) -> TensorDictBase:
        """Check a batch, score it, and write its advantages and batch inputs (``kto``, ``bco``, ``aot``).

        Scores that the env or an earlier call wrote are kept. Advantages are computed from the current rewards. Log-probs under
        ``("next", "log_probs", "full")`` count as the sampling policy's, and the KL is computed from them. Only an exact KL is
        computed from the current models. With ``kl_reward`` the KL is subtracted from the reward once, and
        ``("next", "kl_charged")`` holds the subtracted amount for each token.

        A loss that is called on the result, or on some of its rows, is a mean over the rows of the call. This is right for one
        optimiser step on each of the :meth:`minibatches`. To add up gradients before one step, use :meth:`micro_batches`.

        Args:
            batch: the rollouts of one step, in whole groups. Changed in place where possible.

        Keyword Args:
            count: also :meth:`count` the batch. The losses of its parts then add up to the loss of the batch, so the loss
                of a quarter of the rows is about a quarter of the mean over these rows. False removes the counts of an
                earlier batch.

        Returns:
            The batch, ready for :attr:`loss` and :attr:`critic_loss`.

        Raises:
            SchemaError: if an entry is missing or wrong.
            ValueError: with ``kl_reward``, if another transform scored the KL and may have subtracted it from token rewards.
        """
        self.schema.check(batch)
        written = [part for part in (self.advantage, self.selection) if part is not None]
        for part in written:
            part.check_groups(batch)  # raise errors before a model is forwarded
        if self.kl_transform is not None:
            batch = self._score(self.kl_transform, batch)
        if self.value_transform is not None:
            if not _is_marked(batch, _VALUES_SCORED) or find_key(batch, ("next", "state_value")) is None:
                batch = self.value_transform(batch)
            _mark(batch, _VALUES_SCORED)
        for part in written:
            batch = part(batch)
        # Inputs that depend on the whole batch are computed before it is split. Mismatched answers need a reference model.
        once = self.loss.once
        if once is not None and not (once.mismatched and self.loss.reference is None):
            batch = self.loss.batch_inputs(batch)
        if count:
            return self.count(batch)
        if not batch.is_locked:
            own_leaves(batch, *self._counts)
        return batch.exclude(*self._counts, inplace=not batch.is_locked)

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the denominators for one optimiser step on the whole batch, as :meth:`PolicyLoss.count` does."""
        for loss in self.losses:
            batch = loss.count(batch)
        return batch

    def minibatches(
        self,
        batch: TensorDictBase,
        number: int | None = None,
        *,
        size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[TensorDictBase]:
        """Split a prepared batch into minibatches of random rows, each for its own optimiser step.

        The loss of a minibatch is a mean over its own rows. The two answers of a pair stay together.

        With ``torch.distributed`` each rank splits its own rows. Its loss is the mean over these rows, and averaged gradients
        are the mean over the ranks. ``micro_batches(minibatch, 1)`` gives the mean over the rows of all ranks. Pass ``number``,
        so that all ranks make the same number of steps.

        Args:
            batch: a prepared batch of any number of dimensions. It is not changed. The minibatches have no counts.
            number: the number of minibatches. Their sizes differ by at most one row or pair.

        Keyword Args:
            size: the largest number of rows, instead of ``number``.
            generator: the random generator that shuffles the rows, by default torch's own.

        Returns:
            An iterator over TensorDicts of one batch dimension.

        Raises:
            TypeError: unless exactly one of ``number`` and ``size`` is given.
            ValueError: if there are more minibatches than rows or pairs, or if ``size`` is smaller than a pair.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_llm_kl.algorithms import make_algorithm
            >>> sft = make_algorithm("sft", torch.nn.Embedding(9, 9))
            >>> full = torch.arange(15).reshape(5, 3) % 9
            >>> tokens = TensorDict(full=full, prompt=full[:, :1], batch_size=[5])
            >>> batch = sft.prepare(TensorDict(tokens=tokens, batch_size=[5]))
            >>> [len(minibatch) for minibatch in sft.minibatches(batch, 2)]
            [3, 2]
        """
        return self._split(batch.exclude(*self._counts), number, size, generator, shuffle=True)

    def micro_batches(
        self, batch: TensorDictBase, number: int | None = None, *, size: int | None = None
    ) -> Iterator[TensorDictBase]:
        """Split a prepared batch, in order, into micro-batches whose gradients add up to the gradient of the batch.

        First the loss denominators are computed over the whole batch (see :meth:`count`). If ``torch.distributed`` is
        initialised, they cover all ranks, and each rank must call this once for each step. Call ``backward`` on the loss of
        every part, then make one step. Rows stay in order, so answers to one prompt stay next to each other. A micro-batch
        forwards a prompt that its answers share only once.

        Args:
            batch: a prepared batch of any number of dimensions, or one of its :meth:`minibatches`. It is not changed.
            number: the number of micro-batches. Their sizes differ by at most one row or pair.

        Keyword Args:
            size: the largest number of rows, instead of ``number``.

        Returns, raises:
            As :meth:`minibatches`.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_llm_kl.algorithms import make_algorithm
            >>> sft = make_algorithm("sft", torch.nn.Embedding(9, 9))
            >>> full = torch.arange(15).reshape(5, 3) % 9
            >>> tokens = TensorDict(full=full, prompt=full[:, :1], batch_size=[5])
            >>> batch = sft.prepare(TensorDict(tokens=tokens, batch_size=[5]))
            >>> parts = [sft.loss(part).total_loss for part in sft.micro_batches(batch, 2)]
            >>> torch.testing.assert_close(sum(parts), sft.loss(batch).total_loss)
        """
        counted = self.count(batch.exclude(*self._counts))
        return self._split(counted, number, size, None, shuffle=False)

    def shares(self, batch: TensorDictBase, number: int) -> list[TensorDictBase]:
        """Split a prepared batch into shares of about equally many tokens, such as one for each rank.

        The rows of a share keep their order, and the answers of a pair stay together. A share may be empty.

        Args:
            batch: a prepared batch of any number of dimensions, or one of its :meth:`minibatches`. It is not changed.
            number: the number of shares.

        Returns:
            A TensorDict of one batch dimension for each share.

        Example:
            >>> from tensordict import TensorDict
            >>> from torchrl_llm_kl.algorithms import make_algorithm
            >>> sft = make_algorithm("sft", torch.nn.Embedding(9, 9))
            >>> real = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
            >>> batch = TensorDict(tokens={"full": torch.ones(3, 3).long()}, masks={"all_attention_mask": real}, batch_size=[3])
            >>> [len(share) for share in sft.shares(batch, 2)]
            [1, 2]
        """
        check_range(1, number=number)
        batch = _flat(batch)
        units, _ = self._units(batch)
        real = batch.get(("masks", "all_attention_mask"), None)
        tokens = torch.ones(len(batch)) if real is None else real.flatten(1).sum(1).cpu().float()
        lengths = torch.zeros(int(units.max()) + 1 if len(batch) else 0).index_add_(0, units, tokens)
        owner, loads = torch.zeros(len(lengths), dtype=torch.long), [0.0] * number
        # The longest unit first, each to the share with the fewest tokens.
        for unit in lengths.argsort(descending=True, stable=True).tolist():
            owner[unit] = share = loads.index(min(loads))
            loads[share] += float(lengths[unit])
        return [batch[(owner[units] == share).nonzero().squeeze(-1)] for share in range(number)]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, object]:
        """Return the state that training changes, except the weights of models: coefficients and numbers such as ``step``.

        These are a few numbers. A checkpoint also needs the actor's weights, the critic's weights
        (``critic_loss.critic_network``) and the optimiser's state. If the reference moves, it needs
        :meth:`ReferenceUpdater.state_dict <torchrl_llm_kl.scoring.ReferenceUpdater.state_dict>` too. The caller saves
        the random generators: the one for :meth:`minibatches`, and torch's own.

        Returns:
            The algorithm's name under ``"algorithm"``, and copies of the tensors by name.

        Example:
            >>> from torchrl_llm_kl.algorithms import make_algorithm
            >>> from torchrl_llm_kl.estimators import ScheduledCoefficient
            >>> settings = {"group_size": 8, "kl_loss": "none"}
            >>> mu = ScheduledCoefficient(0.9, 0.1, decay=100)
            >>> chord = make_algorithm("mix_chord", torch.nn.Embedding(9, 9), objective_args={"mu": mu}, **settings)
            >>> mu.update(steps=40)
            >>> saved = chord.state_dict()  # torch.save, or torch.distributed.checkpoint.save({"parts": chord, ...})
            >>> again = ScheduledCoefficient(0.9, 0.1, decay=100)
            >>> chord = make_algorithm("mix_chord", torch.nn.Embedding(9, 9), objective_args={"mu": again}, **settings)
            >>> chord.load_state_dict(saved)
            >>> again.step
            tensor(40)
        """
        state = {"algorithm": self.algorithm.name, **self._state.state_dict()}
        return {key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in state.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the result of :meth:`state_dict`. The parts must have been built with the same arguments.

        Numbers in the state replace the numbers that :func:`make_algorithm` got. To change a number when you resume a run,
        assign it after loading.

        Args:
            state: the saved state. It is not changed, and no reference to it is kept.

        Raises:
            ValueError: if the state belongs to another algorithm, has a tensor of another shape, or has other names. In this
                case nothing changes.
        """
        name, before, given = self.algorithm.name, self.state_dict(), dict(state)
        before.pop("algorithm")
        saved = given.pop("algorithm", None)
        if saved != name:
            raise ValueError(f"expected the state of {name!r}, got the state of {saved!r}: build the saved algorithm.")
        try:
            self._state.load_state_dict(given)
        except RuntimeError as error:
            self._state.load_state_dict(before)  # torch has already loaded the tensors that fit
            raise ValueError(f"the state does not fit {name!r}, use the saved run's arguments: {error}") from None

    @property
    def _state(self) -> nn.ModuleDict:
        """The modules with state by name, without the models."""
        modules = nn.ModuleDict()
        for prefix, loss in (("loss", self.loss), ("critic_loss", self.critic_loss)):
            parts = () if loss is None else loss.named_children()
            modules[prefix] = nn.ModuleDict({name: part for name, part in parts if name not in _NETWORKS})
        transforms = {"kl_transform": self.kl_transform, "value_transform": self.value_transform}
        transforms |= {"advantage": self.advantage, "selection": self.selection}
        modules.update({name: transform for name, transform in transforms.items() if transform is not None})
        return modules

    @property
    def _counts(self) -> list[NestedKey]:
        """The keys under which the losses keep their denominators."""
        return [loss.tensor_keys.denominators for loss in self.losses]

    def _split(
        self,
        batch: TensorDictBase,
        number: int | None,
        size: int | None,
        generator: torch.Generator | None,
        *,
        shuffle: bool,
    ) -> Iterator[TensorDictBase]:
        if (number is None) == (size is None):
            raise TypeError(f"pass the number of parts or their size, got number={number} and size={size}.")
        check_range(1, number=number, size=size)
        batch = _flat(batch)
        units, what = self._units(batch)
        lengths = units.bincount()  # the number of rows of each unit. A unit is never split
        if size is not None:
            most = size // int(lengths.max())
            if most == 0:
                raise ValueError(f"size={size} cannot hold a pair of {int(lengths.max())} rows: pass a larger size.")
            number = -(-len(lengths) // most)
        assert number is not None
        if number > len(lengths):
            raise ValueError(f"{len(lengths)} {what} cannot be split into {number} parts: pass at most {len(lengths)}.")
        # Units are shuffled, not rows, so that the answers of a pair stay together.
        order = torch.arange(len(lengths))
        if shuffle:
            order = torch.randperm(len(lengths), generator=generator)
        rows = order.argsort()[units].argsort(stable=True)
        shares = [int(part.sum()) for part in lengths[order].tensor_split(number)]
        return (batch[part] for part in rows.split(shares))

    def _units(self, batch: TensorDictBase) -> tuple[Tensor, str]:
        """The number of each row's unit, whose rows must stay together, and the name of units in messages."""
        together = self.algorithm.spec.together
        units, what = torch.arange(len(batch)) // together, "rows" if together == 1 else "groups of rows"
        for name in {"pair_id", "match_id"} & self.loss.reads:  # the loss of a pair needs both answers
            key = find_key(batch, getattr(self.loss.tensor_keys, name))
            if key is not None or name == "pair_id":
                ids, what = None if key is None else per_sequence(batch, key), "pairs"
                units = units // 2 if ids is None else ids.cpu().unique(return_inverse=True)[1]
        return units, what

    def _score(self, transform: RetrieveKL | RetrieveLogProb, batch: TensorDictBase) -> TensorDictBase:
        """Score the entries that neither the env nor an earlier call has scored. The sampling policy's log-probs are kept."""
        of_policy = transform[0] if isinstance(transform, RetrieveKL) else transform
        own, mark = _next(of_policy.log_probs_full_key), (_PREPARED, of_policy.log_probs_full_key[0])
        stored, missing = find_key(batch, own), self._missing(transform, batch)
        if isinstance(transform, RetrieveKL):
            return self._compare(transform, batch, stored, missing)
        # Torchrl's wrappers also store log-probs at the root, without the first tokens. Log-probs of `prepare` are marked.
        if stored is None or (stored != own and not _is_marked(batch, mark)):
            batch = transform(batch)
        elif missing:
            batch = _updated(batch, transform(_excluding(batch, own)), missing)
        _mark(batch, mark)
        return batch

    def _compare(
        self, transform: RetrieveKL, batch: TensorDictBase, stored: NestedKey | None, missing: set[NestedKey]
    ) -> TensorDictBase:
        """Write the missing entries: the scores of policy and reference, their KL, and the charged reward."""
        gen, ref, kl = transform
        compared = find_key(batch, ("next", "kl_penalty")) is not None
        charges = transform.add_to_reward and find_key(batch, ("next", CHARGED)) is None
        if charges and compared:
            self._check_uncharged(batch)
        recompute = charges if transform.add_to_reward else not compared
        kept = stored is not None and (compared or stored == _next(gen.log_probs_full_key))
        of_kl, of_ref = _written(kl), {_next(ref.log_probs_full_key)}
        # Nothing can be reused: one call scores both models and charges the reward.
        if not kept and recompute:
            return transform(batch)
        exact = (
            recompute and kl.estimator == "exact"
        )  # an exact KL compares the current models, not the sampling policy
        if not kept:
            missing = _written(transform) - of_kl
        elif exact:
            missing = missing | of_kl
        elif recompute:
            missing = missing | {key for key in of_ref if find_key(batch, key) is None}
        if missing:
            # If only the reference's log-probs are missing, its transform is enough, unless both models run side by side.
            scorer = ref if missing <= of_ref and not transform.side_by_side else transform
            batch = _updated(batch, scorer(_excluding(batch, _next(gen.log_probs_full_key))), missing)
        if not recompute or exact:
            return batch
        located = gen.locate(batch)
        places = [key for key in (stored, *(find_key(batch, key) for key in of_ref)) if key is not None]
        of_policy, of_reference = (per_token(batch, key, located.tokens, located.mask, repeats=False) for key in places)
        unscored = self.loss._reader.unscored(of_policy, located.tokens, located, places[0])
        # Tokens that the policy did not score get the reference's log-prob. Their KL is then 0.
        data = located.tokens.like(torch.where(located.mask & ~unscored, of_policy, of_reference))
        return _updated(batch, kl(write_ragged(batch.copy(), places[0], data.slots(), data.container)), of_kl)

    def _check_uncharged(self, batch: TensorDictBase) -> None:
        """Raise a ValueError for token rewards from which another transform may already have subtracted the KL."""
        reward = find_key(batch, ("next", "reward"))
        if reward is not None and per_sequence(batch, reward) is None:
            raise ValueError(
                f"kl_reward={self.algorithm.kl_reward!r}: another transform wrote ('next', 'kl_penalty') and may have charged "
                "the token rewards with it. If it has, pass kl_reward='none'. If not, remove the entry before prepare."
            )

    def _missing(self, transform: Transform, batch: TensorDictBase) -> set[NestedKey]:
        """The entries that are missing in the batch, and that the transform writes for the advantage or the loss."""
        read = {key for part in (self.advantage, self.loss) if part is not None for key in part.in_keys}
        wanted = _written(transform) & {name for key in read for name in (unravel_key(key), _next(key))}
        return {key for key in wanted if find_key(batch, key) is None}


def _next(key: NestedKey) -> NestedKey:
    """The key below "next"."""
    return unravel_key(("next", key))


def _written(transform: Transform) -> set[NestedKey]:
    """The entries that a transform or its parts write."""
    parts = transform if isinstance(transform, Compose) else [transform]
    return {_next(key) for part in parts for key in part.out_keys}


def _updated(batch: TensorDictBase, scored: TensorDictBase, keys: Collection[NestedKey]) -> TensorDictBase:
    """Write these entries of ``scored`` into the batch."""
    written = [key for key in (find_key(scored, key) for key in keys) if key is not None]
    own_leaves(batch, *written)
    return batch.update(scored.select(*written))


def _excluding(batch: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """A copy of the batch without the log-probs under ``key``. The transform would take them for the sampler's."""
    return batch.copy().exclude(key, inplace=True)


def _is_marked(batch: TensorDictBase, key: NestedKey) -> bool:
    marks = None if find_key(batch, key) is None else per_sequence(batch, key)
    return marks is not None and bool(marks.all())


def _mark(batch: TensorDictBase, key: NestedKey) -> None:
    own_leaves(batch, key)
    batch.set(key, torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))


class KeepBest(Advantage):
    """Set ``loss_mask`` to False for all but the best answers of each group. A new mask is ``[*B, 1]``."""

    def __init__(self, *, group_key: NestedKey | None = None, group_size: int | None = None) -> None:
        super().__init__("best_of_group", group_key=group_key, group_size=group_size, keys={"advantage": _LOSS_MASK})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_mask`` into a batch. A replay buffer with this transform calls it when it is sampled."""
        best = self._of_rows(tensordict, None)[0].reshape(-1).bool()
        given = read_column(tensordict, _LOSS_MASK)
        own_leaves(tensordict, _LOSS_MASK)
        if given is None:
            return tensordict.set(_LOSS_MASK, best.reshape(*tensordict.batch_size, 1))
        whole = per_sequence(tensordict, _LOSS_MASK)
        if whole is not None:
            shape = given[0].shape if isinstance(given, list) else given.shape[tensordict.batch_dims :]
            kept = whole.bool() & best.to(whole.device)
            return tensordict.set(_LOSS_MASK, kept.reshape(*tensordict.batch_size, *shape))
        mask = read_ragged(tensordict, _LOSS_MASK)
        assert mask is not None
        rows = best.to(mask.values.device)[mask.sequence_ids].reshape(-1, *[1] * (mask.values.ndim - 1))
        return write_ragged(tensordict, _LOSS_MASK, mask.like(mask.values.bool() & rows).slots(), mask.container)


# ------------------------------------------------------------------ rollouts and experts' answers in one batch


def mix_buffers(
    rollouts: ReplayBuffer,
    experts: ReplayBuffer,
    *,
    batch_size: int,
    expert_data_ratio: float = 0.5,
) -> ReplayBufferEnsemble:
    """Return a replay buffer whose batches mix rollouts and experts' answers in a fixed proportion.

    Experts' rows get 0 for each entry that only rollouts have (rewards, advantages, log-probs). Objectives for mixed data
    ignore these entries through ``expert_mask``. If some rows have a ``loss_mask``, all others get True. Denominators from
    :meth:`AlgorithmParts.prepare` are dropped, since they belong to another batch. Call :meth:`AlgorithmParts.count` on the
    mixed batch, or let each batch use its own mean.

    Args:
        rollouts: the policy's answers, after :meth:`AlgorithmParts.prepare`.
        experts: answers of experts, with tokens, and with a prompt or a mask that marks the response.

    Keyword Args:
        batch_size: the number of rows of a batch.
        expert_data_ratio: the share of these rows that come from experts.

    Returns:
        A :class:`~torchrl.data.ReplayBufferEnsemble`. It writes ``"expert_mask"``, True for experts' rows. For a share of
        ``m / n`` its ``sample()`` returns a lazy stack ``[n, batch_size / n]``. The first ``n - m`` elements of the stack hold
        rollouts, and the last ``m`` hold experts' answers. The losses of this package accept the stack directly.

    Raises:
        ValueError: if ``batch_size`` rows cannot hold exactly this share of experts' rows.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage
        >>> def buffer(token):
        ...     tokens = TensorDict(full=torch.full((4, 3), token), batch_size=[4])
        ...     buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2)
        ...     buffer.extend(TensorDict(tokens=tokens, batch_size=[4]))
        ...     return buffer
        >>> mix_buffers(buffer(1), buffer(2), batch_size=4).sample()["expert_mask"].tolist()
        [[False, False], [True, True]]

    Source: Trinity-RFT 0.6.0, sample strategy ``mix``.
    """
    share = Fraction(expert_data_ratio).limit_denominator(batch_size)  # 0.1 is not exact as a float
    exact = batch_size % share.denominator == 0 and abs(float(share) - expert_data_ratio) < 1e-6
    if not 0 < share < 1 or not exact:
        many = f"{batch_size} rows cannot hold exactly {expert_data_ratio:g} of experts"
        raise ValueError(f"{many}: use a ratio n / {batch_size} between 0 and 1.")
    # The ensemble takes equally many rows from each member. A buffer is a member as often as its share requires.
    flags = [False] * (share.denominator - share.numerator) + [True] * share.numerator
    return ReplayBufferEnsemble(
        *(experts if flag else rollouts for flag in flags),
        sample_from_all=True,
        batch_size=batch_size,
        collate_fn=partial(_mixed, flags=flags),
    )


def _mixed(samples: Sequence[TensorDictBase], *, flags: Sequence[bool]) -> TensorDictBase:
    """Join the samples of rollouts and experts in one lazy stack whose rows have the same entries."""
    members = [[row.copy() for row in sample.reshape(-1).unbind(0)] for sample in samples]
    rows = [row for member in members for row in member]
    for row in rows:
        for key in _DENOMINATORS:
            row.pop(key, None)
    example = members[flags.index(False)][0]
    length = len(example[TOKENS_FULL])
    # Experts' rows have their own entries under these names.
    shared = example.exclude("tokens", "masks", _LOSS_MASK, "expert_mask")
    only_rollouts = {key: value for key, value in shared.items(True, True) if isinstance(value, Tensor)}
    masks = [row[_LOSS_MASK] for row in rows if has_entry(row, _LOSS_MASK)]
    for flag, member in zip(flags, members, strict=True):
        for row in member:
            tokens = len(row[TOKENS_FULL])
            known = set(row.keys(True, True)) if flag else only_rollouts.keys()
            for key in only_rollouts.keys() - known:
                value = only_rollouts[key]
                shape = (tokens, *value.shape[1:]) if value.shape[:1] == (length,) else value.shape
                row.set(key, torch.zeros(shape, dtype=value.dtype, device=value.device))
            if masks and not has_entry(row, _LOSS_MASK):
                shape = masks[0].shape if masks[0].numel() == 1 else (tokens, *masks[0].shape[1:])
                row.set(_LOSS_MASK, torch.ones(shape, dtype=torch.bool, device=masks[0].device))
            row.set("expert_mask", torch.tensor(flag))
    return lazy_stack([lazy_stack(member) for member in members])
