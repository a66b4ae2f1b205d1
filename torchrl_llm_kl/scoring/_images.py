"""Images of a request: each distinct image is encoded once, and the model's own code places it among the tokens.

A processor returns the pixels of a row under the names of its family (``pixel_values``, ``image_grid_thw``, ...). They are
split by image, hashed, and joined again for the encoder. The steps after the encoder run in the model's multimodal body, which
takes encoded images (``mm_encoder_outputs``). It merges them into the embeddings, numbers the positions and makes the masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import send
from torchrl_llm_kl._typing import ImageRows, Json
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring._fields import Arrays, FieldKind, longs
from torchrl_llm_kl.scoring._model import Setup, asked, call, find_body, has
from torchrl_llm_kl.scoring._wrapping import replaced_forward, unwrapped

#: Families whose scores with images were compared with the model's own forward.
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "llava_onevision", "smolvlm", "idefics3")
# Entries of a processor's output that describe tokens. They follow from the ids, so they are ignored.
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
_GRID, _PIXELS, _SIZES, _ALONE = "image_grid_thw", "pixel_values", "image_sizes", "batch_num_images"
# Families whose pixels have a dimension of rows before the dimension of images.
_BY_ROW = {"smolvlm", "idefics3"}

# ------------------------------------------------------------------ the images of a request


@dataclass(frozen=True, eq=False)
class RowImages:
    """The ``M`` images of ``S`` rows. Each distinct image is stored once, on the CPU.

    Attributes:
        inputs: the encoder's inputs for each distinct image, by the processor's names.
        digests: a digest of the content of each distinct image.
        index: int64 ``[M]``, the index into ``inputs`` of each image, row after row.
        counts: int64 ``[S]``, the number of images of each row.

    Example:
        >>> cat, dog = torch.zeros(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
        >>> images = RowImages.of([{"pixel_values": cat}, None, {"pixel_values": torch.cat([dog, cat])}], 3)
        >>> len(images.inputs), images.index.tolist(), images.counts.tolist()
        (2, [0, 1, 0], [1, 0, 2])
    """

    inputs: tuple[Mapping[str, Tensor], ...]
    digests: tuple[bytes, ...]
    index: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rows: ImageRows | RowImages, count: int) -> RowImages | None:
        """Read the images of ``count`` rows. Returns None if no row has images."""
        given = len(rows.counts) if isinstance(rows, RowImages) else len(rows)
        if given != count:
            raise ValueError(f"images has {given} rows, the tokens have {count}: expected one, or None, for each.")
        if isinstance(rows, RowImages):
            return rows if len(rows.index) else None
        known: dict[object, list[tuple[Mapping[str, Tensor], bytes]]] = {}
        every: list[list[tuple[Mapping[str, Tensor], bytes]]] = []
        for row, record in enumerate(rows):
            tensors = {} if record is None else _row_tensors(record)
            # The answers of a group often share the memory of one image, which is then split and hashed once.
            same = tuple((name, t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in sorted(tensors.items()))
            if same not in known:
                known[same] = [(image, _digest_of(image)) for image in (_images_of(tensors, row) if tensors else [])]
            every.append(known[same])
        flat = [image for images in every for image in images]
        index = torch.arange(len(flat))
        return _tidy([i for i, _ in flat], [d for _, d in flat], index, list(map(len, every))) if flat else None

    @property
    def names(self) -> tuple[str, ...]:
        """The processor's names of the inputs."""
        return tuple(sorted(self.inputs[0])) if self.inputs else ()

    def of_row(self, row: int) -> list[int]:
        """The indices of the distinct images of a row, in order."""
        first = int(self.counts[:row].sum())
        images: list[int] = self.index[first : first + int(self.counts[row])].tolist()
        return images


class ImageField(FieldKind[RowImages]):
    """The images of each sequence."""

    def read(self, name: str, given: object, tokens: Ragged, mask: Tensor) -> RowImages | None:
        """See :class:`FieldKind`."""
        return RowImages.of(cast("ImageRows | RowImages", given), tokens.num_sequences)

    def select(self, value: RowImages, elements: Tensor, rows: Tensor) -> RowImages | None:
        """See :class:`FieldKind`. Returns None if no row has an image."""
        chosen = [value.of_row(row) for row in rows.tolist()]
        index = torch.tensor([i for images in chosen for i in images], dtype=torch.long)
        return _tidy(value.inputs, value.digests, index, list(map(len, chosen))) if len(index) else None

    def concat(self, values: Sequence[RowImages]) -> RowImages:
        """See :class:`FieldKind`."""
        starts = np.cumsum([0, *(len(part.inputs) for part in values)])
        index = torch.cat([part.index + int(start) for part, start in zip(values, starts, strict=False)])
        inputs = [image for part in values for image in part.inputs]
        digests = [digest for part in values for digest in part.digests]
        return _tidy(inputs, digests, index, torch.cat([part.counts for part in values]).tolist())

    def form(self, value: RowImages) -> tuple[object, ...]:
        """The processor's names of the inputs."""
        return value.names

    def sizes(self, value: RowImages, tokens: Ragged) -> Tensor:
        """See :class:`FieldKind`. The size of an image is divided among its rows."""
        numbers = torch.tensor([sum(t.numel() for t in image.values()) for image in value.inputs])
        rows = torch.repeat_interleave(torch.arange(len(value.counts)), value.counts)
        each = (numbers // torch.bincount(value.index))[value.index]
        return torch.zeros_like(value.counts).index_add_(0, rows, each)

    def pack(self, value: RowImages, mask: Tensor) -> dict[str, np.ndarray]:
        """See :class:`FieldKind`. Sends each distinct image once: the numbers of each input end to end, and the shapes."""
        arrays = {"counts": value.counts.int().numpy(), "index": value.index.int().numpy()}
        for name in value.names:
            tensors = [image[name] for image in value.inputs]
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
        digests, index = [_digest_of(image) for image in inputs], longs(arrays["index"])
        if bool(((index < 0) | (index >= len(inputs))).any()):
            raise ValueError(
                f"images.index must be from 0 to {len(inputs) - 1}, the images sent, got {index.tolist()}."
            )
        return _tidy(inputs, digests, index, arrays["counts"].tolist())

    def moved(self, name: str, value: RowImages, source: Tensor, target: Tensor) -> RowImages:
        """See :class:`FieldKind`. The placeholders of the new prompts are counted when they are scored."""
        return value


def _tidy(
    inputs: Sequence[Mapping[str, Tensor]], digests: Sequence[bytes], index: Tensor, counts: Sequence[int]
) -> RowImages:
    """Merge equal images, and drop unused ones."""
    used = list(dict.fromkeys(digests[i] for i in index.tolist()))
    first = {digest: image for digest, image in reversed(list(zip(digests, inputs, strict=True)))}
    place = {digest: i for i, digest in enumerate(used)}
    new_index = torch.tensor([place[digests[i]] for i in index.tolist()], dtype=torch.long)
    chosen = tuple(first[digest] for digest in used)
    if len({frozenset(image) for image in chosen}) > 1:
        raise ValueError("the images of one request have inputs of different names: use one processor for all rows.")
    return RowImages(chosen, tuple(used), new_index, torch.tensor(list(counts), dtype=torch.long))


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

    body: Any  # its forward takes encoded images, and calls the language model
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
        return cls(part[0], token, part[1])

    def encode(self, images: RowImages, device: torch.device) -> list[list[Tensor]]:
        """Features ``[n, H]`` of each distinct image, followed by those for deeper layers of the language model."""
        groups: dict[object, list[int]] = {}
        for i, image in enumerate(images.inputs):
            # The encoder takes images of equal shapes in one batch. With a grid, it packs images of any size.
            shapes = tuple((name, t.shape) for name, t in sorted(image.items()) if _GRID not in image)
            groups.setdefault((shapes, int(image.get(_ALONE, 0))), []).append(i)
        features: list[list[Tensor]] = [[]] * len(images.inputs)
        for group in groups.values():
            some = [images.inputs[i] for i in group]
            given: Json = {}
            for name in images.names:
                join = torch.cat if name == _PIXELS and _GRID in some[0] else torch.stack
                given[name] = send(join([image[name] for image in some]), device)
            if self.body.config.model_type in _BY_ROW:
                given = {name: tensor.unsqueeze(1) for name, tensor in given.items()}
            # Any count above the number of images marks several images per row. The model does not check it.
            if _ALONE in given:
                given[_ALONE] = [1] * len(some) if int(some[0][_ALONE]) == 1 else [len(some) + 1]
            out = self.body.get_image_features(**given, return_dict=True)
            deep = asked(out, "deepstack_features", (list, tuple)) or []
            for place, i in enumerate(group):
                features[i] = [out.pooler_output[place], *(layer[place] for layer in deep)]
        return features


class ImageInputs:
    """The encoded images of a request for one model, and the arguments of the model's forwards."""

    def __init__(self, setup: Setup, images: RowImages, tokens: Ragged) -> None:
        self.setup, self.images, self._tokens = setup, images, tokens
        self.model = ImageModel.of(setup.model)
        self.places = tokens.values == self.model.token
        with setup.active():
            self.features = self.model.encode(images, setup.device)
        expected = torch.tensor(
            [sum(len(self.features[i][0]) for i in images.of_row(r)) for r in range(len(tokens.lengths))]
        )
        # transformers compares only the totals of a batch, where errors of two rows may cancel out.
        placed = torch.zeros_like(tokens.lengths).index_add_(0, tokens.sequence_ids, self.places.long())
        wrong = (placed != expected).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(f"row {row} has {int(placed[row])} image tokens and {int(expected[row])} image features.")

    def keys(self) -> Tensor:
        """The token ids, int64 ``[N]``, with a digest of the image at each placeholder. Equal prefixes have equal keys."""
        # Digests become negative numbers, which never equal a token id.
        digests = torch.tensor([-1 - (int.from_bytes(each[:8], "little") >> 1) for each in self.images.digests])
        counts = torch.tensor([len(features[0]) for features in self.features])
        out = self._tokens.values.clone()
        out[self.places] = digests[self.images.index].repeat_interleave(counts[self.images.index])
        return out

    def arguments(self, rows: Sequence[int], ids: Tensor) -> Json:
        """The arguments of the multimodal body besides the padded ids ``[b, T]`` of some rows and their mask."""
        chosen = [i for row in rows for i in self.images.of_row(row)]
        if not chosen:
            return {}
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        first, *deep = map(list, zip(*(self.features[i] for i in chosen), strict=True))
        stacked = torch.stack(first) if self.model.body.config.model_type == "gemma3" else first
        encoded = BaseModelOutputWithPooling(pooler_output=cast(Tensor, stacked))
        encoded.deepstack_features = deep
        given: Json = {"mm_encoder_outputs": {"image": encoded}}
        if _GRID in self.images.names:
            given[_GRID] = send(torch.stack([self.images.inputs[i][_GRID] for i in chosen]), self.setup.device)
        if self.model.types is not None:
            given[self.model.types] = (ids == self.model.token).long()
        return given

    @contextmanager
    def forward(self) -> Iterator[Any]:
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
            given = {name: x for name, x in seen.items() if isinstance(x, (Tensor, Mapping)) or "deepstack" in name}
            # A pack is causal. It cannot express attention to later tokens, as among the patches of an image.
            if not _is_causal(given.pop("attention_mask", None), real):
                return False
            elements = sources[here]
            self._place[elements] = torch.arange(len(elements)) + sum(len(part["inputs_embeds"]) for part in parts)
            marked, layers = given.pop("visual_pos_masks", None), given.pop("deepstack_visual_embeds", None)
            if marked is not None and layers is not None:
                place = torch.where(
                    marked, marked.flatten().cumsum(0).view_as(marked) - 1 + sum(len(x[0]) for x in deep), -1
                )
                self._deep_place[elements] = place[wanted].cpu()
                deep.append(layers)
            positions = given.pop("position_ids", None)
            # Inputs of an unknown kind may not be one row per token.
            if given.keys() - {"inputs_embeds", "per_layer_inputs"}:
                return False
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

    def of_pack(self, elements: Tensor) -> Json:
        """The recorded inputs of the language model for the tokens at flat ``elements [n]``."""
        at = send(self._place[elements], self.setup.device)
        inputs: Json = {name: x[at][None] for name, x in self._inputs.items()}
        positions = inputs["position_ids"]
        inputs["position_ids"] = positions[..., 0] if positions.shape[-1] == 1 else positions.permute(2, 0, 1)
        deep = self._deep_place[elements]
        if bool((deep >= 0).any()):
            inputs["visual_pos_masks"] = send(deep >= 0, self.setup.device)[None]
            some = send(deep[deep >= 0], self.setup.device)
            inputs["deepstack_visual_embeds"] = [layer[some] for layer in self._deep]
        return inputs


@contextmanager
def _watched(decoder: nn.Module | None) -> Iterator[Json]:
    """Context: calls of the language model return their embeddings, without running it. Yields their arguments."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    seen: Json = {}

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
