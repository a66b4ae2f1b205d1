"""Small random image-text models of eight families, and rows as their processors return them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

IMAGE = 5  # the placeholder
_TEXT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT |= {"num_key_value_heads": 1, "max_position_embeddings": 256}
_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 6}
_IDS = _TOKENS | {"vision_start_token_id": 7, "vision_end_token_id": 8}
_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 2}
_SIGLIP = _TOWER | {"image_size": 8}
_WORDS = "<pad> <s> </s> what is {image} <video> {start} {end} <audio> <user> <bot> <end> a red blue green cat dog car yes no"
_TEMPLATE = (
    "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<user> ' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}IMAGE {% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %} <end> {% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
_SLIDING = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 2}
_QWEN25 = _QWEN | {"intermediate_size": 24, "out_hidden_size": 16}
_GEMMA4 = _SLIDING | {"global_head_dim": 8, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
_GEMMA4 |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40, "use_bidirectional_attention": "vision"}
_GEMMA4_VISION = _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
_GEMMA4_VISION |= {"position_embedding_size": 16}
_LLAVA = {"image_grid_pinpoints": [[8, 8], [8, 16], [16, 8]], "vision_feature_layer": -1}
_IDEFICS = ({"model_type": "llama"}, _SIGLIP, {"image_token_id": IMAGE, "scale_factor": 2})
#: Family -> the beginning of its classes' names, further settings of the text model, the vision model, and other settings.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _MROPE, _QWEN | {"embed_dim": 16, "mlp_ratio": 2}, _IDS),
    "qwen2_5_vl": ("Qwen2_5_VL", _MROPE, _QWEN25 | {"window_size": 8, "fullatt_block_indexes": [1]}, _IDS),
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 8, "rope_parameters": _MROPE["rope_parameters"] | {"mrope_interleaved": True}},
        _QWEN25 | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        _IDS,
    ),
    "gemma3": ("Gemma3", _SLIDING, _SIGLIP, {"mm_tokens_per_image": 4, "image_token_index": IMAGE}),
    "gemma4": ("Gemma4", _GEMMA4, _GEMMA4_VISION, {**_TOKENS, "audio_token_id": 9, "audio_config": None}),
    "llava_onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2"},
        _SIGLIP | {"model_type": "siglip_vision_model", "vision_use_head": False},
        _TOKENS | _LLAVA,
    ),
    "smolvlm": ("SmolVLM", *_IDEFICS),
    "idefics3": ("Idefics3", *_IDEFICS),
}


def image_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model with weights large enough that pixels and positions matter."""
    import transformers

    classes, text, vision, others = FAMILIES[family]
    config = getattr(transformers, f"{classes}Config")(text_config=_TEXT | text, vision_config=vision, **others)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{classes}ForConditionalGeneration")(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def picture(family: str, seed: int, wide: bool = False) -> dict[str, Tensor]:
    """An image in the form in which the family's processor returns a row with one image."""
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    height, width = 4, 8 if wide else 4  # patches
    if family.startswith("qwen"):
        grid = torch.tensor([[1, height, width]])
        return {"pixel_values": pixels(height * width, 3 * 2 * 2 * 2), "image_grid_thw": grid}
    if family == "gemma4":
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        places = torch.cat([places, torch.full((32 - len(places), 2), -1)])
        return {"pixel_values": pixels(1, 32, 12), "image_position_ids": places[None]}
    if family == "llava_onevision":
        crops, sizes = (3, [8, 16]) if wide else (2, [8, 8])
        counted = {"image_sizes": torch.tensor([sizes]), "batch_num_images": torch.tensor([1])}
        return {"pixel_values": pixels(1, crops, 3, 8, 8), **counted}
    if family in ("smolvlm", "idefics3"):
        mask = torch.ones(1, 1, 8, 8, dtype=torch.long)
        return {"pixel_values": pixels(1, 1, 3, 8, 8), "pixel_attention_mask": mask}
    return {"pixel_values": pixels(1, 3, 8, 8)}


def joined(family: str, pictures: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Several images in the form in which the processor returns a row."""
    if family == "llava_onevision":
        # If there are several images, the processor takes only their first crops.
        crops, sizes = zip(*((each["pixel_values"][:, :1], each["image_sizes"]) for each in pictures), strict=True)
        count = torch.tensor([len(pictures)])
        return {"pixel_values": torch.cat(crops), "image_sizes": torch.cat(sizes), "batch_num_images": count}
    dim = 1 if family in ("smolvlm", "idefics3") else 0
    return {name: torch.cat([each[name] for each in pictures], dim) for name in pictures[0]}


def num_placeholders(model: Any, row: dict[str, Tensor]) -> list[int]:
    """The number of features of each image of a row."""
    with torch.no_grad():
        return [len(each) for each in model.get_image_features(**row).pooler_output]


def token_types(family: str, ids: Tensor) -> dict[str, Tensor]:
    """The token types that the processor returns with the ids ``[1, T]``."""
    name = {"gemma3": "token_type_ids"}.get(family, "mm_token_type_ids")
    return {} if family in ("llava_onevision", "smolvlm", "idefics3") else {name: (ids == IMAGE).long()}


def own_log_probs(family: str, model: Any, ids: Sequence[int] | Tensor, row: dict[str, Tensor] | None) -> Tensor:
    """The model's own log-probs of a row's tokens after the first: ``model(**processor_output)``."""
    whole = torch.as_tensor(ids)[None]
    logits = model(input_ids=whole, **(row or {}), **token_types(family, whole)).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, whole[0, 1:, None]).squeeze(-1)


def image_processor(family: str) -> Any:
    """A processor of qwen2_5_vl or gemma3 with few words and images of 8 x 8 pixels."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3Processor, PreTrainedTokenizerFast, Qwen2_5_VLProcessor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin

    names = {"image": "<|image_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
    if family == "gemma3":
        names = {"image": "<image_soft_token>", "start": "<start_of_image>", "end": "<end_of_image>"}
    vocab = {word: i for i, word in enumerate(_WORDS.format(**names).split())}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", bos_token="<s>",
                                        additional_special_tokens=list(names.values()))  # fmt: skip
    if family == "gemma3":
        for name, word in zip(("image_token", "boi_token", "eoi_token"), names.values(), strict=True):
            setattr(tokenizer, name, word)
            setattr(tokenizer, f"{name}_id", vocab[word])
        pixels: Any = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
        template = _TEMPLATE.replace("IMAGE", names["start"])
        return Gemma3Processor(pixels, tokenizer, chat_template=template, image_seq_length=4)

    class ImagesAlone(Qwen2_5_VLProcessor):  # the processor of videos needs torchvision
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = names["image"], "<video>"
            self.image_token_id, self.video_token_id = IMAGE, vocab["<video>"]
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    pixels = Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, size={"shortest_edge": 16, "longest_edge": 64})
    return ImagesAlone(pixels, tokenizer, _TEMPLATE.replace("IMAGE", "{start}{image}{end}".format(**names)))
