"""Checks on a few short sequences that a fast route reproduces the model's own log-probs and hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import send, to_host
from torchrl_llm_kl._private import dispatch_mode, tensor_leaves
from torchrl_llm_kl.head import fused_failure, fused_obstacle
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._forks import ForkedPass, has_state, is_recurrent
from torchrl_llm_kl.scoring._invariant import BLOCK
from torchrl_llm_kl.scoring._model import (
    Inspection,
    Route,
    Setup,
    body_and_head,
    call,
    check_whole_sequence,
    find_body,
    find_head,
    has_window,
    head_weight,
    model_device,
    position_limit,
    read_output,
    vocab_size,
    whole_logits,
)
from torchrl_llm_kl.scoring._options import ScoreOptions
from torchrl_llm_kl.scoring._packs import PackedPass
from torchrl_llm_kl.scoring._passes import PaddedPass
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._scores import HeadReading, States, log_prob_at
from torchrl_llm_kl.scoring._tree import PrefixTree
from torchrl_llm_kl.scoring._wrapping import Ranks, inside

# Lengths of beginnings of the first answer. They are scored in one padded batch with three whole answers.
_BEGINNINGS = (7, 3)

# In order of preference. Routes without position_ids are for models that number positions in their own way. Models with a
# sliding window try the routes without a mask first: in eager float64 attention a padding position with no key in its window
# is NaN, and so are gradients through it. The probe's sequences are too short to show that.
_HEAD_ROUTES = (Route("head"), Route("head", mask=False), Route("head", positions=False))
_FULL_ROUTES = (Route("full"), Route("full", mask=False), Route("full", positions=False))

# Lengths of the parts of the probe's answers. With these, packs have two levels of shared prefixes, a cut inside a node and a
# past from an earlier pack. The answers are equally long.
_TRUNK, _BRANCH, _TAIL, _OTHER = 5, 4, 3, 7
_TOKENS_PER_BATCH = 10

# ---------------------------------------------------------------------- log-probs


def choose_route(model: nn.Module, *, probe: bool, dtype: torch.dtype | None = None) -> tuple[Route, str | None]:
    """The first route that reproduces the model's own forward, and a complaint if it is not the fast one.

    The model's own forward takes one sequence without padding. Its first tokens serve as the other sequences.
    """
    check_whole_sequence(model)
    head = find_head(model)
    has_parts = find_body(model) is not None and head is not None
    name = type(model).__name__
    head_routes, full_routes = (
        sorted(routes, key=lambda route: route.mask and has_window(model)) for routes in (_HEAD_ROUTES, _FULL_ROUTES)
    )
    complaint = "" if has_parts else f"{name} does not expose its body and head (get_decoder, get_output_embeddings)"
    vocab = _predicted_vocab(model)
    if vocab is None or not probe:
        return (head_routes if has_parts else full_routes)[0], complaint or None

    facts = Inspection(model)
    setup = Setup(facts, Route("full"), model_device(facts, torch.device("cpu")), ScoreOptions(dtype=dtype))
    ranks = Ranks([model])
    # Compiled graphs for such short sequences would never be used again.
    with torch.compiler.set_stance("force_eager"), setup.active():
        limit = position_limit(model)
        answers = [row[:limit] for row in _answers(vocab)[0].to_list()]
        request = ScoreRequest.of([*answers, *(answers[0][:length] for length in _BEGINNINGS)])
        plain = _plain_log_probs(model, answers[0], request)
        first_equal = partial(_first_equal, setup=setup, ranks=ranks, request=request, plain=plain, vocab=vocab)
        if has_parts:
            route, difference = inside([(model, *body_and_head(model))], partial(first_equal, head_routes))
            if route is not None:
                return route, None
            complaint = f"the body and the head of {name} do not reproduce the model's own log-probs: {difference}"
        # Not in `inside`, since these routes call the model itself.
        route, difference = first_equal(full_routes)
    if route is None:
        complaint += f"; nor does its padded forward ({difference}): is the model causal and deterministic?"
    return route or full_routes[0], complaint


def _predicted_vocab(model: nn.Module) -> int | None:
    """The number of token ids that the model both embeds and predicts, or None if unknown. Some models embed more."""
    vocab, weight = vocab_size(model), head_weight(model)
    return min(vocab, weight.shape[0]) if vocab and weight is not None and weight.ndim == 2 else vocab


def _first_equal(
    routes: Sequence[Route],
    setup: Setup,
    ranks: Ranks,
    request: ScoreRequest,
    plain: tuple[Tensor, Tensor, float],
    vocab: int,
) -> tuple[Route | None, str]:
    """The first route that reproduces the plain log-probs on all ranks. If all fail, also the outcome of the first one."""
    complaint = ""
    for route in routes:
        setup, equal = replace(setup, route=route), False
        try:
            difference, tolerance, states = _rounding_difference(setup, request, *plain)
            equal, outcome = difference <= tolerance, f"largest difference {difference:.3g}, tolerance {tolerance:.1g}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if ranks.all(equal):
            forks = has_state(setup.model)
            source, on_head = states.source, route.path == "head"
            shared = on_head and route.positions and ranks.all(_can_share(setup, vocab, source, forks))
            unfused = _why_unfused(states, type(setup.model).__name__) if on_head else route.unfused
            return replace(route, sharing=("forks" if forks else "packs") if shared else None, unfused=unfused), ""
        complaint = complaint or outcome
    return None, complaint


def _plain_log_probs(model: nn.Module, row: Tensor, request: ScoreRequest) -> tuple[Tensor, Tensor, float]:
    """The model's own log-probs for the beginnings of ``row [T]`` in the request, the spread of its logits, their precision."""
    ids = send(row, model_device(Inspection(model), row.device))
    logits = whole_logits(model, read_output(call(model, ids[:-1].unsqueeze(0)), "logits")).squeeze(0)[1 - len(row) :]
    spread = (logits - logits.mean(-1, keepdim=True)).abs().max()
    log_probs = log_prob_at(logits, ids[1:].to(logits.device))
    places = request.tokens.positions[request.mask & _of_first(request.tokens)] - 1
    return log_probs[send(places, logits.device)], spread, _relative_precision(logits.dtype, logits.device)


def _of_first(tokens: Ragged) -> Tensor:
    """Whether a token belongs to the first answer or to one of its beginnings."""
    return (tokens.sequence_ids == 0) | (tokens.sequence_ids >= 3)


def _rounding_difference(
    setup: Setup, request: ScoreRequest, plain: Tensor, spread: Tensor, precision: float
) -> tuple[float, float, States]:
    """The largest difference from the plain forward, the largest that rounding can explain, and the states."""
    padded = PaddedPass(setup, request, [torch.arange(request.tokens.num_sequences)])
    elements = padded.elements[0]
    states, targets = padded.run(0), send(request.tokens.values[elements], setup.device)
    log_probs = HeadReading(states, targets, ScoreOptions()).columns()["log_prob"]
    log_probs = log_probs[send(_of_first(request.tokens)[elements], log_probs.device)].to(plain.device)
    difference, largest = to_host((log_probs - plain).abs().max(), spread)
    return float(difference), precision * float(largest) + 1e-6, states


def _why_unfused(states: States, name: str) -> str | None:
    """The reason why the head does not use the fused kernel. None if it has the tiles' values and gradients."""
    head, options = states.head, states.head_options
    if head is None:
        return None
    reason = fused_obstacle(states.source, head.weight, **options)
    failure = None if reason else fused_failure(states.source, head.weight, **options)
    if failure is not None:
        reason = f"liger-kernel's fused kernel does not reproduce their values and gradients: {failure}"
        warnings.warn(f"LogProbScorer computes the head of {name} in tiles, since {reason}.", stacklevel=7)
    return reason


def _relative_precision(dtype: torch.dtype, device: torch.device) -> float:
    """The relative difference that two orders of summation can cause after many layers."""
    if dtype == torch.bfloat16:
        return 5e-2
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return 1e-2 if dtype == torch.float16 or tf32 else 1e-4


# ---------------------------------------------------------------------- shared prefixes


def _can_share(setup: Setup, vocab: int, states: Tensor, forks: bool) -> bool:
    """Whether packs, or forks of a state, have the hidden states of one sequence at a time, and no sequence sees another.

    Compares hidden states, not log-probs, since a head of zeros would hide any difference. A state that leaks from one
    sequence into the next may be smaller than half precision resolves, so some passes run again with other tokens in two
    sequences. This must change nothing in the third.
    """
    model, rows, others = setup.model, *_answers(vocab)
    limit = position_limit(model)
    if limit is not None and limit < _TRUNK + _OTHER + 1:
        return False
    try:
        passes = _forwards(setup, rows, _TOKENS_PER_BATCH, 0, forks)
        if isinstance(passes, PackedPass):
            *parts, again = passes.run_last_twice(others.values)
            hidden, moved, apart = to_host(torch.cat(parts), torch.cat([*parts[:-1], again]), states)
            if has_window(model) and not passes.has_window:
                return False  # its window is in a mask that packs do not have, and too wide to show in these sequences
        else:
            other = _forwards(setup, others, _TOKENS_PER_BATCH, 0, forks)
            hidden, moved, apart = to_host(_run(passes), _run(other), states)
            # Some kernels begin at an empty state, which may differ by less than rounding in these sequences: an altered
            # state must make a difference.
            passes.recurrence = 10.0
            if is_recurrent(model) and torch.equal(_run(passes).cpu(), hidden):
                return False
    except Exception:  # for instance an attention that cannot be exchanged, or a cache of the model's own
        return False
    untouched = (rows.sequence_ids == 2)[torch.cat(passes.elements)]
    ordered = _in_order(rows, passes.elements, [hidden])
    return _equal(setup, ordered, _answered(rows, apart), (moved - hidden)[untouched])


def _answers(vocab: int) -> tuple[Ragged, Ragged]:
    """Two answers to one question and one to another, and the same with other tokens at the end of the first two."""
    generator = torch.Generator().manual_seed(1)
    lengths = (_TRUNK, _BRANCH, _TAIL, _TAIL, _OTHER)
    trunk, branch, one, two, other = (torch.randint(vocab, (n,), generator=generator) for n in lengths)
    parts = ((trunk, branch, one), (trunk, branch, two), (trunk, other))
    rows = Ragged.from_list([torch.cat(row) for row in parts])
    ends = (rows.sequence_ids < 2) & (rows.positions >= _TRUNK + _BRANCH)
    return rows, rows.like(torch.where(ends, (rows.values + 1) % vocab, rows.values))


def _equal(setup: Setup, hidden: Tensor, apart: Tensor, moved: Tensor) -> bool:
    """Whether hidden states agree with ``apart``, and the differences ``moved`` are no more than rounding."""
    precision = _relative_precision(setup.options.dtype or apart.dtype, setup.device)
    largest = float(apart.abs().max())
    if largest == 0.0 or float((hidden - apart).abs().max()) > precision * largest:
        return False  # zeros would agree with anything
    half = precision >= 1e-2  # its shapes are the same in both runs, so any change comes from another sequence
    return float(moved.abs().max()) <= (0.0 if half else 1e-5 * largest)


# ---------------------------------------------------------------------- determinism


@torch.no_grad()
def find_variance(setup: Setup, size: int) -> str | None:
    """The reason why the scores of a sequence depend on the other sequences of a call, or None if they do not.

    Forwards have ``size`` tokens, as in all later calls. Other token ids must lead to the same operators on the same shapes.
    A sequence must have the same bits in a pack of its own and in packs of several orders.
    """
    vocab, limit = _predicted_vocab(setup.model), position_limit(setup.model)
    assert vocab is not None, "a packed route was probed"
    generator = torch.Generator().manual_seed(2)
    lengths = [4, size // 4 + 6, size // 2 + 3, size // 3 + 5, *[size // 8 + 7] * 4]
    rows = [torch.randint(vocab, (min(n, limit or n),), generator=generator) for n in lengths]
    rows[3][: size // 6] = rows[1][: size // 6]  # two rows share a prefix
    others = [(row + 1) % vocab for row in rows]
    first, second = (_operators(setup, each, size) for each in (rows, others))
    if ragged := next((a for a, b in zip(first, second, strict=False) if a != b or "grouped_mm" in a[0]), None):
        return f"runs {ragged[0]} on sizes that depend on the tokens, as in a mixture of experts"
    alone = [_bits(setup, [row], size)[0] for row in rows[:4]]
    for order in (list(range(len(rows))), list(range(len(rows)))[::-1], [3, 0, 4, 2, 1]):
        packed = dict(zip(order, _bits(setup, [rows[i] for i in order], size), strict=True))
        for i, want in enumerate(alone):
            if not torch.equal(packed[i], want):
                difference = float((packed[i] - want).abs().max())
                return f"computes other bits for a sequence in a pack, with differences up to {difference:.1g}"
    return None


def _bits(setup: Setup, rows: list[Tensor], size: int) -> list[Tensor]:
    """Hidden states, log-probs and entropies of each row, ``[T, H + 2]``."""
    tokens = Ragged.from_list(rows)
    packs, parts = _forwards(setup, tokens, size), []
    for i, elements in enumerate(packs.elements):
        states = packs.run(i)
        targets = tokens.values[elements].to(setup.device)
        columns = HeadReading(states, targets, ScoreOptions(entropy=True), tile=BLOCK).columns()
        scores = torch.stack([columns["log_prob"], columns["entropy"]], -1)
        parts.append(torch.cat([states.source, scores.to(states.source.dtype)], -1))
    return tokens.like(_in_order(tokens, packs.elements, parts)).to_list()


def _operators(setup: Setup, rows: list[Tensor], size: int) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The operators that run for the first pack, with the shapes of their inputs."""
    calls: list[tuple[str, list[tuple[int, ...]]]] = []

    class Recorder(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self,
            func: Callable[..., object],
            _: object,
            args: tuple[object, ...] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            calls.append((str(func), [tuple(x.shape) for x in tensor_leaves((args, kwargs))]))
            return func(*args, **(kwargs or {}))

    packs = _forwards(setup, Ragged.from_list(rows), size)
    with Recorder():
        packs.run(0)
    return calls


def _forwards(
    setup: Setup, rows: Ragged, size: int, min_shared: int = 16, forks: bool = False
) -> PackedPass | ForkedPass:
    request = ScoreRequest.of(rows)
    tree = PrefixTree.build(request.tokens, request.forward_lengths, min_shared=min_shared)
    return (ForkedPass if forks else PackedPass)(setup, request, tree, size)


def _run(forwards: PackedPass | ForkedPass) -> Tensor:
    """The hidden states of all steps, ``[n, H]``, in the order of their elements."""
    return torch.cat([forwards.run(i).source for i in range(len(forwards.elements))])


def _answered(rows: Ragged, states: Tensor) -> Tensor:
    """Select the states of the answers from the states of a padded forward, in the form of :func:`_in_order`."""
    elements = (rows.positions > 0).nonzero().squeeze(-1)
    return _in_order(rows, [elements], [states[: len(elements)]])


def _in_order(rows: Ragged, elements: list[Tensor], parts: list[Tensor]) -> Tensor:
    """The hidden state that predicts each token, 0 for first tokens, ``[N, H]``."""
    out = parts[0].new_zeros(rows.values.shape[0], parts[0].shape[-1])
    return out.index_copy(0, torch.cat(elements), torch.cat(parts))
