"""Time of scoring groups of answers to images, compared with a forward per answer: ``python -m benchmarks.images``.

The model is a random Qwen2.5-VL of a few layers. Each group's prompt has one image. Images that pass the encoder are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.environment import machine
from benchmarks.measure import Contender, HostMeter, Measured, alternate
from torchrl_llm_kl import LogProbScorer, ScoreRequest

OWN, OURS = "a forward per answer", "LogProbScorer"
KINDS = ("scores", "scores and gradient")
_IMAGE, _SIDE = 5, 16  # the placeholder, and patches on each side of an image


@dataclass
class Found:
    """Times and images encoded in one call, by kind and contender, and the largest difference of a log-prob."""

    times: dict[str, dict[str, Measured]] = field(default_factory=dict)
    encoded: dict[str, dict[str, int]] = field(default_factory=dict)
    difference: float = 0.0


def measure(layers: int, hidden: int, groups: int, answers: int, length: int, repeats: int) -> Found:
    """Score all answers in both ways, with and without gradient."""
    model, rows = _model(layers, hidden), _rows(groups, answers, length)
    ids, images = [row for row, _ in rows], [image for _, image in rows]
    scorer, found, counts = LogProbScorer(model), Found(), [0]
    encode = model.model.get_image_features

    def counted(pixel_values: Tensor, image_grid_thw: Tensor, **given: Any) -> Any:
        counts[0] += len(image_grid_thw)
        return encode(pixel_values, image_grid_thw, **given)

    model.model.get_image_features = counted

    def own(grad: bool) -> list[Tensor]:
        out = []
        for row, image in rows:
            with torch.set_grad_enabled(grad):
                types = (row == _IMAGE).long()[None]
                logits = model(input_ids=row[None], mm_token_type_ids=types, **image).logits[0, :-1]
                chosen = logits[-length:].log_softmax(-1).gather(-1, row[-length:, None]).squeeze(-1)
                if grad:
                    chosen.sum().backward()
            out.append(chosen.detach())
        return out

    masks = [torch.arange(len(row)) >= len(row) - length for row in ids]

    def ours(grad: bool) -> list[Tensor]:
        log_probs = scorer.score(ScoreRequest.of(ids, masks, images=images), grad=grad)
        if grad:
            log_probs.values.sum().backward()
        return [row[-length:].detach() for row in log_probs.to_list()]

    runs = {OWN: own, OURS: ours}
    for kind, grad in zip(KINDS, (False, True), strict=True):
        found.encoded[kind] = {}
        for name, run in runs.items():
            counts[0] = 0
            run(grad)
            found.encoded[kind][name] = counts[0]
        contenders = {
            name: Contender(lambda _, run=run, grad=grad: run(grad), prepare=model.zero_grad)
            for name, run in runs.items()
        }
        found.times[kind] = alternate(contenders, HostMeter(), repeats=repeats, warm_up=1, memory_apart=True)
    pairs = zip(own(False), ours(False), strict=True)
    found.difference = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def _model(layers: int, hidden: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    text = {
        "vocab_size": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
    }
    text |= {"num_attention_heads": hidden // 64, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_heads": hidden // 64}
    vision |= {"out_hidden_size": hidden, "patch_size": 14, "fullatt_block_indexes": [layers - 1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=_IMAGE, video_token_id=6)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    return model


def _rows(groups: int, answers: int, length: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    generator, rows = torch.Generator().manual_seed(0), []
    grid = torch.tensor([[1, _SIDE, _SIDE]])
    for _ in range(groups):
        pixels = torch.randn(_SIDE**2, 3 * 2 * 14 * 14, generator=generator)
        text = torch.randint(10, 4096, (64,), generator=generator)
        prompt = torch.cat([torch.tensor([7, *[_IMAGE] * (_SIDE**2 // 4), 8]), text])
        for _ in range(answers):
            answer = torch.randint(10, 4096, (length,), generator=generator)
            rows.append((torch.cat([prompt, answer]), {"pixel_values": pixels.clone(), "image_grid_thw": grid}))
    return rows


def table(found: Found) -> Table:
    """Images encoded, seconds and ratios."""
    shown = Table("", "", "images encoded", "seconds", "times as fast")
    for kind, times in found.times.items():
        for name, measured in times.items():
            ratio = times[OWN].seconds / measured.seconds
            shown.add_row(kind, name, str(found.encoded[kind][name]), f"{measured.seconds:.2f}", f"{ratio:.1f}")
    return shown


def main(
    layers: Annotated[int, typer.Option(help="Layers of the language model, and of the encoder.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size of both, a multiple of 64.")] = 256,
    groups: Annotated[int, typer.Option(help="Prompts, each with one image.")] = 4,
    answers: Annotated[int, typer.Option(help="Answers to each.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of an answer.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 7,
) -> None:
    """Print counts and times, on one core."""
    torch.set_num_threads(1)
    console = Console()
    console.print(f"{machine(torch.device('cpu'))['processor']}, one core, float32, {layers} layers of {hidden}")
    found = measure(layers, hidden, groups, answers, length, repeats)
    console.print(table(found))
    console.print(f"largest difference of a log-prob: {found.difference:.1e}")


if __name__ == "__main__":
    typer.run(main)
