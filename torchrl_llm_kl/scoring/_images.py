"""Images of a request: each distinct image is encoded once, and the model's own code places it among the tokens.

A processor returns the pixels of a row under the names of its family (``pixel_values``, ``image_grid_thw``, ...). They are
split by image, hashed, and joined again for the encoder. The steps after the encoder run in the model's multimodal body, which
takes encoded images (``mm_encoder_outputs``). It merges them into the embeddings, numbers the positions and makes the masks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import send
from torchrl_llm_kl._typing import ImageRows, asked, has
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._fields import Arrays, FieldKind
from torchrl_llm_kl.scoring._model import Setup, call, find_body
from torchrl_llm_kl.scoring._wrapping import replaced_forward, unwrapped

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

#: Families whose scores with images were compared with the model's own forward.
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "llava_onevision", "smolvlm", "idefics3")
# Entries of a processor's output that describe tokens. They follow from the ids, so they are ignored.
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_GRID, _PIXELS, _SIZES, _ALONE = "image_grid_thw", "pixel_values", "image_sizes", "batch_num_images"
# Families whose pixels have a dimension of rows before the dimension of images.
_BY_ROW = {"smolvlm", "idefics3"}

# ------------------------------------------------------------------ the images of a request


class Image(NamedTuple):
    """One image, on the CPU."""

    inputs: Mapping[str, Tensor]  # of the encoder, by the processor's names
    digest: bytes  # of the content


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of each of ``S`` rows.

    Raises:
        ValueError: if images have inputs of different names.

    Example:
        >>> cat, dog = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
        >>> images = RowImages.of([{"pixel_values": cat}, None, {"pixel_values": torch.cat([dog, cat])}], 3)
        >>> [len(row) for row in images.rows], len(images.distinct)
        ([1, 0, 2], 2)
    """

    rows: tuple[tuple[Image, ...], ...]

    def __post_init__(self) -> None:
        if len({frozenset(image.inputs) for image in self.distinct.values()}) > 1:
            first, second, *_ = {", ".join(sorted(image.inputs)): None for image in self.distinct.values()}
            raise ValueError(
                f"some images have the inputs {first} and others {second}: process all rows with the same processor."
            )

    @classmethod
    def of(cls, rows: ImageRows | RowImages, count: int) -> RowImages | None:
        """Read the images of ``count`` rows. Returns None if no row has images."""
        given = len(rows.rows if isinstance(rows, RowImages) else rows)
        if given != count:
            raise ValueError(f"images has {given} rows, the tokens have {count}: expected one, or None, for each.")
        if isinstance(rows, RowImages):
            return rows if any(rows.rows) else None
        known: dict[object, tuple[Image, ...]] = {}
        every: list[tuple[Image, ...]] = []
        for row, record in enumerate(rows):
            tensors = {} if record is None else _row_tensors(record)
            # The answers of a group often share the memory of one image, which is then split and hashed once.
            same = tuple((name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in sorted(tensors.items()))
            if same not in known:
                images = _images_of(tensors, row) if tensors else []
                known[same] = tuple(Image(inputs, _digest_of(inputs)) for inputs in images)
            every.append(known[same])
        return cls(tuple(every)) if any(every) else None

    @cached_property
    def distinct(self) -> dict[bytes, Image]:
        """Each distinct image once, by its digest, in the order of the rows."""
        return {image.digest: image for row in self.rows for image in row}

    @property
    def names(self) -> tuple[str, ...]:
        """The processor's names of the inputs."""
        return tuple(sorted(next(iter(self.distinct.values())).inputs))


class ImageField(FieldKind[RowImages]):
    """The images of each sequence. There is at least one image."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> RowImages | None:
        """See :class:`FieldKind`."""
        return RowImages.of(cast("ImageRows | RowImages", given), tokens.num_sequences)

    def select(self, value: RowImages, elements: Tensor, rows: Tensor) -> RowImages | None:
        """See :class:`FieldKind`. Returns None if no row has an image."""
        chosen = tuple(value.rows[row] for row in rows.tolist())
        return RowImages(chosen) if any(chosen) else None

    def concat(self, values: Sequence[RowImages]) -> RowImages:
        """See :class:`FieldKind`."""
        return RowImages(tuple(row for part in values for row in part.rows))

    def form(self, value: RowImages) -> tuple[object, ...]:
        """The processor's names of the inputs."""
        return value.names

    def sizes(self, value: RowImages, tokens: Ragged) -> Tensor:
        """See :class:`FieldKind`. The size of an image is divided among its rows."""
        uses = Counter(image.digest for row in value.rows for image in row)
        each = {key: sum(t.numel() for t in value.distinct[key].inputs.values()) // uses[key] for key in uses}
        return torch.tensor([sum(each[image.digest] for image in row) for row in value.rows])

    def pack(self, value: RowImages, mask: Tensor) -> dict[str, np.ndarray]:
        """See :class:`FieldKind`. Sends each distinct image once: the numbers of each input end to end, and the shapes."""
        place = {digest: i for i, digest in enumerate(value.distinct)}
        index = [place[image.digest] for row in value.rows for image in row]
        arrays = {"counts": np.array([len(row) for row in value.rows], "i4"), "index": np.array(index, "i4")}
        for name in value.names:
            tensors = [image.inputs[name] for image in value.distinct.values()]
            arrays[name] = torch.cat([t.flatten() for t in tensors]).numpy()
            arrays[f"{name}.shapes"] = np.array([t.shape for t in tensors], "i4").reshape(len(tensors), -1)
        return arrays

    def unpack(self, arrays: Arrays, tokens: Ragged, mask: Tensor) -> RowImages:
        """See :class:`FieldKind`."""
        columns: dict[str, list[Tensor]] = {}
        for name in arrays.keys() - {"counts", "index"}:
            if not name.endswith(".shapes"):
                shapes = arrays[f"{name}.shapes"]
                flat = torch.from_numpy(arrays[name].copy()).split(shapes.prod(1).tolist())
                columns[name] = [x.reshape(n) for x, n in zip(flat, shapes.tolist(), strict=True)]
        inputs = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
        index = arrays["index"].tolist()
        # A negative index would silently take another image.
        if not all(0 <= i < len(inputs) for i in index):
            raise ValueError(f"images.index must be from 0 to {len(inputs) - 1}, the images sent, got {index}.")
        sent = [Image(each, _digest_of(each)) for each in inputs]
        images = iter([sent[i] for i in index])
        return RowImages(tuple(tuple(islice(images, count)) for count in arrays["counts"].tolist()))

    def moved(self, name: str, value: RowImages, source: Tensor, target: Tensor) -> RowImages:
        """See :class:`FieldKind`. The placeholders of the new prompts are counted when they are scored."""
        return value


def _row_tensors(record: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a row's images from a processor's output, on the CPU, in dtypes that numpy has."""
    # Inputs are hashed and sent as numpy arrays, and numpy has no bfloat16.
    numpy_types = {torch.bfloat16: torch.float32, torch.bool: torch.uint8}
    names = [name for name in record if name not in _OF_TOKENS and record[name] is not None]
    given = {name: torch.as_tensor(record[name]).detach().cpu() for name in names}
    return {name: tensor.to(numpy_types.get(tensor.dtype, tensor.dtype)) for name, tensor in given.items()}


def _images_of(tensors: Mapping[str, Tensor], row: int) -> list[dict[str, Tensor]]:
    """Split the tensors of a row by image."""
    pixels, grid = tensors[_PIXELS], tensors.get(_GRID)
    if grid is not None:
        sizes = grid.reshape(-1, 3).prod(-1).tolist()
        return [{_PIXELS: p, _GRID: g} for p, g in zip(pixels.split(sizes), grid.reshape(-1, 3), strict=True)]
    if pixels.ndim == 5 and _SIZES not in tensors:  # [1, images, channels, height, width]
        tensors = {name: t.squeeze(0) if len(t) == 1 else t for name, t in tensors.items()}
        pixels = tensors[_PIXELS]
    count = len(pixels)
    images: list[dict[str, Tensor]] = []
    for i in range(count):
        image = {name: t[i] for name, t in tensors.items() if name != _ALONE and t.ndim and len(t) == count}
        if lacking := tensors.keys() - image.keys() - {_ALONE}:
            name = min(lacking)
            raise ValueError(f"images of row {row}: {name} has {len(tensors[name])} entries, expected {count} images.")
        if _ALONE in tensors:  # the encoder treats a row's only image differently
            image[_ALONE] = torch.tensor(1 if count == 1 else 2)
        images.append(image)
    return images


def _digest_of(image: Mapping[str, Tensor]) -> bytes:
    """A digest that is equal for images of equal content."""
    digest = blake2b(digest_size=16)
    for name in sorted(image):
        tensor = image[name]
        # The same bytes in another shape or dtype are another image.
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.digest()


# ------------------------------------------------------------------ a model with images


@dataclass(frozen=True, eq=False)
class ImageModel:
    """The part of an image-text model that encodes images and puts them among the tokens."""

    body: nn.Module  # its forward takes encoded images, and calls the language model
    family: str  # the model type of its configuration
    token: int  # the placeholder
    types: str | None  # the argument that tells image tokens from text

    @classmethod
    def of(cls, model: nn.Module) -> ImageModel:
        """Find the part. Raises a ValueError for a model of another family."""
        inner = unwrapped(model)
        kind, part = asked(asked(inner, "config", object), "model_type", str), None
        for module in inner.modules():  # the last match is the innermost
            takes = inspect.signature(module.forward).parameters if has(module, "get_image_features") else {}
            if "mm_encoder_outputs" in takes:
                part = module, next((name for name in sorted(_OF_TOKENS) if "type" in name and name in takes), None)
        token = None if part is None else asked(part[0].config, "image_token_id", int)
        if part is None or token is None or kind not in FAMILIES:
            raise ValueError(f"{type(inner).__name__} ({kind}) takes no images: expected one of {', '.join(FAMILIES)}.")
        return cls(part[0], kind, token, part[1])

    def encode(self, images: RowImages, device: torch.device) -> dict[bytes, list[Tensor]]:
        """Features ``[n, H]`` of each distinct image, followed by those for deeper layers of the language model."""
        groups: dict[object, list[Image]] = {}
        for image in images.distinct.values():
            # The encoder takes images of equal shapes in one batch. With a grid, it packs images of any size.
            shapes = tuple((name, t.shape) for name, t in sorted(image.inputs.items()) if _GRID not in image.inputs)
            groups.setdefault((shapes, int(image.inputs.get(_ALONE, 0))), []).append(image)
        features: dict[bytes, list[Tensor]] = {}
        for group in groups.values():
            some = [image.inputs for image in group]
            given: dict[str, object] = {}
            for name in images.names:
                join = torch.cat if name == _PIXELS and _GRID in some[0] else torch.stack
                given[name] = send(join([inputs[name] for inputs in some]), device)
            if self.family in _BY_ROW:
                given = {name: cast(Tensor, x).unsqueeze(1) for name, x in given.items()}
            # Any count above the number of images marks several images per row. The model does not check it.
            if _ALONE in given:
                given[_ALONE] = [1] * len(some) if int(some[0][_ALONE]) == 1 else [len(some) + 1]
            run = cast("Callable[..., BaseModelOutputWithPooling]", self.body.get_image_features)
            out = run(**given, return_dict=True)
            deep = asked(out, "deepstack_features", (list, tuple)) or []
            for place, image in enumerate(group):
                features[image.digest] = [cast(Tensor, out.pooler_output)[place], *(layer[place] for layer in deep)]
        return features


class ImageInputs:
    """The encoded images of a request for one model, and the arguments of the model's forwards."""

    def __init__(self, setup: Setup, images: RowImages, tokens: Ragged) -> None:
        self.setup, self.images, self._tokens = setup, images, tokens
        self.model = ImageModel.of(setup.model)
        self.places = tokens.values == self.model.token
        with setup.active():
            self.features = self.model.encode(images, setup.device)
        expected = torch.tensor([sum(len(self.features[image.digest][0]) for image in row) for row in images.rows])
        # transformers compares only the totals of a batch, where errors of two rows may cancel out.
        placed = torch.zeros_like(tokens.lengths).index_add_(0, tokens.sequence_ids, self.places.long())
        wrong = (placed != expected).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(f"row {row} has {int(placed[row])} image tokens and {int(expected[row])} image features.")

    def keys(self) -> Tensor:
        """The token ids, int64 ``[N]``, with a digest of the image at each placeholder. Equal prefixes have equal keys."""
        # Digests become negative numbers, which never equal a token id.
        every = [image.digest for row in self.images.rows for image in row]
        numbers = torch.tensor([-1 - (int.from_bytes(digest[:8], "little") >> 1) for digest in every])
        counts = torch.tensor([len(self.features[digest][0]) for digest in every])
        return self._tokens.values.masked_scatter(self.places, numbers.repeat_interleave(counts))

    def arguments(self, rows: Sequence[int], ids: Tensor) -> dict[str, object]:
        """The arguments of the multimodal body besides the padded ids ``[b, T]`` of some rows and their mask."""
        chosen = [image for row in rows for image in self.images.rows[row]]
        if not chosen:
            return {}
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        first, *deep = map(list, zip(*(self.features[image.digest] for image in chosen), strict=True))
        stacked = torch.stack(first) if self.model.family == "gemma3" else first
        encoded = BaseModelOutputWithPooling(pooler_output=cast(Tensor, stacked))
        encoded.deepstack_features = deep
        given: dict[str, object] = {"mm_encoder_outputs": {"image": encoded}}
        if _GRID in self.images.names:
            given[_GRID] = send(torch.stack([image.inputs[_GRID] for image in chosen]), self.setup.device)
        if self.model.types is not None:
            given[self.model.types] = (ids == self.model.token).long()
        return given

    @contextmanager
    def forward(self) -> Iterator[nn.Module]:
        """Context: the multimodal body. Restores the positions that the body stores for a next call."""
        body, name = self.model.body, "rope_deltas"
        before = getattr(body, name, None)
        try:
            yield body
        finally:
            if hasattr(body, name):
                setattr(body, name, before)

    # ------------------------------------------------------------------ packs

    def prepare(self, batches: Sequence[tuple[Sequence[int], Tensor, Tensor, Tensor]], needed: Tensor) -> bool:
        """Record the inputs that the multimodal body passes to the language model, for the tokens ``needed [N]``.

        Each batch holds whole rows: their indices, and ids, mask and sources as in :class:`PaddedBatch`. Returns False if
        these inputs cannot run in packs, since the attention is not causal or an input is of an unknown kind.
        """
        self._place, self._deep_place = torch.full((2, len(needed)), -1)
        parts: list[dict[str, Tensor]] = []
        deep: list[Sequence[Tensor]] = []
        for rows, *batch, sources in batches:
            here = (sources >= 0) & needed[sources]
            ids, real, wanted = (send(x, self.setup.device) for x in (*batch, here))
            with self.setup.active(), self.forward() as body, _watched(find_body(self.setup.model)) as seen:
                call(body, ids, attention_mask=real, use_cache=False, **self.arguments(rows, ids))
            # A pack is causal. It cannot express attention to later tokens, as among the patches of an image.
            if not _is_causal(seen.pop("attention_mask", None), real):
                return False
            layers = cast("Sequence[Tensor] | None", seen.pop("deepstack_visual_embeds", None))
            unknown = {name for name, x in seen.items() if isinstance(x, Mapping) or "deepstack" in name}
            given = {name: x for name, x in seen.items() if isinstance(x, Tensor)}
            marked, positions = given.pop("visual_pos_masks", None), given.pop("position_ids", None)
            # Inputs of an unknown kind may not be one row per token.
            if (given.keys() | unknown) - {"inputs_embeds", "per_layer_inputs"}:
                return False
            elements = sources[here]
            self._place[elements] = torch.arange(len(elements)) + sum(len(part["inputs_embeds"]) for part in parts)
            if marked is not None and layers is not None:
                place = torch.where(
                    marked, marked.flatten().cumsum(0).view_as(marked) - 1 + sum(len(x[0]) for x in deep), -1
                )
                self._deep_place[elements] = place[wanted].cpu()
                deep.append(layers)
            part = {name: x[wanted] for name, x in given.items()}
            if positions is None:
                positions = send(self._tokens.positions[elements], self.setup.device)[:, None]
            else:  # [b, T], or [k, b, T] of several axes
                positions = positions.reshape(-1, *positions.shape[-2:]).expand(-1, *ids.shape)[:, wanted].T
            parts.append({**part, "position_ids": positions})
        axes = max((part["position_ids"].shape[1] for part in parts), default=1)
        for part in parts:
            # Batches without images have a single axis of positions, those with images may have several.
            part["position_ids"] = part["position_ids"].expand(-1, axes)
        self._inputs = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        self._deep = [torch.cat(layer) for layer in zip(*deep, strict=True)]
        return True

    def of_pack(self, elements: Tensor) -> dict[str, object]:
        """The recorded inputs of the language model for the tokens at flat ``elements [n]``."""
        at = send(self._place[elements], self.setup.device)
        inputs: dict[str, object] = {name: x[at][None] for name, x in self._inputs.items()}
        positions = self._inputs["position_ids"][at][None]
        inputs["position_ids"] = positions[..., 0] if positions.shape[-1] == 1 else positions.permute(2, 0, 1)
        deep = self._deep_place[elements]
        if bool((deep >= 0).any()):
            inputs["visual_pos_masks"] = send(deep >= 0, self.setup.device)[None]
            some = send(deep[deep >= 0], self.setup.device)
            inputs["deepstack_visual_embeds"] = [layer[some] for layer in self._deep]
        return inputs


@contextmanager
def _watched(decoder: nn.Module | None) -> Iterator[dict[str, object]]:
    """Context: calls of the language model return their embeddings, without running it. Yields their arguments."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    seen: dict[str, object] = {}

    def forward(*_: object, inputs_embeds: Tensor | None = None, **given: object) -> BaseModelOutputWithPast:
        seen.update(given, inputs_embeds=inputs_embeds)
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

    with replaced_forward(cast(nn.Module, decoder), forward):
        yield seen


def _is_causal(mask: object, real: Tensor) -> bool:
    """Whether no token of ``real [b, T]`` attends to a later token."""
    if isinstance(mask, Mapping):
        return all(_is_causal(each, real) for each in mask.values())
    if mask is None or not isinstance(mask, Tensor) or mask.ndim != 4:
        return mask is None or isinstance(mask, Tensor)
    allowed = mask if mask.dtype == torch.bool else mask >= 0
    return not bool((allowed.triu(1) & real.bool()[:, None, :, None]).any())
