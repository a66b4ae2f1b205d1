"""Rollouts of a tiny policy in TorchRL's chat env, and slow reference results for the transforms."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory

from toy_models import tiny_model
from toy_tokenizer import build_tokenizer

QUERIES = ["hi", "hello there", "why?", "a longer question, please"]
OUTCOMES = (1.0, -0.5, 2.0, 0.25)


def make_tokenizer() -> Any:
    return build_tokenizer(pad_token="<|pad|>")


def make_model(tokenizer: Any, seed: int, family: str = "qwen2", **config: Any) -> nn.Module:
    return tiny_model(family, seed=seed, vocab_size=len(tokenizer), max_position_embeddings=512, **config)


def make_policy(model: nn.Module, tokenizer: Any, *, pad_output: bool, **kwargs: Any) -> TransformersWrapper:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    how = {"generate": True, "generate_kwargs": {"max_new_tokens": 6, "do_sample": True, **ends}, **kwargs}
    return TransformersWrapper(model, tokenizer=tokenizer, pad_output=pad_output, **how)


def make_scoring_wrapper(model: nn.Module, tokenizer: Any, *, pad_output: bool, **kwargs: Any) -> TransformersWrapper:
    how = {"generate": False, "input_mode": "tokens", **kwargs}
    return TransformersWrapper(model, tokenizer=tokenizer, pad_output=pad_output, **how)


def make_scoring_pair(policy: nn.Module, reference: nn.Module, tokenizer: Any, **kwargs: Any) -> list[Any]:
    """Wrappers of both models, which write ``"log_probs"`` and ``"ref_log_probs"``, without padding by default."""
    return [
        make_scoring_wrapper(model, tokenizer, **{"pad_output": False, "log_probs_key": key, **kwargs})
        for model, key in ((policy, "log_probs"), (reference, "ref_log_probs"))
    ]


class Rewarded(Transform):
    """Adds a reward of shape ``[B, *features]``, which ``reward(step)`` computes from a batch of steps."""

    def __init__(self, reward: Callable[[TensorDictBase], Tensor], features: tuple[int, ...] = (1,)) -> None:
        super().__init__(in_keys=[], out_keys=["reward"])
        self.reward, self.features = reward, features

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = self.reward(tensordict).reshape(*tensordict.batch_size, *[1 for _ in self.features])
        return next_tensordict.set("reward", rewards.expand(*tensordict.batch_size, *self.features).clone())

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, *self.features))
        return reward_spec


def _constant(step: TensorDictBase) -> Tensor:
    return torch.tensor(OUTCOMES[: step.batch_size.numel()])


class Outcome(Rewarded):
    """A constant outcome reward per env."""

    def __init__(self, features: tuple[int, ...] = (1,)) -> None:
        super().__init__(_constant, features)


def make_env(
    tokenizer: Any,
    *transforms: Transform,
    envs: int = 2,
    turns: int = 1,
    input_mode: str = "history",
    group: int | None = None,
    queries: Sequence[str] = QUERIES,
    reward: Transform | None = None,
) -> EnvBase:
    """A chat env that poses each query ``group`` times and is done after ``turns``. By default with the outcome reward."""
    loader = DataLoader([{"query": query} for query in queries] * 100, batch_size=1, collate_fn=_collate)
    how = {"batch_size": (envs,), "tokenizer": tokenizer, "input_mode": input_mode, "repeats": group}
    env = ChatEnv.from_dataloader(loader, **how)
    for transform in (StepCounter(max_steps=turns), reward or Outcome(), *transforms):
        env = env.append_transform(transform)
    return env


def _collate(batch: list[dict[str, Any]]) -> TensorDictBase:
    return torch.stack([TensorDict.from_dict(item) for item in batch])


def collect(
    tokenizer: Any, policy: nn.Module, *transforms: Transform, envs: int = 2, turns: int = 1, seed: int = 0
) -> TensorDictBase:
    """A rollout ``[envs, turns]``."""
    torch.manual_seed(seed)
    return make_env(tokenizer, *transforms, envs=envs, turns=turns).rollout(turns, policy)


def histories(**chats: list[Any]) -> TensorDictBase:
    """Conversations below ``"history"``, as lists of messages: ``full``, ``prompt``, ``response``."""
    fields = {name: History.from_chats(value) for name, value in chats.items()}
    size = [len(next(iter(chats.values())))]
    return TensorDict(history=ChatHistory(**fields, batch_size=size), batch_size=size)


def steps(td: TensorDictBase) -> Iterator[TensorDictBase]:
    """The single steps of a batch of any shape."""
    if td.batch_dims == 0:
        yield td
        return
    for part in td.unbind(0):
        yield from steps(part)


def rows_of(td: TensorDictBase, key: Any) -> list[Tensor]:
    """The rows of an entry in any layout."""
    if td.batch_dims != 1:
        return [step[key] for step in steps(td)]
    return list(rows) if isinstance(rows := td.get(key, as_list=True), list) else list(rows.unbind())


def flat(td: TensorDictBase) -> TensorDictBase:
    return lazy_stack(list(steps(td)))


def plain_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probs of one sequence under the plain model, with 0 for the first token."""
    with torch.no_grad():
        log_probs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), log_probs[:-1].gather(-1, ids[1:, None])[:, 0]])


def response_log_probs(model: nn.Module, step: TensorDictBase) -> Tensor:
    """The expected log-probs of a step: from the plain model on the response, 0 on prompt and padding."""
    full, attention = step["tokens", "full"], step["masks", "all_attention_mask"]
    out = torch.zeros(len(full))
    out[attention] = plain_log_probs(model, full[attention])
    out[: len(step["tokens", "prompt"])] = 0
    return out


def leaves(td: TensorDictBase) -> dict[Any, Any]:
    """Copies of all leaves of a single step, for a before-and-after comparison."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in td.items(True, True)}


def same_leaves(before: dict[Any, Any], td: TensorDictBase, *, except_for: Iterable[Any] = ()) -> bool:
    after = leaves(td)
    skip = set(except_for)
    return set(before) - skip == set(after) - skip and all(
        torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items() if k not in skip
    )
