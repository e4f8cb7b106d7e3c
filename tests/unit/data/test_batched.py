"""Data whose items are batches: `keras.utils.PyDataset`, and what looks like it."""

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import grain
import numpy as np
import pytest

from spmdtrain import Packed, RunConfig, SkipBadRecords, Stream, Subset, UserError
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.sampling import TrainBatches
from spmdtrain.data.streams import ShardReader, as_stream
from spmdtrain.data.training_data import training_data

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")

X, Y = np.arange(84, dtype=np.float32).reshape(28, 3), np.arange(28)


def keep(x: Any, y: Any) -> Any:
    return x, y


class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    """Batches of 6 rows and a last one of 4, in one of the forms that Keras takes."""

    def __init__(self, form: Callable[..., Any] = keep, **options: Any) -> None:
        super().__init__(**options)
        self.form, self.reads = form, 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        rows = slice(index * 6, index * 6 + 6)
        return self.form(X[rows], Y[rows])


class Full(Batches):
    """The batches of 6 rows alone."""

    def __len__(self) -> int:
        return 4


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Any, Any]]]] = {
    "a tuple": (lambda x, y: (x, y), lambda rows: rows),
    "a list": (lambda x, y: [x, y], lambda rows: rows),
    "Python's numbers": (lambda x, y: (x, y.tolist()), lambda rows: rows),
    "no weights": (lambda x, y: (x, y, None), lambda rows: rows),
    "weights": (lambda x, y: (x, y, np.ones(len(y))), lambda rows: rows[:2]),
    "several inputs": (lambda x, y: ([x, -x], y), lambda rows: (-rows[0][1], rows[1])),
    "a dictionary": (lambda x, y: {"x": x, "y": y}, lambda rows: (rows["x"], rows["y"])),
    "an array": (lambda x, y: x, lambda rows: (rows, rows[:, 0] // 3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_batches_are_the_examples(form: str) -> None:
    make, parts = FORMS[form]
    dataset = as_dataset(Batches(make))
    assert len(dataset) == 28
    indices = np.array([27, 0, 5, 6, 13, 0])
    x, y = parts(dataset.rows(indices))
    assert x.tolist() == X[indices].tolist() and y.tolist() == indices.tolist()


def steps(dataset: Any, size: int, **options: Any) -> list[list[int]]:
    batches = TrainBatches(dataset, size, 0, True, 10, np.arange(size), **options)
    return [batches[step][1].tolist() for step in range(len(batches))]


@pytest.mark.slow
def test_the_run_shuffles_the_batches_and_keeps_each_as_it_is() -> None:
    found = steps(as_dataset(Full()), 6)
    items = [Y[i : i + 6].tolist() for i in range(0, 24, 6)]
    assert sorted(found[:4]) == sorted(found[4:8]) == items
    assert found[:4] != found[4:8]
    dataset = pickle.loads(pickle.dumps(as_dataset(Full(keep))))  # for data_workers
    assert steps(dataset, 6) == found
    assert sorted(np.ravel(steps(as_dataset(Batches()), 6))[:28]) == Y.tolist()


@pytest.mark.slow
def test_another_batch_size_is_refused_and_the_ways_out_work() -> None:
    with pytest.raises(UserError) as error:
        training_data(Batches(), RunConfig(epochs=1, global_batch_size=32))
    assert str(error.value) == (
        "the batches of a Batches have 6 rows, and global_batch_size is 32: give "
        "global_batch_size=6, or Subset(data, np.arange(28)), whose examples are in other batches"
    )
    assert len(training_data(Batches(), RunConfig(epochs=1, global_batch_size=6))) == 28  # type: ignore[arg-type]
    subset = training_data(
        Subset(Batches(), np.arange(28)), RunConfig(epochs=1, global_batch_size=14)
    )
    assert sorted(np.ravel(steps(subset, 14)[:2])) == Y.tolist()


class Changing(Batches):
    def on_epoch_end(self) -> None:
        self.form = lambda x, y: (-x, y)


class Endless(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    num_batches = None

    def __getitem__(self, index: int) -> Any:
        return X, Y


def drawn(x: Any, y: Any) -> Any:
    return x + np.random.default_rng().normal(size=x.shape), y


def images() -> Any:
    generator = keras.src.legacy.preprocessing.image.ImageDataGenerator()
    return generator.flow(np.zeros((8, 4, 4, 1)), np.zeros(8), batch_size=2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a hook": (Changing, r"has on_epoch_end\(\), which changes its batches .* the run shuffles"),
    "images of Keras 2": (images, r"a NumpyArrayIterator has on_epoch_end\(\)"),
    "workers": (lambda: Batches(workers=4), "workers=4 of Keras, .* give data_threads=4"),
    "no end": (Endless, "an? Endless has the number of batches None"),
    "random": (lambda: Batches(drawn), "batch 0 of a Batches differs between two reads in 0: .*"),
    "no examples": (lambda: Batches(lambda x, y: (x, 3)), r"batch 0 .* need one number of rows"),
    "other lengths": (lambda: Batches(lambda x, y: (x, y[1:])), "need one number of rows"),
    "text": (lambda: Batches(lambda x, y: (x, ["a"] * 6)), "field '1' of batch 0 .* is text"),
    "other sizes": (
        lambda: Batches(lambda x, y: (x[: 6 - y[0] % 4], y[: 6 - y[0] % 4])),
        "batch 1 of a Batches has 4 rows, and batch 0 has 6: all but the last one",
    ),
    "other fields": (
        lambda: Batches(lambda x, y: {"x": x, "y" if y[0] < 12 else "z": y}),
        "batches of a Batches have other fields or shapes than others",
    ),
    "packed": (lambda: Packed(Batches(), 8), "a Batches cannot be packed: its items are batches"),
    "bad records": (lambda: SkipBadRecords(Batches()), "the items of a Batches are batches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_cannot_be_repeated_or_numbered_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        as_dataset(make()).rows(np.arange(28))


def test_the_way_out_that_the_message_about_other_sizes_names_works() -> None:
    data = Batches(lambda x, y: (x[: 6 - y[0] % 4], y[: 6 - y[0] % 4]))
    dataset = as_dataset(tuple(map(np.concatenate, zip(*data, strict=True))))
    assert len(dataset) == 24 and dataset.rows(np.array([6]))[1].tolist() == [6]


# -- other iterables of batches --------------------------------------------------------------------


def test_a_list_of_tuples_that_could_be_batches_is_refused_with_both_meanings() -> None:
    data = [(X[:6], Y[:6]), (X[6:12], Y[6:12])]
    with pytest.raises(UserError, match="each could be an example or a batch: give tuple"):
        as_dataset(data)
    as_batches = as_dataset(tuple(map(np.concatenate, zip(*data, strict=True))))
    assert len(as_batches) == 12 and as_batches.rows(np.array([7]))[1].tolist() == [7]
    as_examples = as_dataset(tuple(map(np.stack, zip(*data, strict=True))))
    assert [x.shape for x in as_examples.rows(np.array([1]))] == [(1, 6, 3), (1, 6)]
    assert len(as_dataset([(x, y) for x, y in zip(X, Y, strict=True)])) == 28
    assert len(as_dataset([(x, x[:2]) for x in X])) == 28


class Loader:
    """What is seen of PyTorch's stateful DataLoader, which is not installed."""

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size, self.batch_sampler = batch_size, None

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": 1.0}])

    def state_dict(self) -> Any:
        return {}

    load_state_dict = state_dict


Loader.__module__, Loader.__name__ = "torch.utils.data", "DataLoader"


def batching() -> Any:
    return grain.DataLoader(
        data_source=range(48),
        sampler=grain.samplers.SequentialSampler(48),
        operations=[grain.transforms.Batch(4)],
    )


@pytest.mark.filterwarnings("ignore::Warning")  # of datasets
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Loader(4), "DataLoader of PyTorch has batches .* batch_size=None"),
        (lambda: Stream(lambda index, count: Loader(4)), "give it batch_size=None"),
        (lambda: Stream(lambda index, count: batching()), r"grain.DataLoader with .batch\(\) has"),
        (
            lambda: datasets.IterableDataset.from_generator(lambda: iter([{"x": 1}])).batch(2),
            r"IterableDataset with .batch\(\) has batches .* leave .batch\(\) out",
        ),
    ],
)
def test_a_stream_of_batches_is_refused(make: Callable[[], Any], message: str) -> None:
    stream = as_stream(make())
    assert stream is not None
    with pytest.raises(UserError, match=message):
        ShardReader(stream, 0, 1)


def test_single_examples_of_a_loader_are_a_stream() -> None:
    stream = as_stream(Loader(None))
    assert stream is not None
    assert ShardReader(stream, 0, 1).read() == {"x": 1.0}
