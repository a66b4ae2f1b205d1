"""Language tasks so small that every answer can be enumerated, with exact policies and sampled batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, product as tuples

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl.ragged import Ragged

#: In tasks with experts, the sampler never draws answers below this probability.
MIN_P = 0.03


class TabularPolicy(nn.Module):
    """Logits of the next token from a table with a row for each prefix: any autoregressive policy is one of these."""

    def __init__(self, vocab: int, longest: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.table = nn.Parameter(torch.zeros(sum(vocab**n for n in range(1, longest + 1)), vocab))

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        rows = accumulate(input_ids.unbind(1), lambda row, token: (row + 1) * self.vocab + token)
        return (self.table[torch.stack(list(rows), 1)],)


@dataclass(frozen=True)
class Task:
    """Prompts of one token, answers of a few, and the reward of each answer to each prompt."""

    vocab: int
    prompts: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]  # all possible answers; the last token of each ends it
    reward: Tensor  # [P, R], of each answer to each prompt
    reference: Tensor  # [P, R], log-probs of a reference policy

    @property
    def longest(self) -> int:
        return 1 + max(len(answer) for answer in self.answers)

    def policy(self, log_probs: Tensor | None = None) -> TabularPolicy:
        """The policy with these log-probs of answers ``[P, R]``, by default the reference's."""
        model = TabularPolicy(self.vocab, self.longest)
        mass = (self.reference if log_probs is None else log_probs).exp()
        with torch.no_grad():
            for p, prompt in enumerate(self.prompts):
                for prefix in sorted({answer[:n] for answer in self.answers for n in range(len(answer))}):
                    row = reduce(lambda row, token: (row + 1) * self.vocab + token, (prompt, *prefix), -1)
                    for token in range(self.vocab):
                        inside = [i for i, a in enumerate(self.answers) if a[: len(prefix) + 1] == (*prefix, token)]
                        model.table[row, token] = mass[p, inside].sum().log()
                    model.table[row] -= model.table[row].mean()
        return model

    @property
    def _padded(self) -> tuple[Tensor, Tensor]:
        """The tokens of each prompt with each answer, ``[P, R, T]``, and where they are not padding."""
        width = self.longest
        rows = [[[p, *a, *[0] * (width - 1 - len(a))] for a in self.answers] for p in self.prompts]
        lengths = torch.tensor([1 + len(a) for a in self.answers])
        return torch.tensor(rows), (torch.arange(width) < lengths.unsqueeze(-1)).expand(len(self.prompts), -1, -1)

    @torch.no_grad()
    def log_probs(self, model: nn.Module) -> Tensor:
        """Log-probs of every answer to every prompt by the chain rule, ``[P, R]`` float64."""
        full, real = self._padded
        logits = model(input_ids=full.flatten(0, 1))[0].double().log_softmax(-1)
        each = logits[:, :-1].gather(-1, full.flatten(0, 1)[:, 1:].unsqueeze(-1)).squeeze(-1)
        return torch.where(real.flatten(0, 1)[:, 1:], each, 0).sum(-1).reshape(full.shape[:2])

    def sample(
        self, model: nn.Module, rows: int, rng: torch.Generator, group_size: int = 1, min_p: float = 0.0
    ) -> TensorDict:
        """Sample the same number of answers to each prompt, none less likely than ``min_p``. Groups are consecutive.

        Each group is an exact draw of independent answers, from one point of a scrambled Sobol sequence. This spreads the
        groups of a batch evenly, so that a few hundred rows have the mean of many more.
        """
        chosen = []
        p = self.log_probs(model).exp()
        for cdf in torch.where(p < min_p, 0, p).cumsum(-1):
            seed = int(torch.randint(2**31, (), generator=rng))
            points = torch.quasirandom.SobolEngine(group_size, scramble=True, seed=seed)
            uniform = points.draw(rows // len(self.prompts) // group_size).double().flatten()
            chosen.append(torch.searchsorted(cdf, uniform * cdf[-1]).clamp(max=len(cdf) - 1))
        answers = torch.stack(chosen)
        prompts = torch.arange(len(answers)).repeat_interleave(answers.shape[1])
        data = self.batch(prompts, answers.flatten())
        data["query"] = torch.arange(len(data)) // group_size
        return data

    def batch(self, prompts: Tensor, answers: Tensor) -> TensorDict:
        """Rows of answers to prompts, by their numbers ``[B]``."""
        full, real = (x[prompts, answers] for x in self._padded)
        reward = self.reward[prompts, answers].float().unsqueeze(-1)
        tokens, masks = {"full": full, "prompt": full[:, :1]}, {"all_attention_mask": real}
        return TensorDict({"tokens": tokens, "masks": masks, "next": {"reward": reward}}, batch_size=[len(full)])


def _task(vocab: int, answers: Sequence[tuple[int, ...]], prompts: Sequence[int], seed: int) -> Task:
    rng = torch.Generator().manual_seed(seed)
    reward = torch.rand(len(prompts), len(answers), generator=rng, dtype=torch.float64) * 2 - 1
    reference = (0.7 * torch.randn(reward.shape, generator=rng, dtype=torch.float64)).log_softmax(-1)
    return Task(vocab, tuple(prompts), tuple(answers), reward, reference)


def chain(seed: int = 0) -> Task:
    """Answers of one or two tokens, where token 3 ends an answer early. One answer to each prompt is clearly best."""
    task = _task(4, [*tuples(range(3), range(4)), (3,)], (1, 2), seed)
    task.reward.clamp_(max=0.7)
    task.reward[torch.arange(2), torch.tensor([5, 10])] = 1.5
    return task


def bandit(seed: int) -> Task:
    """Answers of one token."""
    return _task(5, [(token,) for token in range(5)], (0, 3), seed)


def product(seed: int = 0) -> Task:
    """Answers of two independent tokens, whose rewards and reference log-probs add up."""
    rng = torch.Generator().manual_seed(seed)
    reward, reference = torch.randn(2, 2, 2, 3, generator=rng, dtype=torch.float64).unbind()
    reference = (0.7 * reference).log_softmax(-1)
    both = [(x[:, 0, :, None] + x[:, 1, None, :]).flatten(1) for x in (reward, reference)]
    return Task(3, (0, 2), tuple(tuples(range(3), repeat=2)), *both)


def total_variation(log_prob: Tensor, target: Tensor) -> float:
    """The total variation of two distributions over answers ``[P, R]``, for the prompt where it is largest."""
    return float((log_prob.exp() - target.exp()).abs().sum(-1).max() / 2)


class TabularCritic(nn.Module):
    """A critic with a value for each prefix."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.values = TabularPolicy(task.vocab, task.longest)

    def forward(self, tokens: Ragged, mask: Tensor) -> Ragged:
        device = self.values.table.device
        padded = self.values(tokens.to_padded().to(device))[0][..., 0]
        before = nn.functional.pad(padded[:, :-1], (1, 0))[tokens.padding_mask().to(device)]
        return tokens.like(torch.where(mask.to(device), before, 0).to(tokens.values.device))

    @torch.no_grad()
    def of(self, *prefix: int) -> float:
        return float(self.values(torch.tensor([prefix]))[0][0, -1, 0])


def unlikely(task: Task) -> TabularPolicy:
    """The reference with 1 % probability of the best answer, which a sampler with ``MIN_P`` never draws."""
    log_probs = task.reference.clone()
    log_probs[torch.arange(2), task.reward.argmax(-1)] = math.log(0.01)
    return task.policy(log_probs.log_softmax(-1))


def experts(task: Task, rows: int) -> TensorDictBase:
    prompts = torch.arange(2).repeat(rows // 2)
    return task.batch(prompts, task.reward.argmax(-1)[prompts])


def mixed(task: Task, actor: TabularPolicy, rng: torch.Generator) -> TensorDictBase:
    usual, expert = task.sample(actor, 96, rng, 8, min_p=MIN_P), experts(task, 32)
    usual["expert_mask"], expert["expert_mask"] = torch.zeros(96, dtype=torch.bool), torch.ones(32, dtype=torch.bool)
    expert["query"] = -1 - torch.arange(32)
    return torch.cat([usual, expert])
