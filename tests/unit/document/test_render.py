"""The page as one file: nothing is requested, and all text is only text."""

import base64
import hashlib
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import vl_convert
from report_files import png

from spmdtrain.document.blocks import (
    Block,
    Fact,
    FactsBlock,
    GalleryBlock,
    ImageBlock,
    LegendEntry,
    NoteBlock,
    Page,
    Section,
    Series,
    StatsBlock,
    TableBlock,
    TextBlock,
    Tone,
    altair,
    chart_block,
    line_chart,
    tick_label,
)
from spmdtrain.document.html import page_content, render_page

EVIL = """</script><script>alert(1)</script><img src=x onerror=alert(1)>'"&lt;\u202e"""


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text outside of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts = "", list[str]()
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def page_of(text: str) -> Page:
    """A page with every kind of block, in which all text is the same."""
    fact = Fact(text, text, text)
    alt = altair()
    bars = alt.Chart(alt.NamedData("bars")).mark_bar().encode(x="v:Q", y="k:N", tooltip=["k:N"])
    image = ImageBlock(png(), title=text)
    blocks: list[Block] = [
        StatsBlock([fact]),
        FactsBlock([fact], text),
        TableBlock([text], [[text]], title=text),
        TableBlock([text], [[text]], title=text, folded=True),
        TextBlock(f"{text}\n{text}", text),
        NoteBlock(text, Tone.BAD),
        image,
        GalleryBlock([image], text),
        line_chart(text, [Series(text, [1, 2], [3.0, None])], values=[text], note=text),
        chart_block(
            text, bars, {"bars": [{"k": text, "v": 1}]}, legend=[LegendEntry(text, 1, text)]
        ),
    ]
    return Page(text, [Section(text, blocks, text)], text, {text: Tone.GOOD}, text)


@pytest.mark.slow
def test_text_of_files_is_never_markup() -> None:
    plain, evil = (Elements(render_page(page_of(text))) for text in ("plain", EVIL))
    # The same elements with the same attributes: nothing that the text says became a part of it.
    names = [[(tag, sorted(of)) for tag, of in page.found] for page in (plain, evil)]
    assert names[0] == names[1]
    assert len(evil.scripts) == len(plain.scripts) == 3
    shown = EVIL.replace("\u202e", r"\u202e")  # it would reverse the text after it
    assert evil.text.count(shown) == plain.text.count("plain") > 20
    # In the data of the charts, too, no element of a script can end.
    assert "alert(1)" in evil.scripts[0] and "<" not in evil.scripts[0]
    assert not re.search("alert", evil.scripts[1] + evil.scripts[2])


def references(html: str) -> Iterator[str]:
    """Everything in a page that a browser would fetch."""
    for _, attributes in Elements(html).found:
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            if (value := attributes.get(name)) and not value.startswith(("#", "data:")):
                yield value
    style = "".join(re.findall(r"<style>(.*?)</style>", html, re.S))
    yield from re.findall(r"@import|url\([^)]*\)", style)


@pytest.mark.slow
def test_the_page_requests_nothing_and_runs_only_its_own_scripts() -> None:
    html = render_page(page_of("plain"))
    assert list(references(html)) == []
    assert list(references('<img src="http://x"><style>a{b:url(c)}</style>')) == [
        "http://x",
        "url(c)",
    ]
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.replace("&#39;", "'").split(";"))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    assert rules["img-src"] == "data:"
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    hashes = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in scripts]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in hashes]
    assert len(html.encode()) < 1_100_000


def test_sections_without_content_are_left_out() -> None:
    page = Page("empty", [Section("Curves", []), Section("Notes", [NoteBlock("a note")])])
    html = render_page(page)
    assert "Curves" not in html and "a note" in html
    assert len(html) < 30_000  # without charts the libraries are not needed


def test_a_chart_keeps_its_id_if_others_appear() -> None:
    def ids(*titles: str) -> list[str]:
        charts = [line_chart(title, [Series("a", [1], [1.0])]) for title in titles]
        return list(page_content(Page("p", [Section("s", charts)]))["charts"])

    assert ids("loss") == ids("accuracy", "loss")[1:]
    assert len(set(ids("loss", "loss"))) == 2


# d3's own formats write `7e+1`, `500m`, `0.30000000000004`.
TICKS = {
    70: "70",
    0.07: "0.07",
    0.1 + 0.2: "0.3",
    0.0001: "0.0001",
    1200: "1,200",
    20_000: "20,000",
    -2.5: "-2.5",
    1_200_000: "1.2M",
    3e9: "3G",
    4.5e14: "450T",
    1e15: "1e15",
    2.5e20: "2.5e20",
    5e-5: "5e-5",
    -1.25e-7: "-1.25e-7",
    0: "0",
}


@pytest.mark.parametrize("axis", ["x", "y"])
def test_ticks_of_a_page_and_of_a_notebook_are_written_as_a_person_does(axis: str) -> None:
    block = line_chart("loss", [Series("train", [*TICKS], [*TICKS])])
    spec: dict[str, Any] = {**block.spec, "width": 300}
    spec["layer"] = [layer for layer in block.spec["layer"] if layer["data"]["name"] == "series"]
    for layer in spec["layer"]:
        shown = {"values": [*TICKS], "tickCount": len(TICKS), "labelOverlap": False}
        layer["encoding"][axis]["axis"] |= shown
    rows = [{"x": x, "y": x, "series": "train", "color": 0, "faint": False} for x in TICKS]
    svg = vl_convert.vegalite_to_svg(spec | {"datasets": {"series": rows}})
    drawn = re.search(f'aria-label="{axis.upper()}-axis.*?role-axis-label(.*?)</g>', svg, re.S)
    assert drawn is not None
    labels = [text.replace("\u2212", "-") for text in re.findall(">([^<>]+)</text>", drawn[1])]
    assert sorted(labels) == sorted(TICKS.values())
    assert [tick_label(x) for x in TICKS] == [*TICKS.values()]


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(st.floats(-1e300, 1e300))
def test_a_tick_s_label_is_short_and_is_its_value_to_four_digits(value: float) -> None:
    label = tick_label(value)
    units = {"M": 1e6, "G": 1e9, "T": 1e12}
    read = float(label.rstrip("MGT").replace(",", "")) * units.get(label[-1], 1.0)
    assert math.isclose(read, value, rel_tol=6e-4)
    assert len(label) <= 11 and ("e" in label) == bool(value and not 1e-4 <= abs(value) < 1e15)
