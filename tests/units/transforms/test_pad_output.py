"""A wrapper's ``pad_output`` decides the layout of the output, as in torchrl, and all readers accept each layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchrl.envs.llm.transforms import kl as torchrl_kl

from closeness import assert_near
from layouts import lay_out
from torchrl_llm_kl import KLComputation, KLRewardTransform, PolicyLoss, RetrieveKL, RetrieveLogProb, make_algorithm
from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.scoring import RememberedModel
from toy_models import FORWARD
from toy_rollouts import plain_log_probs, rows_of

LENGTHS, WIDTH, PROMPTS = (9, 35), 35, (4, 6)
KEYS = [("next", "log_probs", "full"), ("next", "ref_log_probs", "full"), ("next", "kl_penalty"), ("next", "reward")]


def sequences() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randint(5, 60, (length,)) for length in LENGTHS]


def data(form: str = "left") -> TensorDictBase:
    """Two sequences: padded on one side, nested, or leaves of a lazy stack with their own or with padded widths."""
    columns: dict[Any, Any] = {
        ("tokens", "full"): sequences(),
        ("masks", "all_attention_mask"): [torch.ones(length, dtype=torch.bool) for length in LENGTHS],
        ("masks", "all_assistant_mask"): [torch.arange(n) >= p for n, p in zip(LENGTHS, PROMPTS, strict=True)],
    }
    if form in ("left", "right", "padded leaves"):
        side = "left" if form == "left" else "right"
        columns = {key: pad_sequence(rows, batch_first=True, padding_side=side) for key, rows in columns.items()}
    columns["next", "reward"] = torch.tensor([[2.0], [-1.0]])
    return lay_out("lazy" if "leaves" in form else form, columns, LENGTHS, LENGTHS)


@pytest.mark.parametrize("pad_output", [False, True])
def test_the_layout_equals_torchrls(lab: Any, pad_output: bool, ref_model: nn.Module) -> None:
    model, key = lab.wrapped(pad_output)[1], ("ref_log_probs", "full")
    made = (kind(model, assistant_only=False) for kind in (torchrl_kl.RetrieveLogProb, RetrieveLogProb))
    theirs, ours = (rows_of(transform(data().exclude("next")), key) for transform in made)
    assert [*map(len, ours)] == [*map(len, theirs)] == ([WIDTH, WIDTH] if pad_output else [*LENGTHS])
    for got, ids in zip(ours, sequences(), strict=True):
        assert_near(got[-len(ids) :], plain_log_probs(ref_model, ids), **FORWARD)


def expected(policy: nn.Module, ref: nn.Module) -> list[dict[Any, Tensor]]:
    """Log-probs, KL and reward of each sequence, with the outcome on the last token."""
    out = []
    for ids, prompt, outcome in zip(sequences(), PROMPTS, (2.0, -1.0), strict=True):
        gen, other = (plain_log_probs(model, ids) * (torch.arange(len(ids)) >= prompt) for model in (policy, ref))
        reward = -0.5 * (gen - other)
        reward[-1] += outcome
        out.append(dict(zip(KEYS, (gen, other, gen - other, reward.unsqueeze(-1)), strict=True)))
    return out


def check(td: TensorDictBase, want: list[dict[Any, Tensor]], side: str | None, keys: Any = KEYS) -> None:
    """Compare entries. ``side`` is the side of the padding, or None for unpadded rows."""
    for key in keys:
        for got, values in zip(rows_of(td, key), want, strict=True):
            value = values[key]
            if side is not None:
                zeros = value.new_zeros(WIDTH - len(value), *value.shape[1:])
                value = torch.cat([zeros, value] if side == "left" else [value, zeros])
            assert_near(got, value, **FORWARD, msg=str(key))


ROWS, PADDED = {"pad_output": False, "layout": torch.strided}, {"pad_output": True}
JAGGED = {"pad_output": False, "layout": torch.jagged}


@pytest.mark.parametrize(
    ("form", "options", "padding_side", "side"),
    [
        *[("left", ROWS, "left", None), ("right", JAGGED, "left", None), ("nested", JAGGED, "left", None)],
        *[("leaves", ROWS, "left", None), ("padded leaves", JAGGED, "left", None)],
        # Existing padding stays. ``padding_side`` applies to a nested tensor. Leaves of a stack are not padded.
        *[("left", PADDED, "right", "left"), ("right", PADDED, "left", "right"), ("leaves", PADDED, "left", None)],
        *[("padded leaves", PADDED, "left", "right"), ("nested", PADDED, "left", "left")],
        ("nested", PADDED, "right", "right"),
        # A bare model keeps the layout.
        *[("left", None, "left", "left"), ("nested", None, "left", None), ("leaves", None, "left", None)],
    ],
)
def test_layouts(lab: Any, form: str, options: Any, padding_side: str, side: Any, tmp_path: Path) -> None:
    models = (lab.gen_model, lab.ref_model) if options is None else lab.wrapped(**options)
    remembered = RememberedModel(models[1], tmp_path)
    for ref in (models[1], remembered, remembered):  # whose scores are stored, and then found
        out = RetrieveKL(models[0], ref, coeff=0.5, padding_side=padding_side)(data(form))
        check(out, expected(lab.gen_model, lab.ref_model), side)
    assert remembered.store.tokens_recalled > 0


@pytest.mark.parametrize("pad_output", [False, True])
def test_the_reward_transform(lab: Any, pad_output: bool, policy_model: nn.Module, ref_model: nn.Module) -> None:
    td, want = data(), expected(policy_model, ref_model)
    filled = torch.zeros(2, WIDTH)
    for row, values in zip(filled, want, strict=True):
        row[WIDTH - len(values[KEYS[0]]) :] = values[KEYS[0]]
    td["log_probs", "full"] = filled
    out = KLRewardTransform(lab.wrapped(pad_output)[1], coef=0.5)(td)
    check(out, want, "left" if pad_output else None, KEYS[3:])


def test_losses_and_advantages_read_rows_without_padding(lab: Any, policy_model: nn.Module) -> None:
    """Unpadded rows beside padded tokens give the same numbers as padded rows."""
    found = []
    for pad_output in (True, False):
        td = RetrieveKL(*lab.wrapped(pad_output), coeff=0.5)(data())
        td = Advantage("rloo", group_size=2)(td)
        tokens = Advantage("reinforce_plus_plus", keys={"advantage": "token_advantage"})(td.copy())["token_advantage"]
        loss = PolicyLoss(policy_model, "ppo", terms=[KLToReference(0.7)])(td)
        found.append((td["advantage"], tokens, loss["loss_objective"], loss["loss_kl_to_ref"], loss["kl_to_sampler"]))
    assert found[0][0].abs().min() > 0.1
    assert found[0][3] > 0.01
    assert_near(found[1], found[0], **FORWARD)


def test_separate_transforms_equal_the_composition(lab: Any, policy_model: nn.Module, ref_model: nn.Module) -> None:
    """The outcome is on the last assistant token, also for unpadded rows beside padded tokens."""
    td = data("right")
    td["masks", "all_assistant_mask"][1, 30:] = False
    whole = RetrieveKL(*lab.wrapped(), coeff=0.5)(td.clone())
    for model, key in zip(lab.wrapped(), ("log_probs", "ref_log_probs"), strict=True):
        td = RetrieveLogProb(model, log_probs_full_key=(key, "full"))(td)
    td = KLComputation(coeff=0.5)(td)
    want = expected(policy_model, ref_model)[1]
    kl = want[("next", "kl_penalty")].clone()
    kl[30:] = 0
    want_reward = -0.5 * kl
    want_reward[29] -= 1
    for found in (td, whole):
        assert_near(rows_of(found, ("next", "reward"))[1].squeeze(-1), want_reward, **FORWARD)
    again = KLComputation(coeff=0.5)(td)  # a reward per token, in rows without padding
    assert_near(rows_of(again, ("next", "reward"))[1].squeeze(-1), want_reward - 0.5 * kl, **FORWARD)


def test_an_algorithm_keeps_the_layout_of_the_batch(lab: Any) -> None:
    batch = make_algorithm("grpo", lab.wrapped()[0], reference=lab.ref_model, group_size=2).prepare(data())
    assert batch["next", "ref_log_probs", "full"].shape == (2, WIDTH)


def test_tokenizer_padding_without_pad_output_is_refused(lab: Any, ref_model: nn.Module) -> None:
    message = r"tokenizer_kwargs\['padding'\]=True has no effect\. Build the wrapper with pad_output=True"
    for model in (lab.wrapped()[1], ref_model):
        with pytest.raises(ValueError, match=message):
            RetrieveLogProb(model, tokenizer_kwargs={"padding": True})
    RetrieveLogProb(lab.wrapped(True)[1], tokenizer_kwargs={"padding": True})


def test_a_device_for_the_policy_of_a_collector_is_refused(ref_model: nn.Module) -> None:
    with pytest.raises(ValueError, match="device='cpu': the policy of a collector stays on its device"):
        RetrieveLogProb("from_collector", device="cpu")
    assert RetrieveKL("from_collector", ref_model, device="cpu").transforms[1].model is ref_model
