"""Scores with images equal the model's own forward of each row. Each distinct image is encoded once, and splits prefixes."""

import warnings
from functools import cache

import pytest
import torch

from image_models import FAMILIES, IMAGE, image_model, joined, num_placeholders, own_log_probs, picture
from torchrl_llm_kl import LogProbScorer, RememberedModel, ScoreRequest
from torchrl_llm_kl.scoring._images import RowImages

pytestmark = pytest.mark.filterwarnings("ignore:Image tokens attend")
SHARED = [20, 21, 22] * 6  # tokens after the images that all rows share


@cache
def model_of(family, dtype=torch.float32):
    return image_model(family, dtype=dtype)


def row_of(family, images, *, seed=0, answer=3):
    """Token ids with placeholders for a row's images."""
    ids = [1]
    for count in num_placeholders(model_of(family), images) if images else []:
        ids += [7, *[IMAGE] * count, 8]
    generator = torch.Generator().manual_seed(seed)
    return ids + SHARED + torch.randint(10, 40, (answer,), generator=generator).tolist()


def rows_of(family):
    """Two answers to one image, the same ids with another image, only text, a wide image, and two images in both orders."""
    a, b, wide = picture(family, 1), picture(family, 2), picture(family, 3, wide=True)
    images = [a, a, b, None, wide, joined(family, [a, b]), joined(family, [b, a])]
    ids = [row_of(family, x, seed=i, answer=2 + i % 3) for i, x in enumerate(images)]
    ids[2] = ids[1]
    return ids, images


def counted(monkeypatch, model):
    """A list that grows by the number of images in each call of the encoder."""
    calls, body = [], model.model
    own = body.get_image_features

    def encode(*args, **given):
        out = own(*args, **given)
        calls.append(len(out.pooler_output))
        return out

    monkeypatch.setattr(body, "get_image_features", encode)
    return calls


# ------------------------------------------------------------------ the model's own numbers


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_own(family, share):
    model, (ids, images) = model_of(family), rows_of(family)
    scorer = LogProbScorer(model, share_prefixes=share, tokens_per_batch=50)
    found = scorer.score(ScoreRequest.of(ids, images=images)).to_list()
    for row, record, got in zip(ids, images, found, strict=True):
        want = own_log_probs(family, model, row, record).detach()
        text = torch.tensor(row[1:]) != IMAGE
        assert (got[1:] - want)[text].abs().max() < 1e-5
        assert bool((got[1:][~text] == 0).all())  # images are not scored


@pytest.mark.parametrize(("family", "kind"), [("qwen3_vl", "pack"), ("gemma3", "micro-batch")])
def test_a_score_with_images_is_explained(family, kind):
    ids, images = rows_of(family)
    found = LogProbScorer(model_of(family)).explain(ScoreRequest.of(ids[:4], images=images[:4]), 2, len(ids[2]) - 1)
    assert abs(found.difference) < 1e-5
    assert (found.kind, found.attended) == (kind, len(ids[2]) - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_models_own(family, monkeypatch):
    """In float64, for every weight including the encoder's. The encoder runs once for each of the two distinct images."""
    model, (ids, images) = model_of(family, torch.float64), rows_of(family)
    ids, images = ids[:4], images[:4]
    own = sum(
        own_log_probs(family, model, row, record)[torch.tensor(row[1:]) != IMAGE].sum()
        for row, record in zip(ids, images, strict=True)
    )
    weights = {name: weight for name, weight in model.named_parameters() if not name.endswith("k_proj.bias")}
    expected = torch.autograd.grad(own, [*weights.values()], allow_unused=True)
    calls = counted(monkeypatch, model)
    total = LogProbScorer(model).score(ScoreRequest.of(ids, images=images), grad=True).values.sum()
    found = torch.autograd.grad(total, [*weights.values()], allow_unused=True)
    assert sum(calls) == 2
    for name, a, b in zip(weights, expected, found, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a - b).abs().max() <= 1e-6 * (1 + a.abs().max()), name
    assert any(bool(g.any()) for n, g in zip(weights, found, strict=True) if "vis" in n and g is not None)


def test_each_distinct_image_is_encoded_once(monkeypatch):
    """Copies of an image in different rows count as one. The model's own forwards encode all eight."""
    model = image_model("qwen2_5_vl")
    one, two = picture("qwen2_5_vl", 1), picture("qwen2_5_vl", 2)
    copies = [{name: t.clone() for name, t in x.items()} for x in (one, one, one, one, two, two, two, two)]
    ids = [row_of("qwen2_5_vl", one, seed=i) for i in range(8)]
    calls = counted(monkeypatch, model)
    scorer = LogProbScorer(model)
    for options in ({}, {"grad": True}):
        calls.clear()
        scorer.score(ScoreRequest.of(ids, images=copies), **options)
        assert sum(calls) == 2
    calls.clear()
    for row, record in zip(ids, copies, strict=True):
        own_log_probs("qwen2_5_vl", model, row, record)
    assert sum(calls) == 8
    # With a reference, each model encodes its own.
    calls.clear()
    other = LogProbScorer(image_model("qwen2_5_vl", seed=1))
    both = scorer.evaluate(ScoreRequest.of(ids, images=copies), reference=other)
    assert sum(calls) == 2
    assert torch.equal(both.ref_log_prob.values, other.score(ScoreRequest.of(ids, images=copies)).values)


def test_the_whole_output_of_a_processor_is_accepted():
    """A processor's whole output is accepted, and so are the images of a request."""
    model, image = model_of("qwen2_5_vl"), picture("qwen2_5_vl", 1)
    ids = torch.tensor([row_of("qwen2_5_vl", image)])
    output = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
    scorer, rows = LogProbScorer(model), ids.tolist()
    expected = scorer.score(ScoreRequest.of(rows, images=[image])).values
    for images in ([{**output, **image, "pixel_values_videos": None}], ScoreRequest.of(rows, images=[image]).images):
        assert torch.equal(scorer.score(ScoreRequest.of(rows, images=images)).values, expected)
    assert ScoreRequest.of(rows, images=[None]).images is None


# ------------------------------------------------------------------ identity


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_equal_ids_with_other_pixels_are_other_prefixes(family, tmp_path):
    """In the prefix tree of one call, in the cache of several calls, and in a store."""
    model = model_of(family)
    images = [picture(family, seed) for seed in (1, 2)]
    row = row_of(family, images[0])
    want = torch.stack([own_log_probs(family, model, row, image) for image in images])[:, -3:].detach()
    assert (want[0] - want[1]).abs().max() > 0.1
    together = LogProbScorer(model).score(ScoreRequest.of([row] * 2, images=images))
    assert torch.allclose(torch.stack(together.to_list())[:, -3:], want, atol=1e-5)
    remembering, store = LogProbScorer(model, remember=True), RememberedModel(model, tmp_path)
    for scorer in (remembering, store.make_scorer()):
        for image, expected in zip(images * 2, [*want, *want], strict=True):
            (found,) = scorer.score(ScoreRequest.of([row], images=[image])).to_list()
            assert torch.allclose(found[-3:], expected, atol=1e-5)
    assert remembering.memory.tokens_recalled >= 2 * (len(row) - 1)  # the second time
    assert store.store.tokens_recalled * 2 == store.store.tokens_seen


def test_a_conversation_with_one_more_image_continues():
    """The cache recalls everything before the new image."""
    model, first, second = model_of("qwen3_vl"), picture("qwen3_vl", 1), picture("qwen3_vl", 2, wide=True)
    ids = row_of("qwen3_vl", first)
    longer = [*ids, 7, *[IMAGE] * 8, 8, 30, 31]
    scorer = LogProbScorer(model, remember=True)
    scorer.score(ScoreRequest.of([ids], images=[first]))
    images = {name: torch.cat([first[name], second[name]]) for name in first}
    (found,) = scorer.score(ScoreRequest.of([longer], images=[images])).to_list()
    assert scorer.memory.tokens_recalled == len(ids) - 1
    want = own_log_probs("qwen3_vl", model, longer, images).detach()
    assert torch.allclose(found[-2:], want[-2:], atol=1e-5)


# ------------------------------------------------------------------ what does not fit


def test_what_does_not_fit_names_the_row():
    model, image = model_of("qwen2_5_vl"), picture("qwen2_5_vl", 1)
    scorer, good, text = LogProbScorer(model), row_of("qwen2_5_vl", image), [1, 20, 21]
    for ids, images, message in (
        ([text, good], None, "sequence 1, position 2 .* pixels are missing"),
        ([good, good], [image, None], "row 1 has 4 image tokens and 0 image features"),
        ([text, good], [image, image], "row 0 has 0 image tokens and 4 image features"),
        ([good, [*good[:3], *good[4:]]], [image, image], "row 1 has 3 image tokens"),
        ([good], [image, image], "images has 2 rows, the tokens have 1"),
        ([[*good, 6]], [image], "video_token_id"),
        (
            [good, good],
            [image, picture("gemma3", 1)],
            r"some images have the inputs .*pixel_values.* and others .*: process all rows with the same processor",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            scorer.score(ScoreRequest.of(ids, images=images))


def test_models_without_images_are_refused():
    image = picture("qwen2_5_vl", 1)
    row = row_of("qwen2_5_vl", image)
    with pytest.raises(ValueError, match="deterministic=True excludes images"):
        LogProbScorer(model_of("qwen2_5_vl")).score(ScoreRequest.of([row], images=[image]), deterministic=True)
    text = torch.nn.Module()
    text.forward = lambda input_ids: (torch.zeros(*input_ids.shape, 40),)
    with pytest.warns(UserWarning, match="full forward"):
        scorer = LogProbScorer(text)
    with pytest.raises(ValueError, match="takes no images: expected one of qwen2_vl"):
        scorer.score(ScoreRequest.of([row], images=[image]))


@pytest.mark.filterwarnings("default:Image tokens attend")
def test_bidirectional_images_take_the_padded_route_and_say_so():
    model, image = model_of("gemma3"), picture("gemma3", 1)
    scorer = LogProbScorer(model)
    with pytest.warns(UserWarning, match="Gemma3ForConditionalGeneration is given images") as seen:
        scorer.score(ScoreRequest.of([row_of("gemma3", image)] * 2, images=[image] * 2))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.score(ScoreRequest.of([row_of("gemma3", image)] * 2, images=[image] * 2))
    assert scorer.explain([[1, *SHARED]], 0, 3).kind == "pack"  # text still shares prefixes


def test_the_model_is_left_as_it_was():
    """The model stores positions for its next forward. A score must not change them."""
    model, image = model_of("qwen2_5_vl"), picture("qwen2_5_vl", 1)
    row = row_of("qwen2_5_vl", image)
    model.model.rope_deltas = before = torch.tensor([[5]])
    state = model.model.language_model.__dict__.keys()
    for share in (True, False):
        LogProbScorer(model, share_prefixes=share).score(ScoreRequest.of([row], images=[image]))
    assert model.model.rope_deltas is before
    assert "forward" not in state
    model.model.rope_deltas = None


def test_a_row_with_nothing_to_score_needs_no_forward():
    model, image = model_of("smolvlm"), picture("smolvlm", 1)
    row = row_of("smolvlm", image)
    masks = [torch.zeros(len(row), dtype=torch.bool), torch.arange(len(row)) == len(row) - 1]
    found = LogProbScorer(model).score(ScoreRequest.of([row, row], masks, images=[image, image])).to_list()
    want = own_log_probs("smolvlm", model, row, image)[-1]
    assert not found[0].any()
    assert abs(float(found[1][-1] - want.detach())) < 1e-5


# ------------------------------------------------------------------ on the wire


def sent(request):
    """A request after its way to a replica."""
    return ScoreRequest.from_arrays(request.to_arrays())


def places(images):
    """For each row, the places of its images among the distinct ones."""
    return [[list(images.distinct).index(image.digest) for image in row] for row in images.rows]


def test_an_image_that_was_not_sent_is_refused():
    arrays = ScoreRequest.of([[1, 2]], images=[picture("gemma3", 1)]).to_arrays()
    with pytest.raises(ValueError, match=r"images.index must be from 0 to 0, .* got \[-1\]"):
        ScoreRequest.from_arrays(arrays | {"images.index": arrays["images.index"] * 0 - 1})


def test_an_image_is_sent_once():
    one, two = picture("qwen2_5_vl", 1), picture("qwen2_5_vl", 2)
    one["pixel_values"] = one["pixel_values"].bfloat16()
    row = row_of("qwen2_5_vl", picture("qwen2_5_vl", 1))
    request = ScoreRequest.of([row] * 4, images=[one, two, one, one])
    alone = ScoreRequest.of([row] * 4, images=[one, None, None, None])
    pixels = one["pixel_values"].numel() * 4
    sizes = [sum(array.nbytes for array in each.to_arrays().values()) for each in (request, alone)]
    assert pixels < sizes[0] - sizes[1] < 1.2 * pixels
    found = sent(request)
    assert list(found.images.distinct) == list(request.images.distinct)
    assert places(found.images) == [[0], [1], [0], [0]]
    for image, expected in zip(found.images.distinct.values(), (one, two), strict=True):
        assert image.inputs.keys() == {"pixel_values", "image_grid_thw"}
        assert all(torch.equal(x, expected[name].reshape(x.shape)) for name, x in image.inputs.items())


def test_equal_images_of_several_requests_are_one():
    image, other = picture("gemma3", 1), picture("gemma3", 2)
    parts = [ScoreRequest.of([[1, 2]] * 2, images=x) for x in ([image, other], [None, image])]
    request = ScoreRequest.concat(parts)
    assert places(request.images) == [[0], [1], [], [0]]
    assert places(request.select(torch.tensor([3, 2])).images) == [[0], []]


def test_rows_that_share_memory_or_take_it_over_are_told_apart():
    """Records that are created row by row may reuse the memory of earlier ones."""
    records = ({"pixel_values": torch.full((1, 3, 4, 4), float(i // 2)).bfloat16()} for i in range(8))
    images = RowImages.of([next(records) for _ in range(8)], 8)
    assert places(images) == [[0], [0], [1], [1], [2], [2], [3], [3]]
    pixels = torch.arange(96.0).reshape(2, 3, 4, 4)
    shared = RowImages.of([{"pixel_values": pixels[:1]}, {"pixel_values": pixels[1:]}, {"pixel_values": pixels}], 3)
    assert places(shared) == [[0], [1], [0, 1]]
    flipped = RowImages.of([{"pixel_values": pixels}, {"pixel_values": pixels.transpose(2, 3)}], 2)
    assert places(flipped) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("family", ["llava_onevision", "gemma4", "smolvlm"])
def test_every_family_is_sent_and_a_part_without_images_too(family):
    images = [picture(family, 1), None, joined(family, [picture(family, 1), picture(family, 2)])]
    ids = [row_of(family, image) for image in images]
    request = sent(ScoreRequest.of(ids, images=images))
    scorer = LogProbScorer(model_of(family))
    assert torch.equal(scorer.run(request).log_prob.values, scorer.score(ScoreRequest.of(ids, images=images)).values)
    text = request.select(torch.tensor([1]))
    assert text.images is None
    assert sent(text).tokens.values.tolist() == ids[1]


def test_the_size_of_a_shared_image_is_divided():
    cat, dog = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 2, 2)
    request = ScoreRequest.of([[1]] * 4, images=[{"pixel_values": x} for x in (cat, cat, dog)] + [None])
    assert request.sizes().tolist() == [25, 25, 13, 1]
