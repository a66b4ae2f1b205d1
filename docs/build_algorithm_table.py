"""Write ``docs/algorithms.md`` from the presets, the schemas, and what the learning tests show.

Run ``python docs/build_algorithm_table.py`` after a change to any; a test fails while the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "algorithms"))
from learned import LEARNED

from torchrl_llm_kl.algorithms import SCHEMAS, algorithm_table, flag_table, source_table

PAGE = Path(__file__).with_name("algorithms.md")

INTRO = """\
# Algorithms

*Written by `docs/build_algorithm_table.py`; edit that, or the presets in `torchrl_llm_kl.algorithms`, and run it
again.*

An algorithm is a preset: which [objective](losses.md), which advantage, where the KL to the reference goes, and how
terms are summed over tokens. `make_algorithm` puts models to it:

```python
from torchrl_llm_kl import make_algorithm

grpo = make_algorithm("grpo", actor, reference=reference, group_size=8, clip_high=0.28, kl_loss_coeff=0.01)
for batch in collector:
    batch = grpo.prepare(batch)  # checks the data, scores it, writes advantages and token counts
    for rows in torch.arange(len(batch)).chunk(4):  # micro-batches add up to the batch
        out = grpo.loss(batch[rows])
        (out["loss_objective"] + out["loss_kl_to_ref"]).backward()
    optimizer.step()
    optimizer.zero_grad()
```

Any field of a preset, any hyper-parameter of its objective or advantage, and the keys of Trinity-RFT's `algorithm`
section (`policy_loss_fn_args`, `kl_loss_fn`, `advantage_fn_args`, ...) are accepted as keyword arguments. What each
one is called and what it does stands in the docstrings of `torchrl_llm_kl.losses` and `torchrl_llm_kl.advantages`.

"Learning test" is what a test trains on a small language task whose optimum is known: `TV` is the total variation
between the trained policy and that optimum, over whole answers.

"""

KL = """
## Where the KL goes

`kl_loss` is an estimator in the loss, `kl_reward` one in the reward. A `k1` in the loss has a mean gradient of zero,
`k3` that of the forward KL, a clamped one none when far: each of these warns when the loss is made and names the
remedy ([estimators](estimators.md)).

The two places are not the same thing, even with the right estimator. With `k1` in the reward training rests at the
optimum of "reward minus beta times KL" over whole answers, `pi_ref exp(r / beta)` normalised; also with advantages
that are divided by a standard deviation, since all of them are 0 there. A KL per token in the loss (`k2`, `exact`)
takes the prefix as given: it does not see that a token now may lead where the KL will be large later. It rests at
`pi(a | s) ~ pi_ref(a | s) exp(Q(s, a) / beta)`, where `Q` counts rewards alone: the same where tokens are independent,
0.23 of total variation away on the chain that the tests train on. For an exact trade-off between reward and KL use
`kl_loss="none", kl_reward="k1"`; for a leash, `k2` in the loss is fine, and the presets have it because Trinity-RFT
does.

## Flags

As in Trinity-RFT 0.6.0, so that trainers can ask what an algorithm needs. `dapo`, `dr_grpo`, `gigpo` and `jsd` are
beyond its table of core algorithms.

"""

SOURCES = """
## Where each value is from

"""

DATA = """
## What the data holds

A schema lists what a batch must hold before `prepare`; `SCHEMAS[name].check(batch)` says everything that is wrong with
one. `B` is the batch (any number of dimensions), `T` tokens, `P` tokens of the prompt; padded, nested and lazily
stacked data alike.
"""


def render() -> str:
    """Build the page's text."""
    data = "".join(f"\n**`{name}`**\n\n{schema.table()}" for name, schema in SCHEMAS.items())
    return INTRO + algorithm_table(LEARNED) + KL + flag_table() + SOURCES + source_table() + DATA + data


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
