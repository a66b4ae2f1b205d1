"""A small batch of rollouts, on which losses of this package and of other libraries are compared."""

import collections
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from torchrl_llm_kl.estimators import KLPlacementWarning
from toy_models import tiny_model
from toy_tokenizer import build_tokenizer

PROMPT, WIDTH, ROWS = 3, 8, 24
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A model in double precision for the losses of other libraries. `conftest.py` imports it, like :func:`batch`."""
    folder = tmp_path_factory.mktemp("model")
    made = tiny_model("qwen2", seed=0, vocab_size=len(build_tokenizer(pad_token="<|pad|>"))).double()
    made.save_pretrained(folder)
    made.config._name_or_path = str(folder)  # TRL loads the reference from this path
    return made


@pytest.fixture(scope="session")
def batch(model: nn.Module) -> dict[str, Tensor]:
    """Answers of 1 to 8 tokens from the model, with ratios around all clip bounds, and advantages of both signs."""
    rng = torch.Generator().manual_seed(3)

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(*shape, generator=rng, dtype=torch.float64) - 1

    ids = torch.randint(10, model.config.vocab_size, (ROWS, PROMPT), generator=rng)
    with torch.no_grad():
        for _ in range(WIDTH):
            chosen = torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1, generator=rng)
            ids = torch.cat([ids, chosen], 1)
        whole = model(ids).logits.log_softmax(-1)[:, PROMPT - 1 : -1]
        log_prob = whole.gather(-1, ids[:, PROMPT:, None])[..., 0]
    # Some answers have a geometric mean of the ratios far from 1, most have one near 1.
    old = log_prob + 0.3 * uniform(ROWS, 1) ** 3 + 0.4 * uniform(ROWS, WIDTH)
    advantage = uniform(ROWS)
    return {
        "ids": ids,
        "mask": torch.arange(WIDTH) < torch.arange(ROWS)[:, None] % WIDTH + 1,
        "old": old,
        "ref": log_prob + 0.5 * uniform(ROWS, WIDTH),
        "sampler": old + 0.4 * uniform(ROWS, WIDTH),
        "advantage": advantage.sign() * (0.2 + advantage.abs()),
    }


def rollouts(batch: dict[str, Tensor]) -> TensorDict:
    """The batch as this package reads it, without the padding on the right."""
    names = {"log_probs": "old", "ref_log_probs": "ref", "sampler_log_probs": "sampler"}
    rows = []
    for i, mask in enumerate(batch["mask"]):
        stored = {key: torch.cat([torch.zeros(PROMPT), batch[name][i][mask]]) for key, name in names.items()}
        tokens = {"prompt": batch["ids"][i, :PROMPT], "full": batch["ids"][i, : PROMPT + int(mask.sum())]}
        following = {key: {"full": values} for key, values in stored.items()}
        rows.append(TensorDict({"tokens": tokens, "next": following, "advantage": batch["advantage"][i]}))
    return lazy_stack(rows)


class OneDevice(SimpleNamespace):
    """The state of a TRL trainer on one device that its loss reads."""

    def __init__(self, **more: Any) -> None:
        same: dict[str, Any] = dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x)
        same |= {"reduce": lambda x, **_: x, "device": "cpu", "num_processes": 1, "sync_gradients": True}
        given = {"model": SimpleNamespace(training=True), "accelerator": SimpleNamespace(**same)}
        metrics: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        super().__init__(**{**given, "_metrics": metrics, "aux_loss_enabled": False, **more})


#: A loss and the gradients of all parameters.
Found = tuple[Tensor, list[Tensor]]


def with_gradients(model: nn.Module, compute: Callable[[], Tensor]) -> Found:
    model.zero_grad(set_to_none=True)
    loss = compute()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def ours(model: nn.Module, batch: dict[str, Tensor], translation: Any, data: TensorDict | None = None) -> Found:
    """Loss and gradients of a translation, on the batch or on data made from it."""
    reads = translation.overrides.get("kl_loss", "none") != "none" or translation.algorithm in ("dpo", "kto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KLPlacementWarning)
        loss = translation.make(model, **({"reference": "data"} if reads else {})).loss
    return with_gradients(model, lambda: loss(rollouts(batch) if data is None else data).total_loss)


#: Results of :func:`evaluated`, by model and settings.
_EVALUATED: dict[tuple[int, str], Found] = {}


def evaluated(model: nn.Module, batch: dict[str, Tensor], translation: Any) -> Found:
    """As :func:`ours`, once for each algorithm and its settings."""
    key = id(model), repr((translation.algorithm, translation.overrides))
    if key not in _EVALUATED:
        _EVALUATED[key] = ours(model, batch, translation)
    return _EVALUATED[key]


def agree(found: Found, expected: Found) -> None:
    """Check that values and gradients are equal, and that the gradients are not 0."""
    assert_close(found[0].double(), expected[0].double(), **CLOSE)
    assert max(float(gradient.abs().max()) for gradient in expected[1]) > 1e-3
    for got, want in zip(found[1], expected[1], strict=True):
        assert_close(got, want, **CLOSE)


def differ(found: Found, other: Found) -> bool:
    """Whether two losses have different gradients."""
    return max(float((a - b).abs().max()) for a, b in zip(found[1], other[1], strict=True)) > 1e-5


def scored(model: nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response by a plain forward."""
    whole = (model(batch["ids"]).logits / temperature).log_softmax(-1)[:, PROMPT - 1 : -1]
    return whole.gather(-1, batch["ids"][:, PROMPT:, None])[..., 0], -(whole.exp() * whole).sum(-1)


def each_in_one_list(translation: Any, given: Mapping[str, Any]) -> None:
    """Check that each given setting is in exactly one list of a translation."""
    lists = (translation.translated, translation.sampled, translation.outside, translation.refused)
    names = [row.name for rows in lists for row in rows if row.given]
    assert collections.Counter(names) == collections.Counter(list(given))


def one_prompt_each(rewards: list[float], prompts: list[int]) -> TensorDict:
    """An answer of one token for each reward."""
    ids = torch.tensor([[10 * prompt + 1, 12, 13 + i] for i, prompt in enumerate(prompts)])
    entries = {"tokens": {"prompt": ids[:, :2], "full": ids}, "next": {"reward": torch.tensor(rewards)[:, None]}}
    return TensorDict(entries, batch_size=[len(ids)])
