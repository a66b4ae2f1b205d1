"""Where the answers of a run come from: sampled between the updates, or ahead of them with weights that are a few steps old."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.scoring import ScoreOptions
from torchrl_llm_kl.transforms import RetrieveLogProb

Sample = Callable[[], TensorDictBase]


class Weights(Protocol):
    """The weights of a sampler that is not the trained model itself, such as a copy or a server."""

    def take(self, version: int) -> object:
        """Copy the trained weights, in the thread that trains."""

    def install(self, taken: object | None, version: int) -> int:
        """Give them to the sampler, in the thread that samples, and return the version that it has then.

        This is called before each batch. ``taken`` is None if the sampler has the newest weights.
        """

    def close(self) -> None:
        """End a call of :meth:`install` that waits for other ranks."""


class CopiedWeights:
    """The weights of a copy of the policy. Weights that are not trained are shared with it.

    Args:
        policy: the model that is trained.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> weights = CopiedWeights(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.fill_(1.0)
        >>> weights.install(weights.take(1), 1)
        1
        >>> weights.copy.weight[0].tolist()
        [1.0, 1.0]
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        # In the memo of a deep copy they count as copied, so the base model of adapters is not held twice.
        fixed = {id(p): p for p in policy.parameters() if not p.requires_grad}
        self.copy = copy.deepcopy(policy, fixed).requires_grad_(False)

    def take(self, version: int) -> dict[str, Tensor]:
        """See :class:`Weights`."""
        return {name: p.detach().clone() for name, p in self.policy.named_parameters() if p.requires_grad}

    def install(self, taken: object | None, version: int) -> int:
        """See :class:`Weights`."""
        own = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, values in taken.items() if isinstance(taken, Mapping) else ():
                own[name].copy_(values)
        return version

    def close(self) -> None:
        """See :class:`Weights`."""


class Answers:
    """Samples the batch of each step.

    With ``ahead=0`` a batch is sampled when it is asked for. With ``ahead=n`` a thread samples while the run trains: the batch
    of step ``k`` begins as soon as the batch before it is finished and the weights of step ``k - n`` exist, and it uses the
    newest ones.

    Args:
        sample: samples the next batch, in the order of the prompts.

    Keyword Args:
        weights: the weights of the sampler. None if the sampler is the trained model.
        version: the number of finished steps. The sampler has the weights after them.
        ahead: the largest number of steps by which the weights of a batch may be older than those that it trains. Above 0
            ``sample`` must use no object that the training changes.

    Example:
        >>> from tensordict import TensorDict
        >>> answers = Answers(lambda: TensorDict(batch_size=[2]), weights=CopiedWeights(nn.Linear(2, 2)))
        >>> answers.updated()
        >>> answers.take()["policy_version"].flatten().tolist()
        [1, 1]
    """

    def __init__(self, sample: Sample, *, weights: Weights | None = None, version: int = 0, ahead: int = 0) -> None:
        self.sample, self.weights, self.version, self.ahead = sample, weights, version, ahead
        self.waited = 0.0  # seconds in the last `take`
        self._newest: object = None  # weights that the sampler has not got yet
        self._lock = Lock()
        self._batches: deque[Future[TensorDictBase]] = deque()
        self._thread = ThreadPoolExecutor(1, "answers") if ahead else None

    def take(self) -> TensorDictBase:
        """The next batch.

        A sampler with weights of its own adds ``"policy_version"``, the number of steps that its weights had, int64 ``[B, 1]``.
        """
        begin = time.perf_counter()
        if self._thread is None:
            batch = self._sample()
        else:
            # Of the batches in the queue the last one is for the step `version + ahead`, so none begins too early.
            while len(self._batches) <= self.ahead:
                self._batches.append(self._thread.submit(self._sample))
            batch = self._batches.popleft().result()
        self.waited = time.perf_counter() - begin
        return batch

    def updated(self) -> None:
        """Say that the trained weights have changed. Call it once after each step."""
        # Outside of the lock: writing the weights of a server takes seconds, and the thread may go on.
        taken = None if self.weights is None else self.weights.take(self.version + 1)
        if self._thread is None and self.weights is not None:
            # Now, since an evaluation may use the sampler before the next batch.
            self.weights.install(taken, self.version + 1)
            taken = None
        with self._lock:
            self.version, self._newest = self.version + 1, taken

    def close(self) -> None:
        """End the thread. Batches that were sampled ahead are lost."""
        if self.weights is not None:
            self.weights.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _sample(self) -> TensorDictBase:
        """Sample a batch with the newest weights."""
        with self._lock:  # both at once, so that the version belongs to these weights
            version, taken, self._newest = self.version, self._newest, None
        if self.weights is not None and self._thread is not None:
            version = self.weights.install(taken, version)
        batch = self.sample()
        if self.weights is None:
            return batch
        return batch.set("policy_version", torch.full((*batch.batch_size, 1), version, device=batch.device))


def record_log_probs(sample: Sample, policy: nn.Module, options: ScoreOptions) -> Sample:
    """Add the log-probs of the policy that samples, as an engine does, under ``("log_probs", "full")``.

    Example:
        >>> sample = record_log_probs(sample, copied, ScoreOptions())  # doctest: +SKIP
    """
    score = RetrieveLogProb(policy, options=options, service_backend="direct")

    def scored() -> TensorDictBase:
        batch = score(sample())
        batch.set(("log_probs", "full"), batch["next"].pop("log_probs")["full"])
        return batch

    return scored


def age_figures(batch: TensorDictBase, limit: int) -> dict[str, float]:
    """``age``, the mean age in steps, ``age_max``, and ``too_old``, the number of rows above ``limit``. Empty without ages.

    Example:
        >>> from tensordict import TensorDict
        >>> age_figures(TensorDict(age=torch.tensor([[1], [3]]), batch_size=[2]), 2)
        {'age': 2.0, 'age_max': 3, 'too_old': 1}
    """
    if not has_entry(batch, "age"):
        return {}
    ages = batch["age"].flatten()
    return {"age": ages.float().mean().item(), "age_max": int(ages.max()), "too_old": int((ages > limit).sum())}


def sampler_gap(batch: TensorDictBase) -> float | None:
    """The mean distance of the sampler's log-probs to the trainer's, in nats per token.

    For rows of older weights it includes the steps between both.

    Returns:
        None if the batch lacks the log-probs of one of them.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(batch_size=[1])
        >>> batch["next", "log_probs", "full"] = torch.tensor([[0.0, -1.0]])
        >>> batch["next", "sampler_log_probs", "full"] = torch.tensor([[0.0, -1.5]])
        >>> sampler_gap(batch)
        0.5
    """
    keys = [("next", name, "full") for name in ("log_probs", "sampler_log_probs")]
    if not all(has_entry(batch, key) for key in keys):
        return None
    own, theirs = (batch[key] for key in keys)
    off = (own - theirs).abs()[(theirs != 0) & theirs.isfinite()]
    return off.mean().item() if len(off) else None
