"""Mixtures: training on several datasets with declared weights, in a fixed order."""

import contextlib
import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmdtrain.data.datasets import (
    Dataset,
    MappedDataset,
    Subset,
    as_dataset,
    blocks_of,
    classes_of,
    fingerprint,
    own_rows,
)
from spmdtrain.data.order import EpochOrder, Order, permuted
from spmdtrain.errors import BadRecordError, UserError
from spmdtrain.tree import named_leaves

# -- The order of a mixture: which component is at which position, and which of its examples -------

BLOCK = 2048  # positions in which the number of examples of each component is fixed
PERIOD = 2**20  # positions after which the numbers of the blocks repeat


def examples_per_period(weights: Mapping[str, float]) -> np.ndarray:
    """Returns how many of `PERIOD` examples each component has, int64 (components,).

    They are the weights' shares, rounded by the method of largest remainders.

    Raises:
      UserError: If a weight is below a millionth of their sum, and not 0.
    """
    values = np.array(list(weights.values()), np.float64)
    if values.max() > np.finfo(np.float64).max / len(values):
        values = values / len(values)  # so that the sum is finite
    quotas = values / values.sum() * PERIOD
    for (name, weight), quota in zip(weights.items(), quotas, strict=True):
        if weight and quota < 1:
            raise UserError(
                f"the weight of {name!r} is {weight:g} of a total of {values.sum():g}: it must be "
                "0 or at least a millionth of the total"
            )
    counts = np.floor(quotas).astype(np.int64)
    return _with_total(counts, quotas - counts, PERIOD)


def _with_total(counts: np.ndarray, remainders: np.ndarray, total: int) -> np.ndarray:
    """Adds 1 to the counts with the largest remainders, so that the counts add up to a total.

    If they are above the total, subtracts 1 from the counts with the smallest remainders.
    """
    missing = total - int(counts.sum())
    if missing >= 0:
        chosen = np.argsort(-remainders, kind="stable")[:missing]
        counts[chosen] += 1
    else:
        possible = np.flatnonzero(counts)
        chosen = possible[np.argsort(remainders[possible], kind="stable")[:-missing]]
        counts[chosen] -= 1
    return counts


def _counts_of_blocks(per_period: np.ndarray) -> np.ndarray:
    """Returns how many examples of each component are before each block of a period.

    A block has the share of each component, rounded by the method of largest remainders. The
    rounding error is added to the share of the next block, so that errors do not accumulate. The
    result is int64 (blocks + 1, components).
    """
    blocks = PERIOD // BLOCK
    before = np.zeros((blocks + 1, len(per_period)), np.int64)
    for block in range(blocks):
        # In units of 1 / blocks, because integers have no rounding errors.
        due = per_period * (block + 1) - before[block] * blocks
        counts = np.maximum(due, 0) // blocks
        before[block + 1] = before[block] + _with_total(counts, due - counts * blocks, BLOCK)
    return before


@dataclass(frozen=True)
class _Stage:
    """Positions with constant weights.

    Attributes:
      first: Its first position.
      per_period: int64 (components,), examples of each component in a period.
      before: Examples of each component before each block of a period.
      starts: int64 (components,), examples of each component before the stage.
    """

    number: int
    first: int
    per_period: np.ndarray
    before: np.ndarray
    starts: np.ndarray
    seed: int

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the component of each position, and the position in the component's stream."""
        blocks, within = np.divmod(positions - self.first, BLOCK)
        components, of_component = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            chosen = blocks == block
            which, numbers = self._block(int(block))
            components[chosen] = which[within[chosen]]
            of_component[chosen] = numbers[within[chosen]]
        return components, of_component

    def end(self, position: int) -> np.ndarray:
        """Returns the number of examples of each component before a position, int64."""
        block, within = divmod(position - self.first, BLOCK)
        begin, _ = self._counts(block)
        which, _ = self._block(block)
        return begin + np.bincount(which[:within], minlength=len(begin))

    def _counts(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of examples of each component before a block, and within it."""
        period, block = divmod(block, PERIOD // BLOCK)
        before, after = self.before[block : block + 2]
        return self.starts + period * self.per_period + before, after - before

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `at` of all positions of a block."""
        begin, counts = self._counts(block)
        by_component = np.repeat(np.arange(len(counts)), counts)
        shuffled = permuted(
            np.arange(BLOCK),
            size=BLOCK,
            seed=self.seed,
            epochs=np.asarray(block),
            part=self.number,
        )
        components = by_component[shuffled]
        # The examples of each component are numbered in the order of their positions.
        numbers = np.empty_like(components)
        first = np.cumsum(counts) - counts
        in_order = np.argsort(components, kind="stable")
        numbers[in_order] = np.arange(BLOCK) + np.repeat(begin - first, counts)
        return components, numbers


class MixtureOrder:
    """The order of several components, each of which repeats independently.

    Every block of `BLOCK` positions has a fixed number of examples of each component, which the
    weights determine, in random order. The component of a position is computed from its block
    alone, at any position in constant time.

    Args:
      offsets: int64 (components,), the index of the first example of each component.
      stages: The examples of each component in a period (see `examples_per_period`), by the
        position from which on they hold. The first position is 0.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        offsets: np.ndarray,
        stages: Mapping[int, np.ndarray],
        seed: int,
    ) -> None:
        self._orders, self._offsets = orders, offsets
        self._stages: list[_Stage] = []
        starts = np.zeros(len(orders), np.int64)
        for number, (first, per_period) in enumerate(sorted(stages.items())):
            if self._stages:
                starts = self._stages[-1].end(first)
            before = _counts_of_blocks(per_period)
            self._stages.append(_Stage(number, first, per_period, before, starts, seed))

    def components(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the component of each position, and the position in the component's stream.

        All arrays are int64 (n,).
        """
        firsts = [stage.first for stage in self._stages]
        stages = np.searchsorted(firsts, positions, side="right") - 1
        components, of_component = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(stages):
            chosen = stages == number
            found = self._stages[number].at(positions[chosen])
            components[chosen], of_component[chosen] = found
        return components, of_component

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index in the mixture and the epoch of its component for each position."""
        components, of_component = self.components(positions)
        indices, epochs = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(components):
            chosen = components == number
            found, epochs[chosen] = self._orders[number].examples(of_component[chosen])
            indices[chosen] = found + self._offsets[number]
        return indices, epochs


# -- Mixtures: training on several datasets with declared weights ----------------------------------

PyTree = Any


class Mixture:
    """Several datasets, sampled in proportion to their weights.

    Training examples are divided into groups of 2,048, counted from the first example of each
    stage. In each group (not in each batch) the number from each component is its share of the
    weights, rounded; rounding errors are carried over, so that the share stays exact. Each
    component has its own epochs, so a run has none: give `steps`. An evaluation counts every
    example of every component once.

    Args:
      components: Dataset (or arrays) and weight by name. The weights hold from batch 0 on.
      stages: New weights of all components, by the batch from which they hold, counted from 0:
        the weights of `{10: ...}` hold after 10 steps.

    Attributes:
      components: The datasets, sorted by name.
      stages: The weights of the components, by the batch from which they hold; the first is 0.

    Raises:
      UserError: If a weight or a step is not valid, or the components differ in their arrays.
    """

    def __init__(
        self,
        components: Mapping[str, tuple[Any, float]],
        stages: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        _check_components(components)
        self.components: dict[str, Dataset] = {
            name: as_dataset(components[name][0], f"component {name!r} of a Mixture")
            for name in sorted(components)
        }
        if not isinstance(stages, Mapping | None):
            raise UserError(f"stages of a Mixture are {stages!r}: give {{step: {{name: weight}}}}")
        self.stages: dict[int, dict[str, float]] = {
            step: self._checked(step, weights)
            for step, weights in sorted(
                [(0, {name: weight for name, (_, weight) in components.items()})]
                + [(_checked_step(step), weights) for step, weights in (stages or {}).items()]
            )
        }
        _check_same_arrays(self.components)
        self._sizes = np.array([len(x) for x in self.components.values()], np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes

    def __len__(self) -> int:
        return int(self._sizes.sum())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components, sorted."""
        return tuple(self.components)

    @property
    def classes(self) -> Sequence[str]:
        """The class names of the components, which are the same."""
        return classes_of(next(iter(self.components.values())))

    def rows(self, indices: np.ndarray) -> PyTree:
        """Returns examples of the concatenation of the components.

        Args:
          indices: int64 (n,).
        """
        component = self.component_of(indices)
        datasets, present = list(self.components.values()), np.unique(component)
        places = {n: indices[component == n] - self._offsets[n] for n in present}
        parts = {n: own_rows(datasets[n], places[n]) for n in present}
        if len(parts) == 1:
            return parts[present[0]]

        def merged(*leaves: Any) -> np.ndarray:
            whole = np.empty((len(indices), *np.shape(leaves[0])[1:]), np.asarray(leaves[0]).dtype)
            for number, leaf in zip(present, leaves, strict=True):
                whole[component == number] = leaf
            return whole

        return jax.tree.map(merged, *parts.values())

    def component_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the number of the component of each example, int32, in the order of `names`.

        Args:
          indices: int64 (n,), indices of examples.
        """
        found = np.searchsorted(self._offsets, indices, side="right") - 1
        return found.astype(np.int32)

    def place_of(self, index: int) -> tuple[str, int]:
        """Returns the component of an example, and the index of the example in it.

        Args:
          index: The index of the example.
        """
        number = int(self.component_of(np.array([index]))[0])
        return self.names[number], index - int(self._offsets[number])

    def order(self, seed: int, *, shuffle: bool, batch_size: int) -> MixtureOrder:
        """Returns the order of training.

        Args:
          seed: The run's seed.
          shuffle: Whether the components are shuffled. The interleaving is random in either case.
          batch_size: Number of examples of a step.
        """
        orders = [
            EpochOrder(len(x), _own_seed(seed, name), shuffle=shuffle, blocks=blocks_of(x))
            for name, x in self.components.items()
        ]
        stages = {
            step * batch_size: examples_per_period(weights) for step, weights in self.stages.items()
        }
        return MixtureOrder(orders, self._offsets, stages, seed)

    def parts_fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprints of the components, and the stages, as JSON."""
        return {
            "components": {name: fingerprint(x) for name, x in self.components.items()},
            "stages": {str(step): dict(weights) for step, weights in self.stages.items()},
        }

    def _checked(self, step: int, weights: Mapping[str, float]) -> dict[str, float]:
        """Returns the weights of a stage in the order of the components."""
        where = "a Mixture" if step == 0 else f"stage {step} of a Mixture"
        if not isinstance(weights, Mapping):
            raise UserError(f"{where} is {weights!r}: give {{name: weight}} of all components")
        if set(weights) != set(self.components):
            raise UserError(
                f"{where} has weights of {', '.join(map(str, weights))}: give those of all "
                f"components: {', '.join(self.components)}"
            )
        for name, weight in weights.items():
            valid = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
            if not valid or not 0 <= weight < math.inf:
                raise UserError(
                    f"{where} has the weight {weight!r} of {name!r}: it must be 0 or more"
                )
        if not any(weights.values()):
            raise UserError(f"{where} has no weight above 0")
        checked = {name: float(weights[name]) for name in self.components}
        examples_per_period(checked)
        return checked


def mixture_of(dataset: Any) -> Mixture | None:
    """Returns the mixture behind a dataset, also through `MappedDataset`; None if there is none.

    Raises:
      UserError: If it is a `Subset` of a mixture, whose weights would have no meaning.
    """
    inner, is_subset = dataset, False
    while isinstance(inner, (MappedDataset, Subset)):
        is_subset |= isinstance(inner, Subset)
        inner = inner.dataset
    if not isinstance(inner, Mixture):
        return None
    if is_subset:
        raise UserError("a Subset of a Mixture has no weights: give a Mixture of Subsets")
    return inner


def components_of(dataset: Any) -> dict[str, Dataset]:
    """Returns the components of a mixture by name, with its map function applied; else {}."""
    if isinstance(dataset, MappedDataset):
        parts = components_of(dataset.dataset)
        return {name: MappedDataset(part, dataset.function) for name, part in parts.items()}
    mixture = mixture_of(dataset)
    return {} if mixture is None else dict(mixture.components)


def epoch_size(dataset: Dataset | None) -> int:
    """Returns the number of examples of an epoch; 0 without data, and for a mixture."""
    return 0 if dataset is None or mixture_of(dataset) is not None else len(dataset)


def _check_components(components: Any) -> None:
    if not isinstance(components, Mapping):
        given = type(components).__name__
        raise UserError(f"a Mixture needs a dictionary {{name: (dataset, weight)}}, not a {given}")
    if not components:
        raise UserError("a Mixture needs at least one component, and the dictionary is empty")
    for name, given in components.items():
        if not isinstance(name, str) or not name:
            raise UserError(f"a component of a Mixture is named {name!r}: use a string")
        if not isinstance(given, tuple) or len(given) != 2:
            raise UserError(
                f"component {name!r} of a Mixture is a {type(given).__name__}: give (dataset, "
                "weight)"
            )
        if isinstance(given[0], Mixture):
            raise UserError(
                f"component {name!r} of a Mixture is a Mixture: give its components themselves"
            )


def _checked_step(step: Any) -> int:
    if not isinstance(step, numbers.Integral) or isinstance(step, bool) or step < 1:
        raise UserError(
            f"a stage of a Mixture begins at step {step!r}: stages begin at step 1 or later, and "
            "the weights of the components hold before"
        )
    return int(step)


def _check_same_arrays(components: Mapping[str, Dataset]) -> None:
    """Checks that all components have the same arrays and classes."""
    first, arrays = "", dict[str, str]()
    classes: tuple[str, ...] = ()
    for name, dataset in components.items():
        leaves = named_leaves(_first_row(dataset))
        own = {n: f"{np.asarray(x).dtype}{list(np.shape(x)[1:])}" for n, x in leaves.items()}
        if not first:
            first, arrays, classes = name, own, tuple(classes_of(dataset))
        for array in [*arrays, *own]:
            if arrays.get(array) != own.get(array):
                what = f"array {array!r}" if array else "the array"
                raise UserError(
                    f"the components of a Mixture differ: {what} is {arrays.get(array, 'absent')} "
                    f"in {first!r} and {own.get(array, 'absent')} in {name!r}; map one of them "
                    "(MappedDataset)"
                )
        if tuple(classes_of(dataset)) != classes:
            raise UserError(
                f"the components {first!r} and {name!r} of a Mixture differ in their classes, so "
                "the same label would mean different things"
            )


def _first_row(dataset: Dataset) -> PyTree:
    """Returns the first example that can be read, as rows of leading dim 1.

    A run may leave bad records out, so the first one may be bad. `BadRecordError` if none of the
    first 100 examples can be read.
    """
    last = min(len(dataset), 100) - 1
    for index in range(last):
        with contextlib.suppress(BadRecordError):
            return dataset.rows(np.array([index]))
    return dataset.rows(np.array([last]))


def _own_seed(seed: int, name: str) -> int:
    """Returns the seed of a component, so that two of the same length have different orders."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
