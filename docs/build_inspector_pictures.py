"""Take the pictures of ``docs/inspector.md`` in a headless Chromium: ``python docs/build_inspector_pictures.py [DATA]``.

Trains a small model on GSM8K's questions with solutions of real models (a minute), and scores them with two of its checkpoints.
``DATA`` holds ``gsm8k_model_solutions.jsonl`` of openai/grade-school-math. Needs Debian's chromium and the extra ``dev``.

With ``--measure`` it writes 1,000 rollouts of 1,000 tokens instead, and prints time and size.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_llm_kl import LogProbScorer, Ragged, inspect_tokens
from torchrl_llm_kl.diagnostics import TokenColumns

FOLDER = Path(__file__).parent
START, END = "<|im_start|>", "<|im_end|>"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
DOUBT = "Are you sure? Please check each step, and give the answer again."


def read(data: Path, count: int) -> list[dict[str, Any]]:
    """The first questions with their four solutions."""
    with (data / "gsm8k_model_solutions.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(count), lines, strict=False)]


def train_tokenizer(texts: list[str], vocab_size: int = 4000) -> PreTrainedTokenizerFast:
    """A byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[START, END], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=[START])


def turns_of(item: dict[str, Any], name: str, second: str | None) -> list[tuple[str, str]]:
    """One answer, or an answer, a doubt and another answer."""
    turns = [("user", item["question"]), ("assistant", item[name]["solution"])]
    return turns if second is None else [*turns, ("user", DOUBT), ("assistant", item[second]["solution"])]


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which are the assistant's."""
    ids: list[int] = []
    mask: list[bool] = []
    for role, text in turns:
        for part, scored in ((f"{START}{role}\n", False), (f"{text}{END}", role == "assistant"), ("\n", False)):
            new = tokenizer(part, add_special_tokens=False)["input_ids"]
            ids += new
            mask += [scored] * len(new)
    return ids, mask


def train(model: Any, rows: list[list[int]], steps: int, generator: torch.Generator) -> None:
    """Next-token prediction on random rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        chosen = [rows[int(i)][:256] for i in torch.randint(len(rows), (8,), generator=generator)]
        width = max(map(len, chosen))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in chosen])
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in chosen])
        out = model(input_ids=ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def batches(data: Path) -> tuple[TokenColumns, TokenColumns, Any]:
    """The columns of 160 rollouts at two checkpoints, and the tokenizer."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    items = read(data, 240)
    texts = [text for item in items for text in (item["question"], *(item[name]["solution"] for name in MODELS))]
    tokenizer = train_tokenizer([*texts, DOUBT])
    rollouts = []
    for at, item in enumerate(items[:40]):
        for k, name in enumerate(MODELS):
            second = MODELS[(k + 1) % 4] if at % 4 == 3 else None
            rollouts.append(
                (*encode(tokenizer, turns_of(item, name, second)), float(item[second or name]["is_correct"]))
            )
    rows = [encode(tokenizer, turns_of(item, name, None))[0] for item in items for name in MODELS]
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    train(model, rows, 250, generator)
    checkpoints = [copy.deepcopy(model)]  # the reference, then two steps of the policy
    for steps in (6, 40):
        train(model, rows[:160], steps, generator)
        checkpoints.append(copy.deepcopy(model))
    reference, first, second = checkpoints
    sampler = copy.deepcopy(first).bfloat16()  # an engine of another precision
    ids = Ragged.from_list([torch.tensor(row) for row, _, _ in rollouts])
    mask = torch.tensor([scored for _, row, _ in rollouts for scored in row])
    rewards = torch.tensor([reward for _, _, reward in rollouts])
    groups = rewards.reshape(-1, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).reshape(-1)
    with torch.no_grad():
        old = LogProbScorer(first).score(ids, mask).values
        sampled = LogProbScorer(sampler).score(ids, mask).values
    out = []
    for policy in (first, second):
        scores = LogProbScorer(policy).evaluate(ids, mask, entropy=True, reference=LogProbScorer(reference))
        assert scores.kl is not None
        assert scores.entropy is not None
        assert scores.ref_log_prob is not None
        columns = {
            "log_prob": scores.log_prob.values,
            "old_log_prob": old,
            "sampler_log_prob": sampled,
            "ref_log_prob": scores.ref_log_prob.values,
            "entropy": scores.entropy.values,
            "kl": scores.kl.values,
            "advantage": advantages[ids.sequence_ids],
        }
        columns = {name: values.detach().float().masked_fill(~mask, torch.nan) for name, values in columns.items()}
        prompts = torch.arange(len(rollouts)) // 4
        out.append(TokenColumns(ids, mask, columns, {"reward": rewards}, prompts))
    return out[0], out[1], tokenizer


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium without a window."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("chromium is not installed: `apt-get install chromium`.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        yield browser
        browser.close()


def take(one: Path, both: Path, worst_row: int) -> None:
    """The four pictures."""
    with chromium() as browser:
        for name in ("light", "dark", "worst", "diff"):
            page = browser.new_page(
                viewport={"width": 1360, "height": 820}, color_scheme="dark" if name == "dark" else "light"
            )
            page.goto((both if name == "diff" else one).as_uri())
            page.wait_for_selector("html[data-ready]")
            if name in ("light", "diff"):
                page.click("[data-sort=kl]")
            if name == "diff":
                page.click("#list .row >> nth=0")
                page.check("#difference")
                page.hover(".tokens >> nth=0 >> .w1 >> nth=0")
            elif name == "worst":
                page.select_option("#quantity", "mismatch")
                page.click("#tab-worst")
                page.click("#worst button >> nth=0")
            else:
                page.evaluate(
                    f"document.querySelector('#list').scrollTop = {56 * (worst_row if name == 'dark' else 0)}"
                )
                page.click("#list .row >> nth=6" if name == "light" else f"#row-{worst_row}")
                if name == "dark":
                    page.select_option("#quantity", "entropy")
                    page.keyboard.press("n")
            page.wait_for_timeout(200)
            page.screenshot(path=FOLDER / f"inspector_{name}.png")
            page.close()


def measure(path: Path) -> None:
    """Time and size of 1,000 rollouts of 1,000 tokens with eight random columns."""
    torch.manual_seed(0)
    names = ("log_prob", "old_log_prob", "sampler_log_prob", "ref_log_prob", "entropy", "kl", "kl_penalty", "advantage")
    tokenizer = train_tokenizer([chr(0x4E00 + i) + chr(0x4E00 + j) for i in range(70) for j in range(70)])
    ids = Ragged.from_list(list(torch.randint(0, len(tokenizer), (1000, 1000))))
    mask = ids.positions >= 200
    columns = {name: -torch.rand(1_000_000).log().masked_fill(~mask, torch.nan) for name in names}
    start = time.perf_counter()
    inspect_tokens(TokenColumns(ids, mask, columns, {"reward": torch.rand(1000)}), tokenizer, path)
    print(f"written in {time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.1f} MB")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1360, "height": 820})
        start = time.perf_counter()
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector("html[data-ready]")
        print(f"list complete and first rollout open after {time.perf_counter() - start:.1f} s")
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first paint after {paint / 1000:.2f} s")
        print("frames of the scrolling list: median {:.0f} ms, 95 % below {:.0f} ms".format(*page.evaluate(SCROLL)))
        print(f"next rollout: {page.evaluate(NEXT):.0f} ms")
        start = time.perf_counter()
        page.fill("#search", tokenizer.decode([3000]))
        page.wait_for_selector(".t.hit, #count:has-text('of')")
        print(f"search in all texts: {time.perf_counter() - start:.1f} s")


#: The time between frames while the list scrolls by 300 pixels a frame.
SCROLL = """async () => {
  const list = document.querySelector("#list"), times = [];
  for (let i = 0, last = performance.now(); i < 120; i++) {
    list.scrollTop += 300;
    await new Promise(requestAnimationFrame);
    times.push(performance.now() - last);
    last = performance.now();
  }
  times.sort((a, b) => a - b);
  return [times[60], times[114]];
}"""
#: The mean time from the button to the next rollout's heading and frame.
NEXT = """async () => {
  const start = performance.now();
  for (let row = 1; row <= 10; row++) {
    document.querySelector("#next").click();
    while (document.querySelector("#heading").textContent !== `Rollout ${row}`) await new Promise(requestAnimationFrame);
  }
  return (performance.now() - start) / 10;
}"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", type=Path, default=FOLDER.parents[1] / "shared" / "data")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder")
    arguments = parser.parse_args()
    folder = arguments.pages or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True, parents=True)
    if arguments.measure:
        measure(folder / "large.html")
        sys.exit()
    step_1, step_2, tokenizer = batches(arguments.data)
    title = "GSM8K, step 6"
    inspect_tokens(step_1, tokenizer, folder / "one.html", title=title)
    inspect_tokens(
        step_1, tokenizer, folder / "both.html", other=step_2, names=("step 6", "step 46"), title="GSM8K, two steps"
    )
    take(folder / "one.html", folder / "both.html", worst_row=12)
