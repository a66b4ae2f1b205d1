"""Changes that no test can notice, with the reason."""

from __future__ import annotations

#: (file below ``torchrl_llm_kl``, function, the line with the change) -> why it is the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {}


def _same(file: str, function: str, reason: str, *lines: str) -> None:
    EQUIVALENT.update({(file, function, line): reason for line in lines})


_same(
    "losses/_arithmetic.py",
    "aggregate",
    "a count of 0 goes with a sum of 0",
    "return value.sum() / torch.where(denominator == 0, 2, denominator)",
)
_same("losses/_arithmetic.py", "clean", "booleans have no graph", "return (value & mask).detach()")
_same(
    "losses/_value_loss.py",
    "value_error",
    "any tiny number will do: it only keeps 0 / 0 away",
    "variance = masked_mean(spread.square(), mask).clamp(min=2e-12)",
)

_same(
    "losses/corrections.py",
    "_corrected",
    "multiplied by that weight of 0",
    "return term.replace(value=torch.where(weights == 0, 1, term.value) * weights)",
)
_same(
    "losses/corrections.py",
    "_effective_size",
    "a common factor of all weights cancels",
    "scaled = weight / weight.amax().clamp(min=2.0) if weight.numel() else weight",
)
_same(
    "losses/corrections.py",
    "_effective_size",
    "0 divided by anything",
    "return masked_mean(scaled, mask).square() / torch.where(square == 0, 2, square)",
)
for _function in ("rejection_mask", "mismatch_metrics"):
    _same(
        "losses/corrections.py",
        _function,
        "masked-out tokens are dropped again further on",
        "old, sampler = checked((mask | True), old_log_prob=old_log_prob, sampler_log_prob=sampler_log_prob)",
    )
_same(
    "losses/corrections.py",
    "top_entropy_mask",
    "masked-out tokens are dropped again further on",
    "(entropy,) = checked((mask | True), entropy=entropy)",
)

_same(
    "losses/objectives/_clipped.py",
    "clipped_surrogate",
    "where the advantage is 0 the value is 0, and nothing is clipped",
    "metrics = clip_fractions(clipped & (advantage <= 0), clipped & (advantage > 0), mask)",
    "metrics = clip_fractions(clipped & (advantage < 0), clipped & (advantage >= 0), mask)",
    'metrics["clip_fraction_dual"] = masked_mean(((value > ceiling) & (advantage <= 0)).float(), mask)',
    "value = torch.where(advantage <= 0, torch.minimum(value, ceiling), value)",
)

_CHOICE = "a choice is boolean: it has no graph"
_same(
    "losses/objectives/_covariance.py",
    "clip_cov",
    _CHOICE,
    "selected = (select_clip_cov( log_prob, mask, old_log_prob=old_log_prob, advantage=advantage, fraction=fraction, "
    "cov_low=cov_low, cov_high=cov_high, clip_low=clip_low, clip_high=clip_high, )).detach()",
)
_same(
    "losses/objectives/_covariance.py",
    "kl_cov",
    _CHOICE,
    "selected = (select_kl_cov(log_prob, mask, advantage=advantage, fraction=fraction)).detach()",
)
_same(
    "losses/objectives/_covariance.py",
    "select_kl_cov",
    "means and candidates are masked: what is cleaned is never read",
    "log_prob, advantage = checked((mask | True), log_prob=log_prob, advantage=advantage)",
)
_same(
    "losses/objectives/_covariance.py",
    "select_clip_cov",
    "the mask is for metrics, which are not used",
    "surrogate, _ = clipped_surrogate(ratio, advantage, (mask | True), clip_low, clip_high)",
)
_same(
    "losses/objectives/_covariance.py",
    "_highest",
    "the order of equal scores is unspecified",
    "order = torch.where(candidates, score, -torch.inf).flatten().argsort(descending=True, stable=False)",
)
_same(
    "losses/objectives/_off_policy.py",
    "dppo",
    "where both are equal the distance is 0, which is above no bound",
    "too_high, too_low = (distance > clip_high) & (now >= old_log_prob), (distance > clip_low) & (now < old_log_prob)",
    "too_high, too_low = (distance > clip_high) & (now > old_log_prob), (distance > clip_low) & (now <= old_log_prob)",
)
_same(
    "losses/objectives/_clipped.py",
    "gmpo",
    "the bound is taken only where it is a constant",
    "bound = (clamp(free, -clip_low, clip_high)).detach()",
)
_same(
    "losses/objectives/_supervised.py",
    "mix",
    "the expert mask is False where the mask is",
    "(expert,) = sft(log_prob, expert_mask)",
)
_same(
    "losses/objectives/_supervised.py",
    "mix",
    "both parts have the dtype of log_prob",
    "fraction = masked_mean(expert.mask.to(usual.value.dtype), mask)",
)
_same(
    "losses/objectives/_supervised.py",
    "mu_schedule",
    "a first and only step begins at 0",
    "rising = mu_peak * (step / max(mu_warmup_steps, 2))",
    "progress = (step - mu_warmup_steps) / max(mu_decay_steps, 2)",
)
_same(
    "losses/objectives/_supervised.py",
    "mu_schedule",
    "the cosine of minus an angle is its cosine",
    "progress = -((step - mu_warmup_steps) / max(mu_decay_steps, 1))",
)
_same(
    "losses/objectives/_preference.py",
    "interleaving",
    "the first one raises",
    "for at in (found != 1).any(-1).nonzero().flatten().tolist()[:2]:",
)
_same(
    "losses/objectives/_preference.py",
    "interleaving",
    "on a CPU every sort is stable",
    "first = (~chosen).long().argsort(stable=False)",
    "return first[pair_id[first].argsort(stable=False)]",
)
_same(
    "losses/objectives/_preference.py",
    "finish",
    "both have one dtype",
    '"reward_accuracy": masked_mean((won > lost).to(lost.dtype), mask),',
)
_same(
    "losses/objectives/_clipped.py",
    "sapo",
    "a product with 1 is a quotient by 1",
    "tau = torch.where(advantage > 0, tau_pos / one, tau_neg * one)",
    "tau = torch.where(advantage > 0, tau_pos * one, tau_neg / one)",
)
_same(
    "losses/objectives/_off_policy.py",
    "sppo",
    "the ratio is only compared",
    "ratio = bounded_exp(log_prob - old_log_prob)",
)
_same(
    "losses/objectives/_off_policy.py",
    "topr",
    "log-probs are 0 where the mask is False",
    "log_ratio = sequence_sum(log_ratio, (mask | True))",
)
_same(
    "losses/objectives/_off_policy.py",
    "vespo",
    "log-probs are 0 where the mask is False",
    "log_w = sequence_sum(log_prob.detach() - old_log_prob, (mask | True))",
)

_same(
    "advantages/_token.py",
    "estimate",
    "on a CPU every sort is stable",
    "order = (~mask).byte().argsort(dim=-1, stable=False)",
)
_same(
    "advantages/_token.py",
    "estimate",
    "after the last token there are only zeros",
    "last = torch.arange(mask.shape[-1], device=mask.device) > mask.sum(-1, keepdim=True) - 1",
    "last = torch.arange(mask.shape[-1], device=mask.device) >= mask.sum(-1, keepdim=True) + 1",
)
_same(
    "advantages/_group.py",
    "Groups.centred",
    "any number of a group will do to measure from",
    "above = x - self.max(x)",
)
_same(
    "advantages/_group.py",
    "opo",
    "any number of a group will do to measure from",
    "above = reward - groups.max(reward) # as in Groups.centred",
)
_same(
    "advantages/_group.py",
    "Groups.rank",
    "on a CPU every sort is stable",
    "order = x.argsort(stable=False)",
    "order = order[self.ids[order].argsort(stable=False)]",
)
_same(
    "advantages/_group.py",
    "normalised",
    "where nothing spreads all are 0",
    "return centred / torch.where(std == 0, 2, std + epsilon)",
)
_same(
    "advantages/_group.py",
    "rec",
    "groups stay apart",
    "groups = Groups(3 * groups.ids + dropped) # the kept rows of a group are a group",
)
_same(
    "advantages/_group.py",
    "_surplus",
    "no more than the negative ones are surplus, and they come first",
    "return (among_negative < surplus)",
)
_same(
    "advantages/_trajectory.py",
    "Trajectories.discounted",
    "a table without rows",
    "shape = (len(self.rows.sizes), int(self.rows.sizes.max()) if len(reward) else 1)",
)
_same(
    "advantages/_trajectory.py",
    "Trajectories.discounted",
    "with values of 0 the target is the advantage",
    "return estimate(table, torch.zeros_like(table), present, gamma, 1.0)[1][where]",
)
