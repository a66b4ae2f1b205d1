"""What the prose of each page takes as given: models, a tokenizer, a batch, under the names that it uses.

Names of the package are never given: a block imports them, or an earlier block of its page does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
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

from torchrl_llm_kl import Advantage, RetrieveKL, Sampling, make_algorithm
from toy_rollouts import collect, flat, make_model, make_policy, make_tokenizer

Names = Mapping[str, Any]


class World:
    """A tiny policy, its reference, and what they sample; each thing is made once, when a page asks for it."""

    @cached_property
    def tokenizer(self) -> Any:
        return make_tokenizer()

    @cached_property
    def model(self) -> Any:
        return self.new_model(0)

    @cached_property
    def reference(self) -> Any:
        return self.new_model(1).requires_grad_(False)

    def new_model(self, seed: int) -> Any:
        model = make_model(self.tokenizer, seed=seed)
        model.generation_config.eos_token_id = self.tokenizer.eos_token_id
        return model

    @cached_property
    def policy(self) -> TransformersWrapper:
        """Samples from the whole distribution, up to six tokens; nothing is padded."""
        return self.wrap(pad_output=False)

    def wrap(self, *, pad_output: bool) -> TransformersWrapper:
        generate = Sampling().generate_kwargs(self.model, max_new_tokens=6)
        generate |= {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        return TransformersWrapper(
            self.model, tokenizer=self.tokenizer, pad_output=pad_output, generate_kwargs=generate
        )

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    @cached_property
    def rollouts(self) -> Any:
        """Eight answers to each of two questions, with the sampler's log-probs and a reward."""
        return self.roll_out(self.policy)

    def roll_out(self, policy: TransformersWrapper) -> Any:
        torch.manual_seed(0)
        chats = [[{"role": "user", "content": question}] for question in ("Why?", "How many eggs?") for _ in range(8)]
        history = ChatHistory(prompt=History.from_chats(chats), batch_size=[16])
        rows = policy(TensorDict(history=history, batch_size=[16]))
        rows["next"] = TensorDict(reward=torch.rand(16, 1), batch_size=[16])
        return rows

    @cached_property
    def batch(self) -> Any:
        """The rollouts with log-probs of policy and reference, their KL, and an advantage, as rows of a stack."""
        rows = RetrieveKL(self.model, self.reference, add_to_reward=False)(self.rollouts.clone())
        return lazy_stack(list(Advantage("grpo", group_size=8)(rows).unbind(0)))

    @cached_property
    def grpo(self) -> Any:
        return make_algorithm("grpo", self.model, reference=self.reference, group_size=8)

    def buffer(self) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyStackStorage(64), batch_size=8)


def _algorithms(world: World) -> Names:
    given = {"actor": world.model, "reference": world.reference, "collector": [world.rollouts.clone()]}
    return {**given, "optimizer": world.optimizer}


def _one_rank() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _distributed(world: World) -> Names:
    _one_rank()
    return {"name": "Qwen/Qwen2.5-0.5B-Instruct", "loader": [world.batch]}


def _doctor(world: World) -> Names:
    logger = SimpleNamespace(log=lambda measures: None)
    given = {"batch": world.batch, "policy": world.model, "reference": world.reference, "tokenizer": world.tokenizer}
    return {**given, "buffer": world.buffer(), "logger": logger}


def _elsewhere(world: World) -> Names:
    Path("grpo.yaml").write_text("algorithm:\n  algorithm_type: grpo\n  repeat_times: 8\n", encoding="utf-8")
    return {"actor": world.model, "reference": world.reference}


def _inspector(world: World) -> Names:
    given = {"batch": world.batch, "tokenizer": world.tokenizer, "model": world.model, "reference": world.reference}
    return {**given, "step_100": world.model, "step_200": world.new_model(2)}


def _kl_study(world: World) -> Names:
    rows = world.roll_out(world.wrap(pad_output=True))
    batch = RetrieveKL(world.model, world.reference, add_to_reward=False)(rows)
    return {"model": world.model, "reference": world.reference, "batch": batch}


def _logging(world: World) -> Names:
    coefficient = torch.nn.Module()
    coefficient.forward = lambda: torch.tensor(0.1)  # type: ignore[method-assign]
    rows = world.roll_out(world.wrap(pad_output=True))
    batch = RetrieveKL(world.model, world.reference, add_to_reward=False)(rows)
    given = {"collector": [batch], "parts": world.grpo, "loss": world.grpo.loss}
    given |= {"tokenizer": world.tokenizer, "advance": print}
    return {**given, "coefficient": coefficient}


def _losses(world: World) -> Names:
    _one_rank()
    reference, batch = world.reference, world.batch.clone()
    for row in batch.unbind(0):
        row["next", "sampler_log_probs"] = row["log_probs"]
    given = {"model": world.model, "reference": reference, "batch": batch, "grpo": world.grpo}
    given |= {"optimizer": world.optimizer, "other_model": world.new_model(3), "buffer": world.buffer()}
    labelled = [batch.clone().set("chosen", torch.arange(16) % 3 == 0) for _ in range(2)]
    return {**given, "share": world.batch.clone(), "batches": labelled}


def _ray(world: World) -> Names:
    import ray

    ray.init(num_cpus=8, num_gpus=4, include_dashboard=False)  # logical: a model without CUDA stays on the CPU

    def load_reference() -> Any:
        from toy_rollouts import make_model, make_tokenizer

        return make_model(make_tokenizer(), seed=1)

    from toy_rollouts import make_env

    return {"load_reference": load_reference, "env": make_env(world.tokenizer), "policy": world.new_model(1)}


def _recipes(world: World) -> Names:
    from toy_rollouts import make_env

    policy = make_policy(world.model, world.tokenizer, pad_output=False)
    kl = RetrieveKL(world.model, world.reference, add_to_reward=False)
    data = flat(collect(world.tokenizer, policy, kl, envs=4))
    given = {"env": make_env(world.tokenizer), "reference": world.reference, "model": world.model, "padded": False}
    given |= {"tokenizer": world.tokenizer, "data": data, "advantage": torch.tensor([1.0, -1.0, 0.5, -0.5])}
    return {**given, "teacher": world.reference}


def _torchrl(world: World) -> Names:
    from torchrl.trainers import MixedPrecisionOptimizationStepper

    given = {"policy": world.model, "reference": world.reference, "torch": torch}
    return {**given, "MixedPrecisionOptimizationStepper": MixedPrecisionOptimizationStepper}


def _routing(world: World) -> Names:
    experts = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 6
    request = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=experts)])  # what an engine returns for a request
    import base64

    answer = {"meta_info": {"routed_experts": base64.b64encode(experts.astype(np.int32).tobytes()).decode()}}
    data = TensorDict(batch_size=[1])
    return {"outputs": [request], "data": data, "answer": answer, "layers": 3, "k": 2}


def _sampling(world: World) -> Names:
    from torchrl_llm_kl import LogProbScorer

    sequences = [[3, 4, 5, 6], [7, 8, 9]]
    mask = [torch.tensor([False, False, True, True]), torch.tensor([False, True, True])]
    ref_scorer = LogProbScorer(world.reference, temperature=0.7)
    given = {"policy": world.model, "sampler": world.policy, "reference": world.reference, "ref_scorer": ref_scorer}
    chats = [[{"role": "user", "content": "Why?"}], [{"role": "user", "content": "How?"}]]
    prompts = TensorDict(history=ChatHistory(prompt=History.from_chats(chats), batch_size=[2]), batch_size=[2])
    return {**given, "sequences": sequences, "mask": mask, "prompts": prompts, "vocab_size": len(world.tokenizer)}


def _scoring(world: World) -> Names:
    from torchrl_llm_kl import LogProbScorer

    rows = [torch.tensor([3, 5, 7, 9]), torch.tensor([4, 6, 8])]
    ids = torch.tensor([[3, 5, 7, 9], [0, 4, 6, 8]])
    batch = {"input_ids": ids, "attention_mask": ids > 0}
    mask = torch.tensor([False, False, True, True, False, True, True])
    given = {
        "scorer": LogProbScorer(world.model),
        "ref_scorer": LogProbScorer(world.reference),
        "rows": rows,
        "mask": mask,
    }
    given |= {"batch": batch, "sequences": rows, "student": LogProbScorer(world.new_model(2)), "buffer": world.buffer()}
    adapted = _adapted(world.new_model(4))
    return {
        **given,
        "model": world.model,
        "ref_model": world.reference,
        "policy": adapted,
        "reference": world.reference,
    }


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, config := LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.add_adapter("ref", config)
    return adapted


def _debugging(world: World) -> Names:
    """A model with distributions wide enough that top-k is far from all tokens."""
    return {"batch": world.batch, "model": world.model, "reference": world.reference, "tokenizer": world.tokenizer}


def _off_policy(world: World) -> Names:
    given = {"model": world.model, "batch": world.rollouts.clone(), "rollouts": world.rollouts.clone()}
    return {**given, "reference": world.reference, "optimizer": world.optimizer}


def _lora(world: World) -> Names:
    return {"batch": world.rollouts.clone()}


def _resuming(world: World) -> Names:
    return {"model": world.model, "reference": world.reference}


def _cli(world: World) -> Names:
    return {"batch": world.batch}


def _concepts(world: World) -> Names:
    return {"tokenizer": world.tokenizer}


def _multi_turn(world: World) -> Names:
    return {"tokenizer": world.tokenizer, "model": world.model, "reference": world.reference}


#: Page -> the names that its prose introduces. The code of any other page makes all that it uses.
PREAMBLES: dict[str, Callable[[World], Names]] = {
    "docs/algorithms.md": _algorithms,
    "docs/cli.md": _cli,
    "docs/concepts.md": _concepts,
    "docs/debugging.md": _debugging,
    "docs/distributed.md": _distributed,
    "docs/doctor.md": _doctor,
    "docs/elsewhere.md": _elsewhere,
    "docs/inspector.md": _inspector,
    "docs/kl_study.md": _kl_study,
    "docs/logging.md": _logging,
    "docs/lora.md": _lora,
    "docs/losses.md": _losses,
    "docs/multi_turn.md": _multi_turn,
    "docs/off_policy.md": _off_policy,
    "docs/ray.md": _ray,
    "docs/recipes.md": _recipes,
    "docs/resuming.md": _resuming,
    "docs/routing.md": _routing,
    "docs/sampling.md": _sampling,
    "docs/scoring.md": _scoring,
    "docs/torchrl.md": _torchrl,
}
