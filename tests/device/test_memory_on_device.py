"""Peak bytes of a score and of a training step, compared with the formula of docs/scoring.md."""

import pytest
import torch

from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import tiny_model

MIB = 2**20
HIDDEN, INTERMEDIATE, KEYS = 64, 128, 32  # of the model; two heads of keys, of 16 numbers
#: Columns: number of sequences, tokens of each, scored tokens of each, tokens of a shared prefix, vocabulary, layers,
#: tokens_per_batch.
CASES: dict[str, tuple[int, ...]] = {
    "one pack, all scored": (8, 64, 63, 0, 8192, 2, 16384),
    "a wider vocabulary": (8, 64, 63, 0, 32768, 2, 16384),
    "more scored positions": (32, 64, 63, 0, 8192, 2, 16384),
    "many packs": (32, 64, 63, 0, 8192, 2, 512),
    "one token scored": (8, 64, 1, 0, 8192, 2, 16384),
    "more layers": (8, 64, 1, 0, 8192, 8, 16384),
    "many tokens": (32, 64, 1, 0, 8192, 2, 2048),
    "a prefix of many packs": (20, 10, 1, 1990, 8192, 8, 100),
    "fewer layers": (20, 10, 1, 1990, 8192, 2, 100),
}


def measured(device: torch.device, case: str, grad: bool) -> float:
    """The peak above the memory that was in use before the call."""
    sequences, length, scored, shared, vocab, layers, budget = CASES[case]
    sizes = {"num_hidden_layers": layers, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    model = tiny_model("llama", vocab_size=vocab, max_position_embeddings=4096, **sizes).to(device)
    scorer = LogProbScorer(model, tokens_per_batch=budget)
    rng = torch.Generator().manual_seed(0)
    prefix = torch.randint(vocab, (shared,), generator=rng)
    rows = [torch.cat([prefix, torch.randint(vocab, (length,), generator=rng)]) for _ in range(sequences)]
    batch = Ragged.from_list(rows)
    mask = batch.positions >= shared + length - scored
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    found = scorer.score(batch, mask, grad=grad).values
    if grad:
        found.sum().backward()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def formula(case: str, grad: bool) -> float:
    """The formula of docs/scoring.md, in bytes."""
    sequences, length, scored, shared, vocab, layers, budget = CASES[case]
    tokens, positions = shared + sequences * length, sequences * scored
    pack = min(tokens, budget)
    if not grad:
        positions = min(positions, positions * budget // tokens)  # of a pack
    tile = 4 * min(positions, 2048) * min(vocab, 8192)
    if grad:
        weights = 2 * vocab * HIDDEN + layers * (2 * HIDDEN * (HIDDEN + KEYS) + 3 * HIDDEN * INTERMEDIATE)
        activations = layers * tokens * 6 * (INTERMEDIATE + HIDDEN)
        masks = 4 * pack * tokens  # one for each pack
        return 4 * (weights + activations) + masks + 5 * tile + min(4 * positions * vocab, 64 * MIB)
    past = shared if shared > budget else 0
    body = 4 * pack * (3 * INTERMEDIATE + 4.5 * HIDDEN) + 4 * pack * (past + pack)
    return max(body + 4 * (layers + 1) * past * 2 * KEYS, 3 * tile)


STEPS = [case for case in CASES if "prefix" not in case and "fewer" not in case]


@pytest.mark.parametrize(("case", "grad"), [*((x, False) for x in CASES), *((x, True) for x in STEPS)])
def test_peak_of_a_score_and_of_a_training_step(device, case, grad, figures):
    found, expected = measured(device, case, grad), formula(case, grad)
    row = f"{'training step' if grad else 'score'}: {case}"
    figures("memory", row, f"{found / MIB:.2f} MiB", f"{expected / MIB:.2f} MiB")
    slack = 0 if device.type == "sim" else 64 * MIB  # what libraries of kernels keep for themselves
    assert (0.75 if grad else 0.8) * expected - slack < found < 1.15 * expected + slack
