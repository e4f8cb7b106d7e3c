"""The page of plans: values that it shows, and what it is drawn from."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from helpers import DIGITS
from plan_helpers import HOSTILE, MB, MEMORY, TIMES, report

from spmdtrain.document.blocks import NoteBlock, TableBlock, Tone
from spmdtrain.document.html import render_page
from spmdtrain.errors import UserError
from spmdtrain.plan import command, topologies
from spmdtrain.plan.page import Part, plan_page, timeline
from spmdtrain.plan.page_links import draw_topology, link_loads
from spmdtrain.plan.tables import plan_blocks, time_parts
from spmdtrain.plan.time_model import InstructionTimes, Overlap, TimeSource, topology_links
from spmdtrain.record.page_file import open_page_file

OF_PLAN = "#v5e-4x4"


@pytest.mark.slow
def test_a_browser_shows_the_values_of_the_plans_and_requests_nothing(tmp_path: Path) -> None:
    larger = report("v5p:4x4x4", memory=dataclasses.replace(MEMORY, peak=2000 * MB))
    broken = {"topology": "v5e:8x8", "error": "batch 64 " + HOSTILE}
    changes = ["v5e:4x4 to v5p:4x4x4: no longer fits"]
    page = plan_page([report(), larger, broken], changes, "Plan of digits", "command " + HOSTILE)
    file = tmp_path / "plan.html"
    file.write_text(render_page(page))
    with chromium() as browser:
        browser.dark(True)
        browser.open(file, width=390)
        browser.drawn()
        assert browser.messages == [] and browser.requests == [file.as_uri()]
        assert browser.evaluate("document.title") == "Plan of digits"
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        drawn = (
            "[...document.querySelectorAll('.plot')].map(x => x.querySelectorAll('path').length)"
        )
        assert len(counts := browser.evaluate(drawn)) == 2 + 2 * 3 and min(counts) > 5
        names, values = (browser.texts(f"{OF_PLAN} .stat {x}") for x in ("dt", "dt + dd"))
        facts = dict(zip(names, values, strict=True))
        assert facts["memory of a device"] == "1.00 GB" and facts["a step"] == "5.00 ms"
        assert facts["all 1,000 steps"] == "5.00 s" and facts["examples/s"] == "12,800"
        rows = [row.split("\t") for row in browser.texts(f"{OF_PLAN} tbody tr")]
        (reduced,) = (row for row in rows if row[0] == "all-reduce")
        assert reduced[1:8] == ["data", "x, y", "1", "24.0 MB", "45.0 MB", "3.00 ms", "no"]
        legend = browser.texts(f"{OF_PLAN} .legend li")
        assert any(re.fullmatch(r"activations\s+690 MB", entry) for entry in legend)
        compared = [row.split("\t") for row in browser.texts("#comparison tbody tr")]
        assert [(row[0], row[3], row[6]) for row in compared] == [
            ("v5e:4x4", "1.00 GB", "5.00 ms"),
            ("v5p:4x4x4", "2.00 GB", "5.00 ms"),
        ]
        assert "no longer fits" in browser.texts("#comparison")[0]
        assert browser.texts("#v5e-8x8 .note") == [f"Error: {broken['error']}"]


def test_a_step_is_its_parallel_parts_and_then_what_nothing_overlaps() -> None:
    plan = report()
    spans = {segment.part: (segment.start, segment.end) for segment in timeline(plan)}
    assert spans == {
        Part.PRODUCTS: (0, 5e-4),
        Part.MEMORY: (0, 2e-3),
        Part.OVERLAPPED: (0, 1e-3),
        Part.EXPOSED: (2e-3, plan["time"]["estimate"]),
    }
    plan["time"]["overlap"] = Overlap.COLLECTIVES  # as on a GPU
    spans = {segment.part: (segment.start, segment.end) for segment in timeline(plan)}
    assert spans[Part.MEMORY] == (5e-4, 2.5e-3) and spans[Part.OVERLAPPED] == (0, 1e-3)
    times = dataclasses.replace(TIMES, overlap=Overlap.COLLECTIVES)
    assert times.estimate == pytest.approx(2.5e-3 + times.waiting)
    plan["time"]["overlap"] = Overlap.NOTHING
    spans = {segment.part: (segment.start, segment.end) for segment in timeline(plan)}
    assert [spans[part][0] for part in Part if part in spans] == [0, 5e-4, 2.5e-3, 3.5e-3]


def test_what_a_device_waits_for_the_host_is_the_end_of_a_step() -> None:
    times = dataclasses.replace(TIMES, host=7e-3, rates=TimeSource.MEASURED)
    plan = report(times=times)
    last = timeline(plan)[-1]
    assert (last.row, last.part) == ("host", Part.HOST)
    assert [last.start, last.end] == pytest.approx([TIMES.estimate, times.estimate])
    assert plan["time"]["sources"]["host"] == "measured rates" and times.bottleneck == "the host"


def test_instructions_and_kernels_of_a_step_follow_each_other() -> None:
    own = InstructionTimes(products=1e-3, vector=4e-3, memory=5e-4)
    plan = report(times=dataclasses.replace(TIMES, instructions=own, kernels=2e-3))
    spans = {segment.part: (segment.start, segment.end) for segment in timeline(plan)}
    expected = {
        Part.WITH_PRODUCTS: (0, 1e-3),
        Part.VECTOR: (1e-3, 5e-3),
        Part.WAITING: (5e-3, 5.5e-3),
        Part.KERNELS: (5.5e-3, 7.5e-3),
        Part.MEMORY: (0, 2e-3),
        Part.OVERLAPPED: (0, 1e-3),
        Part.EXPOSED: (7.5e-3, plan["time"]["estimate"]),
    }
    assert spans == {part: pytest.approx(span) for part, span in expected.items()}
    sources = plan["time"]["sources"]
    assert sources["instructions"] == "the compiler's cycles"
    assert sources["kernels"] == "an assumption"


def test_operations_on_elements_follow_the_products_at_measured_rates() -> None:
    rates = TimeSource.MEASURED
    plan = report(
        times=dataclasses.replace(TIMES, elements=1e-3, overlap=Overlap.NOTHING, rates=rates)
    )
    segments = timeline(plan)
    assert [(segment.row, segment.part) for segment in segments[:2]] == [
        ("instructions", Part.PRODUCTS),
        ("instructions", Part.ELEMENTS),
    ]
    starts = sorted(segment.start for segment in segments)
    assert starts == pytest.approx([0, 5e-4, 1.5e-3, 3.5e-3, 4.5e-3])
    parts = time_parts(plan["time"])
    assert ("operations on elements", 1e-3, "measured rates") in parts
    assert {source for *_, source in parts} == {"measured rates"}


def test_each_link_has_the_bytes_and_seconds_of_the_collectives_that_use_it() -> None:
    loads = link_loads(report())
    assert (loads["x"].sent, loads["x"].seconds) == (37 * MB, 4e-3)
    assert (loads["y"].sent, loads["y"].kinds) == (30 * MB, ("all-reduce",))


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("v5e:16x4", [("x", 16, 100e9, True), ("y", 4, 50e9, False)]),
        ("v5p:4x4x1", [("x", 4, 100e9, False), ("y", 4, 100e9, False)]),
        ("tpu7x:4x4x4@2", [("the chip", 2, 7380e9, False), *((d, 4, 200e9, True) for d in "xyz"),
                           ("the network between slices", 2, 12.5e9, False)]),
        ("gpu:h100:2x8", [("NVLink", 8, 450e9, False),
                          ("the network between hosts", 2, 50e9, False)]),
        ("gpu:h100:1x8", [("NVLink", 8, 450e9, False)]),
        ("cpu:8", [("memory", 8, None, False)]),
    ],
)  # fmt: skip
def test_links_of_a_topology(name: str, links: list[tuple[Any, ...]]) -> None:
    found = topology_links(topologies.parse(name))
    assert [(x.name, x.size, x.bandwidth, x.ring) for x in found] == links


@pytest.mark.parametrize(
    ("name", "chips", "lines"),
    [
        ("v5e:4x4", 16, {"x": 12, "y": 12}),
        # Four of sixteen are drawn along x, with the two ends of the ring in each of two rows.
        ("v5e:16x2", 8, {"x": 6 + 4, "y": 4}),
        # Of 64 chips, 37 are on the three faces in sight.
        ("v5p:4x4x4", 37, {"x": 21, "y": 21, "z": 21}),
        ("gpu:h100:2x4", 8, {"NVLink": 2 * (4 + 3), "the network between hosts": 3}),
        ("v5e:2x1@3", 6, {"x": 3, "the network between slices": 5}),
    ],
)
def test_a_drawing_of_a_topology(name: str, chips: int, lines: dict[str, int]) -> None:
    drawing = draw_topology(report(name)["links"])
    assert drawing is not None
    assert len(set(drawing.chips)) == len(drawing.chips) == chips
    counts = [link.link for link in drawing.links]
    assert {link: counts.count(link) for link in counts} == lines


def test_virtual_devices_are_not_drawn() -> None:
    assert draw_topology(report("cpu:8")["links"]) is None


@pytest.mark.slow
def test_parameters_are_in_the_order_of_their_bytes() -> None:
    page = plan_page([report()], [], "title", "command")
    (section,) = (x for x in page.sections if x.title == "Parameters")
    (table,) = section.blocks
    assert isinstance(table, TableBlock)
    assert [(row[0], row[3], row[5], row[8]) for row in table.rows] == [
        ("kernel", "P('data')", "100 MB", "300 MB"),
        (HOSTILE, "P('data')", "1.00 MB", "3.00 MB"),
    ]


def test_a_plan_begins_with_the_compiler_of_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = topologies.parse("gpu:h100:1x8")
    stand_in = topologies.compiler_of(h100)
    monkeypatch.setattr(topologies, "installed_cuda", lambda: "cuda12")
    own = topologies.compiler_of(h100)
    shown = {}
    for compiler in (stand_in, own, None):
        plan = report("gpu:h100:1x8", compiler=compiler)
        first, *_ = plan_page([plan], [], "title", "command").sections[0].blocks
        assert isinstance(first, NoteBlock)
        shown[plan_blocks(plan)[1]] = (first.text, first.tone)
    assert shown == {
        NoteBlock("compiled by the CPU's compiler, not by the GPU's: its figures are rough"): (
            "Compiled by the CPU's compiler, not by the GPU's: its figures are rough.",
            Tone.WARNING,
        ),
        NoteBlock("compiled by the GPU's own compiler, without autotuning"): (
            "Compiled by the GPU's own compiler, without autotuning.",
            Tone.PLAIN,
        ),
        NoteBlock("not compiled, because the state and the batch alone do not fit"): (
            "Not compiled, because the state and the batch alone do not fit.",
            Tone.WARNING,
        ),
    }


def test_a_missing_library_is_known_before_the_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    options = ["--config", str(DIGITS), "--topology", "v5e:4x4", "--html", str(tmp_path / "x")]
    with pytest.raises(UserError, match=r"pip install 'spmdtrain\[report\]'"):
        command.execute(options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_known_before_the_plan_is_made(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "plan.html"
    why = "cannot be written: No such file or directory; give"
    for target, message in ((missing, why), (tmp_path, "is not a file")):
        options = ["--config", str(DIGITS), "--topology", "v5e:4x4", "--html", str(target)]
        with pytest.raises(UserError, match=f"--html {re.escape(str(target))} {message}"):
            command.execute(options)
    kept = tmp_path / "plan.html"
    kept.write_text("earlier")
    file = open_page_file(str(kept))
    assert kept.read_text() == "earlier" and list(tmp_path.iterdir()) == [kept]
    file.write("later")
    assert kept.read_text() == "later" and list(tmp_path.iterdir()) == [kept]
