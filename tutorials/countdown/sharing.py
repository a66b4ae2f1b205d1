"""One of several collectors: it answers a share of a step's problems, in its own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensordict
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import pad
from torchrl.collectors.llm import LLMCollector
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.model import as_policy
from countdown.task import Problem, make_env
from torchrl_llm_kl import RetrieveKL

PROMPTS = ("tokens", "prompt")
ANSWERED = (  # prompts with their answers: one number per token
    ("tokens", "full"),
    ("masks", "all_attention_mask"),
    ("next", "log_probs", "full"),
    ("next", "kl_penalty"),
    ("next", "reward"),
)
EXTRA = (  # if they were scored or charged
    ("next", "kl_charged"),
    ("next", "entropy"),
    ("next", "moments", "collision"),
    ("next", "moments", "discriminator"),
)
SENT_BACK = (
    PROMPTS,
    *ANSWERED,
    *EXTRA,
    ("next", "success"),
    ("next", "done"),
)  # read by the trainer; the text of the conversations is not sent

State = Mapping[str, Tensor]


class ShareCollector:
    """A collector with its own env, its own copy of the policy, and its own share of the problems.

    Args:
        policy: a model of the policy's shape; its weights are replaced in each step.
        tokenizer: of the policy.
        problems: the collector's share; no other collector uses them.
        num_prompts: problems per step.
        group_size: answers per problem. A group is never split between collectors: its answers are compared.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Problem],
        *,
        num_prompts: int,
        group_size: int,
    ) -> None:
        torch.set_num_threads(1)
        tensordict.set_list_to_stack(True).set()
        self._policy, self._tokenizer, self._problems = policy, tokenizer, problems
        self._sizes = {"num_prompts": num_prompts, "group_size": group_size}
        self._collector: LLMCollector | None = None

    def start(self, kl: RetrieveKL, *, seed: int) -> None:
        """Start a run: a new env, which scores its answers with ``kl`` and orders its problems by ``seed``."""
        self.stop()
        self._kl = kl
        self._collector = LLMCollector(
            make_env(self._problems, self._tokenizer, seed=seed, **self._sizes).append_transform(kl),
            policy=as_policy(self._policy, self._tokenizer),
            dialog_turns_per_batch=self._sizes["num_prompts"] * self._sizes["group_size"],
            total_dialog_turns=-1,
            flatten_data=True,
        )
        self._batches = iter(self._collector)

    def collect(self, state: tuple[State, State], *, seed: int) -> TensorDictBase:
        """Collect the answers of one step, scored and rewarded.

        Args:
            state: the weights of the policy and the state of the KL coefficient.
            seed: for sampling.
        """
        weights, coefficient = state
        self._policy.load_state_dict(weights)
        self._kl.coeff.load_state_dict(coefficient)
        torch.manual_seed(seed)
        return next(self._batches).select(*SENT_BACK, strict=False).contiguous()

    def stop(self) -> None:
        """Stop the current run, if any."""
        if self._collector is not None:
            self._collector.shutdown()
            self._collector = None


def join(shares: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate batches in order, with prompts padded on the left to the longest and answers on the right."""
    prompt = max(share[PROMPTS].shape[1] for share in shares)
    answer = max(share["tokens", "full"].shape[1] - share[PROMPTS].shape[1] for share in shares)
    return torch.cat([_widen(share, prompt, answer) for share in shares])


def _widen(share: TensorDictBase, prompt: int, answer: int) -> TensorDictBase:
    left = prompt - share[PROMPTS].shape[1]
    width = share["tokens", "full"].shape[1]
    right = prompt + answer - left - width
    share = share.copy()
    share[PROMPTS] = pad(share[PROMPTS], (left, 0))
    for key in (*ANSWERED, *(key for key in EXTRA if key in share.keys(True))):
        if share[key].shape[1] == width:  # a reward without a penalty is one number per answer
            features = (0, 0) * (share[key].dim() - 2)
            share[key] = pad(share[key], (*features, left, right))
    return share
