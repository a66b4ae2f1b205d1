"""The demo with pictures: teach an image-text model to count coloured squares, while a KL penalty keeps it near its start.

Run it with ``make demo-image``. It takes a few minutes on two CPU cores and needs no network. Append changes of
:class:`Settings`, such as ``ARGS="seed=3 kl_target=0.2"``. It

1. draws pictures of red, green and blue squares, and holds some of them out
2. builds a tokenizer of words and a small Qwen2.5-VL, and trains it with ``make_algorithm("sft")`` on demonstrations, some of
   which have wrong counts
3. freezes a copy as the reference, samples groups of answers to each picture, and trains with ``make_algorithm("grpo")``. The
   reward is 1 for a right answer *minus a coefficient times the KL to the reference*. The coefficient adapts to hold the KL at
   a target.
4. writes figures and curves of the training and the held-out pictures to ``runs/image``

The entry ``"images"`` of a row holds the output of the image processor. No other part of the loop depends on pictures. Each
picture is encoded once per batch, for all its answers. Start reading at :func:`train`.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from countdown.report import Metrics, MetricsFile, keep_earlier_run, print_table, progress, silence_dependencies
from countdown.settings import check_positive, read_settings
from torchrl_llm_kl import PIKLCoefficient, RunMonitor, Sampling, make_algorithm
from torchrl_llm_kl.training import learn, loss_entries, plot_curves, seed_everything, step_figures


@dataclass
class Settings:
    """Settings of the pictures and the training, which were chosen on seeds from 100 on."""

    seed: int = 0  # seed of the pictures, the weights and the sampling
    pictures: int = 2000  # for training
    held_out: int = 400
    wrong: float = 0.6  # share of the demonstrations that count one red square too many
    warmup_steps: int = 200
    warmup_lr: float = 2e-3
    steps: int = 60
    num_pictures: int = 32  # per step
    group_size: int = 8  # answers to each picture
    kl_target: float = 0.4  # nats per answer
    lr: float = 3e-4
    evaluate_every: int = 20
    out: str = "runs/image"


# ------------------------------------------------------------------ the pictures

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 80, 220)}
MOST = 3  # squares of one colour
GRID, CELL = 4, 8  # cells per side of a picture, pixels per side of a cell
PATCH, MERGE = 4, 2  # a patch has 4 x 4 pixels, and the model merges 2 x 2 patches, which are one cell, into one token


def draw(cells: Sequence[str | None]) -> Image.Image:
    """Draw a picture from the colour of each cell, or None for a white cell."""
    picture = Image.new("RGB", (GRID * CELL, GRID * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for place, colour in enumerate(cells):
        if colour is not None:
            y, x = (CELL * index for index in divmod(place, GRID))
            pen.rectangle((x + 1, y + 1, x + CELL - 2, y + CELL - 2), fill=COLOURS[colour])
    return picture


def make_pictures(number: int, seed: int) -> TensorDict:
    """Make different pictures, as the image processor returns them, and the right answer to each."""
    rng = random.Random(seed)
    found: dict[tuple[str | None, ...], str] = {}
    while len(found) < number:
        counts = {colour: rng.randint(0, MOST) for colour in COLOURS}
        cells = [colour for colour, count in counts.items() for _ in range(count)]
        cells += [None] * (GRID**2 - len(cells))
        rng.shuffle(cells)
        found[tuple(cells)] = describe(counts.values())
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, do_resize=False)
    output = processor([draw(cells) for cells in found], return_tensors="pt")  # patches of all pictures in one tensor
    images = TensorDict(
        pixel_values=output["pixel_values"].unflatten(0, (number, -1)),
        image_grid_thw=output["image_grid_thw"][:, None],  # one picture per row
        batch_size=[number],
    )
    return TensorDict(images=images, answer=list(found.values()), batch_size=[number])


def describe(counts: Sequence[int]) -> str:
    """The answer, such as ``red 2 green 0 blue 3``."""
    return " ".join(f"{colour} {count}" for colour, count in zip(COLOURS, counts, strict=True))


def one_too_many(answer: str) -> str:
    """A wrong answer with one more red square. An answer with three red squares stays."""
    colour, count, *rest = answer.split()
    return " ".join([colour, str(min(int(count) + 1, MOST)), *rest])


# ------------------------------------------------------------------ the model

IMAGE, VIDEO, START, STOP = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
PROMPT = f"{USER} {START} {f'{IMAGE} ' * GRID**2}{STOP} count the squares {ASSISTANT}"  # a placeholder for each cell


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token for each word."""
    words = [PAD, END, USER, ASSISTANT, IMAGE, VIDEO, START, STOP, *["count", "the", "squares"], *COLOURS]
    words += [str(count) for count in range(MOST + 1)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def build_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build an untrained Qwen2.5-VL of 0.2 million parameters."""
    hidden = {"hidden_size": 64, "intermediate_size": 128}
    text = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 1,
        "num_heads": 4,
        "out_hidden_size": hidden["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "fullatt_block_indexes": [0],
    }
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": STOP,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in names.items()}
    config = Qwen2_5_VLConfig(text_config={**text, **hidden}, vision_config={**vision, **hidden}, **ids)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


# ------------------------------------------------------------------ answers


def make_batch(tokens: Tensor, pictures: TensorDict, tokenizer: PreTrainedTokenizerFast) -> TensorDict:
    """Build the rows that losses and transforms read: prompt and answer ``[B, T]``, with one picture for each row."""
    prompt = encode([PROMPT] * len(tokens), tokenizer)
    width, shape = prompt.shape[1], {"batch_size": [len(tokens)]}
    ended = (tokens[:, width:] == tokenizer.eos_token_id).int()
    answer = ended.cumsum(-1) == ended  # up to the end token, which is part of the answer
    before = torch.zeros_like(prompt, dtype=torch.bool)
    masks = TensorDict(
        all_assistant_mask=torch.cat([before, answer], 1), all_attention_mask=torch.cat([~before, answer], 1), **shape
    )
    return TensorDict(
        tokens=TensorDict(full=tokens, prompt=prompt, **shape), masks=masks, images=pictures["images"], **shape
    )


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """The token ids of texts with equal numbers of tokens."""
    return torch.tensor(tokenizer(list(texts))["input_ids"])


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    pictures: TensorDict,
    *,
    group_size: int = 1,
    greedy: bool = False,
) -> TensorDict:
    """Sample ``group_size`` answers to each picture, in consecutive rows. The reward is 1 for a right answer, otherwise 0."""
    prompt, config = encode([PROMPT] * len(pictures), tokenizer), model.config
    # Sampling() drops transformers' default top-k, so that answers come from the distribution that is scored.
    drawn = {"do_sample": False} if greedy else Sampling().generate_kwargs()
    tokens = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        mm_token_type_ids=(prompt == config.image_token_id).int(),
        **{name: value.flatten(0, 1) for name, value in pictures["images"].items()},
        num_return_sequences=group_size,
        max_new_tokens=2 * len(COLOURS) + 1,
        suppress_tokens=[config.image_token_id, config.video_token_id],
        **drawn,
    )
    pictures = pictures[torch.arange(len(pictures)).repeat_interleave(group_size)]
    batch = make_batch(tokens, pictures, tokenizer)
    replies = [
        tokenizer.decode(row[mask]) for row, mask in zip(tokens, batch["masks", "all_assistant_mask"], strict=True)
    ]
    right = [reply == f"{answer} {END}" for reply, answer in zip(replies, pictures["answer"], strict=True)]
    batch["next"] = TensorDict(reward=torch.tensor(right).float()[:, None], batch_size=[len(right)])
    batch["group"] = torch.arange(len(right)) // group_size
    return batch


def evaluate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: TensorDict) -> Metrics:
    """The share of held-out pictures with a right answer, for sampled answers and for the most probable ones."""
    with torch.random.fork_rng(devices=[]):  # so that evaluations do not change the random numbers of the training
        torch.manual_seed(0)
        answers = {name: sample(model, tokenizer, held_out, greedy=name == "greedy") for name in ("sampled", "greedy")}
    found = {name: rows["next", "reward"].mean().item() for name, rows in answers.items()}
    for name, share in list(found.items()):
        found[f"low/{name}"], found[f"high/{name}"] = interval(share, len(held_out))
    return found


def interval(share: float, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``number`` independent answers."""
    z = 1.96
    centre, shrunk = share + z**2 / (2 * number), 1 + z**2 / number
    half = z * (share * (1 - share) / number + (z / (2 * number)) ** 2) ** 0.5
    return (centre - half) / shrunk, (centre + half) / shrunk


# ------------------------------------------------------------------ training


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pictures: TensorDict, settings: Settings
) -> Iterator[float]:
    """Run SFT on demonstrations, many of which are wrong. Yields the loss of each step."""
    rng, most = random.Random(settings.seed), settings.warmup_lr
    sft = make_algorithm("sft", model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=most)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, most, total_steps=max(settings.warmup_steps, 20), pct_start=0.1
    )
    monitor = RunMonitor(every=0)
    for step in range(settings.warmup_steps):
        chosen = pictures[torch.randint(len(pictures), (settings.num_pictures,))]
        shown = [one_too_many(each) if rng.random() < settings.wrong else each for each in chosen["answer"]]
        tokens = encode([f"{PROMPT} {answer} {END}" for answer in shown], tokenizer)
        learn(sft, sft.prepare(make_batch(tokens, chosen, tokenizer)), optimizer, monitor=monitor)
        schedule.step()
        yield monitor.step(step)["loss_objective"]


def train(settings: Settings, out: Path) -> dict[str, str]:
    """Warm up, then train with GRPO. Returns a summary, label -> figure."""
    torch.set_num_threads(1)  # more threads are no faster on a model this small, and change the rounding
    seed_everything(settings.seed)
    pictures = make_pictures(settings.pictures + settings.held_out, settings.seed)
    held_out, pictures = pictures[: settings.held_out], pictures[settings.held_out :]
    tokenizer = build_tokenizer()
    policy = build_model(tokenizer)
    with progress("warm-up", settings.warmup_steps) as advance:
        for loss in warm_up(policy, tokenizer, pictures, settings):
            advance(f"loss {loss:.2f}")
    reference = copy.deepcopy(policy)

    gains = {
        "proportional": 2.0,
        "integral": 0.08,
        "smoothing": 0.9,
        "max_step": 0.2,
    }  # 256 answers measure the KL well
    coefficient = PIKLCoefficient(init=0.3, target=settings.kl_target, **gains)
    grpo = make_algorithm(
        "grpo",
        policy,
        reference=reference,
        group_key="group",
        kl_loss="none",
        kl_reward="k1",
        kl_reward_coeff=coefficient,
        # With the deviation of a group, right answers that differ only in their KL would get large advantages.
        advantage_args={"std": "batch"},
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / settings.steps)
    monitor = RunMonitor(every=0, kl_target=settings.kl_target)
    metrics, evaluations = (MetricsFile(out / f"{name}.jsonl") for name in ("metrics", "evaluations"))

    start = time.perf_counter()
    evaluations.append({"step": 0, **evaluate(policy, tokenizer, held_out)})
    with progress("grpo", settings.steps) as advance:
        for step in range(settings.steps):
            chosen = pictures[torch.randperm(len(pictures))[: settings.num_pictures]]
            batch = sample(policy, tokenizer, chosen, group_size=settings.group_size)
            batch = grpo.prepare(batch)  # scores under both models, charges the KL to the rewards, computes advantages
            figures = step_figures(batch, coefficient=coefficient, charged=True)
            learn(grpo, loss_entries(batch), optimizer, epochs=2, minibatches=2, monitor=monitor)
            schedule.step()
            coefficient.update(figures["kl"], n=len(batch))
            row = monitor.step(step, **figures)
            metrics.append({"step": step, **row, "seconds": time.perf_counter() - start})
            advance(monitor.status)
            if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
                evaluations.append({"step": step + 1, **evaluate(policy, tokenizer, held_out)})
    return report(metrics.rows, evaluations.rows, settings, out)


def report(rows: Sequence[Metrics], evaluations: Sequence[Metrics], settings: Settings, out: Path) -> dict[str, str]:
    """Draw the curves. Returns the summary."""
    plot_curves(
        rows,
        out / "curves.png",
        kl_target=settings.kl_target,
        held_out=[(row["step"], row["sampled"], row["low/sampled"], row["high/sampled"]) for row in evaluations],
        title=f"GRPO on pictures, seed {settings.seed}: counting coloured squares",
        reward_label="share right, sampled answers",
        held_out_label=f"share right, {settings.held_out} held-out pictures",
        held_out_format="{:.1%}",
        reward_range=(0, 1),
    )
    found, last = {}, [row["kl"] for row in rows[-max(1, len(rows) // 4) :]]
    for name, label in (("sampled", "sampled answers"), ("greedy", "most probable answers")):
        ends = (evaluations[0], evaluations[-1])
        before, after = (f"{row[name]:.1%} ({row[f'low/{name}']:.1%} to {row[f'high/{name}']:.1%})" for row in ends)
        found[f"right, held-out pictures, {label}"] = f"{before} -> {after}"
    found["KL to the reference, last quarter"] = f"{sum(last) / len(last):.3f} nats per answer"
    found["its target"] = f"{settings.kl_target:g} nats per answer"
    found["GRPO"] = f"{len(rows)} steps, {rows[-1]['seconds']:.0f} s"
    return found


def main(settings: Settings) -> None:
    """Train, and print the summary and the paths of the files."""
    silence_dependencies()
    check_positive(**{name: getattr(settings, name) for name in ("steps", "kl_target", "lr", "evaluate_every")})
    out, start, cpu = Path(settings.out), time.perf_counter(), time.process_time()
    keep_earlier_run(out, ("metrics.jsonl", "evaluations.jsonl", "curves.png"))
    found = train(settings, out)
    found["everything"] = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of CPU"
    print_table(f"Counting coloured squares, seed {settings.seed}, {settings.held_out} held-out pictures", found)
    print(f"wrote {out / 'curves.png'}, metrics.jsonl and evaluations.jsonl")


if __name__ == "__main__":
    try:
        main(read_settings(Settings, sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
