"""Score under the policy and the reference, and compute their KL, in one transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import Compose, Transform

from torchrl_llm_kl.transforms._base import Output, StepPlaces
from torchrl_llm_kl.transforms._factories import RayVariant, resolve_factory
from torchrl_llm_kl.transforms._kl_computation import KLComputation
from torchrl_llm_kl.transforms._pairs import check_same_tokens
from torchrl_llm_kl.transforms._retrieve_log_prob import RetrieveLogProb
from torchrl_llm_kl.transforms._reward import RewardPlacement

__all__ = ["RetrieveKL"]

# What goes to both RetrieveLogProb, beside the arguments that torchrl names.
_OF_BOTH = {"adapters", "dtype", "memory", "scope", "temperature"}
# Attributes of the parts that are read and written on the whole too.
_OF_PARTS = {
    **dict.fromkeys(("assistant_only", "dtype", "memory", "scope", "temperature"), (0, 1)),
    **dict.fromkeys(("coeff", "reward_placement"), (2,)),
}


class RetrieveKL(RayVariant, StepPlaces, Compose):
    r"""Write the log-probs of the policy and of the reference, their KL, and the penalised reward.

    A composition of two :class:`RetrieveLogProb` and a :class:`KLComputation` that locates the tokens once for both
    models, and checks that both see the same ones.

    Args:
        gen_model: the policy as a wrapper with ``generate=False`` or a transformers model; ``"from_collector"``
            (default): the policy of the collector that runs the env, found at the first step.
        ref_model: the reference, the same way; ``"base"``: the policy's own weights with its PEFT adapters switched off.

    Keyword Args:
        gen_model_factory: makes ``gen_model``.
        ref_model_factory: makes ``ref_model``.
        assistant_only: count only what the assistant produced. Default True.
        history_key: where conversations are, used when the data holds no tokens. Default ``"history"``.
        tokenizer_kwargs: see :class:`RetrieveLogProb`; so are ``detach``, ``device``, ``tokenizer``, ``padding_side``,
            ``temperature``, ``scope``, ``dtype`` and ``memory``, which hold for both models; ``detach=False`` gives the
            policy's log-probs a gradient, the frozen reference never has one.
        entropy_key: where to write the policy's entropy, if anywhere.
        gen_log_probs_full_key: default ``("log_probs", "full")``.
        ref_log_probs_full_key: default ``("ref_log_probs", "full")``.
        kl_key: see :class:`KLComputation`; so are ``add_to_reward``, ``coeff``, ``reward_placement``,
            ``old_log_probs_key`` and ``reward_key``.
        estimator: see :class:`KLComputation`; with ``"exact"`` both models are run side by side, and the KL at each token
            is the sum over the whole vocabulary (both must have the same one).

    Shapes:
        log-probs and KL: float32 nats ``[*B, T]``; reward ``[*B, T, 1]``; all in the form of the tokens.

    Raises:
        ValueError: at construction, for models that generate, differ in ``pad_output``, or write to one key; on data, see
            :class:`RetrieveLogProb` and :class:`KLComputation`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=8, intermediate_size=8,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> data = TensorDict(tokens=tokens, next=TensorDict(reward=torch.ones(1, 1), batch_size=[1]), batch_size=[1])
        >>> data = RetrieveKL(model, model)(data)  # the KL of a model with itself is 0
        >>> data["next", "kl_penalty"].tolist(), data["next", "reward"].squeeze(-1).tolist()
        ([[0.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 1.0]])
    """

    def __init__(
        self,
        gen_model: Any = "from_collector",
        ref_model: Any = None,
        *,
        gen_model_factory: Callable[[], Any] | None = None,
        ref_model_factory: Callable[[], Any] | None = None,
        assistant_only: bool = True,
        history_key: NestedKey = "history",
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor | nn.Module = 1.0,
        use_ray_service: bool = False,
        estimator: Any = "k1",
        reward_placement: RewardPlacement = "last",
        old_log_probs_key: NestedKey | None = None,
        reward_key: NestedKey = "reward",
        entropy_key: NestedKey | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := sorted(set(kwargs) - _OF_BOTH):
            raise TypeError(
                f"RetrieveKL() got unexpected keyword arguments {unknown}; beyond those named it takes {sorted(_OF_BOTH)}"
            )
        gen_model = resolve_factory("gen_model", gen_model, gen_model_factory, default="from_collector")
        ref_model = resolve_factory("ref_model", ref_model, ref_model_factory, default=None)
        _check_models(gen_model, ref_model)
        if isinstance(gen_model, str):  # as torchrl: otherwise RetrieveLogProb warns
            _check_full_keys(gen=gen_log_probs_full_key, ref=ref_log_probs_full_key)
        shared: dict[str, Any] = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
            "history_key": history_key,
            **kwargs,
        }
        base = isinstance(ref_model, str)
        super().__init__(
            RetrieveLogProb(gen_model, log_probs_full_key=gen_log_probs_full_key, entropy_key=entropy_key, **shared),
            RetrieveLogProb(
                gen_model if base else ref_model,
                log_probs_full_key=ref_log_probs_full_key,
                **{**shared, "detach": True, **({"adapters": False} if base else {})},
            ),
            KLComputation(
                gen_log_probs_full_key,
                ref_log_probs_full_key,
                kl_key=kl_key,
                add_to_reward=add_to_reward,
                coeff=coeff,
                padding_side=padding_side,
                estimator=estimator,
                reward_placement=reward_placement,
                old_log_probs_key=old_log_probs_key,
                reward_key=reward_key,
            ),
        )

    @property
    def coeff(self) -> nn.Module:
        """The coefficient module: call it for its value, ``update`` it if it adapts."""
        return self[2].coeff

    def __setattr__(self, name: str, value: Any) -> None:
        for part in _OF_PARTS.get(name, ()):
            setattr(self[part], name, value)
        if name not in _OF_PARTS:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_PARTS:
            return getattr(self[_OF_PARTS[name][0]], name)
        return super().__getattr__(name)

    def clone(self) -> RetrieveKL:
        """A copy that another env can hold: a transform of this class, with the same models."""
        found = Transform.clone(self)
        found.transforms = nn.ModuleList(part.clone() for part in self)
        for part in found:
            part.set_container(found)
        return found

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Locate once, score twice, compute."""
        gen, ref, kl = self[0], self[1], self[2]
        located = gen.locate(td)
        if not located.sampled and not gen.tokenises_like(ref):
            check_same_tokens(located, ref.locate(td))
        exact = kl.estimator == "exact"
        ref_scores = (
            None if exact else ref.begin(located)
        )  # in another process it works while the policy is scored here
        scores = gen.evaluate(located, ref.scorer if exact else None)
        ref_log_prob = scores.ref_log_prob if ref_scores is None else ref_scores().log_prob
        assert ref_log_prob is not None
        old = kl.read_old(td, next_td, scores.log_prob)
        outputs = [
            Output.of(gen.log_probs_full_key, scores.log_prob),
            Output.of(ref.log_probs_full_key, ref_log_prob),
            *kl.compute(scores.log_prob, ref_log_prob, located.mask, next_td, old=old, exact=scores.kl),
        ]
        if scores.entropy is not None:
            outputs.append(Output.of(gen.entropy_key, scores.entropy))
        return outputs


def _check_full_keys(**keys: NestedKey) -> None:
    for name, key in keys.items():
        if not isinstance(key, tuple) or key[-1] != "full":
            raise ValueError(
                f"The {name}_log_probs_full_key {key} is not a tuple or does not end with 'full'. "
                "This may cause issues with the KL computation. "
                "Please use a tuple with the log_probs_key and 'full' as the last element."
            )


def _check_models(gen_model: Any, ref_model: Any) -> None:
    """The checks of torchrl, with its texts, on whichever models are known at construction."""
    if isinstance(ref_model, str) and ref_model != "base":
        raise ValueError(f"ref_model must be a model or 'base', got {ref_model!r}")
    if ref_model is None:
        raise ValueError("ref_model cannot be None")
    if gen_model is None:
        raise ValueError("gen_model cannot be None when not using 'from_collector'")
    both = not isinstance(gen_model, str) and not isinstance(ref_model, str)
    paddings = [model.pad_output for model in (gen_model, ref_model) if hasattr(model, "pad_output")]
    if len(set(paddings)) > 1:
        raise ValueError(
            f"pad_output mismatch: gen_model.pad_output={paddings[0]}, ref_model.pad_output={paddings[1]}. "
            "Both models must use the same padding strategy for KL computation."
        )
    for name, model in (("generation", gen_model), ("reference", ref_model)):
        if isinstance(model, str):
            continue
        if not getattr(model, "return_log_probs", True):
            raise ValueError(f"The {name} model must have `return_log_probs=True` to use the `RetrieveKL` transform.")
        if getattr(model, "generate", False) is True:
            raise ValueError(f"The {name} model must have `generate=False` to use the `RetrieveKL` transform.")
    if both and getattr(gen_model, "log_probs_key", "gen_log_probs") == getattr(
        ref_model, "log_probs_key", "log_probs"
    ):
        raise ValueError(
            "The generation and reference models must have different `log_prob_key` values to use the `RetrieveKL` transform."
        )
