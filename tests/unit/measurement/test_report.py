"""Reports: every value shown, escaped, inside its picture; the page read in a real browser."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
import torch

from env.chromium import chromium, needs_chromium
from refusals import refuses
from shardwise.measurement.report import machine_facts, markdown_of, write_report
from shardwise.plots.figures import Bars, Heat, Plot, Series, Table, axis_over
from shardwise.plots.page import Findings, Section, html_of
from shardwise.plots.svg import NARROW, WIDE, colours_of, draw_bars, draw_plot

SIZES = tuple(4.0**power * 1024 for power in range(9))
NAUGHTY = "<script>alert('x')</script> & | *"


def line(name, factor=1.0, **more):
    return Series(name=name, points=tuple((size, factor * size / (3e5 + size)) for size in SIZES), **more)


BANDWIDTH = Plot(
    title="Bus bandwidth",
    x_label="bytes",
    y_label="GB/s",
    series=(line("all_reduce"), line("all_reduce fitted", 1.1, dashed=True), line("broadcast", 2.0)),
    log_x=True,
    x_is_bytes=True,
)
TIMES = Bars(
    title="A step", unit="ms", parts=("compute", "data"), rows=(("1 rank", (104.25, 2.0)), ("2 ranks", (52.0, 3.0)))
)
PAIRS = Heat(
    title="Latency",
    unit="ms",
    row_labels=("rank 0", "rank 1"),
    column_labels=("rank 0", "rank 1"),
    values=((None, 0.125), (20.5, None)),
    marked=((1, 0),),
)
WIDE_TABLE = Table(
    header=tuple(f"a rather long header {number}" for number in range(9)),
    rows=(("all_reduce", *["12.5 ms"] * 8), ("broadcast", *["1.25 ms"] * 8)),
)
FINDINGS = Findings(
    title=f"Collectives {NAUGHTY}",
    verdict="all_reduce reaches 88 % of the link; see `bench p2p`.",
    facts=(("host", NAUGHTY), ("a name without a place to break it", "x" * 120)),
    method=("Each call is timed alone.",),
    sections=(
        Section(title="Bandwidth", text=f"Large ones.\n{NAUGHTY}", parts=(BANDWIDTH, WIDE_TABLE)),
        Section(title="Links", parts=(PAIRS, TIMES)),
    ),
)
BROKEN = Findings(
    title="Nothing came out",
    verdict="",
    facts=(),
    method=(),
    sections=(
        Section(
            title="All of it",
            parts=(
                Plot(title="no line", x_label="x", y_label="y", series=()),
                Plot(title="no point", x_label="x", y_label="y", series=(Series(name="a", points=()),)),
                Plot(
                    title="no number",
                    x_label="x",
                    y_label="y",
                    series=(Series(name="a", points=((1.0, math.nan), (math.inf, 1.0), (0.0, 1.0), (2.0, -1.0))),),
                    log_x=True,
                    log_y=True,
                ),
                Plot(title="one", x_label="x", y_label="y", series=(Series(name="a", points=((7.0, 0.0),)),)),
                Bars(title="no bar", unit="ms", parts=(), rows=()),
                Bars(
                    title="no size", unit="", parts=("a", "b"), rows=(("x", (0.0, math.nan)), ("y", (-1.0, math.inf)))
                ),
                Heat(title="empty", unit="", row_labels=(), column_labels=(), values=()),
                Heat(title="odd", unit="", row_labels=("r",), column_labels=("c", "d"), values=((math.nan, None),)),
                Table(header=("a", "b"), rows=()),
                Table(header=("a", "b"), rows=(("short",),)),
            ),
        ),
    ),
)


def pictures(page):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.HTML.txt"])
def test_another_kind_of_report_is_refused(tmp_path, name):
    with refuses("bench.report-extension", ".html", ".md"):
        write_report(FINDINGS, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_report_in_no_folder_is_refused_with_the_command_that_makes_it(tmp_path):
    with refuses("cli.output-folder-missing", f"mkdir -p {tmp_path}/none"):
        write_report(FINDINGS, tmp_path / "none" / "report.md")


@pytest.mark.parametrize("findings", [FINDINGS, BROKEN], ids=["findings", "broken"])
@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_a_report_is_written_whatever_the_values(tmp_path, findings, suffix):
    path = tmp_path / f"report{suffix}"
    write_report(findings, path)
    text = path.read_text()
    shown = [part.title for section in findings.sections for part in section.parts if not isinstance(part, Table)]
    assert all(title in text for title in shown)
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+", "", text)


def test_foreign_text_never_becomes_markup():
    page = html_of(FINDINGS)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; | *") == 4
    text = markdown_of(FINDINGS)
    assert "<script" not in text
    assert text.count(r"&lt;script>alert('x')&lt;/script> & \| \*") == 3


def test_the_page_asks_for_nothing_else():
    page = html_of(FINDINGS)
    assert not re.search(r"https?:|<script|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(", page)


def test_what_stands_between_backticks_is_code():
    assert "see <code>bench p2p</code>." in html_of(FINDINGS)
    assert "see `bench p2p`." in markdown_of(FINDINGS)


def test_every_part_is_drawn_for_the_desk_and_for_the_phone():
    kinds = [svg.get("class") for svg in pictures(html_of(FINDINGS))]
    assert kinds == ["wide", "narrow"] * 2


def test_of_many_plots_in_a_row_only_the_first_is_large():
    for count, kinds in ((3, ["wide", "narrow"] * 3), (4, ["wide", "narrow", "narrow", "narrow", "narrow"])):
        page = html_of(replace(FINDINGS, sections=(Section(title="Times", parts=(BANDWIDTH,) * count),)))
        assert [svg.get("class") for svg in pictures(page)] == kinds
        assert page.count("<figcaption>Bus bandwidth</figcaption>") == count


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_nothing_is_drawn_outside_the_picture(width):
    for picture in (draw_plot(BANDWIDTH, width), draw_bars(TIMES, width)):
        root = ET.fromstring(picture)
        _, _, right, bottom = map(float, root.get("viewBox").split())
        places = [(float(e.get("cx", e.get("x"))), float(e.get("cy", e.get("y")))) for e in root if e.tag != "path"]
        places += [
            tuple(map(float, pair)) for e in root for pair in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", e.get("d", ""))
        ]
        ends = [float(e.get("x")) + float(e.get("width")) for e in root.iter("rect")]
        assert len(places) >= 10
        assert all(0 <= x <= right and 0 <= y <= bottom for x, y in places)
        assert all(end <= right for end in ends)


def test_higher_values_lie_higher_and_a_gap_breaks_the_line():
    points = ((1.0, 1.0), (2.0, 3.0), (3.0, math.nan), (4.0, 2.0), (5.0, 0.0))
    plot = Plot(title="t", x_label="x", y_label="y", series=(Series(name="a", points=points),))
    root = ET.fromstring(draw_plot(plot, WIDE))
    heights = [float(mark.get("cy")) for mark in root.iter("circle")]
    assert heights[1] < heights[2] < heights[0] < heights[3]
    path = next(element.get("d") for element in root.iter("path") if element.get("class") == "line")
    assert path.count("M") == 2


def test_no_peak_is_lost_among_a_hundred_thousand_points():
    points = tuple((float(step), 9.0 if step == 54_321 else 1.0) for step in range(100_000))
    picture = draw_plot(Plot(title="t", x_label="x", y_label="y", series=(Series(name="a", points=points),)), NARROW)
    assert len(picture) < 30_000
    heights = {float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", re.search(r' d="(M[^"]{999,})"', picture)[1])}
    assert len(heights) == 2


def test_a_fitted_line_has_the_colour_of_the_measured_one():
    measured, fitted, other = colours_of(BANDWIDTH.series)
    assert measured == fitted != other


def test_the_length_of_a_bar_is_proportional_to_its_parts():
    rects = [float(rect.get("width")) for rect in ET.fromstring(draw_bars(TIMES, WIDE)).iter("rect")]
    assert rects[0] / rects[2] == pytest.approx(104.25 / 52.0, rel=0.01)
    assert rects[3] / rects[1] == pytest.approx(1.5, rel=0.05)


def test_the_marked_cell_and_no_other_is_marked():
    cells = re.findall(r'<td class="([a-z ]*)"[^>]*>([\d.]*)</td>', html_of(FINDINGS))
    assert [value for kinds, value in cells if "marked" in kinds] == ["20.5"]
    assert "| rank 1 | 20.5 (!) |  |" in markdown_of(FINDINGS)


def test_columns_of_numbers_stand_to_the_right():
    page = html_of(FINDINGS)
    assert '<td>all_reduce</td><td class="number">12.5 ms</td>' in page


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ((1024, 2**26), {"log": True, "is_bytes": True}, ["1 KiB", "64 MiB"]),
        (range(1024, 2**26, 2**20), {"log": True, "is_bytes": True}, ["1 KiB", "16 KiB", "256 KiB", "4 MiB"]),
        ((1, 2, 4, 8), {"log": True}, ["1", "2", "4", "8"]),
        ([1 + step / 7 for step in range(60)], {"log": True}, ["1", "2", "5"]),
        ([step / 7 for step in range(60)], {"log": False, "from_zero": True}, ["0", "2", "4", "6", "8"]),
        ([10.0**power for power in range(-9, 9)], {"log": True}, ["1e-9", "1e-5", "0.1", "1,000", "10,000,000"]),
    ],
)
def test_ticks_are_round_or_where_the_data_are(values, options, labels):
    assert [label for _, label in axis_over(values, **options).ticks(5)] == labels


def test_markdown_tables_have_as_many_cells_in_every_row():
    tables = re.findall(r"(?:^\|.*\n)+", markdown_of(FINDINGS), re.MULTILINE)
    assert len(tables) == 5
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def test_markdown_of_a_plot_has_a_few_points_of_every_line():
    text = markdown_of(FINDINGS)
    assert "| bytes | all_reduce | all_reduce fitted | broadcast |" in text
    assert re.search(r"\| 1 KiB \| 0\.003402 \| 0\.003742 \| 0\.006803 \|", text)
    assert "| 64 MiB |" in text


def test_machine_facts_name_host_torch_and_device():
    facts = dict(machine_facts(torch.device("cpu")))
    assert facts["torch"] == torch.__version__
    assert facts["measured on"] == "cpu"
    assert facts["host"]
    assert facts["GPUs"]
    assert "measured on" not in dict(machine_facts(None))


@needs_chromium
def test_the_page_reads_in_a_browser_on_desk_and_phone_in_light_and_dark(tmp_path):
    path = tmp_path / "report.html"
    write_report(FINDINGS, path)
    (tmp_path / "broken.html").write_text(html_of(BROKEN))
    grounds = set()
    with chromium() as browser:
        page = browser.open(path.as_uri())
        for width, dark in ((1100, False), (390, True)):
            page.show(width, 844, dark=dark)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(
                "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0)"
                f".every(s => s.classList.contains('{'wide' if width > 640 else 'narrow'}'))"
            )
            box = "document.querySelector('.box')"
            assert page.evaluate(f"getComputedStyle({box}).overflowX") == "auto"
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(f"{box}.scrollWidth > {box}.clientWidth")
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
        page.go((tmp_path / "broken.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.errors == []
    assert len(grounds) == 2
