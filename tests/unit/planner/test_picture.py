import itertools
import re
from xml.etree import ElementTree as ET

import pytest

from shardwise.hardware.calibration import default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.layout import Layout
from shardwise.planner.cost.time import TimeModel, timeline
from shardwise.planner.model.decoder_parts import published
from shardwise.planner.model.forms import Model
from shardwise.planner.search.page import draw
from shardwise.planner.search.question import Question
from shardwise.planner.search.search import search
from shardwise.plans import Plan, Precision
from shardwise.plots.svg import SHEET

SVG = "{http://www.w3.org/2000/svg}"
BF16 = Precision(compute="bf16")
LLAMA = Model(
    plain=published("llama-7b", compute="bf16", gathered=False),
    gathered=published("llama-7b", compute="bf16", gathered=True),
)
WHERE = parse_cluster("8xA100-40GB")
TIMES = TimeModel(WHERE, default_calibration(WHERE.node))


@pytest.fixture(scope="module")
def answer():
    return search(Question(model=LLAMA, cluster=WHERE, calibration=TIMES.calibration, batch_size=64, precision=BF16))


def spans_of(**fields):
    plan = Plan(precision=BF16, **fields)
    return timeline(TIMES, LLAMA.for_plan(plan), plan)


def drawn(answer, spans):
    return ET.fromstring(draw(answer, spans, title="a < b & c"))


def test_the_picture_is_sound_xml_with_a_bar_for_every_family_that_has_a_plan(answer):
    texts = [element.text for element in drawn(answer, spans_of(layout=Layout(shard=8), zero=3)).iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    assert {"ddp", "zero1", "zero3 (chosen)", "pp"} <= set(texts)
    assert "offload" not in texts


def placed_rects(element, x=0.0, y=0.0):
    """Yield (left, top, right, bottom) of every rectangle, with the shifts of the groups around it."""
    for child in element:
        if child.tag == f"{SVG}g":
            dx, dy = map(float, re.findall(r"[\d.]+", child.get("transform")))
            yield from placed_rects(child, x + dx, y + dy)
        elif child.tag == f"{SVG}rect":
            left, top = x + float(child.get("x", 0)), y + float(child.get("y", 0))
            yield left, top, left + float(child.get("width")), top + float(child.get("height"))


def test_nothing_is_drawn_outside_the_picture(answer):
    root = drawn(answer, spans_of(layout=Layout(shard=8), zero=3))
    height = float(root.get("viewBox").split()[3])
    rects = list(placed_rects(root))
    assert len(rects) > 50
    for left, top, right, bottom in rects:
        assert 0 <= left <= right <= SHEET + 0.5
        assert 0 <= top <= bottom <= height


def test_it_reads_on_light_and_dark_grounds(answer):
    assert "prefers-color-scheme:dark" in draw(answer, [], title="it")


def test_without_a_plan_only_memory_is_drawn(answer):
    assert "One step" not in draw(answer, [], title="it")


def test_a_timeline_has_compute_and_communication_and_ends_with_the_update():
    spans = spans_of(layout=Layout(shard=8), zero=3)
    assert {span.stream for span in spans} == {"compute", "communication"}
    assert spans[-1].label == "update"
    assert all(span.start <= span.end for span in spans)


def test_streams_do_one_thing_at_a_time():
    for stream in ("compute", "communication"):
        mine = sorted(
            (span for span in spans_of(layout=Layout(replicate=8)) if span.stream == stream),
            key=lambda span: span.start,
        )
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(mine))


def test_a_pipeline_has_a_row_for_every_rank():
    spans = spans_of(layout=Layout(pp=4, replicate=2), accumulation=64)
    assert {span.stream for span in spans} == {f"pp rank {rank}" for rank in range(4)}
    assert len(spans) == 4 * 2 * 8
