"""Where the transform finds inputs and leaves outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensordict import NestedKey

from torchrl_llm_kl.advantages._spec import AdvantageSpec

__all__ = ["ADVICE", "DEFAULT_KEYS", "resolve_keys"]

#: Where each input is read and each output written by default. For a mask, and for what tells trajectories apart, there
#: is no such key: see :class:`~torchrl_llm_kl.advantages.Advantage`.
DEFAULT_KEYS: dict[str, NestedKey] = {
    "reward": ("next", "reward"),
    "group": "query",
    "baseline": "reward_baseline",
    "value": ("next", "state_value"),
    "old_log_prob": ("next", "log_probs", "full"),
    "teacher_log_prob": ("next", "ref_log_probs", "full"),
    "state": "state",
    "advantage": "advantage",
    "value_target": "value_target",
}

#: What to do about an input that is missing.
ADVICE: dict[str, str] = {
    "reward": "Add a transform to the env that rewards, or give keys={'reward': ...}",
    "group": "Give group_key=, the entry that is equal for all answers to a prompt, or group_size= if they are consecutive",
    "baseline": "Answer each prompt greedily once and store that reward, or give keys={'baseline': ...}",
    "value": "Put RetrieveValue before, or give keys={'value': ...}",
    "old_log_prob": "Put RetrieveLogProb (or RetrieveKL) of the policy before, or give keys={'old_log_prob': ...}",
    "teacher_log_prob": "Put RetrieveLogProb of the teacher before (RetrieveKL(policy, teacher) writes both), or give "
    "keys={'teacher_log_prob': ...}",
    "state": "Store a number or string that identifies the env's state before the step, or give keys={'state': ...}",
    "run": "keys={'run': ...} says where it is",
    "step": "keys={'step': ...} says where it is",
}


def resolve_keys(
    spec: AdvantageSpec, inputs: Sequence[str], layout: str, given: Mapping[str, NestedKey] | None
) -> dict[str, NestedKey]:
    """The keys that are read and written: the defaults, and over them what was given.

    Raises:
        ValueError: if a key is given for something that is neither read nor written.
    """
    # Derived from log-probs of tokens, and told by arguments of their own.
    names = {"old_log_prob" if name == "mean_log_prob" else name for name in inputs} - {"group", "mask"}
    tokens = {"mask"} if layout == "token" or "mean_log_prob" in inputs else set()
    known = {*names, *tokens, *spec.outputs}
    for name in given or {}:
        if name not in known:
            advice = ": give group_key=" if name == "group" and "group" in inputs else ""
            raise ValueError(f"{spec.name} has no key {name!r}{advice}; it has {', '.join(sorted(known))}")
    defaults = {name: key for name, key in DEFAULT_KEYS.items() if name in known}
    return {**defaults, **(given or {})}
