"""Draw ``docs/log_probs.png``: three log-probs of a sampled token, who computes them and when, and the two quotients.

Run ``make docs`` after a change of the keys.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).with_name("log_probs.png")

#: Title, when it is computed, entry.
BOXES = (
    ("sampler", "the engine, while it generates", '("next", "sampler_log_probs", "full")', "#fbe3c4"),
    (
        "trainer_old",
        "the trainer's model, same weights,\nbefore the first step on the batch",
        '("next", "log_probs", "full")',
        "#dbe9f6",
    ),
    ("policy_now", "the trainer's model, at each step,\nwith gradient", "scored by PolicyLoss", "#cfe3d4"),
)
#: Name, quotient, what is done with it.
QUOTIENTS = (
    (
        "mismatch = trainer_old / sampler",
        "another kernel, precision, or top-p;\nconstant over the steps",
        "ImportanceWeights, RejectionMask\nmetrics mismatch_k1, chi2_seq, ...",
    ),
    (
        "drift = policy_now / trainer_old",
        "what the steps have changed;\n1 at the first step",
        "the ratio r of the objective: clipped\nmetrics ratio_*, ESS, clip_fraction",
    ),
)


def draw() -> None:
    """Boxes from left to right, and a quotient below each gap."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    figure, axes = plt.subplots(figsize=(11, 4.4))
    for i, (title, when, entry, colour) in enumerate(BOXES):
        x = 2.1 + 4.3 * i
        box = FancyBboxPatch(
            (x - 1.75, 2.6),
            3.5,
            1.3,
            boxstyle="round,pad=0.02,rounding_size=0.1",
            facecolor=colour,
            edgecolor="#555555",
        )
        axes.add_patch(box)
        axes.text(x, 3.66, title, ha="center", va="center", weight="bold", size=12)
        axes.text(x, 3.28, when, ha="center", va="center", size=8.5)
        axes.text(x, 2.8, entry, ha="center", va="center", size=8, family="monospace")
    for i, (name, why, use) in enumerate(QUOTIENTS):
        left, right = 2.1 + 4.3 * i, 2.1 + 4.3 * (i + 1)
        middle, shift = (left + right) / 2, 0.25
        axes.annotate(
            "", xy=(right - shift, 2.5), xytext=(left + shift, 2.5),
            arrowprops={"arrowstyle": "<->", "color": "#333333", "lw": 1.3, "connectionstyle": "bar,fraction=0.08"},
        )  # fmt: skip
        axes.text(middle, 1.75, name, ha="center", va="center", weight="bold", size=10.5)
        axes.text(middle, 1.27, why, ha="center", va="center", size=8.5)
        axes.text(middle, 0.68, use, ha="center", va="center", size=8.5, color="#1f4e79")
    axes.text(
        6.4,
        0.12,
        "policy_now / sampler = mismatch x drift",
        ha="center",
        va="center",
        size=9.5,
        color="#444444",
        style="italic",
    )
    axes.set_xlim(0.1, 12.7)
    axes.set_ylim(-0.1, 4.1)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
