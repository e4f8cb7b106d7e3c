"""Mixtures: the number of examples of each component, their order, and what is refused."""

import time
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from step_helpers import on

from spmdtrain import Mixture, UserError
from spmdtrain.data.datasets import MappedDataset, Subset, fingerprint
from spmdtrain.data.loader import train_batches
from spmdtrain.data.mixture import (
    BLOCK,
    MixtureOrder,
    components_of,
    epoch_size,
    examples_per_period,
    mixture_of,
)
from spmdtrain.data.sampling import TrainBatches, all_rows
from spmdtrain.sharding.mesh import batch_sharding, build_mesh

SETTINGS = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
WEIGHTS = st.lists(
    st.one_of(st.floats(1e-3, 1), st.integers(1, 9), st.just(0)), min_size=1, max_size=6
).filter(any)


def mixture(weights: Any, sizes: Any = None, stages: Any = None) -> Mixture:
    """Components a, b, ... of the numbers from 0, 1000, ... on."""
    sizes = sizes or [7 + 5 * n for n in range(len(weights))]
    names = "abcdefgh"[: len(weights)]
    parts = [1000 * n + np.arange(size) for n, size in enumerate(sizes)]
    named = {step: dict(zip(names, values, strict=True)) for step, values in (stages or {}).items()}
    return Mixture(dict(zip(names, zip(parts, weights, strict=True), strict=True)), named)


def order(of: Mixture, *, seed: int = 0, batch_size: int = 8) -> MixtureOrder:
    return of.order(seed, shuffle=True, batch_size=batch_size)


@pytest.mark.slow
@hypothesis.given(weights=WEIGHTS, seed=st.integers(0, 3), first=st.integers(0, 10**9))
@SETTINGS
def test_every_block_has_the_share_of_each_component_and_errors_do_not_accumulate(
    weights: list[float], seed: int, first: int
) -> None:
    shares = np.array(weights) / np.sum(weights)
    found = order(mixture(weights), seed=seed)
    # From the start on, and at any distance from it.
    for start in (0, first // BLOCK * BLOCK):
        components, numbers = found.components(np.arange(start, start + 12 * BLOCK))
        counts = np.array(
            [np.bincount(x, minlength=len(shares)) for x in components.reshape(-1, BLOCK)]
        )
        assert np.abs(counts / BLOCK - shares).max() <= 0.001
        expected = shares * (start + BLOCK * np.arange(1, 13)[:, None])
        before = [numbers[components == n].min(initial=2**62) for n in range(len(shares))]
        for n in np.flatnonzero(shares):
            if before[n] < 2**62:
                totals = before[n] + np.cumsum(counts[:, n])
                # The weights are rounded to multiples of 2**-20.
                assert np.abs(totals - expected[:, n]).max() < 1.5 + start * 2**-20


@pytest.mark.slow
@hypothesis.given(
    weights=WEIGHTS, later=st.integers(1, 40), batch_size=st.integers(1, 300), data=st.data()
)
@SETTINGS
def test_each_component_has_its_own_epochs_through_all_stages(
    weights: list[float], later: int, batch_size: int, data: st.DataObject
) -> None:
    other = data.draw(st.permutations(weights))
    of = mixture(weights, stages={later: other, later + 3: weights})
    positions = np.arange(50 * batch_size)
    found = order(of, batch_size=batch_size)
    indices, epochs = found.examples(positions)
    components = of.component_of(indices)
    for number, part in enumerate(of.components.values()):
        own, own_epochs = indices[components == number], epochs[components == number]
        assert np.array_equal(own_epochs, np.arange(len(own)) // len(part))
        for epoch in range(len(own) // len(part)):
            assert len(set(own[own_epochs == epoch])) == len(part)
    chosen = np.random.default_rng(0).permutation(len(positions))[:20]
    alone = found.examples(positions[chosen])
    assert np.array_equal(alone[0], indices[chosen]) and np.array_equal(alone[1], epochs[chosen])


def test_the_order_of_a_mixture_stays_what_it_is() -> None:
    of = mixture([2, 1], [3, 2], stages={2: [1, 3]})
    batches = TrainBatches(of, 8, 0, True, 4, all_rows(8))
    assert [batches[k].rows.tolist() for k in range(4)] == [
        [2, 1000, 1001, 0, 1, 2, 1001, 1000],
        [0, 1000, 1, 1001, 2, 1, 0, 1000],
        [2, 1001, 1001, 1, 1000, 1001, 1000, 1001],
        [1000, 0, 1000, 1001, 2, 1000, 1001, 1],
    ], "see STABLE in test_data.py"


def test_weights_change_with_the_batch_of_their_step() -> None:
    of = mixture([1, 0, 1], stages={3: [0, 1, 0], 5: [1, 1, 1]})
    batches = TrainBatches(of, 64, 0, True, 50, all_rows(64))
    present = [set(batches[step].component.tolist()) for step in range(7)]
    assert present == [{0, 2}] * 3 + [{1}] * 2 + [{0, 1, 2}] * 2


def test_at_position_1_000_000_000_the_order_takes_no_longer() -> None:
    found = order(mixture([0.7, 0.2, 0.1]))
    began = time.perf_counter()
    components, numbers = found.components(np.arange(16384) + 10**9)
    assert time.perf_counter() - began < 0.5  # 13 ms where the machine has nothing else to do
    for n, share in enumerate([0.7, 0.2, 0.1]):
        assert abs(numbers[components == n][0] - share * 10**9) < 1100  # 2**-20 of a billion


def test_components_of_one_length_have_different_orders() -> None:
    indices, _ = order(mixture([1, 1], [500, 500])).examples(np.arange(2000))
    first, second = (indices[indices // 500 == n][:500] % 500 for n in (0, 1))
    assert (first == second).mean() < 0.02


def test_batches_are_the_same_on_any_number_of_devices_and_know_their_components() -> None:
    of = mixture([3, 1], [40, 9])
    read = []
    for devices in (1, 2, 8):
        batches = train_batches(
            MappedDataset(of, lambda rows: {"x": rows}),
            16,
            batch_sharding(build_mesh(on(devices))),
            seed=0,
            shuffle=True,
            start=2,
            stop=5,
            threads=devices % 3,
        )
        read.append([(x.rows["x"].tolist(), x.component.tolist(), x.names) for x in batches])
    assert read[0] == read[1] == read[2]
    for rows, components, names in read[0]:
        assert [row // 1000 for row in rows] == components and names == ("a", "b")


def test_an_augmentation_draws_by_the_epoch_of_the_component() -> None:
    def augment(example: Any, draw: np.random.Generator) -> Any:
        return example, draw.random()

    of = mixture([1, 1], [2, 50])
    batches = TrainBatches(of, 8, 0, True, 4, all_rows(8), augment)
    examples, drawn = zip(*(batches[k].rows for k in range(4)), strict=True)
    of_first = np.concatenate(drawn)[np.concatenate(examples) == 0]
    assert len(of_first) > 4 and len(set(of_first)) == len(of_first)


def test_as_a_dataset_it_is_the_concatenation_of_its_components() -> None:
    of = Mixture({"b": ({"x": np.arange(3.0)}, 1), "a": ({"x": np.arange(10.0, 12)}, 1)})
    assert len(of) == 5 and of.names == ("a", "b")
    assert of.rows(np.array([4, 0, 2, 1]))["x"].tolist() == [2, 10, 0, 11]
    assert of.rows(np.array([3, 2]))["x"].tolist() == [1, 0]
    mapped = MappedDataset(of, lambda rows: rows["x"] + 1)
    parts = {name: part.rows(np.arange(2)).tolist() for name, part in components_of(mapped).items()}
    assert parts == {"a": [11, 12], "b": [1, 2]}
    assert mixture_of(mapped) is of and components_of(of.components["a"]) == {}
    assert [epoch_size(x) for x in (mapped, of.components["a"], None)] == [0, 2, 0]


def test_the_fingerprint_names_components_and_stages() -> None:
    of = mixture(np.array([2, 1], np.float32), [3, 2], stages={np.int64(9): [1, 1]})
    found = fingerprint(of)
    assert found["stages"] == {"0": {"a": 2.0, "b": 1.0}, "9": {"a": 1.0, "b": 1.0}}
    assert [part["examples"] for part in found["components"].values()] == [3, 2]
    mapped = fingerprint(MappedDataset(of, lambda rows: rows * 2))
    assert mapped["stages"] == found["stages"] and mapped["crc32"] != found["crc32"]


def test_weights_whose_sum_is_not_finite_are_shares() -> None:
    assert examples_per_period({"a": 1e308, "b": 1e308, "c": 0}).tolist() == [2**19, 2**19, 0]


X = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("components", "stages", "message"),
    [
        ([(X, 1)], None, r"needs a dictionary \{name: \(dataset, weight\)\}, not a list"),
        ({}, None, "needs at least one component"),
        ({"a": X}, None, "component 'a' of a Mixture is a ndarray"),
        ({1: (X, 1)}, None, "is named 1"),
        ({"a": (X, -1)}, None, "a Mixture has the weight -1 of 'a'"),
        ({"a": (X, float("inf"))}, None, "a Mixture has the weight inf of 'a'"),
        ({"a": (X, "1")}, None, "a Mixture has the weight '1' of 'a'"),
        ({"a": (X, 0), "b": (X, 0)}, None, "no weight above 0"),
        ({"a": (X, 1), "b": (X, 1e-9)}, None, "the weight of 'b' is 1e-09 of a total of 1"),
        ({"a": (X, 1)}, {0: {"a": 1}}, "begins at step 0"),
        ({"a": (X, 1)}, {"5": {"a": 1}}, "begins at step '5'"),
        ({"a": (X, 1)}, [(5, {"a": 1})], r"stages of a Mixture are \[\(5, "),
        ({"a": (X, 1)}, {5: 0.5}, "stage 5 of a Mixture is 0.5"),
        ({"a": (X, 1e308), "b": (X, 5e-324)}, None, "the weight of 'b' is 4.94066e-324"),
        ({"a": (X, 1), "b": (X, 1)}, {5: {"a": 1}}, "stage 5 of a Mixture has weights of a:"),
        ({"a": (X, 1), "b": (X[:0], 1)}, None, "component 'b' of a Mixture is empty"),
        ({"a": ((X, X), 1), "b": ((X, X[:, None]), 1)}, None, r"array '1' is float32\[\] in 'a'"),
        ({"a": ({"x": X}, 1), "b": ({"y": X}, 1)}, None, "array 'x' is float32.* and absent in"),
        ({"a": (X, 1), "b": (X.astype(int), 1)}, None, "the array is float32.* and int64"),
        ({"a": (Mixture({"b": (X, 1)}), 1)}, None, "component 'a' of a Mixture is a Mixture"),
    ],
)
def test_what_no_mixture_can_be_made_of_is_refused(
    components: Any, stages: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Mixture(components, stages)


def test_components_that_differ_are_refused_in_these_words() -> None:
    with pytest.raises(UserError) as caught:
        Mixture({"web": ({"tokens": np.zeros((3, 8))}, 1), "code": ({"tokens": X}, 1)})
    assert str(caught.value) == (
        "the components of a Mixture differ: array 'tokens' is float32[] in 'code' and float64[8] "
        "in 'web'; map one of them (MappedDataset)"
    )


def test_a_subset_of_a_mixture_is_refused() -> None:
    with pytest.raises(UserError, match="give a Mixture of Subsets"):
        TrainBatches(Subset(mixture([1, 1]), np.arange(3)), 2, 0, True, 1, all_rows(2))
