"""A batch with random numbers for the inspector, and its page in a browser."""

import math
import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torchrl_llm_kl import Ragged
from torchrl_llm_kl.diagnostics import TokenColumns
from toy_tokenizer import build_tokenizer

NAN = math.nan
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: NO PAGE IS TESTED IN A BROWSER")
TOKENIZER = build_tokenizer(pad_token="<|pad|>", merges=[("t", "h"), ("th", "e"), ("Ġ", "the")])
QUESTIONS = ("How many eggs?", "Count the ducks.", "What is left?")


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def batch(seed: int = 0, answers: int = 4) -> TokenColumns:
    """Answers of one or two turns to three questions, with random numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows, masks = [], []
    for question in range(3):
        for answer in range(answers):
            parts = [(f"<|im_start|>{QUESTIONS[question]}\n", False), (f"the answer is {answer * 7}, the end", True)]
            if answer == 1:
                parts += [("<|im_end|>\nSure?\n", False), (f"yes, the number {question}", True)]
            ids = [(token, scored) for text, scored in parts for token in encode(text)]
            rows.append(torch.tensor([token for token, _ in ids]))
            masks += [scored for _, scored in ids]
    tokens, mask = Ragged.from_list(rows), torch.tensor(masks)

    def random(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(mask), generator=generator) ** 3

    old = -random(1).abs()
    columns = {"log_prob": old + random(0.1), "old_log_prob": old, "sampler_log_prob": old + random(0.01)}
    columns |= {"ref_log_prob": old + random(0.5), "entropy": random(1).abs(), "kl": random(0.3).abs()}
    columns["advantage"] = torch.randn(len(rows), generator=generator)[tokens.sequence_ids]
    columns = {name: values.masked_fill(~mask, NAN) for name, values in columns.items()}
    reward = torch.rand(len(rows), generator=generator)
    return TokenColumns(tokens, mask, columns, {"reward": reward}, torch.arange(len(rows)) // answers)


def span(columns: TokenColumns, row: int) -> slice:
    """The slice of a rollout's tokens."""
    return slice(*columns.tokens.offsets[row : row + 2].tolist())


@dataclass
class Tab:
    """A page of the inspector, with its requests and messages."""

    page: Any
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def rows(self) -> list[int]:
        return [int(text[1:]) for text in self.page.locator("#list .row .numbers > :first-child").all_inner_texts()]

    def open(self, row: int) -> None:
        self.page.locator(f"#row-{row}").click()
        self.wait_for_rollout(row)

    def wait_for_rollout(self, row: int) -> None:
        self.wait_for("#heading", f"Rollout {row}")

    def wait_for(self, selector: str, text: str) -> None:
        """Wait for a text. ``wait_for_function`` would evaluate strings in the page, which its content policy forbids."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector)).to_have_text(text)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def focused(self) -> int:
        return int(self.page.evaluate("document.activeElement.dataset.i ?? -1"))

    def token(self, i: int) -> Any:
        return self.page.locator(f".tokens >> nth=0 >> [data-i='{i}']")

    def classes(self, pane: int = 0) -> list[set[str]]:
        """The classes of each token."""
        spans = f".tokens[data-side='{pane}'] [data-i]"
        found = self.page.eval_on_selector_all(spans, "spans => spans.map(span => span.className)")
        return [set(names.split()) for names in found]

    def card(self) -> dict[str, float]:
        """The numbers of the first batch on the visible card."""
        read = "cells => cells.map(cell => [cell.dataset.name, cell.textContent])"
        cells = self.page.eval_on_selector_all("#card dd[data-side='0']", read)
        return {name: float(text.replace("∞", "inf")) for name, text in cells}
