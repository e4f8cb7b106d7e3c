"""Rules for weights: names, parts, orders of dims, and the way back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmdtrain import UserError, WeightRule
from spmdtrain.checkpoints.weights.weight_map import (
    DimOrder,
    MisfitError,
    read_weight_map,
    region_of,
    slices,
    unmapped,
)


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("d (c n h) -> n d c h", (6, 24), (4, 6, 3, 2)),
        ("o i -> i o", (6, 4), (4, 6)),
        ("(n h) d -> n h d", (8, 5), (4, 2, 5)),
        ("a b c -> c (a b)", (2, 3, 4), (4, 6)),
    ],
)
def test_any_part_of_a_reordered_array_is_that_of_the_whole(
    text: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    order, array = DimOrder(text), np.arange(np.prod(before)).reshape(before)
    lengths = order.lengths(before, after if "(a b)" not in text else None)
    # Written out by hand, without the code under test.
    whole = {
        "d (c n h) -> n d c h": array.reshape(6, 3, 4, 2).transpose(2, 0, 1, 3)
        if before == (6, 24)
        else None,
        "o i -> i o": array.T,
        "(n h) d -> n h d": array.reshape(-1, 2, before[-1]),
        "a b c -> c (a b)": array.reshape(-1, before[-1]).T,
    }[text]
    assert whole is not None and whole.shape == after
    random = np.random.default_rng(0)
    for _ in range(30):
        box = tuple(tuple(sorted(random.choice(n + 1, 2, replace=False).tolist())) for n in after)
        boxes: list[int] = []

        def read(part: tuple[tuple[int, int], ...], boxes: list[int] = boxes) -> np.ndarray:
            boxes.append(int(np.prod([end - first for first, end in part])))
            return array[slices(part)]

        found = order.read(lengths, box, read)
        np.testing.assert_array_equal(found, whole[slices(box)])
        if "(" not in text:
            assert boxes == [found.size]  # nothing else is read


def test_a_part_of_an_array() -> None:
    array = np.arange(24).reshape(4, 6)
    for slot, expected in {
        "": array,
        "2": array[2],
        "{layer},:": array[3],
        "1:3, 1/3": array[1:3, 2:4],
        ":,0": array[:, 0],
    }.items():
        region = region_of(array.shape, slot, {"layer": "3"})
        np.testing.assert_array_equal(
            array[slices(region.box)].reshape(region.shape), expected, err_msg=slot
        )
    for slot in ("4", ":,0/4", "0:7", ":,:,0"):
        with pytest.raises(MisfitError):
            region_of(array.shape, slot, {})
    with pytest.raises(UserError, match="x"):
        region_of(array.shape, "x", {})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("h.{layer", "a"), "brace"),
        (("h.{layer:(}", "a"), "not valid"),
        (("h.{layer}", "a[{other}]"), "'other'"),
        (("h", "a", "i o -> i"), "same names"),
        (("h", "a", "i o"), "-> "),
    ],
)
def test_a_malformed_rule_is_refused_where_it_is_written(rule: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        WeightRule(*rule)


def test_the_way_back_stacks_splits_and_merges() -> None:
    random = np.random.default_rng(0)
    model = {
        "blocks/qkv": random.normal(size=(2, 6, 3, 4)),
        "query": random.normal(size=(5, 2)),
        "rest": random.normal(size=(5, 4)),
        "head/kernel": random.normal(size=(7, 6)),
    }
    rules = (
        WeightRule("{prefix:(m\\.)?}h.{layer}.q", "blocks/qkv[{layer},:,0]", "o i -> i o"),
        WeightRule("h.{layer}.kv[0/2]", "blocks/qkv[{layer},:,1]"),
        WeightRule("h.{layer}.kv[1/2]", "blocks/qkv[{layer},:,2]"),
        WeightRule("wide[:,0:2]", "query"),
        WeightRule("wide[:,2:6]", "rest"),
        WeightRule("{name:head|tail}.weight", "{name:head|tail}/kernel[0:3]"),
    )
    found = unmapped(rules, model)
    assert sorted(found) == ["h.0.kv", "h.0.q", "h.1.kv", "h.1.q", "head.weight", "wide"]
    qkv = model["blocks/qkv"]
    np.testing.assert_array_equal(found["h.1.q"], qkv[1, :, 0].T)
    np.testing.assert_array_equal(found["h.0.kv"], np.concatenate([qkv[0, :, 1], qkv[0, :, 2]]))
    np.testing.assert_array_equal(found["wide"], np.hstack([model["query"], model["rest"]]))
    np.testing.assert_array_equal(found["head.weight"], model["head/kernel"][:3])
    with pytest.raises(UserError, match="no rule that writes rest"):
        unmapped(rules[:4] + rules[5:], model)
    with pytest.raises(UserError, match="elements of wide"):
        unmapped((*rules[:3], rules[4], WeightRule("wide[:,0:1]", "query[:,0:1]"), rules[5]), model)


def test_a_file_with_a_map_may_import_modules_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "names_of_weights.py").write_text("SOURCE = 'kernel'\n")
    (tmp_path / "experiment.py").write_text(
        "from names_of_weights import SOURCE\n"
        "from spmdtrain import WeightRule\n"
        "WEIGHT_MAP = [WeightRule(SOURCE, 'layers/0/kernel')]\n"
    )
    (rule,) = read_weight_map(str(tmp_path / "experiment.py"))
    assert rule == WeightRule("kernel", "layers/0/kernel")


@pytest.mark.parametrize(
    ("text", "message"),
    [("import sys; sys.exit(3)", "SystemExit: 3"), ("WEIGHT_MAP = []", "its WEIGHT_MAP is empty")],
)
def test_a_file_without_a_map_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "experiment.py").write_text(text)
    with pytest.raises(UserError, match=message):
        read_weight_map(str(tmp_path / "experiment.py"))
