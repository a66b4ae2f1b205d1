"""Draw the figures of ``docs/concepts.md``: scored tokens, masks, estimators, places of the KL, weights of tokens.

Curves and weights are computed by the package itself. Run ``make docs`` after a change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrl_llm_kl.estimators import get_estimator
from torchrl_llm_kl.losses import aggregate

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY = "#dbe9f6", "#fbe3c4", "#cfe3d4", "#eeeeee"
LINES = ("#1f4e79", "#c05a00", "#2f7d4f", "#8a2b6b")

#: A conversation of two turns: text, and who wrote it.
TURNS = (
    ("<|user|>", "template"),
    ("2+2?", "user"),
    ("<|assistant|>", "template"),
    ("It", "assistant"),
    ("is", "assistant"),
    ("4", "assistant"),
    ("<|end|>", "assistant"),
    ("<|user|>", "template"),
    ("Twice?", "user"),
    ("<|assistant|>", "template"),
    ("8", "assistant"),
    ("<|end|>", "assistant"),
)


def box(axes: Any, x: float, y: float, width: float, height: float, text: str, colour: str, **style: Any) -> None:
    """A box around its centre, with text."""
    from matplotlib.patches import FancyBboxPatch

    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0.01,rounding_size=0.06",
        facecolor=colour,
        edgecolor="#666666",
        linewidth=0.8,
    )
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", **{"size": 9, **style})


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """An arrow from one point to another."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "#444444", "lw": 1.1, **style})


def canvas(plt: Any, width: float, height: float, **kwargs: Any) -> tuple[Any, Any]:
    """A figure with one panel."""
    figure, axes = plt.subplots(figsize=(width, height), **kwargs)
    return figure, axes


def save(plt: Any, figure: Any, name: str) -> None:
    """Write the figure to ``docs/concepts_NAME.png``."""
    figure.tight_layout()
    figure.savefig(FOLDER / f"concepts_{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


# ---------------------------------------------------------------------- one figure each


def scored(plt: Any) -> None:
    """Which position predicts which token, and the log-ratio of each."""
    figure, axes = canvas(plt, 10, 3.7)
    tokens = ("<|user|>", "2+2?", "<|assistant|>", "It", "is", "4", "<|end|>")
    policy = (None, None, None, -0.4, -0.1, -0.3, -0.1)
    reference = (None, None, None, -0.6, -0.1, -0.9, -0.2)
    for i, token in enumerate(tokens):
        response = policy[i] is not None
        box(axes, i, 0, 0.86, 0.5, token, BLUE if response else GREY, family="monospace", size=8.5)
        if response:
            arrow(axes, (i - 1, 0.28), (i - 0.06, 0.92), connectionstyle="arc3,rad=-0.15")
            axes.text(i, 1.08, f"{policy[i]:.1f}", ha="center", size=10, color=LINES[0])
            axes.text(i, 1.48, f"{reference[i]:.1f}", ha="center", size=10, color=LINES[1])
            axes.text(
                i, 1.93, f"{policy[i] - reference[i]:+.1f}".replace("+0.0", "0.0"), ha="center", size=10, weight="bold"
            )
    for y, text, colour in ((1.08, "log_prob", LINES[0]), (1.48, "ref_log_prob", LINES[1]), (1.93, "d", "black")):
        axes.text(-0.45, y, text, ha="left", size=9.5, family="monospace", color=colour)
    axes.text(-0.45, 2.35, "d = log_prob - ref_log_prob, nats", size=9, style="italic", color="#444444")
    for left, right, text in (
        (-0.43, 2.43, "prompt: conditioned on, never scored"),
        (2.57, 6.43, "response: sampled, so scored"),
    ):
        axes.annotate(
            "", xy=(left, -0.42), xytext=(right, -0.42), arrowprops={"arrowstyle": "|-|", "lw": 0.9, "color": "#666666"}
        )
        axes.text((left + right) / 2, -0.72, text, ha="center", size=9)
    axes.set_xlim(-0.6, 6.6)
    axes.set_ylim(-0.9, 2.6)
    axes.axis("off")
    save(plt, figure, "scored")


def masks(plt: Any) -> None:
    """The masks of a conversation of two turns."""
    figure, axes = canvas(plt, 11, 3.6)
    assistant = [who == "assistant" for _, who in TURNS]
    last_prompt = 10  # tokens before the second answer
    rows = (
        ("attention mask", [True] * len(TURNS)),
        ("assistant mask", assistant),
        ('"sft": this step', [a and i >= last_prompt for i, a in enumerate(assistant)]),
        ('"rlhf": all turns', assistant),
        ('"generic"', [i > 0 for i in range(len(TURNS))]),
    )
    colours = {"template": GREY, "user": ORANGE, "assistant": BLUE}
    for i, (text, who) in enumerate(TURNS):
        box(axes, i, 0, 0.9, 0.62, text, colours[who], family="monospace", size=5.9)
        for j, (_, mask) in enumerate(rows):
            y = -0.75 - 0.48 * j
            colour = LINES[0] if mask[i] else "#f4f4f4"
            axes.add_patch(
                plt.Rectangle((i - 0.43, y - 0.15), 0.86, 0.3, facecolor=colour, edgecolor="#bbbbbb", lw=0.6)
            )
    for j, (name, _) in enumerate(rows):
        axes.text(-0.65, -0.75 - 0.48 * j, name, ha="right", va="center", size=9)
    for left, right, text in ((-0.43, 6.43, "step 1"), (6.57, 11.43, "step 2")):
        axes.annotate(
            "", xy=(left, 0.52), xytext=(right, 0.52), arrowprops={"arrowstyle": "|-|", "lw": 0.9, "color": "#666666"}
        )
        axes.text((left + right) / 2, 0.66, text, ha="center", size=9)
    axes.set_xlim(-3.0, 11.6)
    axes.set_ylim(-3.0, 1.0)
    axes.axis("off")
    save(plt, figure, "masks")


def estimators(plt: Any) -> None:
    """Values of k1, k2 and k3 over the log-ratio, and the slope that a loss gets from each."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9))
    d = torch.linspace(-1.6, 1.6, 161)
    for name, colour in zip(("k1", "k2", "k3"), LINES, strict=False):
        log_prob = d.clone().requires_grad_()
        value = get_estimator(name)(log_prob, torch.zeros_like(d))
        (slope,) = torch.autograd.grad(value.sum(), log_prob)
        left.plot(d, value.detach(), color=colour, label=name, lw=1.8)
        right.plot(d, slope, color=colour, label=name, lw=1.8)
    left.set_title("value: k1 may be negative, k2 and k3 may not", size=10)
    right.set_title("slope in log_prob: what a loss differentiates", size=10)
    for axes in (left, right):
        axes.axhline(0, color="#bbbbbb", lw=0.8, zorder=0)
        axes.axvline(0, color="#bbbbbb", lw=0.8, zorder=0)
        axes.set_xlabel("d = log_prob - ref_log_prob, nats")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("nats")
    left.legend(frameon=False)
    right.annotate("k1: 1 at every token, a mean of 0", (-1.5, 1.08), size=8.5, color=LINES[0])
    right.annotate("k2: d", (0.98, 1.35), size=8.5, color=LINES[1], ha="right")
    right.annotate("k3: 1 - exp(-d)", (-1.2, -3.2), size=8.5, color=LINES[2])
    save(plt, figure, "estimators")


def placement(plt: Any) -> None:
    """Where a KL can enter, and which tokens it changes."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 5.4), height_ratios=(1.15, 1))
    places = (("env", "RetrieveKL"), ("replay buffer", "RetrieveKL,\nKLRewardTransform"), ("loss", "KLToReference"))
    for i, (where, what) in enumerate(places):
        x = 1.6 + 3.5 * i
        box(top, x, 1.0, 2.2, 0.62, where, (ORANGE, ORANGE, GREEN)[i], weight="bold", size=11)
        top.text(x, 0.33, what, ha="center", va="center", size=9, family="monospace")
        if i < 2:
            arrow(top, (x + 1.15, 1.0), (x + 2.35, 1.0))
            top.text(x + 1.75, 1.12, ("rollouts", "batches")[i], ha="center", size=8.5)
    top.annotate(
        "", xy=(0.45, 1.62), xytext=(6.25, 1.62), arrowprops={"arrowstyle": "|-|", "lw": 0.9, "color": "#666666"}
    )
    top.text(3.35, 1.74, "in the reward: reward - coeff * k1, a constant", ha="center", size=9.5)
    top.annotate(
        "", xy=(7.5, 1.62), xytext=(9.7, 1.62), arrowprops={"arrowstyle": "|-|", "lw": 0.9, "color": "#666666"}
    )
    top.text(8.6, 1.74, "in the loss: + coeff * k2, differentiated", ha="center", size=9.5)
    top.set_xlim(0.2, 10.4)
    top.set_ylim(0, 2.0)

    for row, (y, title, colour) in enumerate(((1.05, "in the reward", LINES[1]), (0.2, "in the loss", LINES[2]))):
        bottom.text(0.25, y, title, size=9.5, va="center")
        for i in range(6):
            box(
                bottom,
                2.6 + 1.25 * i,
                y,
                0.95,
                0.34,
                f"token {i + 1}",
                GREY if i != 4 else (ORANGE, GREEN)[row],
                size=8.5,
            )
        credited = range(5) if row == 0 else (4,)
        for i in credited:
            bottom.plot(2.6 + 1.25 * i, y - 0.28, marker="^", color=colour, ms=8)
    bottom.text(
        5.7,
        1.5,
        "The KL of token 5 changes the probability of the marked tokens",
        ha="center",
        size=9.5,
        style="italic",
    )
    bottom.set_xlim(0.2, 10.4)
    bottom.set_ylim(-0.25, 1.7)
    for axes in (top, bottom):
        axes.axis("off")
    save(plt, figure, "placement")


def weights(mode: str) -> Tensor:
    """The weight of each token of answers of 2 and 6 tokens, ``[2, 6]``: the gradient of the aggregated loss."""
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    value = torch.zeros(2, 6, requires_grad=True)
    loss = aggregate(value, mask, mode, max_len=8)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss, value)
    return gradient


def aggregation(plt: Any) -> None:
    """The weight of each token under each aggregation."""
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    figure, axes = plt.subplots(1, 4, figsize=(11, 3.0), sharey=False)
    for panel, mode in zip(axes, modes, strict=True):
        found = weights(mode)
        values = [*found[0, :2].tolist(), 0.0, *found[1].tolist()]
        colours = [LINES[1]] * 2 + ["none"] + [LINES[0]] * 6
        panel.bar(range(9), values, color=colours, width=0.75)
        panel.set_title(mode, size=9.5)
        panel.set_xticks([0.5, 5.5], ["2 tokens", "6 tokens"], size=8.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", labelsize=8)
        panel.tick_params(axis="x", length=0)
        panel.set_ylim(0, max(values) * 1.25)
        panel.text(0.5, values[0] * 1.05, f"{values[0]:.3g}", ha="center", size=8.5)
        panel.text(5.5, values[-1] + max(values) * 0.05, f"{values[-1]:.3g}", ha="center", size=8.5)
    axes[0].set_ylabel("weight of a token", size=9)
    save(plt, figure, "aggregation")


def draw() -> None:
    """All figures."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for figure in (scored, masks, estimators, placement, aggregation):
        figure(plt)


if __name__ == "__main__":
    draw()
