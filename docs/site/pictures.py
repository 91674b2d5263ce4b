"""Draws the pictures of concepts.md and architecture.md: python docs/site/pictures.py

Each has a white ground, so that it can be read in a dark theme too.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).resolve().parents[1] / "images"
INK, FAINT, LINE = "#24292f", "#57606a", "#8c959f"
GREY, GREEN, EDGE, BLUE = "#f6f8fa", "#cfe8d5", "#2da44e", "#ddeaf8"


class Picture:
    """SVG elements in the order in which they are painted."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.size, self.label = (width, height), label
        self.body: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = GREY, edge: str = LINE
    ) -> None:
        self.body.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            f'stroke="{edge}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start", fill: str = INK) -> None:
        self.body.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, w: float, h: float, *lines: str,
        fill: str = GREY, edge: str = LINE,
    ) -> None:  # fmt: skip
        self.rect(x, y, w, h, fill, edge)
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 18 * (i - (len(lines) - 1) / 2), line, "middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.body.append(
            f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def line(self, points: list[tuple[float, float]], color: str, dash: str = "") -> None:
        path = "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.body.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
        )

    def svg(self) -> str:
        w, h = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
            "</defs>"
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
                f'viewBox="0 0 {w} {h}" font-family="system-ui, Helvetica, Arial, sans-serif" '
                f'font-size="14" role="img" aria-label="{escape(self.label)}">',
                f'<rect width="{w}" height="{h}" fill="#ffffff"/>',
                head,
                *self.body,
                "</svg>\n",
            ]
        )


def kept() -> Picture:
    p = Picture(
        760, 300,
        "A squared-ReLU block. Plain PyTorch keeps its input and two tensors of the hidden size; "
        "a compressed block keeps its input, a mask and packed values.",
    )  # fmt: skip
    stops = [
        ("x", 40), ("up", 62), ("a", 34), ("relu", 62), ("r", 34), ("square", 70), ("r²", 40),
        ("down", 66), ("y", 34),
    ]  # fmt: skip
    x = 20.0
    for i, (name, w) in enumerate(stops):
        operation = i % 2 == 1
        p.box(x, 20, w, 34, name, fill=BLUE if operation else GREY)
        if i + 1 < len(stops):
            p.arrow((x + w, 37), (x + w + 34, 37))
        x += w + 34
    for y, name in ((90, "plain PyTorch keeps"), (195, "a compressed block keeps")):
        p.text(20, y + 16, name)
        p.box(230, y, 100, 34, "x")
    p.box(230, 130, 240, 34, "r: tokens × d_ff")
    p.box(490, 130, 240, 34, "r²: tokens × d_ff")
    p.box(230, 235, 48, 34, "mask", fill=GREEN, edge=EDGE)
    p.box(288, 235, 130, 34, "values of r ≠ 0", fill=GREEN, edge=EDGE)
    p.text(440, 257, "r and r² are computed again from these", fill=FAINT)
    return p


def step() -> Picture:
    p = Picture(
        760, 350,
        "Memory for hidden activations over a step of four layers. Dense: a large step up for each "
        "layer of the forward pass, and down again in backward. Compressed: small steps, with a "
        "passing peak in each layer.",
    )  # fmt: skip
    left, ground, unit = 60.0, 290.0, 22.0

    def steps(high: float, forward: float, backward: float) -> list[tuple[float, float]]:
        """Units are hidden tensors: what a layer keeps, and what it needs in passing."""
        points, level, x = [(left, ground)], 0.0, left
        for layer in range(8):
            peak = level + (forward if layer < 4 else backward)
            level += high if layer < 4 else -high
            points += [(x, ground - unit * peak), (x + 30, ground - unit * peak)]
            points += [(x + 30, ground - unit * level), (x + 80, ground - unit * level)]
            x += 80
        return points

    p.line([(left, 20), (left, ground), (left + 660, ground)], LINE)
    p.line([(left + 320, 30), (left + 320, ground)], LINE, "4 4")
    p.line(steps(2, 3, 2), INK)
    p.line(steps(0.4, 2, 1), EDGE)
    p.text(left + 160, ground + 24, "forward, four layers", "middle")
    p.text(left + 480, ground + 24, "backward", "middle")
    p.line([(left + 20, 40), (left + 50, 40)], INK)
    p.text(left + 58, 45, "dense")
    p.line([(left + 20, 64), (left + 50, 64)], EDGE)
    p.text(left + 58, 69, "compressed")
    p.text(left, ground + 50, "A sketch for squared ReLU, not a measurement.", fill=FAINT)
    return p


def slots() -> Picture:
    p = Picture(
        760, 330,
        "A matrix of tokens and neurons is read column by column. Eight consecutive tokens of a "
        "neuron are a bucket; empty buckets cost nothing but a bit.",
    )  # fmt: skip
    fires = {1: (0, 1, 2, 5, 6), 2: (9, 10, 11, 12, 14), 5: (0, 2, 3, 4, 9, 10), 7: (12,)}
    size, left, top = 15, 140, 50
    for neuron in range(10):
        for token in range(16):
            on = token in fires.get(neuron, ())
            p.rect(left + size * neuron, top + size * token, size, size,
                   GREEN if on else GREY, EDGE if on else "#d0d7de")  # fmt: skip
    p.line([(left, top + 8 * size), (left + 10 * size, top + 8 * size)], INK)
    p.text(left + 75, top - 12, "neurons", "middle")
    p.text(left - 14, top + 4 * size, "8 tokens", "end")
    p.text(left - 14, top + 12 * size, "8 tokens", "end")
    p.arrow((left + 170, top + 120), (left + 230, top + 120))
    x, y = left + 250, top + 20
    p.text(x, top - 12, "column by column, in buckets of 8 slots")
    for bucket in range(20):
        neuron, half = divmod(bucket, 2)
        tokens = [t - 8 * half for t in fires.get(neuron, ()) if t // 8 == half]
        at = x + 17 * bucket
        p.rect(at, y, 15, 24, GREEN if tokens else GREY, EDGE if tokens else "#d0d7de")
        if tokens:
            for slot in range(8):
                p.rect(at, y + 44 + 9 * slot, 15, 9, GREEN if slot in tokens else GREY,
                       EDGE if slot in tokens else "#d0d7de")  # fmt: skip
    p.text(x, y + 140, "one bit for each bucket: is it empty?")
    p.text(x, y + 160, "eight bits for each that is not: which slots?")
    p.text(x, y + 190, "Neighbouring tokens tend to fire the same neurons,", fill=FAINT)
    p.text(x, y + 208, "so most buckets are empty or well filled.", fill=FAINT)
    p.text(140, 315, "Drawn with 16 tokens; blocks have 64, and buckets are in groups of 8.",
           fill=FAINT)  # fmt: skip
    return p


def exact() -> Picture:
    p = Picture(
        760, 310,
        "Forward: the down projection reads the dense hidden tensor, beside it the tensor is "
        "compressed. Backward: the hidden tensor is rebuilt with every bit, and the products read "
        "it as in plain PyTorch.",
    )  # fmt: skip
    p.text(20, 30, "forward")
    p.box(20, 50, 130, 44, "pre-activation")
    p.arrow((150, 72), (200, 72))
    p.box(200, 50, 170, 44, "hidden tensor, dense", fill=BLUE)
    p.arrow((370, 72), (430, 72))
    p.box(430, 50, 310, 44, "PyTorch's product with w_down: output")
    p.arrow((285, 94), (285, 132))
    p.box(200, 132, 170, 44, "positions and values", fill=GREEN, edge=EDGE)
    p.text(384, 159, "kept until backward; integers that are copied", fill=FAINT)
    p.text(20, 235, "backward")
    p.arrow((285, 176), (285, 216))
    p.box(200, 216, 170, 44, "hidden tensor, dense", fill=BLUE)
    p.arrow((370, 238), (430, 238))
    p.box(430, 216, 310, 44, "PyTorch's products: the gradients")
    p.text(200, 288, "Every bit as it was, so the products have the same operands.", fill=FAINT)
    return p


def bits(density: float, fast: bool) -> float:
    """Bits an element of bfloat16 without signs, nonzeros independent: docs/format.md, Sizes."""
    if fast:
        return 1 + 15 * density + 20 / 4096
    q = 1 - density
    return 84 / 4096 + (1 - q**64) / 8 + (1 - q**8) + 11 * density + 28 / 4096 + 20 / 4096


def density() -> Picture:
    p = Picture(
        760, 360,
        "Bits an element against density: dense bfloat16 takes 16 at any density; a mask with "
        "15-bit values and buckets with 11-bit values rise with the density.",
    )  # fmt: skip
    left, ground, wide, high = 70.0, 290.0, 600.0, 250.0

    def at(d: float, b: float) -> tuple[float, float]:
        return left + wide * d, ground - high * b / 18

    def curve(f: Callable[[float], float]) -> Iterator[tuple[float, float]]:
        return (at(i / 100, f(i / 100)) for i in range(101))

    for b in (0, 4, 8, 12, 16):
        p.line([at(0, b), at(1, b)], "#d8dee4")
        p.text(left - 10, at(0, b)[1] + 5, str(b), "end")
    for tenth in range(0, 11, 2):
        p.text(at(tenth / 10, 0)[0], ground + 22, f"{tenth / 10:g}", "middle")
    p.text(left + wide / 2, ground + 46, "density: share of elements that are not zero", "middle")
    p.text(20, 24, "bits an element")
    p.line([at(0, 16), at(1, 16)], INK)
    p.line(list(curve(lambda d: min(bits(d, True), 16))), LINE, "6 4")
    p.line(list(curve(lambda d: bits(d, False))), EDGE)
    p.text(at(0.02, 0)[0], at(0, 16)[1] - 8, "dense")
    p.text(at(0.37, 0)[0], at(0, 9.2)[1], "flat, unsigned", "end")
    p.text(at(0.56, 0)[0], at(0, 5)[1], "bucketed, exponent4", fill="#1a7f37")
    return p


def architecture() -> Picture:
    p = Picture(
        760, 330,
        "Activation yields the dense hidden tensor and a survey of positions and counts. From the "
        "survey codings are chosen, and positions and values are coded. From these, backward "
        "rebuilds the hidden tensor and the gradient of the pre-activation.",
    )  # fmt: skip
    p.box(20, 60, 130, 48, "pre-activation")
    p.arrow((150, 76), (240, 50))
    p.arrow((150, 92), (240, 132))
    p.text(176, 48, "activate", "middle", FAINT)
    p.box(240, 20, 220, 48, "dense hidden tensor", fill=BLUE)
    p.arrow((460, 44), (540, 44))
    p.box(540, 20, 200, 48, "down projection")
    p.box(240, 110, 220, 48, "survey: positions,", "exact counts")
    p.arrow((350, 158), (350, 200))
    p.text(362, 184, "choose codings, encode", fill=FAINT)
    p.box(240, 200, 220, 48, "coded positions", "and values", fill=GREEN, edge=EDGE)
    p.arrow((460, 214), (540, 194))
    p.arrow((460, 234), (540, 276))
    p.text(512, 226, "hidden", "middle", FAINT)
    p.text(478, 272, "gradient", "middle", FAINT)
    p.box(540, 164, 200, 56, "dense hidden tensor, for", "the weight gradient", fill=BLUE)
    p.box(540, 250, 200, 56, "gradient of", "the pre-activation")
    return p


PICTURES = {f.__name__: f for f in (kept, step, slots, exact, density, architecture)}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    sys.stdout.write("\n".join(PICTURES) + "\n")
