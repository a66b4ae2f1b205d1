"""Host syncs and kernels of each operation stay within a ceiling. Lower the ceiling when an operation gets cheaper.

A sync is a wait of the host for the device. Kernels of transformers' own code are counted only for ``PACKED``. Each operation
runs once before it is counted. Three kernels of each score are for a sum without the largest probability (``rest_of``), which
keeps the digits of a nearly certain token's log-prob.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from parity import CPU, to
from policy_batches import batch
from scoring_reference import conversation
from seeded import clean, make_tokenizer
from simulated import watch
from torchrl_llm_kl import KLComputation, LogProbScorer, PolicyLoss, Ragged, Sampling, diagnose
from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.losses import KLToReference
from toy_models import tiny_model


class Budget(NamedTuple):
    """The ceilings of one operation."""

    syncs: int
    kernels: int | None = None


BUDGETS: dict[str, Budget] = {
    "construction of a scorer": Budget(5, 82),
    "score, ids on the device": Budget(2, 31),
    "score, padded ids on the device": Budget(2, 34),
    "score, ids on the CPU": Budget(1, 28),
    "score of top-k and top-p": Budget(2, 90),
    "PolicyLoss forward": Budget(3, 154),
    "PolicyLoss backward": Budget(0, 258),
    "KLComputation": Budget(1, 12),
    "GRPO advantage": Budget(1, 11),
    "diagnose": Budget(8, None),
}
#: All kernels of a scorer's construction, including the model's own.
PROBE = 540
#: Kernels of a packed score with shared prefixes, divided by those of a plain padded forward of the same sequences.
PACKED = 1.1


def scoring(device: torch.device, on_device: bool = True, **settings: Any) -> Callable[[], Any]:
    tokens = to(Ragged.from_list(conversation()), device if on_device else CPU)
    scorer, mask = LogProbScorer(tiny_model("llama").to(device), **settings), tokens.positions > 0
    return lambda: scorer.score(tokens, mask)


def padded(device: torch.device) -> Callable[[], Any]:
    data = batch().to(device)
    scorer, masks = LogProbScorer(tiny_model("llama").to(device)), data["masks"]
    mask, attention = masks["all_assistant_mask"], masks["all_attention_mask"]
    return lambda: scorer.score(data["tokens", "full"], mask & attention, attention_mask=attention)


def policy_loss(device: torch.device) -> Callable[[], Any]:
    loss, data = PolicyLoss(tiny_model("llama").to(device), terms=[KLToReference(0.1)]), batch().to(device)
    return lambda: loss(data)


def backward(device: torch.device) -> Callable[[], Any]:
    forward = policy_loss(device)
    total = [forward().total_loss for _ in range(2)]
    return lambda: total.pop().backward()


def kl(device: torch.device) -> Callable[[], Any]:
    transform, data = KLComputation(coeff=0.1), batch().to(device)["next"]
    data["reward"] = torch.ones(6, 1, device=device)
    return lambda: transform(data.clone())


def advantage(device: torch.device) -> Callable[[], Any]:
    data = batch().to(device)
    data["next", "reward"] = torch.arange(6.0, device=device).unsqueeze(-1)
    data["group"] = torch.arange(6, device=device) // 3
    transform = Advantage("grpo", group_key="group")
    return lambda: transform(data.clone())


def doctor(device: torch.device) -> Callable[[], Any]:
    model, rollout = clean("qwen2", 0)
    model, data = to(model, device), rollout.batch().to(device)
    return lambda: diagnose(data, policy=model, tokenizer=make_tokenizer())


OPERATIONS: dict[str, Callable[[torch.device], Callable[[], Any]]] = {
    "construction of a scorer": lambda device: partial(LogProbScorer, tiny_model("llama").to(device)),
    "score, ids on the device": scoring,
    "score, padded ids on the device": padded,
    "score, ids on the CPU": partial(scoring, on_device=False),
    "score of top-k and top-p": partial(scoring, sampling=Sampling(0.9, top_k=20, top_p=0.9)),
    "PolicyLoss forward": policy_loss,
    "PolicyLoss backward": backward,
    "KLComputation": kl,
    "GRPO advantage": advantage,
    "diagnose": doctor,
}


def warned_of_syncs(operation: Callable[[], Any]) -> int:
    """The number of CUDA's warnings that the host waits."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            operation()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BUDGETS)
def test_an_operation_stays_within_its_budget(device, name, figures):
    operation = OPERATIONS[name](device)
    operation()
    if device.type != "sim":
        syncs = warned_of_syncs(operation)
        figures("budgets", name, str(syncs))
        pytest.skip(f"{syncs} syncs, copies from pageable memory among them; budgets are of the simulated accelerator")
    with watch() as record:
        operation()
    budget, kernels = BUDGETS[name], record.kinds["kernel"] - record.inside["model", "kernel"]
    figures("budgets", name, str(record.kinds["sync"]), str(kernels))
    assert record.kinds["sync"] <= budget.syncs, f"{record.kinds['sync']} syncs:\n{record.text('sync')}"
    assert kernels <= (budget.kernels or kernels), f"{kernels} kernels:\n{record.text('kernel')}"
    if name == "construction of a scorer":
        assert record.kinds["kernel"] <= PROBE, f"{record.kinds['kernel']} kernels with the model's own"
    assert not record.inside["library", "h2d"], f"copies that the host waits for:\n{record.text('h2d')}"


def test_packs_with_shared_prefixes_cost_hardly_more_kernels_than_a_padded_forward(sim, figures):
    model: Any = tiny_model("llama").to(sim)
    rows = conversation()
    ids = pad_sequence(rows, True).to(sim)
    real = pad_sequence([torch.ones_like(row) for row in rows], True).to(sim)
    scorer, tokens = LogProbScorer(model), Ragged.from_list(rows)

    def kernels(run: Callable[[], Any]) -> int:
        with torch.no_grad():
            run()
            with watch() as record:
                run()
        return record.kinds["kernel"]

    packed = kernels(lambda: scorer.score(tokens))
    padded = kernels(lambda: model(input_ids=ids, attention_mask=real).logits.log_softmax(-1))
    figures("budgets", "packs by a padded forward", "", f"{packed} / {padded}")
    assert packed <= PACKED * padded, f"{packed} kernels, {packed / padded:.2f} times those of a padded forward"


def test_the_default_loss_has_its_bounds_on_the_cpu(device):
    """On a GPU, clamp takes no tensor of the CPU, not even a 0-dim one such as a hyper-parameter."""
    loss, data = PolicyLoss(tiny_model("llama").to(device)), batch().to(device)
    assert loss.clip_low.device.type == "cpu"
    with pytest.raises(RuntimeError, match="same device"):
        data["advantage"].clamp_min(loss.clip_low)
    loss(data).total_loss.backward()
