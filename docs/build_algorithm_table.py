"""Write ``docs/algorithms.md`` from the presets, the schemas and the results of the learning tests.

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
terms are summed over tokens. `make_algorithm` binds it to models:

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
section (`policy_loss_fn_args`, `kl_loss_fn`, `advantage_fn_args`, ...) are accepted as keyword arguments; the
docstrings of `torchrl_llm_kl.losses` and `torchrl_llm_kl.advantages` describe them. A preset is a typed, frozen dataclass:
a type checker reports a wrong name.

"Learning test" is what the algorithm reaches in a test, on a small language task whose optimum is known: `TV` is the
total variation between the trained policy and that optimum, over whole answers.

"""

KL = """
## Where the KL goes

`kl_loss` is an estimator in the loss, `kl_reward` one in the reward. A `k1` in the loss has a mean gradient of zero,
`k3` has that of the forward KL, a clamped one has none where the clamp is active: each of these warns at construction
and recommends another ([estimators](estimators.md)).

The two places differ even with the right estimator. With `k1` in the reward, training converges to the optimum of
"reward minus beta times KL" over whole answers, `pi_ref exp(r / beta)` normalised (also with advantages divided by a
standard deviation: at the optimum all of them are 0). A KL per token in the loss (`k2`, `exact`) treats the prefix as
fixed and ignores that a token now may lead to a large KL later. It converges to `pi(a | s) ~ pi_ref(a | s) exp(Q(s, a) /
beta)`, where `Q` sums rewards alone: the same where tokens are independent, a total variation of 0.23 away on the chain
that the tests train on. For an exact trade-off between reward and KL use `kl_loss="none", kl_reward="k1"`; to keep the
policy near the reference, `k2` in the loss is fine, and the presets have it because Trinity-RFT does.

## Flags

Trinity-RFT 0.6.0's, for trainers that need to know what an algorithm needs. Its table of core algorithms has no `dapo`,
`dr_grpo`, `gigpo` and `jsd`. `use_reference` and `use_critic` follow from the other fields unless given.

"""

SOURCES = """
## The source of each value

"""

DATA = """
## Entries of the data

A schema lists what a batch must hold before `prepare`; `SCHEMAS[name].check(batch)` reports everything that is wrong with
it. `B` is the batch (any number of dimensions), `T` tokens, `P` tokens of the prompt; data may be padded, nested or
lazily stacked.
"""


def render() -> str:
    """Build the page's text."""
    data = "".join(f"\n**`{name}`**\n\n{schema.table()}" for name, schema in SCHEMAS.items())
    return INTRO + algorithm_table(LEARNED) + KL + flag_table() + SOURCES + source_table() + DATA + data


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
