"""Draws docs/pictures/chunk.png, the data's way through a chunk of the fused head: make pictures.

The figures in it are the shapes that `kernels/head_torch.py` computes with.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INPUT, WORK, OUTPUT = "#dbe9f6", "#fff2cc", "#dff0d8"
EDGE = "#444444"
BOXES = (  # left, lower, width, height, bold first line, lines below it, fill
    (3.2, 7.2, 3.0, 1.5, "head W [V, D]", "bias and soft-cap\nwhere there are any", INPUT),
    (3.0, 4.6, 3.6, 1.7, "logits z [C, V]", "fp32, only one chunk\nz = H W$^T$ / T", WORK),
    (7.3, 4.6, 3.3, 1.7, "log-prob [C]", "log-softmax, gather:\nz$_{target}$ - logsumexp(z)", WORK),
    (11.7, 4.6, 4.7, 1.7, "loss of each token [C]",
     "ratio = exp(logp - old), clip,\n+ $\\beta$ KL to the reference", WORK),
    (11.7, 7.2, 4.7, 1.5, "old, ref, A, w [N]",
     "log-probs under old policy and\nreference, advantages, weights", INPUT),
    (11.7, 2.0, 4.7, 1.7, "g = dloss / dlogp [C]", "known as soon as logp is:\nnothing waits for other tokens", WORK),
    (5.6, 2.0, 5.0, 1.7, "dlogits [C, V], in place of z",
     "g (onehot - softmax(z)) / T\nthe memory of the logits", WORK),
    (0.5, 0.6, 3.9, 1.2, "dH [N, D]", "dlogits W, of this chunk", OUTPUT),
    (0.5, 2.15, 3.9, 1.2, "dW [V, D]", "+= dlogits$^T$ H, over chunks", OUTPUT),
)  # fmt: skip
ARROWS = (
    ((2.1, 6.9), (3.0, 5.7)), ((4.7, 7.2), (4.7, 6.3)), ((6.6, 5.45), (7.3, 5.45)), ((10.6, 5.45), (11.7, 5.45)),
    ((14.05, 7.2), (14.05, 6.3)), ((14.05, 4.6), (14.05, 3.7)), ((11.7, 2.85), (10.6, 2.85)), ((4.9, 4.6), (6.3, 3.7)),
    ((5.6, 3.0), (4.4, 2.8)), ((5.6, 2.6), (4.4, 1.4)),
)  # fmt: skip


def draw(path):
    """Draw the picture into a file."""
    figure, axes = plt.subplots(figsize=(11.5, 6.2), dpi=110)
    axes.set(xlim=(0, 17), ylim=(0, 9.2))
    axes.axis("off")
    axes.text(1.3, 8.85, "hidden [N, D]", ha="center", fontsize=11, weight="bold")
    for i in range(4):  # all tokens; one chunk is at work
        axes.add_patch(Rectangle((0.5, 7.45 - 1.05 * i), 1.6, 1.05, fc=INPUT if i != 1 else WORK, ec=EDGE, lw=1.2))
        axes.text(1.3, 7.97 - 1.05 * i, f"chunk {i + 1}", ha="center", va="center", fontsize=9.5)
    axes.text(1.3, 4.2, "tokens without\ngradient are left out", ha="center", va="top", fontsize=8.5)
    for x, y, width, height, title, text, color in BOXES:
        style = "round,pad=0,rounding_size=0.12"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=EDGE, lw=1.2))
        middle, centred = x + width / 2, {"ha": "center", "va": "center"}
        axes.text(middle, y + height - 0.3, title, fontsize=11, weight="bold", **centred)
        axes.text(middle, y + (height - 0.5) / 2, text, fontsize=9.5, linespacing=1.45, **centred)
    for start, end in ARROWS:
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=15, lw=1.4, color=EDGE))
    for i, (color, text) in enumerate([(INPUT, "given"), (WORK, "one chunk at a time"), (OUTPUT, "results")]):
        axes.add_patch(Rectangle((5.6 + 3.6 * i, 0.75), 0.45, 0.4, fc=color, ec=EDGE))
        axes.text(6.2 + 3.6 * i, 0.95, text, va="center", fontsize=9.5)
    note = "Logits [N, V] of all tokens never exist in memory."
    axes.text(5.6, 0.25, note, fontsize=10.5, va="center", style="italic")
    figure.savefig(path, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
