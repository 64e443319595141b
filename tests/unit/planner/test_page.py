"""The page of a report: one file without scripts that shows every plan, its timeline, reasons and the next command."""

import re
from html.parser import HTMLParser

import pytest

import shardwise as sw
from env.chromium import chromium, needs_chromium


class Reading(HTMLParser):
    """Tags, and text by tag."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self._open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def report():
    return sw.plan(
        "llama-7b", cluster="8xH100", batch_size=64, plan="pp2.shard4", set=["recompute=full"], tokens="1T", price=2
    )


@pytest.fixture(scope="module")
def page(report):
    return report.to_html()


def test_the_page_is_one_file_without_scripts(page):
    found = Reading(page)
    assert not any(tag in {"script", "img", "iframe"} for tag, _ in found.tags)
    assert all(not values.get("href", "data:").startswith("http") for _, values in found.tags)
    assert page.count("<svg") == page.count("</svg>")
    assert "prefers-color-scheme:dark" in page


def test_the_page_has_memory_time_timelines_reasons_and_the_next_command(report, page):
    text = " ".join(Reading(page).text)
    families = [name for name, entry in report.answer.families.items() if hasattr(entry, "time")]
    for family in families:
        assert re.search(rf"\b{family}( \(chosen\))?: \S+, [\d.]+ m?s shown of", text), family
    assert "yours: pp2.shard4" in text
    assert report.budget.to_text() in text
    assert report.next_command in text
    for why in report.rejected.values():
        assert why in text


def test_times_of_a_step_are_in_the_unit_of_their_size(page):
    assert "Time of one step by part (s)" in page
    short = sw.plan("resnet-50", cluster="8xH100", batch_size=256).to_html()
    assert "Time of one step by part (ms)" in short


def test_the_page_names_idle_devices_and_shows_no_more_of_a_step_than_it_takes():
    page = sw.plan("resnet-50", cluster="64xH100", batch_size=1000).to_html()
    assert "24 more devices stay idle" in page
    shown = re.findall(r"([\d.]+) ms shown of ([\d.]+) ms", page)
    assert shown
    assert all(float(part) < float(whole) for part, whole in shown)
    assert "pp: pp2.replicate20, a step of 17.9 ms" in page


def test_where_nothing_fits_the_page_has_memory_and_no_timeline():
    page = sw.plan("llama-7b", cluster="1xT4", batch_size=8).to_html()
    assert "No plan fits." in page
    assert "Timelines" not in page
    assert "<svg" in page


@needs_chromium
def test_the_page_fits_a_desktop_and_a_phone(page, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page)
    with chromium() as browser:
        shown = browser.open(path.as_uri())
        for width, dark in ((1280, False), (480, True)):
            shown.show(width, dark=dark)
            assert shown.evaluate("document.documentElement.scrollWidth") == width
            assert shown.evaluate("document.querySelectorAll('figure').length") > 4
        assert shown.errors == []
