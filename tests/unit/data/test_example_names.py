"""The origin of an example, and a summary of its values."""

from pathlib import Path

import numpy as np

from spmdtrain import ArrayDataset, MappedDataset, Subset
from spmdtrain.data.mixture import Mixture
from spmdtrain.data.sources.text_files import TextSource
from spmdtrain.data.sources.token_files import TokenFile
from spmdtrain.data.text import Packed, Tokenized
from spmdtrain.replay.rerun import describe_values, place_of_example


def test_an_example_is_traced_to_its_file_and_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("four four\n")
    packed = Packed(Tokenized(TextSource(str(tmp_path / "*.txt")), "bytes", append=256), 10)
    rows = packed.rows(np.arange(len(packed)))
    places = [place_of_example(packed, row) for row in range(len(packed))]
    texts = [describe_values(packed, rows, row)[0] for row in range(len(packed))]
    found = dict(zip(texts, places, strict=True))
    assert found["tokens 'four four'"] == f"{tmp_path}/b.txt: line 1 (record 3)"
    assert (
        found["tokens 'three | one'"]
        == f"{tmp_path}/a.txt: line 1 (record 0); {tmp_path}/a.txt: line 3 (record 2)"
    )
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "t.bin")
    assert place_of_example(TokenFile(str(tmp_path / "t.bin"), 8), 2) == (
        f"{tmp_path}/t.bin: token 16"
    )


def test_an_example_of_a_mixture_of_parts_has_its_index_in_the_whole() -> None:
    arrays: dict[str, np.ndarray] = {"image": np.ones((9, 2, 2), np.float32), "label": np.arange(9)}
    arrays["image"][7, 0, 0] = np.nan
    part = MappedDataset(Subset(arrays, np.array([8, 7])), lambda rows: rows)
    mixture = Mixture({"b": (part, 1.0), "a": (ArrayDataset(arrays), 1.0)})
    assert place_of_example(mixture, 10) == "b: example 7 of ArrayDataset"
    assert place_of_example(mixture, 4) == "a: example 4 of ArrayDataset"
    image, label = describe_values(mixture, mixture.rows(np.array([10])), 0)
    assert image.startswith("image float32[2,2] from nan to nan (crc32 ") and label == "label 7"
