"""Media: what can be logged, what is refused, and the form that trackers receive."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdtrain import Figure, Histogram, Image, Table, Text, UserError
from spmdtrain.record.run_files import Status
from spmdtrain.trackers.base import Media, RunInfo
from spmdtrain.trackers.run_trackers import MediaFiles, check_items

SVG = "<svg xmlns='http://www.w3.org/2000/svg'></svg>"
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((4, 5), (1, 4, 5, 1)),
    ((4, 5, 3), (1, 4, 5, 3)),
    ((7, 4, 5), (7, 4, 5, 1)),
    ((2, 4, 5, 4), (2, 4, 5, 4)),
]


@pytest.mark.parametrize(("shape", "found"), SHAPES)
def test_images_of_each_shape_become_bytes(shape: tuple[int, ...], found: tuple[int, ...]) -> None:
    for make in (np.asarray, jnp.asarray):
        image = Image(make(np.full(shape, 0.5, np.float32)))
        image.check()
        array = image.detach().on_host().array
        assert (array.shape, array.dtype) == (found, np.uint8) and (array == 128).all()


def test_values_of_images_are_clipped_and_bytes_and_truths_are_kept() -> None:
    def row(values: Any) -> list[int]:
        return Image(values[None]).on_host().array.ravel().tolist()

    assert row(np.array([-1, 0, 0.25, 1, 7, np.nan])) == [0, 0, 64, 255, 255, 0]
    assert row(jnp.array([0, 1, 2], jnp.bfloat16)) == [0, 255, 255]
    assert row(np.array([3, 255], np.uint8)) == [3, 255]
    assert row(np.array([True, False])) == [255, 0]


def test_several_images_become_rows_of_one() -> None:
    grid = Image(np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1)).on_host().grid()
    assert grid[..., 0].tolist() == [[0, 1, 2], [3, 4, 0]]


def test_histograms_count_what_is_finite() -> None:
    found = Histogram(jnp.array([[0, 1], [2, jnp.nan]]), bins=2).detach().on_host()
    assert found.edges.tolist() == [0, 1, 2] and found.counts.tolist() == [1, 2]
    of_integers = Histogram.of_integers({3: 2, 5: 1})
    assert of_integers.edges.tolist() == [2.5, 3.5, 4.5, 5.5]
    assert of_integers.counts.tolist() == [2, 0, 1]
    wide = Histogram.of_integers({0: 2, 10**6: 1}).on_host()
    assert wide.counts.sum() == 3 and len(wide.counts) == 512


def test_media_pass_through_jit_with_their_order_and_texts() -> None:
    @jax.jit
    def made(x: jax.Array) -> dict[str, Media]:
        return {
            "table": Table({"z": x, "a": x + 1}),
            "image": Image(x[None, None, :, None], captions=["one"]),
            "text": Text(x.astype(int), str),
            "fixed": Text(["a", "b"]),
            "counted": Histogram(edges=jnp.arange(4), counts=x),
        }

    found = made(jnp.array([0.0, 1.0, 2.0]))
    check_items(found, "media")
    table, image, text, fixed, counted = (
        found[name].detach().on_host() for name in ("table", "image", "text", "fixed", "counted")
    )
    assert isinstance(table, Table) and list(table.columns) == ["z", "a"]
    assert table.rows() == [[0, 1], [1, 2], [2, 3]]
    assert isinstance(image, Image) and tuple(image.captions) == ("one",)
    assert isinstance(text, Text) and text.value == ("[0 1 2]",)
    assert isinstance(fixed, Text) and fixed.joined() == "a\n\nb"
    assert isinstance(counted, Histogram) and counted.counts.tolist() == [0, 1, 2]


def test_what_was_logged_is_what_it_was_at_the_call() -> None:
    numpy, text = np.zeros((2, 2)), ["before"]
    jax_array = jnp.zeros((2, 2))
    kept: list[Media] = [Image(numpy), Image(jax_array), Table({"a": text})]
    kept = [media.detach() for media in kept]
    numpy[:], text[0] = 1, "after"
    jax_array.delete()  # as the next step does with the state
    first, second, third = (each.on_host() for each in kept)
    assert isinstance(first, Image) and isinstance(second, Image) and isinstance(third, Table)
    assert not first.array.any() and not second.array.any()
    assert third.rows() == [["before"]]


def test_odd_texts_and_numbers_reach_the_trackers_in_a_form_that_they_can_write() -> None:
    half = Text(np.array([[1]]), lambda row: "a\ud800")  # of a surrogate pair, cut by a tokenizer
    assert half.on_host().joined() == "a\\ud800"
    assert Table({"a": [2**70, -(2**63) + 1]}).on_host().rows() == [[str(2**70)], [-(2**63) + 1]]
    with pytest.raises(UserError, match=r"counts of a Histogram must be 0 or more: \[ 3 -4\]"):
        Histogram(edges=[0, 1, 2], counts=[3, -4]).on_host()


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Image([["a"]]), "dtype <U1"),
    (lambda: Image(np.zeros((2, 2), int)), "dtype int64: it must be uint8"),
    (lambda: Image(np.zeros(3)), r"shape \(3,\): it must be \(H, W\)"),
    (lambda: Image(np.zeros((1, 2, 2, 2))), "1, 3 or 4 channels"),
    (lambda: Image(np.zeros((0, 8, 8, 1))), "empty"),
    (lambda: Image(np.zeros((65, 8, 8, 1))), r"65 images: the limit is 64.*images\[:64\]"),
    (lambda: Image(np.zeros((5000, 5000), bool)), "25,000,000 pixels"),
    (lambda: Image(np.zeros((2, 8, 8, 1)), ["one"]), "2 images has 1 captions"),
    (
        lambda: Image(np.zeros((2, 8, 8, 1)), "ab"),
        "captions of an Image is 'ab': it must be a list",
    ),
    (lambda: Image("file.png"), "takes an array, and not a str"),
    (lambda: Text(3), "takes strings or an array of tokens, and not a int"),
    (lambda: Text([]), "not empty"),
    (lambda: Text(np.zeros(3)), "float64.*must be integers"),
    (lambda: Text(np.zeros(3, int)), "needs decode"),
    (lambda: Text("a" * 1_000_001), "1,000,001 characters"),
    (lambda: Histogram(), "takes values, or edges and counts"),
    (lambda: Histogram(np.zeros(0)), "0 values"),
    (lambda: Histogram(np.ones(2), 513), "513 bins"),
    (lambda: Histogram(["a"]), "it takes real numbers"),
    (lambda: Histogram(np.ones(2, complex)), "dtype complex128: it takes real numbers"),
    (lambda: Histogram(edges=[1, 2], counts=[1, 2]), r"\(n \+ 1,\)"),
    (lambda: Table([[1, 2]]), "takes columns by name"),  # type: ignore[arg-type]
    (lambda: Table({"a": [1], "b": [1, 2]}), "different lengths: {'a': 1, 'b': 2}"),
    (lambda: Table({"a": np.zeros(10_001)}), "10,001 rows"),
    (lambda: Table({"a": np.zeros((2, 2))}), r"column 'a'.*float64\[2, 2\]"),
    (lambda: Table({"a": [object()]}), "column 'a' of a Table holds a object"),
    (lambda: Figure(b"GIF89a"), "neither PNG nor SVG"),
    (lambda: Figure(np.zeros(3)), "a Figure of a ndarray"),
    (lambda: 0.5, "is a float.*numbers are metrics: add them to event.metrics"),
    (lambda: np.zeros((8, 8)), "is a ndarray: it must be an Image"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_wrong_media_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^log\(\): 'samples'.*{message}"):
        check_items({"samples": make()}, "log()")


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\\b", "a\nb", "\u202ea", 3, "a" * 101])
def test_wrong_names_are_refused(name: Any) -> None:
    with pytest.raises(UserError, match="name"):
        check_items({name: Text("x")}, "log()")
    with pytest.raises(UserError, match="takes media by name"):
        check_items([Text("x")], "log()")


# -- the files -------------------------------------------------------------------------------------


def opened(folder: Path, step: int = 0) -> MediaFiles:
    files = MediaFiles()
    files.start(
        RunInfo(name="run", workdir=None, folder=folder, step=step, earlier=None, config={})
    )
    return files


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "media.jsonl").read_text().splitlines()]


def test_each_item_is_a_line_and_a_resume_removes_those_of_later_steps(tmp_path: Path) -> None:
    from PIL import Image as Pillow

    files = opened(tmp_path)
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    table = Table({"answer": [1, "two", None, float("nan")]}).on_host()
    for step in (1, 2):
        files.image(step, "eval/a b", Image(pixels, ["first"]).on_host())
        files.text(step, "train/said", Text(["one", "two"]).on_host())
        files.histogram(step, "eval/h", Histogram(edges=[0, 1], counts=[step]).on_host())
        files.table(step, "eval/t", table)
        files.figure(step, "eval/f", Figure(SVG).detach())
    files.close(Status.FINISHED)
    image, text, histogram, rows, figure = lines(tmp_path)[:5]
    assert {**image, "file": None} == {
        **{"step": 1, "split": "eval", "name": "a b", "kind": "image", "file": None},
        **{"count": 1, "width": 2, "height": 2, "captions": ["first"]},
    }
    assert (np.asarray(Pillow.open(tmp_path / image["file"])) == pixels).all()
    assert (text["kind"], text["split"], text["text"]) == ("text", "train", "one\n\ntwo")
    assert (histogram["edges"], histogram["counts"]) == ([0, 1], [1])
    assert (rows["columns"], rows["rows"]) == (["answer"], [[1], ["two"], [None], [None]])
    assert (tmp_path / figure["file"]).read_text() == SVG
    assert figure["file"] == "media/eval-f-00000001.svg"

    with (tmp_path / "media.jsonl").open("a") as file:
        file.write('{"step": 9, "file": "../precious"}\nbroken\n{"st')
    opened(tmp_path, step=1)
    assert [line["step"] for line in lines(tmp_path)] == [1] * 5
    kept = {Path(line["file"]).name for line in lines(tmp_path) if "file" in line}
    assert {path.name for path in (tmp_path / "media").iterdir()} == kept and len(kept) == 2


def test_a_cell_that_json_lacks_is_written_as_text(tmp_path: Path) -> None:
    columns = {
        "day": np.array(["2026-01-02"], "M8[D]"),
        "moment": np.array(["2026-01-02T03:04:05"], "M8[ns]"),
        "number": [np.complex64(1 + 2j)],
        "half": jnp.array([0.5], jnp.bfloat16),
    }
    table = Table(columns)
    table.check()
    opened(tmp_path).table(1, "eval/t", table.detach().on_host())
    (line,) = lines(tmp_path)
    assert line["rows"] == [["2026-01-02", "2026-01-02T03:04:05.000000000", "(1+2j)", 0.5]]


@pytest.mark.parametrize("edges", [[-np.inf, 0, np.inf], [0, np.nan, 1], [0, 1, 1]])
def test_edges_that_are_not_finite_or_do_not_rise_are_refused(edges: list[float]) -> None:
    with pytest.raises(UserError, match="edges of a Histogram must be finite and rise"):
        Histogram(edges=edges, counts=[1, 2]).on_host()


def test_names_that_differ_have_different_files(tmp_path: Path) -> None:
    files = opened(tmp_path)
    for name in ("a b", "a-b", "a_b", "a.b", "\u00e4"):
        files.figure(1, f"eval/{name}", Figure(SVG).detach())
    assert len({line["file"] for line in lines(tmp_path)}) == 5


@pytest.mark.parametrize("name", ["media", "media.jsonl"])
def test_media_are_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    if name == "media":
        victim.mkdir()
    else:
        victim.write_text("")
    (run / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        opened(run).figure(1, "eval/f", Figure(SVG).detach())
    assert (list(victim.iterdir()) if name == "media" else victim.read_bytes()) in ([], b"")
