"""Reference scores from the plain model, one sequence at a time without padding, sample data, and other backends."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from closeness import assert_near
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE


def random_sequences(*lengths: int, seed: int = 0, vocab: int = VOCAB_SIZE) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list([torch.randint(vocab, (length,), generator=generator) for length in lengths])


def random_mask(sequences: Ragged, *, keep: float = 0.5) -> Tensor:
    """A mask with holes, False at first tokens."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(sequences.values.shape, generator=generator) < keep) & (sequences.positions > 0)


def plain_log_probs(model: nn.Module, sequences: Ragged, mask: Any = None, *, temperature: float = 1.0) -> Tensor:
    """Log-probs ``[N]`` of the plain model, 0 where nothing is scored."""
    rows = []
    for ids in sequences.to_list():
        rows.append(torch.zeros(min(len(ids), 1), device=ids.device))
        if len(ids) > 1:
            output = model(input_ids=ids[None])
            logits = (output.logits if hasattr(output, "logits") else output[0])[0].float() / temperature
            rows.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1))
    return torch.cat(rows) if mask is None else torch.where(mask, torch.cat(rows), 0.0)


def assert_scores(scorer: LogProbScorer, model: nn.Module, rows: list[Tensor], **options: bool) -> None:
    """Check that the log-probs of each row equal the plain model's."""
    found = scorer.score(Ragged.from_list(rows), **options).to_list()
    for row, log_probs in zip(rows, found, strict=True):
        with torch.no_grad():
            want = plain_log_probs(model, Ragged.from_list([row]))
        assert_near(log_probs, want, **FORWARD)


def assert_gradients(found: Any, want: Any) -> None:
    """Check that gradients are equal, and missing for the same parameters."""
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_near(a, b, **BACKWARD, dtype=torch.float32)  # norms and rotations are float32 in any model


def ids(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


#: The number of tokens of ``conversation()`` that go through the body, by hand.
SHARED = 37 + 16 + 18 + 12 + 10


def conversation() -> list[Tensor]:
    """Two groups of answers, of which one continues with a second turn, and two other sequences."""
    prompt, other = ids(20, 0), ids(18, 1)
    second = torch.cat([prompt, ids(17, 2)])
    prompts = (prompt, prompt, second, second, other, other, ids(0, 0), ids(0, 0))
    lengths = (6, 3, 4, 7, 5, 9, 11, 1)
    return [torch.cat([p, ids(n, 3 + i)]) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]


def body_tokens(model: Any, run: Any) -> int:
    """The number of tokens without padding that go through the first layer while ``run`` runs."""
    seen = 0

    def count(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        mask = kwargs.get("attention_mask")
        seen += kwargs["input_ids"].numel() if mask is None else int(mask.sum())

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    run()
    handle.remove()
    return seen


class FullLogits(nn.Module):
    """A model without a separate head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None) -> tuple[Tensor]:
        return (self.inner(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids).logits,)


def make_scorer(model: nn.Module, kind: str, **settings: Any) -> LogProbScorer:
    """A scorer of a kind: ``packed``, ``padded``, or ``full`` for a model that only returns logits."""
    if kind == "full":
        with pytest.warns(UserWarning, match="full forward"):
            return LogProbScorer(FullLogits(model), **settings)
    return LogProbScorer(model, share_prefixes=kind != "padded", **settings)


class Recurrent(nn.Module):
    """A language model from another library: no configuration, no named parts, logits in ``form``."""

    def __init__(self, seed: int = 0, form: Callable[[Tensor], Any] = lambda logits: (logits, None)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.body = nn.Embedding(VOCAB_SIZE, 8), nn.GRU(8, 8, batch_first=True)
        self.head, self.form = nn.Linear(8, VOCAB_SIZE), form
        nn.init.normal_(self.head.weight)

    def forward(self, input_ids: Tensor) -> Any:
        return self.form(self.head(self.body(self.embedding(input_ids))[0]))


class FakeBackend(LLMWrapperBase):
    """A wrapper whose engine is not a module. It returns vLLM's form and drops padding like vLLM's wrapper."""

    DEFAULTS: ClassVar = {"generate": True, "input_mode": "history", "log_probs_key": "log_probs", "pad_output": True}
    DEFAULTS |= {"return_log_probs": None, "input_key": None, "tokenizer_kwargs": None, "padding_value": 5}

    def __init__(self, model: Any, **settings: Any) -> None:
        nn.Module.__init__(self)
        self.model = model
        for name, default in self.DEFAULTS.items():
            setattr(self, name, settings.pop(name, default))
        assert not settings
        if self.tokenizer_kwargs is not None:
            self.tokenizer_kwargs["padding"] = self.pad_output
        self._batch_queue, self._futures, self._min_batch_size, self._max_batch_size = [], [], None, None

    def get_new_version(self, **kwargs: Any) -> "FakeBackend":
        return type(self)(self.model, **{**{name: getattr(self, name) for name in self.DEFAULTS}, **kwargs})

    def forward(self, tensordict: Any) -> Any:
        assert (self.generate, self.input_mode, self.pad_output) == (False, "tokens", False)
        rows = [ids[ids != self.padding_value] for ids in tensordict.get(self.input_key, as_list=True)]
        self.model.requests.append([len(row) for row in rows])
        found = [self.model.score(row) for row in rows]
        out = lazy_stack([TensorDict() for _ in rows])
        log_probs = LogProbs._from_tensordict(out.empty())
        log_probs.full = found
        return out.set(self.log_probs_key, log_probs)


def engine(module: nn.Module) -> SimpleNamespace:
    """An engine that scores token ids and is not a module."""

    def score(ids: Tensor) -> Tensor:
        device = next(module.parameters(), ids).device
        return plain_log_probs(module, Ragged.from_list([ids.to(device)])).double()

    return SimpleNamespace(score=score, requests=[])
