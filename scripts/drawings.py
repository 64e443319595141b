"""Draws docs/images/concept-*.svg, the drawings of the concept pages: `python scripts/drawings.py`.

Each drawing is a card with an opaque background, so that it is readable on light and dark pages; its colours follow the
colour scheme of the viewer's system. Coordinates are in units of a card 480 wide: at 420 pixels the smallest text
is still 10 pixels high. The script raises an error if a text does not fit its box or the card. Schedules, process
groups and byte counts are computed, partly by the functions that `shardwise plan` and `train` use.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from shardwise.layout import parse_layout
from shardwise.planner.cost.events import pipeline_actions, run_pipeline

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 480
MARGIN = 14
INNER = WIDTH - 2 * MARGIN
SIZES = {"title": 15, "": 13, "bold": 13, "muted": 12, "small": 12, "code": 12}
"""Font size of each kind of text."""
LETTER = {"title": 0.6, "bold": 0.6, "code": 0.61}
"""Upper estimate of the mean width of a character, in font sizes; 0.58 for other kinds."""

LIGHT = {
    "card": ("#fbfcfe", "#c9d1dc"),
    "panel": ("#eef2f7", "#c9d1dc"),
    "parameters": ("#cfe1f5", "#3f73ab"),
    "gradients": ("#fbdcb8", "#c96f12"),
    "states": ("#d0ebcb", "#3f8a35"),
    "activations": ("#e4d5ee", "#86559f"),
    "error": ("#f8d0d0", "#c23b3d"),
    "absent": ("none", "#a9b4c2"),
    "ink": "#1c2530",
    "muted": "#515d6b",
}
DARK = {
    "card": ("#161b22", "#3b4654"),
    "panel": ("#212934", "#3b4654"),
    "parameters": ("#23415f", "#78abdf"),
    "gradients": ("#5c3a13", "#f0a04b"),
    "states": ("#234a20", "#7cc472"),
    "activations": ("#452f54", "#c091da"),
    "error": ("#5f2425", "#f07b7c"),
    "absent": ("none", "#566374"),
    "ink": "#e8edf3",
    "muted": "#a3b0be",
}


class Drawing:
    """A card of fixed width on which boxes, texts and arrows are placed, in units from its upper left corner."""

    def __init__(self, title: str, description: str, height: int) -> None:
        self.title, self.description, self.height = title, description, height
        self.shapes: list[str] = []
        self.text(MARGIN, 25, title, kind="title")

    def text(self, x: float, y: float, text: str, *, kind: str = "", anchor: str = "start", fit: float = INNER) -> None:
        """Write one line with its baseline at y; raise ValueError if it is wider than `fit` or leaves the card."""
        width = len(text) * SIZES[kind] * LETTER.get(kind, 0.58)
        start = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if width > fit or start < 4 or start + width > WIDTH - 4 or y > self.height - 4:
            raise ValueError(f"text {text!r} needs {width:.0f} of {fit:.0f} units at x {x:.0f}, y {y:.0f}")
        names = f' class="{kind}"' if kind else ""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.shapes.append(f'<text x="{x:g}" y="{y:g}"{names}{place}>{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "panel") -> None:
        """Draw a box with centred lines of text."""
        self.shapes.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for index, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * index, line, anchor="middle", kind="small", fit=width - 4)

    def arrow(self, *points: tuple[float, float], kind: str = "flow") -> None:
        """Draw a line through the points; kind "flow" has a head at its end, "both" at both ends, "line" has none."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        heads = {"flow": ' marker-end="url(#head)"', "line": ""}
        both = ' marker-start="url(#head)" marker-end="url(#head)"'
        self.shapes.append(f'<path class="flow" d="{path}"{heads.get(kind, both)}/>')

    def render(self) -> str:
        """Return the SVG document."""
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH * 1.3:g}" height="{self.height * 1.3:g}"'
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
        )
        stripes = (
            '<pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path class="stripe" d="M0 0V6"/></pattern>'
        )
        card = f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8"/>'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="description">{escape(self.description)}</desc>',
            f"<style>{style_sheet()}</style>",
            f"<defs>{head}{stripes}</defs>",
            card,
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def style_sheet() -> str:
    """Return the style sheet of every drawing: light colours, and dark ones where the system prefers them."""
    fonts = [f".{kind}{{font-size:{size}px}}" for kind, size in SIZES.items() if kind]
    return (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}"
        + "".join(fonts)
        + ".title,.bold{font-weight:600}.code{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}"
        ".flow{fill:none;stroke-width:1.5}.absent{stroke-dasharray:3 3}.wait{fill:url(#stripes)}"
        "rect.mark{stroke-width:3}"
        + colour_rules(LIGHT)
        + "@media(prefers-color-scheme:dark){"
        + colour_rules(DARK)
        + "}"
    )


def colour_rules(colours: dict[str, str | tuple[str, str]]) -> str:
    """Return the CSS rules of one colour scheme."""
    ink, muted = colours["ink"], colours["muted"]
    rules = [f"text,.head{{fill:{ink}}}.muted{{fill:{muted}}}.flow,rect.mark{{stroke:{ink}}}"]
    rules.append(f".wait,.stripe{{stroke:{colours['absent'][1]}}}")
    for kind, colour in colours.items():
        if isinstance(colour, tuple):
            rules.append(f".{kind}{{fill:{colour[0]};stroke:{colour[1]}}}")
    return "".join(rules)


def meshes() -> Drawing:
    """Draw eight ranks of pp2.shard2.tp2, and the groups of rank 5."""
    layout, rank = parse_layout("pp2.shard2.tp2"), 5
    kinds = {"tp": "gradients", "shard": "states", "pp": "parameters"}
    groups = {axis: next(group for group in layout.groups(axis) if rank in group) for axis in kinds}
    drawing = Drawing(
        f"Eight ranks as a mesh: {layout}",
        "Each rank has a coordinate on every axis; ranks that differ along one axis only form a process group.",
        278,
    )
    for stage in range(layout.pp):
        left = MARGIN + stage * 231
        drawing.box(left, 40, 221, 136)
        drawing.text(left + 10, 58, f"pp {stage}", kind="bold")
        for index in range(2):
            drawing.text(left + 102 + 76 * index, 58, f"tp {index}", kind="muted", anchor="middle")
            drawing.text(left + 10, 94 + 54 * index, f"shard {index}", kind="muted")
    for other in range(layout.world_size):
        place = layout.coordinate(other)
        axes = [axis for axis, group in groups.items() if other in group and other != rank]
        kind = kinds[axes[0]] if axes else "card mark" if other == rank else "card"
        x, y = MARGIN + place.pp * 231 + 68 + 76 * place.tp, 68 + 54 * place.shard
        drawing.box(x, y, 68, 44, f"rank {other}", kind=kind)
    for row, (axis, sends) in enumerate(
        (
            ("tp", "all-reduce of activations, every block"),
            ("shard", "all-gather, reduce-scatter of shards"),
            ("pp", "send and receive between stages"),
        )
    ):
        y = 192 + 27 * row
        drawing.box(MARGIN, y, 62, 21, axis, kind=kinds[axis])
        [peer] = set(groups[axis]) - {rank}
        drawing.text(MARGIN + 74, y + 15, f"rank {rank} with rank {peer}", kind="small")
        drawing.text(WIDTH - MARGIN, y + 15, sends, kind="muted", anchor="end")
    return drawing


def data_parallel() -> Drawing:
    """Draw four DDP ranks and the all-reduce of their gradients."""
    drawing = Drawing(
        "DDP: equal replicas, different samples",
        "Four ranks store all parameters, Adam states and gradients; an all-reduce sums the gradients.",
        296,
    )
    for rank in range(4):
        x = MARGIN + rank * 116
        drawing.box(x, 40, 104, 186)
        drawing.text(x + 52, 58, f"rank {rank}", kind="bold", anchor="middle")
        drawing.box(x + 4, 66, 96, 28, f"samples {4 * rank}-{4 * rank + 3}", kind="activations")
        drawing.box(x + 4, 100, 96, 34, "parameters", "P", kind="parameters")
        drawing.box(x + 4, 140, 96, 34, "Adam states", "2P", kind="states")
        drawing.box(x + 4, 180, 96, 40, "gradients", "P", kind="gradients")
        drawing.arrow((x + 52, 222), (x + 52, 250), kind="both")
    drawing.box(MARGIN, 252, INNER, 30, "all-reduce of gradients, bucket by bucket, during backward", kind="card")
    return drawing


def zero_stages() -> Drawing:
    """Draw what rank 1 of 4 stores in each ZeRO stage, and the turns of one FSDP block."""
    drawing = Drawing(
        "ZeRO: what rank 1 of 4 stores",
        "Stage 1 shards optimizer states, stage 2 gradients as well, stage 3 parameters as well.",
        330,
    )
    columns = (("parameters", 1), ("gradients", 1), ("states", 2))
    for column, (kind, _) in enumerate(columns):
        name = "2 Adam states" if kind == "states" else kind
        drawing.text(118 + 96 * column, 50, name, kind="small", anchor="middle")
    drawing.text(WIDTH - MARGIN, 50, "in P/4 bytes", kind="muted", anchor="end")
    for stage, plan in enumerate(("ddp", "zero1", "zero2", "zero3 = fsdp")):
        y = 60 + 40 * stage
        drawing.text(MARGIN, y + 19, plan.partition(" = ")[0], kind="bold")
        quarters = 0
        for column, (kind, copies) in enumerate(columns):
            is_sharded = stage >= {"states": 1, "gradients": 2, "parameters": 3}[kind]
            quarters += copies * (1 if is_sharded else 4)
            for part in range(4):
                stored = part == 1 or not is_sharded
                x = 74 + 96 * column + 22 * part
                drawing.box(x, y, 22, 28, kind=kind if stored else "absent")
        if stage == 2:
            quarters += 1  # the gathered parameters are beside the rank's own shard
        drawing.text(WIDTH - MARGIN, y + 19, str(quarters), kind="bold", anchor="end")
    drawing.text(MARGIN, 240, "One block under zero3, on every rank", kind="bold")
    turns = (
        ("all-gather", "parameters"),
        ("forward", "activations"),
        ("free", "absent"),
        ("all-gather", "parameters"),
        ("backward", "activations"),
        ("reduce-", "gradients"),
    )
    for index, (turn, kind) in enumerate(turns):
        x = MARGIN + 76 * index
        lines = ("reduce-", "scatter") if turn == "reduce-" else (turn,)
        drawing.box(x, 252, 74, 38, *lines, kind=kind)
    drawing.text(MARGIN, 314, "time → the all-gather of the next block overlaps compute", kind="muted")
    return drawing


def tensor_parallel() -> Drawing:
    """Draw an MLP of two matrices, the first split by columns and the second by rows."""
    drawing = Drawing(
        "Tensor parallelism: columns, then rows",
        "Each rank computes half of the hidden units; one all-reduce sums the partial outputs of both ranks.",
        304,
    )
    names = ("input X", "A by columns", "hidden H", "B by rows", "partial", "")
    centres = (46, 128, 214, 300, 384)
    for name, centre in zip(names, centres, strict=False):
        drawing.text(centre, 54, name, kind="small", anchor="middle")
    for rank in range(2):
        y = 66 + 98 * rank
        drawing.box(MARGIN, y, 64, 72, "X", "whole", kind="activations")
        for part in range(2):
            kind = "parameters" if part == rank else "absent"
            name = (f"A{part}",) if part == rank else ()
            drawing.box(96 + 33 * part, y, 32, 72, *name, kind=kind)
            name = (f"B{part}",) if part == rank else ()
            drawing.box(268, y + 37 * part, 64, 35, *name, kind=kind)
        drawing.box(186, y, 56, 72, f"H{rank} =", f"f(X A{rank})", kind="activations")
        drawing.box(354, y, 60, 72, f"H{rank} B{rank}", kind="gradients")
        for start, end in ((78, 94), (162, 184), (242, 266), (333, 352)):
            drawing.arrow((start, y + 36), (end, y + 36))
        drawing.arrow((414, y + 36), (430, y + 36))
        drawing.text(MARGIN, y + 87, f"rank {rank}", kind="bold")
    drawing.box(432, 66, 34, 170, kind="card")
    for index, letters in enumerate(("all-", "re-", "duce")):
        drawing.text(449, 136 + 16 * index, letters, kind="small", anchor="middle", fit=34)
    drawing.text(MARGIN, 274, "X A0 and X A1 are columns of X A, so f works on each alone;", kind="muted")
    drawing.text(MARGIN, 291, "H B = H0 B0 + H1 B1. Backward all-reduces the gradient of X.", kind="muted")
    return drawing


def schedule_spans(schedule: str, pp: int, micro_batches: int) -> list:
    """Return start and end of each rank's turns, with a backward that takes twice as long as a forward."""
    actions = [pipeline_actions(schedule, rank, pp=pp, chunks=1, micro_batches=micro_batches) for rank in range(pp)]
    return run_pipeline(actions, [1.0] * pp, [2.0] * pp, lambda _: 0.0)


def peak_in_flight(spans: list) -> int:
    """Return the largest number of micro-batches between their forward and their backward on one rank."""
    open_now = peak = 0
    for span in spans:
        open_now += 1 if span.label.startswith("F") else -1
        peak = max(peak, open_now)
    return peak


def pipeline() -> Drawing:
    """Draw the GPipe and 1F1B schedules of three stages and six micro-batches."""
    pp, micro_batches = 3, 6
    drawing = Drawing(
        f"Pipeline: {pp} stages, {micro_batches} micro-batches",
        "Forward and backward turns of each stage over time; striped time is the bubble.",
        322,
    )
    slot, left = 16.5, 68
    for row, (schedule, name) in enumerate((("gpipe", "GPipe"), ("1f1b", "1F1B"))):
        spans = schedule_spans(schedule, pp, micro_batches)
        end = max(turns[-1].end for turns in spans)
        top = 48 + 122 * row
        busy = sum(span.end - span.start for turns in spans for span in turns)
        in_flight = peak_in_flight(spans[0])
        drawing.text(MARGIN, top + 6, name, kind="bold")
        drawing.text(
            WIDTH - MARGIN,
            top + 6,
            f"bubble {1 - busy / (pp * end):.0%}, stage 0 stores {in_flight} micro-batches",
            kind="muted",
            anchor="end",
        )
        for rank, turns in enumerate(spans):
            y = top + 16 + 30 * rank
            drawing.text(MARGIN, y + 18, f"stage {rank}", kind="small")
            drawing.box(left, y, end * slot, 26, kind="wait")
            for span in turns:
                kind = "parameters" if span.label.startswith("F") else "states"
                number = str(int(span.label[1:]) + 1)
                drawing.box(left + span.start * slot, y, (span.end - span.start) * slot, 26, number, kind=kind)
    y = 290
    for x, width, name, kind in (
        (MARGIN, 20, "forward", "parameters"),
        (110, 30, "backward", "states"),
        (232, 30, "bubble", "wait"),
    ):
        drawing.box(x, y, width, 18, kind=kind)
        drawing.text(x + width + 8, y + 14, name, kind="small")
    drawing.text(WIDTH - MARGIN, y + 14, "time →", kind="muted", anchor="end")
    return drawing


def context_parallel() -> Drawing:
    """Draw attention over a sequence of eight tokens and four heads on two ranks."""
    tokens, heads, ranks = 8, 4, 2
    kinds = ("parameters", "gradients")
    drawing = Drawing(
        "Context parallelism: all-to-all around attention",
        "Outside of attention a rank has half of the tokens of all heads, inside all tokens of half of the heads.",
        338,
    )
    cell = 13
    for column, (title, note) in enumerate(
        (("slice of tokens", "all heads"), ("attention", "all tokens, 2 heads"), ("slice of tokens", "all heads"))
    ):
        centre = (92, 254, 416)[column]
        drawing.text(centre, 52, title, kind="bold", anchor="middle", fit=120)
        drawing.text(centre, 68, note, kind="muted", anchor="middle", fit=140)
        for rank in range(ranks):
            top, left = 80 + 118 * rank, centre - heads * cell / 2
            for token in range(tokens):
                for head in range(heads):
                    by_token, by_head = token * ranks // tokens, head * ranks // heads
                    stored = (by_head if column == 1 else by_token) == rank
                    kind = kinds[by_token] if stored else "absent"
                    drawing.box(left + head * cell, top + token * cell, cell - 1, cell - 1, kind=kind)
    for rank in range(ranks):
        drawing.text(MARGIN, 136 + 118 * rank, f"rank {rank}", kind="small", fit=44)
    for x in (133, 295):
        drawing.arrow((x, 130), (x + 80, 130))
        drawing.arrow((x, 248), (x + 80, 248))
        drawing.arrow((x + 8, 138), (x + 72, 240))
        drawing.arrow((x + 8, 240), (x + 72, 138))
        drawing.text(x + 40, 112, "all-to-all", kind="small", anchor="middle")
    drawing.text(MARGIN, 324, "rows: 8 tokens, columns: 4 heads; dashed: on the other rank", kind="muted")
    return drawing


def normalizer() -> Drawing:
    """Draw two ranks with different numbers of tokens, and both ways to average their losses."""
    losses = ((4.0, 4.0), (1.0,) * 6)
    drawing = Drawing(
        "The loss normalizer: a mean of means is wrong",
        "Rank 0 has two tokens and rank 1 six; only the sum over all tokens divided by their number is right.",
        262,
    )
    means = []
    for rank, values in enumerate(losses):
        y = 44 + 48 * rank
        drawing.text(MARGIN, y + 21, f"rank {rank}", kind="bold")
        for index in range(6):
            has_token = index < len(values)
            text = (f"{values[index]:g}",) if has_token else ()
            kind = ("gradients", "parameters")[rank] if has_token else "absent"
            drawing.box(70 + 40 * index, y, 36, 32, *text, kind=kind)
        means.append(sum(values) / len(values))
        drawing.text(WIDTH - MARGIN, y + 14, f"sum {sum(values):g}, {len(values)} tokens", kind="small", anchor="end")
        drawing.text(WIDTH - MARGIN, y + 30, f"mean {means[-1]:g}", kind="small", anchor="end")
    total, count = sum(map(sum, losses)), sum(map(len, losses))
    drawing.text(70, 154, "one box per token, with its loss; dashed: padding", kind="muted")
    drawing.box(MARGIN, 168, 220, 78, kind="error")
    drawing.box(246, 168, 220, 78, kind="states")
    for x, name, formula, note in (
        (
            124,
            "mean of means",
            f"({means[0]:g} + {means[1]:g}) / 2 = {sum(means) / 2:g}",
            "tokens of rank 0 count 3 times",
        ),
        (356, "sum over count", f"{total:g} / {count} = {total / count:g}", "the loss of one process"),
    ):
        drawing.text(x, 189, name, kind="bold", anchor="middle", fit=212)
        drawing.text(x, 212, formula, anchor="middle", fit=212)
        drawing.text(x, 234, note, kind="small", anchor="middle", fit=212)
    return drawing


def checkpoints() -> Drawing:
    """Draw one matrix that four FSDP ranks save by rows and two tensor-parallel ranks load by columns."""
    rows, columns = 4, 2
    drawing = Drawing(
        "Checkpoint: saved by fsdp4, loaded by tp2",
        "Four ranks write row blocks of a matrix; two ranks each read the half of every block that they need.",
        330,
    )
    kinds = ("parameters", "gradients", "states", "activations")
    drawing.text(MARGIN, 52, "4 ranks save their rows of one matrix", kind="bold")
    for row in range(rows):
        x = MARGIN + 116 * row
        drawing.box(x, 60, 104, 38, f"rank {row}", f"rows {2 * row}-{2 * row + 1}", kind=kinds[row])
        drawing.arrow((x + 52, 98), (x + 52, 114))
        drawing.box(x, 116, 104, 38, f"rank-{row:05d}", ".safetensors", kind=kinds[row])
    drawing.box(MARGIN, 164, INNER, 30, "manifest.json: shape, dtype, offset and CRC-32 of every piece", kind="card")
    drawing.text(MARGIN, 222, "2 ranks load their columns, a part of every piece", kind="bold")
    for column in range(columns):
        left = 92 + 200 * column
        drawing.text(left - 12, 276, f"rank {column}", kind="small", anchor="end")
        for row in range(rows):
            for part in range(columns):
                kind = kinds[row] if part == column else "absent"
                drawing.box(left + 56 * part, 234 + 20 * row, 54, 18, kind=kind)
    return drawing


def hang_verdict() -> Drawing:
    """Draw the recorded calls of four ranks, one of which does not enter the last collective."""
    drawing = Drawing(
        "Hang verdict: which rank is missing in call #7",
        "Ranks 0 to 2 wait in all_reduce number 7; rank 3 made call 6 last, and its stack shows the data loader.",
        330,
    )
    arrivals = {0: 306, 1: 292, 2: 318}
    for rank in range(4):
        y = 44 + 42 * rank
        drawing.text(MARGIN, y + 20, f"rank {rank}", kind="bold")
        for call, x in ((5, 72), (6, 182)):
            drawing.box(x + 6 * rank, y, 84, 30, f"call #{call}", kind="states")
        if rank in arrivals:
            drawing.box(arrivals[rank], y, 466 - arrivals[rank], 30, kind="wait")
            drawing.box(arrivals[rank], y, 70, 30, "call #7", kind="gradients")
        else:
            drawing.box(306, y, 160, 30, "loads a batch", kind="error")
    drawing.text(MARGIN, 230, "1  every rank records its calls, numbered by group", kind="small")
    drawing.text(MARGIN, 248, "2  ranks 0-2 are inside #7 for longer than the limit; 3 is not", kind="small")
    drawing.text(MARGIN, 266, "3  the stack of rank 3 shows what it does instead", kind="small")
    drawing.box(MARGIN, 278, INNER, 40, kind="card")
    drawing.text(MARGIN + 8, 294, "ranks 0-2 wait in all_reduce #7 at train.py:88 for 10 s;", kind="code")
    drawing.text(MARGIN + 8, 310, "rank 3 waits for data in __getitem__ at data.py:41", kind="code")
    return drawing


DRAWINGS = {
    "meshes": meshes,
    "ddp": data_parallel,
    "zero": zero_stages,
    "tensor": tensor_parallel,
    "pipeline": pipeline,
    "context": context_parallel,
    "normalizer": normalizer,
    "checkpoints": checkpoints,
    "hang": hang_verdict,
}
"""The drawing of each concept page, by the name of its file."""


def main() -> None:
    """Write every drawing into docs/images."""
    for name, draw in DRAWINGS.items():
        path = IMAGES / f"concept-{name}.svg"
        path.write_text(draw().render())
        print(path.relative_to(IMAGES.parents[1]))


if __name__ == "__main__":
    main()
