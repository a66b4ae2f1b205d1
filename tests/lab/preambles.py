"""What the prose of each page takes as given: models, a tokenizer, a batch, under the names that it uses.

Names of the package are never given: a block imports them, or an earlier block of its page does.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory

from torchrl_llm_kl import Advantage, LogProbScorer, RetrieveKL, Sampling, make_algorithm
from toy_rollouts import collect, flat, make_env, make_model, make_policy, make_tokenizer


def prompts_of(questions: list[str]) -> TensorDict:
    chats = [[{"role": "user", "content": question}] for question in questions]
    size = [len(chats)]
    return TensorDict(history=ChatHistory(prompt=History.from_chats(chats), batch_size=size), batch_size=size)


class World:
    """A tiny policy, its reference, and what they sample; each of ``PARTS`` is made once, when a page asks for it."""

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = PARTS[name](self)
        return value

    def new_model(self, seed: int) -> Any:
        model = make_model(self.tokenizer, seed=seed)
        model.generation_config.eos_token_id = self.tokenizer.eos_token_id
        return model

    def sample(self, *, pad_output: bool) -> Any:
        """Eight answers to each of two questions, with the sampler's log-probs and a reward."""
        torch.manual_seed(0)
        rows = _sampler(self, pad_output)(prompts_of(["Why?"] * 8 + ["How many eggs?"] * 8))
        rows["next"] = TensorDict(reward=torch.rand(16, 1), batch_size=[16])
        return rows

    def with_kl(self, rows: Any) -> Any:
        """With log-probs of policy and reference, and their KL."""
        return RetrieveKL(self.model, self.reference, add_to_reward=False)(rows)


def _sampler(world: World, pad_output: bool = False) -> TransformersWrapper:
    """Samples from the whole distribution, up to six tokens."""
    policy = make_policy(world.model, world.tokenizer, pad_output=pad_output)
    policy.generate_kwargs |= Sampling().generate_kwargs(world.model, max_new_tokens=6)
    return policy


def _batch(world: World) -> Any:
    rows = Advantage("grpo", group_size=8)(world.with_kl(world.rollouts.clone()))
    return lazy_stack(list(rows.unbind(0)))


def _adapted(world: World) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(world.new_model(4), config)
    adapted.add_adapter("ref", config)
    return adapted


Made = Callable[[World], Any]
PARTS: dict[str, Made] = {
    "tokenizer": lambda world: make_tokenizer(),
    "model": lambda world: world.new_model(0),
    "reference": lambda world: world.new_model(1).requires_grad_(False),
    "sampler": _sampler,
    "optimizer": lambda world: torch.optim.AdamW(world.model.parameters(), lr=1e-4),
    "rollouts": lambda world: world.sample(pad_output=False),
    "padded": lambda world: world.with_kl(world.sample(pad_output=True)),
    "batch": _batch,
    "grpo": lambda world: make_algorithm("grpo", world.model, reference=world.reference, group_size=8),
    "buffer": lambda world: ReplayBuffer(storage=LazyStackStorage(64), batch_size=8),
    "adapted": _adapted,
}


def _one_rank() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _distributed(world: World) -> dict[str, Any]:
    _one_rank()
    return {"name": "Qwen/Qwen2.5-0.5B-Instruct", "loader": [world.batch]}


def _elsewhere(world: World) -> dict[str, Any]:
    Path("grpo.yaml").write_text("algorithm:\n  algorithm_type: grpo\n  repeat_times: 8\n", encoding="utf-8")
    return {}


def _logging(world: World) -> dict[str, Any]:
    coefficient = torch.nn.Module()
    coefficient.forward = lambda: torch.tensor(0.1)  # type: ignore[method-assign]
    return {"collector": [world.padded], "loss": world.grpo.loss, "advance": print, "coefficient": coefficient}


def _losses(world: World) -> dict[str, Any]:
    _one_rank()
    batch = world.batch.clone()
    for row in batch.unbind(0):
        row["next", "sampler_log_probs"] = row["log_probs"]
    labelled = [batch.clone().set("chosen", torch.arange(16) % 3 == 0) for _ in range(2)]
    return {"batch": batch, "other_model": world.new_model(3), "batches": labelled}


def _ray(world: World) -> dict[str, Any]:
    import ray

    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False)  # logical: a model without CUDA stays on the CPU

    def load_reference() -> Any:
        from toy_rollouts import make_model, make_tokenizer

        return make_model(make_tokenizer(), seed=1)

    return {"load_reference": load_reference, "env": make_env(world.tokenizer), "policy": world.new_model(1)}


def _recipes(world: World) -> dict[str, Any]:
    policy = make_policy(world.model, world.tokenizer, pad_output=False)
    kl = RetrieveKL(world.model, world.reference, add_to_reward=False)
    given = {"data": flat(collect(world.tokenizer, policy, kl, envs=4)), "env": make_env(world.tokenizer)}
    return {**given, "padded": False, "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5])}


def _routing(world: World) -> dict[str, Any]:
    experts = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 6
    request = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=experts)])  # what an engine returns for a request
    answer = {"meta_info": {"routed_experts": base64.b64encode(experts.astype(np.int32).tobytes()).decode()}}
    return {"outputs": [request], "data": TensorDict(batch_size=[1]), "answer": answer, "layers": 3, "k": 2}


def _sampling(world: World) -> dict[str, Any]:
    mask = [torch.tensor([False, False, True, True]), torch.tensor([False, True, True])]
    given = {"sequences": [[3, 4, 5, 6], [7, 8, 9]], "mask": mask, "prompts": prompts_of(["Why?", "How?"])}
    ref_scorer = LogProbScorer(world.reference, temperature=0.7)
    return {**given, "ref_scorer": ref_scorer, "vocab_size": len(world.tokenizer)}


def _scoring(world: World) -> dict[str, Any]:
    rows = [torch.tensor([3, 5, 7, 9]), torch.tensor([4, 6, 8])]
    ids = torch.tensor([[3, 5, 7, 9], [0, 4, 6, 8]])
    models = {"scorer": world.model, "ref_scorer": world.reference, "student": world.new_model(2)}
    given = {name: LogProbScorer(model) for name, model in models.items()}
    mask = torch.tensor([False, False, True, True, False, True, True])
    batch = {"input_ids": ids, "attention_mask": ids > 0}
    return {**given, "rows": rows, "sequences": rows, "mask": mask, "batch": batch}


def _torchrl(world: World) -> dict[str, Any]:
    from torchrl.trainers import MixedPrecisionOptimizationStepper

    return {"torch": torch, "MixedPrecisionOptimizationStepper": MixedPrecisionOptimizationStepper}


#: Page -> what its prose introduces: parts of the world, maybe under another name, and what no other page has. The code of
#: any other page makes all that it uses.
PREAMBLES: dict[str, tuple[str, Made | None]] = {
    "docs/algorithms.md": ("actor=model reference optimizer", lambda world: {"collector": [world.rollouts]}),
    "docs/cli.md": ("batch", None),
    "docs/concepts.md": ("tokenizer", None),
    "docs/debugging.md": ("batch model reference tokenizer", None),
    "docs/distributed.md": ("", _distributed),
    "docs/doctor.md": (
        "batch policy=model reference tokenizer buffer",
        lambda world: {"logger": SimpleNamespace(log=lambda measures: None)},
    ),
    "docs/elsewhere.md": ("actor=model reference", _elsewhere),
    "docs/inspector.md": (
        "batch tokenizer model reference step_100=model",
        lambda world: {"step_200": world.new_model(2)},
    ),
    "docs/kl_study.md": ("model reference batch=padded", None),
    "docs/logging.md": ("parts=grpo tokenizer", _logging),
    "docs/lora.md": ("batch=rollouts", None),
    "docs/losses.md": ("model reference share=batch grpo optimizer buffer", _losses),
    "docs/multi_turn.md": ("tokenizer model reference", None),
    "docs/off_policy.md": ("model rollouts reference optimizer", lambda world: {"batch": world.rollouts.clone()}),
    "docs/ray.md": ("", _ray),
    "docs/recipes.md": ("reference teacher=reference model tokenizer", _recipes),
    "docs/resuming.md": ("model reference", None),
    "docs/routing.md": ("", _routing),
    "docs/sampling.md": ("policy=model sampler reference", _sampling),
    "docs/scoring.md": ("model ref_model=reference reference policy=adapted buffer", _scoring),
    "docs/torchrl.md": ("policy=model reference", _torchrl),
}


def given(page: str) -> dict[str, Any]:
    """The names that a page takes as given."""
    parts, own = PREAMBLES.get(page, ("", None))
    world = World()
    names = {part.partition("=")[0]: getattr(world, part.rpartition("=")[2]) for part in parts.split()}
    return {**names, **(own(world) if own else {})}
