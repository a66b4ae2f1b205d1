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
from torchrl_llm_kl.losses import PolicyLoss, ValueLoss, spec_of
from torchrl_llm_kl.ragged import has_entry, node_of, own_leaves, read_column, read_ragged, write_ragged
from torchrl_llm_kl.rollouts import find_key, per_sequence, per_token
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue

_LOSS_MASK = "loss_mask"
#: Below "next": what an algorithm with a KL in the reward has subtracted from each token's reward.
CHARGED = "kl_charged"
# Stored with each row: marks of what an earlier `prepare` scored, and the counts of its batch.
_PREPARED = "prepared"
_VALUES_SCORED = (_PREPARED, "values")
# Children of losses that are models, not state of the algorithm.
_NETWORKS = frozenset({"actor_network", "critic_network", "actor_network_params", "target_actor_network_params"})
_DENOMINATORS = ("denominators", "value_denominators")


def _flat(batch: TensorDictBase) -> TensorDictBase:
    """A batch of one dimension whose rows can be chosen: nested tensors, which have no such index, become rows of a stack."""
    batch = batch.reshape(-1) if batch.batch_dims != 1 else batch
    return lazy_stack(list(batch.unbind(0))) if _holds_nested(batch) else batch


def _holds_nested(batch: TensorDictBase) -> bool:
    """Whether an entry is a nested tensor. Rows of a stack can be chosen, and may differ in shape: they are not looked at."""
    batch = node_of(batch)
    if isinstance(batch, LazyStackedTensorDict):
        return False
    return any(
        value.is_nested if isinstance(value, Tensor) else is_tensor_collection(value) and _holds_nested(value)
        for value in batch.values()
    )


@dataclass(frozen=True, eq=False)
class AlgorithmParts:
    """An algorithm bound to its models; the result of :func:`make_algorithm`.

    Args:
        algorithm: the preset, with its overrides.
        schema: the data's entries before :meth:`prepare`.
        loss: the policy's loss.
        kl_transform: scores the policy, the reference or both, whichever the loss, the advantage or the reward reads, and
            subtracts the KL from the reward if the algorithm does; None if nothing reads either. Append it to the env or the
            collector if the policy is updated between sampling and training; otherwise :meth:`prepare` applies it.
        value_transform: writes the critic's values; None without critic.
        advantage: writes the advantage; None if the objective needs none.
        selection: masks out answers that are not trained on; None to train on all.
        critic_loss: the critic's loss; None without critic.
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

        Scores from the env or an earlier call are kept; advantages are computed from the current rewards. Log-probs under
        ``("next", "log_probs", "full")`` are taken for the sampling policy's, and the KL is computed from them (an exact
        KL from the models as they are now). With ``kl_reward`` it is subtracted once: ``("next", "kl_charged")`` holds what
        was taken off each token's reward.

        Each loss of the result or of any of its rows is a mean over these rows: right for an optimiser step on each of
        :meth:`minibatches`. For gradients that add up to the batch's see :meth:`micro_batches`.

        Args:
            batch: the rollouts of one step, whole groups; changed in place where possible.

        Keyword Args:
            count: also :meth:`count` the batch: the losses of any rows of the result add up to the loss of the batch. A
                minibatch of a quarter of these rows then has a quarter of its mean's gradient. False removes
                the counts of an earlier batch.

        Returns:
            The batch, ready for :attr:`loss` and :attr:`critic_loss`.

        Raises:
            SchemaError: if an entry is missing or wrong.
            ValueError: with ``kl_reward``, for token rewards beside a KL that another transform scored.
        """
        self.schema.check(batch)
        written = [part for part in (self.advantage, self.selection) if part is not None]
        for part in written:
            part.check_groups(batch)  # fail before models run
        if self.kl_transform is not None:
            batch = self._score(self.kl_transform, batch)
        if self.value_transform is not None:
            if not _is_marked(batch, _VALUES_SCORED) or find_key(batch, ("next", "state_value")) is None:
                batch = self.value_transform(batch)
            _mark(batch, _VALUES_SCORED)
        for part in written:
            batch = part(batch)
        once = self.loss.once
        if once is not None and not (once.mismatched and self.loss.reference is None):
            batch = self.loss.batch_inputs(batch)
        if count:
            return self.count(batch)
        if not batch.is_locked:
            own_leaves(batch, *self._counts)
        return batch.exclude(*self._counts, inplace=not batch.is_locked)

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the denominators for one optimiser step on the whole batch; see :meth:`PolicyLoss.count`."""
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
        """The rows of a prepared batch in random order, in minibatches: each for its own optimiser step.

        The loss of a minibatch is a mean over its own rows. The two answers of a pair stay together.

        With ``torch.distributed`` each rank splits its own share, and averaged gradients are the mean of the ranks' means. For
        the mean over all ranks' rows take ``micro_batches(minibatch, 1)``. Pass ``number``, so that all ranks make as many
        steps.

        Args:
            batch: prepared, of any number of dimensions; not changed. Counts that it holds are left out.
            number: of minibatches; their sizes differ by one row or pair at most.

        Keyword Args:
            size: instead of ``number``: the largest number of rows.
            generator: of the order; torch's own by default.

        Returns:
            An iterator over TensorDicts of one batch dimension.

        Raises:
            TypeError: unless one of ``number`` and ``size`` is given.
            ValueError: for more minibatches than rows or pairs, or a size that holds no pair.

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
        """The rows of a prepared batch in order, in micro-batches whose gradients add up to the gradient of the batch.

        The batch is counted first (over all ranks, if ``torch.distributed`` is initialised: then each rank calls this once for
        each step). Call ``backward`` on the loss of every part, then make one step. Groups of answers that are neighbours are
        split as little as possible, since a prompt is forwarded once per micro-batch.

        Args:
            batch: prepared, of any number of dimensions; or one of its :meth:`minibatches`. Not changed.
            number: of micro-batches; their sizes differ by one row or pair at most.

        Keyword Args:
            size: instead of ``number``: the largest number of rows.

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

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, object]:
        """All that training changes beside the weights of models: coefficients, and numbers of the losses such as ``step``.

        A few numbers, whatever the models' size. A checkpoint holds them beside the actor's weights, the critic's
        (``critic_loss.critic_network``) and the optimiser's state; of a reference that moves,
        :meth:`ReferenceUpdater.state_dict <torchrl_llm_kl.scoring.ReferenceUpdater.state_dict>`. Random generators are the
        caller's: the one for :meth:`minibatches`, and torch's own.

        Returns:
            ``"algorithm"``, its name, and tensors by name: copies.

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
        """Restore what :meth:`state_dict` returned, in parts that were built with the same arguments.

        Numbers of the state replace those given to :func:`make_algorithm`: to change one on resuming, assign it afterwards.

        Args:
            state: not changed, nor referred to.

        Raises:
            ValueError: for the state of another algorithm, a tensor of another shape, or if the state lacks a number of these
                parts, or has one that these parts do not; nothing is changed.
        """
        name, before, given = self.algorithm.name, self.state_dict(), dict(state)
        before.pop("algorithm")
        saved = given.pop("algorithm", None)
        if saved != name:
            raise ValueError(
                f"expected the state of {name!r}, got that of {saved!r}: build the algorithm that was saved."
            )
        try:
            self._state.load_state_dict(given)
        except RuntimeError as error:
            self._state.load_state_dict(before)
            what = f"the state does not fit {name!r}: build the parts with the arguments of the run that was saved."
            raise ValueError(f"{what} {error}") from None

    @property
    def _state(self) -> nn.ModuleDict:
        """The modules with state, by name; the models are not among them."""
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
        """Where the losses keep denominators."""
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
        together = spec_of(self.algorithm.objective).together
        units, what = torch.arange(len(batch)) // together, "rows" if together == 1 else "groups of rows"
        for name in {"pair_id", "match_id"} & self.loss.reads:  # a loss of pairs needs both answers
            key = find_key(batch, getattr(self.loss.tensor_keys, name))
            if key is not None or name == "pair_id":
                ids, what = None if key is None else per_sequence(batch, key), "pairs"
                units = units // 2 if ids is None else ids.cpu().unique(return_inverse=True)[1]
        lengths = units.bincount()
        if size is not None:
            most = size // int(lengths.max())
            if most == 0:
                raise ValueError(f"size={size} cannot hold a pair of {int(lengths.max())} rows: pass a larger size.")
            number = -(-len(lengths) // most)
        assert number is not None
        if number > len(lengths):
            raise ValueError(f"{len(lengths)} {what} cannot be split into {number} parts: pass at most {len(lengths)}.")
        order = torch.arange(len(lengths))
        if shuffle:
            order = torch.randperm(len(lengths), generator=generator)
        rows = order.argsort()[units].argsort(stable=True)
        shares = [int(part.sum()) for part in lengths[order].tensor_split(number)]
        return (batch[part] for part in rows.split(shares))

    def _score(self, transform: RetrieveKL | RetrieveLogProb, batch: TensorDictBase) -> TensorDictBase:
        """Score what neither the env nor an earlier call has scored. Log-probs of the policy that sampled stay."""
        of_policy = transform[0] if isinstance(transform, RetrieveKL) else transform
        own, mark = _next(of_policy.log_probs_full_key), (_PREPARED, of_policy.log_probs_full_key[0])
        stored, missing = find_key(batch, own), self._missing(transform, batch)
        if isinstance(transform, RetrieveKL):
            return self._compare(transform, batch, stored, missing)
        # torchrl's wrappers store log-probs at the root, without first tokens'; ours are marked.
        if stored is None or (stored != own and not _is_marked(batch, mark)):
            batch = transform(batch)
        elif missing:
            batch = _updated(batch, transform(_excluding(batch, own)), missing)
        _mark(batch, mark)
        return batch

    def _compare(
        self, transform: RetrieveKL, batch: TensorDictBase, stored: NestedKey | None, missing: set[NestedKey]
    ) -> TensorDictBase:
        """Policy, reference, their KL and the charged reward, as far as they are not there."""
        gen, ref, kl = transform
        compared = find_key(batch, ("next", "kl_penalty")) is not None
        charges = transform.add_to_reward and find_key(batch, ("next", CHARGED)) is None
        if charges and compared:
            self._check_uncharged(batch)
        recompute = charges if transform.add_to_reward else not compared
        kept = stored is not None and (compared or stored == _next(gen.log_probs_full_key))
        of_kl, of_ref = _written(kl), {_next(ref.log_probs_full_key)}
        if not kept and recompute:
            return transform(batch)
        exact = recompute and kl.estimator == "exact"  # of the models as they are now, whichever sampled
        if not kept:
            missing = _written(transform) - of_kl
        elif exact:
            missing = missing | of_kl
        elif recompute:
            missing = missing | {key for key in of_ref if find_key(batch, key) is None}
        if missing:
            scorer = ref if missing <= of_ref and not transform.side_by_side else transform
            batch = _updated(batch, scorer(_excluding(batch, _next(gen.log_probs_full_key))), missing)
        if not recompute or exact:
            return batch
        located = gen.locate(batch)
        places = [key for key in (stored, *(find_key(batch, key) for key in of_ref)) if key is not None]
        of_policy, of_reference = (per_token(batch, key, located.tokens, located.mask, repeats=False) for key in places)
        unscored = self.loss._reader.unscored(of_policy, located.tokens, located, places[0])
        data = located.tokens.like(
            torch.where(located.mask & ~unscored, of_policy, of_reference)
        )  # a KL of 0 elsewhere
        return _updated(batch, kl(write_ragged(batch.copy(), places[0], data.slots(), data.container)), of_kl)

    def _check_uncharged(self, batch: TensorDictBase) -> None:
        """Reject token rewards beside a KL that another transform scored: it may be in them, or not."""
        reward = find_key(batch, ("next", "reward"))
        if reward is not None and per_sequence(batch, reward) is None:
            raise ValueError(
                f"kl_reward={self.algorithm.kl_reward!r}: found one reward for each token and a KL, ('next', 'kl_penalty'), "
                "that another transform scored, which it may have subtracted. If it has, pass kl_reward='none'; if it has "
                "not, remove ('next', 'kl_penalty') before prepare, or put kl_transform of this algorithm in its place."
            )

    def _missing(self, transform: Transform, batch: TensorDictBase) -> set[NestedKey]:
        """What the advantage or the loss reads, the transform writes and the batch does not hold.

        An entropy or moments; a teacher's top k; log-probs of the reference.
        """
        read = {key for part in (self.advantage, self.loss) if part is not None for key in part.in_keys}
        wanted = _written(transform) & {name for key in read for name in (unravel_key(key), _next(key))}
        return {key for key in wanted if find_key(batch, key) is None}


def _next(key: NestedKey) -> NestedKey:
    """A key below "next"."""
    return unravel_key(("next", key))


def _written(transform: Transform) -> set[NestedKey]:
    """What a transform, or each part of one, writes."""
    parts = transform if isinstance(transform, Compose) else [transform]
    return {_next(key) for part in parts for key in part.out_keys}


def _updated(batch: TensorDictBase, scored: TensorDictBase, keys: Collection[NestedKey]) -> TensorDictBase:
    """The batch with these entries of ``scored``, and nothing else changed."""
    written = [key for key in (find_key(scored, key) for key in keys) if key is not None]
    own_leaves(batch, *written)
    return batch.update(scored.select(*written))


def _excluding(batch: TensorDictBase, key: NestedKey) -> TensorDictBase:
    """A copy without the policy's scores, which are not to be taken for log-probs that the sampler stored."""
    return batch.copy().exclude(key, inplace=True)


def _is_marked(batch: TensorDictBase, key: NestedKey) -> bool:
    marks = None if find_key(batch, key) is None else per_sequence(batch, key)
    return marks is not None and bool(marks.all())


def _mark(batch: TensorDictBase, key: NestedKey) -> None:
    own_leaves(batch, key)
    batch.set(key, torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))


class KeepBest(Advantage):
    """Clear ``loss_mask`` for all but the best answers of each group; it keeps its shape, ``[*B, 1]`` if there is none."""

    def __init__(self, *, group_key: NestedKey | None = None, group_size: int | None = None) -> None:
        super().__init__("best_of_group", group_key=group_key, group_size=group_size, keys={"advantage": _LOSS_MASK})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch: on a direct call, or when a replay buffer is sampled."""
        self.check_writable(tensordict)
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
    expert_mask_key: NestedKey = "expert_mask",
    tokens_key: NestedKey = ("tokens", "full"),
) -> ReplayBufferEnsemble:
    """A replay buffer whose batches hold rollouts and experts' answers in a fixed proportion.

    Experts' rows get 0 for each entry that only rollouts have (rewards, advantages, log-probs); objectives for mixed data
    ignore it through ``expert_mask``. Rows without a ``loss_mask`` get True if others have one. Denominators that
    :meth:`AlgorithmParts.prepare` wrote belong to another batch and are dropped: call :meth:`AlgorithmParts.count` on the
    mixed batch, or let each batch use its own mean.

    Args:
        rollouts: the policy's answers, prepared (:meth:`AlgorithmParts.prepare`).
        experts: answers of experts: tokens, and the prompt or mask that marks the response.

    Keyword Args:
        batch_size: rows of a batch.
        expert_data_ratio: the experts' share.
        expert_mask_key: entry to write: True for experts' rows; bool ``[B]``.
        tokens_key: entry of the tokens.

    Returns:
        A :class:`~torchrl.data.ReplayBufferEnsemble`; for a share of ``m / n`` its ``sample()`` returns a lazy stack
        ``[n, batch_size / n]``: rollouts first, then ``m`` times experts. The losses of this package accept it directly.

    Raises:
        ValueError: if the batch does not divide in that proportion.

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
    if not 0 < expert_data_ratio < 1:
        raise ValueError(f"expert_data_ratio must lie between 0 and 1, got {expert_data_ratio}.")
    share = Fraction(expert_data_ratio).limit_denominator(batch_size)
    if batch_size % share.denominator or abs(float(share) - expert_data_ratio) > 1e-6:
        raise ValueError(
            f"a batch of {batch_size} cannot hold exactly {expert_data_ratio:g} of experts: use a ratio n / {batch_size}."
        )
    flags = [False] * (share.denominator - share.numerator) + [True] * share.numerator
    return ReplayBufferEnsemble(
        *(experts if flag else rollouts for flag in flags),
        sample_from_all=True,
        batch_size=batch_size,
        collate_fn=partial(_mixed, flags=flags, mask_key=expert_mask_key, tokens_key=tokens_key),
    )


def _mixed(
    samples: Sequence[TensorDictBase], *, flags: Sequence[bool], mask_key: NestedKey, tokens_key: NestedKey
) -> TensorDictBase:
    """The samples of rollouts and experts as one lazy stack of rows with the same entries."""
    members = [[row.copy() for row in sample.reshape(-1).unbind(0)] for sample in samples]
    rows = [row for member in members for row in member]
    for row in rows:
        for key in _DENOMINATORS:
            row.pop(key, None)
    example = members[flags.index(False)][0]
    length = len(example[tokens_key])
    shared = example.exclude("tokens", "masks", _LOSS_MASK, mask_key)  # experts have their own
    only_rollouts = {key: value for key, value in shared.items(True, True) if isinstance(value, Tensor)}
    masks = [row[_LOSS_MASK] for row in rows if has_entry(row, _LOSS_MASK)]
    for flag, member in zip(flags, members, strict=True):
        for row in member:
            tokens = len(row[tokens_key])
            known = set(row.keys(True, True)) if flag else only_rollouts.keys()
            for key in only_rollouts.keys() - known:
                value = only_rollouts[key]
                shape = (tokens, *value.shape[1:]) if value.shape[:1] == (length,) else value.shape
                row.set(key, torch.zeros(shape, dtype=value.dtype, device=value.device))
            if masks and not has_entry(row, _LOSS_MASK):
                shape = masks[0].shape if masks[0].numel() == 1 else (tokens, *masks[0].shape[1:])
                row.set(_LOSS_MASK, torch.ones(shape, dtype=torch.bool, device=masks[0].device))
            row.set(mask_key, torch.tensor(flag))
    return lazy_stack([lazy_stack(member) for member in members])
