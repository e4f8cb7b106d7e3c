"""Streams that are refused, and errors while one is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from stream_helpers import (
    Counter,
    CounterIterator,
    batches,
    counters,
    filtered,
    hugging_face,
    loader,
)

from spmdtrain import RunConfig, Stream, UserError
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.streams import ShardedStream, ShardReader, as_stream, shards_of
from spmdtrain.data.training_data import examples_per_epoch, training_data
from spmdtrain.errors import StorageError


def test_a_generator_is_refused_with_what_makes_it_a_stream() -> None:
    with pytest.raises(UserError) as error:
        as_stream(x for x in range(3))
    assert str(error.value) == (
        "a generator is not a stream, because it can be read only once and, after an interruption, "
        "not from the same example. Give spmdtrain.Stream(make_shard): make_shard(index, count) "
        "returns the iterable of shard `index` of `count`, such as a grain.DataLoader with these "
        "ShardOptions; its iterators need get_state() and set_state(state)"
    )


def test_a_pipeline_that_cannot_be_divided_is_read_as_one_shard_only() -> None:
    stream = as_stream(loader(0, 1))
    assert stream is not None
    with pytest.raises(UserError, match="a DataLoader cannot be divided into 2 shards"):
        ShardReader(stream, 0, 2)
    assert len({ShardReader(stream, 0, 1).read()["x"].item()}) == 1


def interleaved(datasets: int) -> grain.IterDataset:
    return grain.experimental.InterleaveIterDataset([filtered()] * datasets, cycle_length=2)


UNDIVIDED: dict[str, tuple[Callable[[], grain.IterDataset], str]] = {
    "limit": (
        lambda: grain.experimental.LimitIterDataset(filtered(), count=10),
        "with a limit cannot be divided",
    ),
    "index": (
        lambda: filtered().map_with_index(lambda i, x: {"x": i}),
        "with .map_with_index.* cannot be divided .* the index would count within each shard",
    ),
    "random": (
        lambda: filtered().random_map(lambda x, generator: x, seed=1),
        "with .random_map.* cannot be divided .* each shard would draw the same numbers",
    ),
    "interleave": (lambda: interleaved(6), "6 datasets .* into 8 shards: give stream_shards=4"),
    "workers": (
        lambda: filtered().mp_prefetch(grain.MultiprocessingOptions(num_workers=3)),
        "3 datasets or workers of mp_prefetch .* into 8 shards: give stream_shards=2",
    ),
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_grain_pipeline_whose_shards_would_differ_from_the_whole_is_refused(name: str) -> None:
    pipeline, message = UNDIVIDED[name]
    stream = as_stream(pipeline())
    assert stream is not None
    with pytest.raises(UserError, match=message):
        ShardReader(stream, 0, 8)


def test_batches_of_grain_are_refused() -> None:
    source = grain.MapDataset.range(24)
    workers = grain.MultiprocessingOptions(num_workers=2)
    for batched in (
        source.to_iter_dataset().batch(4),
        source.batch(4).to_iter_dataset(),
        source.to_iter_dataset().batch(4).mp_prefetch(workers),
    ):
        with pytest.raises(
            UserError, match=r"grain.IterDataset with .batch\(\) has batches as its"
        ):
            as_stream(batched)
    assert as_stream(source.to_iter_dataset().mp_prefetch(workers)) is not None


@pytest.mark.parametrize(
    ("library", "name", "advice"),
    [
        ("torch.utils.data", "DataLoader", "Give its dataset, loader.dataset"),
        ("tensorflow.python.data", "DatasetV2", "Read its files by an indexed format"),
    ],
)
def test_a_pipeline_without_a_state_is_refused_with_the_dataset_to_give(
    library: str, name: str, advice: str
) -> None:
    methods = {"__iter__": lambda self: iter([1]), "__len__": lambda self: 1}
    pipeline = type(name, (), methods | {"__module__": library})
    with pytest.raises(UserError, match=f"{name} is not a stream, .*position .*: {advice}"):
        as_stream(pipeline())
    stateful = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    assert as_stream(type("Stateful", (pipeline,), stateful)()) is not None


@pytest.mark.filterwarnings("ignore::Warning")
def test_hugging_face_pipelines_that_cannot_resume_or_divide_are_refused(tmp_path: Path) -> None:
    data = hugging_face(tmp_path)
    with pytest.raises(UserError, match=r"num_shards=4 .* stream_shards=6: give stream_shards=3"):
        ShardReader(as_stream(data) or counters(1), 0, 6)
    shuffled = as_stream(data.shuffle(seed=1, buffer_size=5)) or counters(1)
    with pytest.raises(UserError, match="its buffer is not part of its state"):
        ShardReader(shuffled, 0, 2)
    del vars(data)["_ex_iterable"]  # as in a version of the library that renames it
    with pytest.raises(UserError, match=r"cannot see whether .* is shuffled"):
        ShardReader(as_stream(data) or counters(1), 0, 2)


def test_an_iterator_without_state_is_refused() -> None:
    with pytest.raises(UserError, match="a list_iterator, cannot be resumed, because it lacks"):
        ShardReader(Stream(lambda index, count: [1, 2]), 0, 2)


def test_a_state_that_cannot_be_stored_is_named() -> None:
    class Held(CounterIterator):
        def get_state(self) -> Any:
            return {"file": object()}

    class Holding(Counter):
        def __iter__(self) -> CounterIterator:
            return Held(self)

    stream = ShardedStream(Stream(lambda index, count: Holding(index, count, 8)), 2)
    with pytest.raises(UserError, match=r"the state of shard 0 of 2 .* holds .* builtins.object"):
        stream.first  # noqa: B018


def test_an_error_of_the_pipeline_is_raised_with_shard_and_example() -> None:
    # A launcher starts a job again that ends by a StorageError, and not one that ends by the other.
    for failure, expected in ((OSError, StorageError), (KeyError, UserError)):
        with pytest.raises(expected) as error:
            list(batches(ShardedStream(counters(40, fails=13, error=failure), 4), 8, 9))
        assert str(error.value).startswith(
            f"shard 1 of 4 of the stream failed at example 3 of epoch 0: {failure.__name__}: "
        )
        assert "the connection is lost" in str(error.value)
        assert "stream_helpers.py:" in str(error.value)  # the line of the user's code


FIRST, FOUND = "example 0 of epoch 0 of shard 0 of 4", "example 3 of epoch 0 of shard 2 of 4"


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            {"x": np.float32(1)},
            f"field 'x' of {FOUND} of a stream holds float32, but int32 in the first example: a "
            "field needs one dtype. Write 1.0 instead of 1, or convert it by a map function of the "
            "pipeline",
        ),
        (
            {"x": np.zeros(2, np.int32)},
            f"field 'x' of a stream has the shape () in {FIRST} and (2,) in {FOUND}: the examples "
            "of a batch need one shape. Pad them by a map function of the pipeline",
        ),
        (
            {"y": np.int32(1)},
            f"{FOUND} of a stream has the fields y; {FIRST} has the fields x: all examples must "
            "have the same fields",
        ),
        (None, f"{FOUND} of a stream is None: leave it out in the pipeline"),
        (
            {"x": "abc"},
            f"field 'x' of {FOUND} of a stream is text: a batch holds numbers. Tokenize it in the "
            "pipeline, or leave it out by a map function of the pipeline",
        ),
    ],
)
def test_an_example_that_differs_from_the_first_is_named(example: Any, message: str) -> None:
    stream = ShardedStream(counters(40, at=14, example=example), 4)
    with pytest.raises(UserError) as error:
        list(batches(stream, 8, 9))
    assert str(error.value) == message


def test_text_is_refused_by_field_before_the_first_batch() -> None:
    stream = ShardedStream(counters(40, at=0, example={"x": 1, "text": "abc"}), 4)
    with pytest.raises(UserError, match=r"'text' of example 0 of epoch 0 .* is text"):
        stream.first  # noqa: B018


def test_an_empty_shard_is_named_instead_of_waiting_for_ever() -> None:
    with pytest.raises(UserError, match="shard 3 of 4 of the stream has no examples in epoch 0"):
        list(batches(ShardedStream(counters(3), 4), 4, 1))


def config(**options: Any) -> RunConfig:
    return RunConfig(**{"steps": 10, "global_batch_size": 12} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream_shards": 8}, "stream_shards is 8: it must divide the global batch size, 12"),
        ({"steps": None, "epochs": 2}, "a stream has no number of examples"),
        ({"data_on_device": True}, "data_on_device copies"),
        ({"data_threads": 2}, "data_threads is 2"),
        ({"strategy": "parameter_server"}, "strategy parameter_server assigns batches"),
    ],
)
def test_options_that_streams_do_not_support_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        training_data(counters(40), config(**options))


def test_stream_shards_is_refused_for_data_with_random_access() -> None:
    with pytest.raises(UserError, match="stream_shards is 4: it is for streams"):
        training_data(np.zeros(8), config(stream_shards=4))


def test_by_default_the_number_of_shards_divides_the_batch() -> None:
    sizes = {size: shards_of(config(global_batch_size=size)) for size in (1, 12, 30, 64)}
    assert sizes == {1: 1, 12: 4, 30: 2, 64: 8}


def test_a_stream_is_training_data_only() -> None:
    assert examples_per_epoch(counters(40)) == 0
    for stream in (counters(40), filtered()):
        with pytest.raises(UserError, match="no number of examples, so it is training data only"):
            as_dataset(stream)
