"""Every field of a request and of the options survives what is done with them; a new field is covered by its kind."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import Sampling, ScoreOptions, ScoreRequest
from torchrl_llm_kl.scoring._bytes import Arrays
from torchrl_llm_kl.scoring._options import SHARED

REQUEST = ScoreRequest.of([[3, 4, 5], [6, 7], [], [8, 9, 10, 11]], torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 1]).bool())
COUNTS = torch.tensor([0, 2, 0, 0, 1, 0, 0, 3, 1])  # of what was kept: at scored tokens alone
#: What a field of each kind holds.
VALUES: dict[str, Callable[[], Any]] = {
    "integers": lambda: torch.randint(5, (9, 2, 3), generator=torch.Generator().manual_seed(0)),
    "lists": lambda: Kept(torch.tensor([4, 20, 7, 21, 10, 22, 11]), torch.nn.functional.pad(COUNTS.cumsum(0), (1, 0))),
}
DIMS = {each.name: each.metadata["dims"] for each in fields(ScoreRequest) if "dims" in each.metadata}
FIELDS = {name: "integers" if dims else "lists" for name, dims in DIMS.items()}


def rows(request: ScoreRequest, name: str) -> list[Any]:
    """A field as a list for each sequence, of what each of its tokens has."""
    value, tokens = getattr(request, name), request.tokens
    each = value.ids.split(value.offsets.diff().tolist()) if isinstance(value, Kept) else value
    flat = [x.tolist() for x in each]
    return [flat[a:b] for a, b in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True)]


def every(request: ScoreRequest) -> list[list[Any]]:
    masks = [x.bool() for x in request.tokens.like(request.mask.long()).to_list()]
    tensors = (request.tokens.to_list(), masks)
    return [*([row.tolist() for row in each] for each in tensors), *(rows(request, x) for x in FIELDS)]


def test_a_request_is_cut_joined_and_sent() -> None:
    assert set(FIELDS) == set(ScoreRequest.optional())
    request = replace(REQUEST, **{name: VALUES[kind]() for name, kind in FIELDS.items()})
    assert request.recorded.keys() == FIELDS.keys()
    whole = every(request)
    first, second = request.select(torch.tensor([3, 0])), request.select(torch.tensor([2, 1]))
    assert every(first) == [[part[3], part[0]] for part in whole]
    assert every(ScoreRequest.concat([first, second])) == [[part[i] for i in (3, 0, 2, 1)] for part in whole]
    for name in FIELDS:  # alone, too
        alone = replace(REQUEST, **{name: getattr(request, name)})
        for each, names in ((request, [*FIELDS]), (alone, [name])):
            found = ScoreRequest.from_arrays(Arrays(each.to_arrays(), "request"), names)
            assert found.recorded.keys() == set(names)
            assert all(rows(found, x) == rows(each, x) for x in names)
        with pytest.raises(ValueError, match="requests with the same fields"):
            ScoreRequest.concat([request, alone])


#: A value of each option that is not its default, by name or by type.
OTHERS: dict[str, Any] = {
    "sampling": Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01, reference="kept"),
    "adapters": "old",
    "dtype": torch.bfloat16,
    "direction": "forward",
    "beta": 0.25,
    "int": 3,
    "bool": True,
}


@pytest.mark.parametrize("name", [each.name for each in fields(ScoreOptions)])
def test_options_are_sent(name: str) -> None:
    """Those that decide the scores of given tokens; the others are of the process that scores."""
    kinds = {each.name: str(each.type) for each in fields(ScoreOptions)}
    options = ScoreOptions(**{name: OTHERS.get(name, OTHERS.get(kinds[name]))})
    assert options != ScoreOptions()
    found = ScoreOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert found == (options if name in SHARED else ScoreOptions())
    assert list(options.to_dict()) == [name] * (name in SHARED)
