"""KL estimators, the exact KL, and their coefficients: pure functions of tensors of one shape.

The table in ``docs/estimators.md`` says which estimator to use where. The per-token estimators share these arguments:

Args:
    log_prob: nats, log-prob of the sampled token under the current policy, ``[*B, T]``.
    ref_log_prob: log-prob of the same token under the reference, without graph, same shape.
    old_log_prob: log-prob of the same token under the policy that sampled it, without graph, same shape. Only
        ``corrected_k3`` uses it. The others check its shape.

Returns:
    One value per token, ``[*B, T]``, not masked, not reduced and not detached. The arithmetic and the result are in float32
    or wider. NaN where both log-probs are ``-inf``: mask such positions *before* calling.

Raises:
    ValueError: if the shapes differ.
"""

from __future__ import annotations

from torchrl_llm_kl._exports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

from torchrl_llm_kl.estimators import _per_token  # noqa: E402, F401  (they register themselves)
