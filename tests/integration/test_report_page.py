"""The page of a run in a real browser."""

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from helpers import BOUND, DIGITS, environment, metrics, run
from report_files import watch_lines, write_lines, write_run

from spmdtrain.document.terminal import number


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def report(*arguments: object) -> str:
    command = [sys.executable, "-m", "spmdtrain.report", *map(str, arguments)]
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=BOUND
    )
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def test_the_values_of_a_real_run_are_on_its_page(browser: Browser, tmp_path: Path) -> None:
    options = ("--epochs", 3, "--workdir", tmp_path / "run")
    assert run(DIGITS, *options).returncode == 0
    assert "report.html" in report(tmp_path / "run")
    browser.open(tmp_path / "run" / "report.html")
    browser.drawn()
    assert browser.texts("h1") == ["run"] and browser.texts(".badge") == ["finished"]
    (test,) = metrics(tmp_path / "run", "test")
    trained = metrics(tmp_path / "run", "train")
    stats = dict(
        zip(browser.texts(".stat dt"), browser.texts(".stat dd:nth-of-type(1)"), strict=True)
    )
    assert stats["step"] == f"{trained[-1]['step']:,}"
    assert stats["test loss"] == number(test["loss"])
    legend = browser.texts(".chart:nth-of-type(1) .legend li")
    assert f"train {number(trained[-1]['loss'])}" in [" ".join(x.split()) for x in legend]
    # Every value is a point of the line, and the last one is where the axis says.
    first = "document.querySelector('.chart .plot')"
    path = browser.evaluate(f"{first}.querySelector('.mark-line path').getAttribute('d')")
    points = [tuple(map(float, p.split(","))) for p in re.findall(r"[ML]([-\d.e]+,[-\d.e]+)", path)]
    assert len(points) == len(trained)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    falls = [(a[1] < b[1]) for a, b in itertools.pairwise(points)]
    losses = [line["loss"] for line in trained]
    assert falls == [a > b for a, b in itertools.pairwise(losses)]  # y points down
    assert browser.texts("tr.marked td:last-child") == ["best loss"]
    (address,) = browser.requests
    assert address.startswith("file://") and browser.messages == []


def test_a_watched_layer_has_a_row_of_cells(browser: Browser, tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run")
    lines = watch_lines(12, (1, 100, 200, 300), broken_from=300)
    write_lines(workdir / "watch.jsonl", lines)
    report(workdir)
    browser.open(workdir / "report.html")
    browser.drawn()
    chart = (
        "[...document.querySelectorAll('.chart')]"
        ".find(x => x.textContent.includes('Norms of outputs'))"
    )
    cells = browser.evaluate(
        f"[...{chart}.querySelectorAll('.mark-rect path')]"
        ".map(x => [x.getAttribute('aria-label'), x.getAttribute('fill'), "
        "Number(x.getAttribute('opacity'))])"
    )
    assert len(cells) == 48
    found = {
        (re.search(r"layer: ([^;]*)", x)[1], re.search(r"step: ([^;]*)", x)[1]): (fill, shade)  # type: ignore[index]
        for x, fill, shade in cells
    }
    # Darker from layer to layer and from step to step; another color where it is not finite.
    shades = [found[f"blocks/{n}", "200"][1] for n in range(12)]
    assert shades == sorted(shades) and shades[0] < shades[-1] <= 1
    assert found["blocks/3", "1"][1] < found["blocks/3", "300"][1]
    fills = {fill for fill, _ in found.values()}
    assert [key for key, (fill, _) in found.items() if fill != found["blocks/0", "1"][0]] == [
        ("blocks/11", "300")
    ] and len(fills) == 2
    names = browser.evaluate(
        f"[...{chart}.querySelectorAll('.mark-text.role-axis-label text')].map(x => x.textContent)"
    )
    assert [x for x in names if x.startswith("blocks/")] == [f"blocks/{n}" for n in range(12)]
    assert browser.messages == []


def test_the_pointer_shows_the_values_of_all_series(browser: Browser, tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run")
    report(workdir)
    browser.open(workdir / "report.html")
    browser.drawn()
    box = browser.evaluate(
        "(({left, top, right, height}) => ({left, top, right, height}))"
        "(document.querySelector('.chart .plot svg').getBoundingClientRect())"
    )
    browser.move_pointer(box["right"] - 8, box["top"] + box["height"] / 2)
    browser.wait("!document.querySelector('.pointer').hidden")
    shown = [" ".join(text.split()) for text in browser.texts(".pointer > div") if text]
    last = [x for x in metrics_of(workdir) if x["step"] == 600]
    assert shown[0] == "step 600"
    assert f"test {last[-1]['loss']:g}" in shown and len(shown) == 5
    browser.evaluate("document.querySelector('button.log').click()")
    browser.drawn()
    assert browser.evaluate("document.querySelector('button.log').ariaPressed") == "true"
    ticks = browser.evaluate(
        "[...document.querySelector('.plot').querySelectorAll('.role-axis-label text')]"
        ".map(x => x.textContent)"
    )
    assert "0" not in ticks and browser.messages == []


def metrics_of(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_it_fits_a_phone_and_follows_light_and_dark(browser: Browser, tmp_path: Path) -> None:
    workdir = write_run(tmp_path / ("a-long-name-of-a-run" * 5))
    report(workdir, "--output", tmp_path / "page.html")
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    colors = """[getComputedStyle(document.body).backgroundColor,
        document.querySelector('.mark-line path').getAttribute('stroke')]"""
    theme = "getComputedStyle(document.documentElement).getPropertyValue('--color-0').trim()"
    found = []
    for width in (390, 1280):
        browser.open(tmp_path / "page.html", width=width)
        browser.drawn()
        scroll, client = browser.evaluate(widths)
        assert scroll == client <= width
        cut = """[...document.querySelectorAll('.plot')].filter(x =>
            x.querySelector('svg').getBoundingClientRect().right >
            x.getBoundingClientRect().right + 1).length"""
        assert browser.evaluate(cut) == 0
        for dark in (False, True):
            browser.dark(dark)
            browser.wait(f"({colors})[1] === {theme}")
            found.append(tuple(browser.evaluate(colors)))
        browser.dark(False)
    assert found[:2] == found[2:] and found[0][0] != found[1][0] and found[0][1] != found[1][1]


@pytest.mark.nightly
def test_a_run_of_100_000_logged_steps_is_small_and_opens_quickly(
    browser: Browser, tmp_path: Path
) -> None:
    workdir = write_run(tmp_path / "run", steps=100_000, every=1)
    report(workdir)
    page = workdir / "report.html"
    assert page.stat().st_size < 3_000_000
    began = time.monotonic()
    browser.open(page)
    browser.wait("!!document.querySelector('.plot[data-drawn]')")
    seconds = time.monotonic() - began
    browser.drawn()
    # It takes 0.6 s on an idle machine; the bound allows for one that is busy.
    assert seconds < 30
    assert browser.texts(".stat dd")[0] == "100,000"


def test_a_page_that_is_followed_shows_new_lines_and_keeps_its_place(
    browser: Browser, tmp_path: Path
) -> None:
    workdir = write_run(tmp_path / "run")
    (workdir / "status.json").write_text('{"status": "running", "step": 600}')
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "spmdtrain.report", str(workdir), "--follow"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        browser.open(url)
        browser.drawn()
        browser.evaluate("document.querySelector('details').open = true")
        browser.evaluate("scrollTo(0, 700)")
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 610, "split": "train", "loss": 7.125}\n')
        browser.wait("document.querySelector('.legend b').innerText === '7.125'")
        browser.drawn()
        assert browser.evaluate("scrollY") == 700
        assert browser.evaluate("document.querySelector('details').open")
        assert browser.texts(".stat dd")[0] == "610"
        line_of = "document.querySelector('.plot .mark-line path').getAttribute('d')"
        browser.wait(f"{line_of}.split('L').length === 61")
        assert browser.messages == []
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        browser.wait("document.documentElement.dataset.connected === 'no'")
    finally:
        server.kill()
        server.communicate()
    assert not (workdir / "report.html").exists()
