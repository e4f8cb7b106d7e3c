"""Streams: their shards, the order of the examples, positions and states, and what is refused."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from stream_helpers import (
    Counter,
    CounterIterator,
    as_text,
    batches,
    counters,
    filtered,
    hugging_face,
    loader,
    mixed,
    numbers,
    windows,
)

from spmdtrain import RunConfig, Stream, UserError
from spmdtrain.data import streams
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.streams import (
    ShardedStream,
    ShardReader,
    UnsupportedStateError,
    as_stream,
    from_text,
    shards_of,
)
from spmdtrain.data.training_data import examples_per_epoch, training_data
from spmdtrain.errors import StorageError

# -- the order of the examples ---------------------------------------------------------------------


def test_each_shard_gives_consecutive_rows_and_repeats_by_itself() -> None:
    stream = ShardedStream(counters(7), 2)  # shards 0 2 4 6 and 1 3 5
    assert numbers(batches(stream, 4, 4)) == [
        [0, 2, 1, 3],
        [4, 6, 5, 1],
        [0, 2, 3, 5],
        [4, 6, 1, 3],
    ]


def test_a_process_reads_only_the_shards_of_its_rows() -> None:
    made = []

    def make_shard(index: int, count: int) -> Counter:
        made.append(index)
        return Counter(index, count, 40)

    stream = ShardedStream(Stream(make_shard), 4)
    stream.first  # noqa: B018 (reads the first example of this process)
    made.clear()
    found = numbers(batches(stream, 8, 2, rows=np.array([4, 5, 6, 7])))
    assert found == [[2, 6, 3, 7], [10, 14, 11, 15]]
    assert made == [2, 3]


def test_two_batches_are_read_ahead_by_a_thread_that_ends() -> None:
    threads: set[threading.Thread] = set()
    read = threading.Semaphore(0)

    def make_shard(index: int, count: int) -> Counter:
        threads.add(threading.current_thread())
        return Counter(index, count, 400, called=read.release)

    reading = batches(ShardedStream(Stream(make_shard), 2), 4, 50)
    assert numbers([next(reading)]) == [[0, 2, 1, 3]]
    assert all(read.acquire(timeout=20) for _ in range(13))  # the first example, and 3 batches
    assert not read.acquire(timeout=0.1)
    (reader,) = threads - {threading.current_thread()}
    reading.close()  # type: ignore[attr-defined]
    assert not reader.is_alive()


def test_padding_rows_repeat_the_last_example() -> None:
    stream = ShardedStream(counters(40), 3)
    rows = np.array([0, 1, 2, 3, 4, 5, 5, 5])
    assert numbers(batches(stream, 6, 1, rows=rows)) == [[0, 3, 1, 4, 2, 5, 5, 5]]


def test_a_process_that_holds_a_part_of_a_shard_is_refused() -> None:
    with pytest.raises(UserError, match="stream_shards is 2, and 1 processes divide a batch"):
        batches(ShardedStream(counters(40), 2), 8, 1, rows=np.arange(2))


def test_augment_draws_by_seed_shard_example_and_epoch() -> None:
    def augment(example: Any, generator: np.random.Generator) -> Any:
        return {"x": generator.integers(2**30)}

    def drawn(seed: int, start: int = 0, positions: Any = None) -> list[list[int]]:
        found = batches(
            ShardedStream(counters(8), 2),
            4,
            6,
            seed=seed,
            augment=augment,
            start=start,
            positions=positions or {},
        )
        return numbers(found)

    first = drawn(1)
    assert len({*itertools.chain(*first)}) == 24  # also in other epochs of the same example
    *_, (_, after) = itertools.islice(
        batches(ShardedStream(counters(8), 2), 4, 6, seed=1, augment=augment), 3
    )
    assert drawn(1, 3, as_text(after)) == first[3:]
    assert drawn(2) != first


# -- pipelines of libraries ------------------------------------------------------------------------


SOURCES: dict[str, Callable[[Path], Any]] = {
    "own": lambda _: counters(40),
    "grain": lambda _: filtered(),
    "grain-windows": lambda _: windows(),
    "grain-mix": lambda _: mixed(),
    "grain-loader": lambda _: Stream(loader),
    "hugging-face": hugging_face,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize("name", SOURCES)
def test_from_every_position_the_same_examples_follow(name: str, tmp_path: Path) -> None:
    stream = as_stream(SOURCES[name](tmp_path))
    assert stream is not None
    whole = list(batches(ShardedStream(stream, 2), 6, 20))
    for done in range(1, 20, 3):
        positions = json.loads(json.dumps(as_text(whole[done - 1][1])))
        again = SOURCES[name](tmp_path)
        resumed = ShardedStream(as_stream(again) or stream, 2)
        found = batches(resumed, 6, 20, start=done, positions=positions)
        assert numbers(found) == numbers(whole[done:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("name", [n for n in SOURCES if n != "grain-mix"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_shards_are_a_partition_of_the_examples(name: str, count: int, tmp_path: Path) -> None:
    stream = as_stream(SOURCES[name](tmp_path))
    assert stream is not None

    def epoch(index: int, count: int) -> Iterator[int]:
        reader = ShardReader(stream, index, count)
        for _ in range(10_000):
            (leaf,) = reader.read().values()
            if reader.epoch:
                return
            yield int(leaf)

    shards = [[*epoch(index, count)] for index in range(count)]
    assert sorted(itertools.chain(*shards)) == sorted(epoch(0, 1))
    assert all(shards)


def test_a_shard_of_grain_shares_the_source() -> None:
    class Source:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"x": np.int32(index)}

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    stream = as_stream(grain.MapDataset.source(Source()).to_iter_dataset())
    assert stream is not None
    assert [example["x"] for example in stream.make_shard(1, 4)] == [1, 5]


# -- data that are missing -------------------------------------------------------------------------


def changing(*lengths: int, **options: Any) -> Stream:
    """A stream of one shard whose epochs have these lengths."""
    remaining = list(lengths)
    return Stream(lambda index, count: Counter(index, count, remaining.pop(0)), **options)


def read(reader: ShardReader, count: int) -> list[int]:
    return [reader.read()["x"].item() for _ in range(count)]


def test_an_epoch_that_is_shorter_than_the_first_is_an_error() -> None:
    reader = ShardReader(changing(3, 10), 0, 1)  # a longer one is not
    assert read(reader, 13) == [*range(3), *range(10)]
    reader = ShardReader(changing(10, 11, 3), 0, 1)
    position = [reader.position().text() for _ in read(reader, 12)][-1]
    for same in (reader, ShardReader(changing(11, 3), 0, 1, position)):
        with pytest.raises(UserError) as error:
            read(same, 20)
        assert str(error.value) == (
            "shard 0 of 1 of the stream ends after 3 examples of epoch 2, and 10 were read before: "
            "files are missing or truncated. If its epochs differ in length, give "
            "Stream(make_shard, same_length=False)"
        )
    reader = ShardReader(changing(10, 3, 4, same_length=False), 0, 1)
    assert read(reader, 17) == [*range(10), *range(3), *range(4)]


def test_a_position_beyond_the_data_is_an_error() -> None:
    reader = ShardReader(counters(48), 1, 2)
    first = read(reader, 24)
    position = reader.position().text()
    with pytest.raises(UserError, match=r"ends after 15 examples of epoch 0, and 24 were"):
        ShardReader(counters(30), 1, 2, position).read()
    assert read(ShardReader(counters(48), 1, 2, position), 24) == first  # the end is no error


# -- states of iterators as text -------------------------------------------------------------------

text = st.text(alphabet='aä\0"\\', max_size=5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)  # the states of NumPy's generators have 128 bits
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=9)
)
keys = text | st.integers() | st.sampled_from(["__stored_as__", "value"])
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """Returns a value with its types, which `==` alone does not compare: 1 == 1.0 == True."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), value


@pytest.mark.slow
@hypothesis.given(states)
def test_a_state_is_restored_with_its_types_and_the_order_of_its_keys(state: Any) -> None:
    assert typed(from_text(streams.as_text(state))) == typed(state)


def test_an_array_keeps_dtype_and_shape() -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2]
    restored = from_text(streams.as_text({"buffer": array}))["buffer"]
    assert restored.dtype == np.uint16
    np.testing.assert_array_equal(restored, array)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), 1j])
def test_a_value_that_cannot_be_stored_is_named_by_its_type(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=type(value).__name__):
        streams.as_text({"state": [value]})


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '{"__stored_as__":"pickle","value":""}',
        '{"__stored_as__":"array","value":["<i4",[3],"AAAA"]}',
        '{"__stored_as__":"array","value":["O",[0],""]}',
        '{"__stored_as__":"tuple"}',
        "[" * 10**5,
    ],
)
def test_malformed_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)


# -- streams that are refused, and errors while one is read ----------------------------------------


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
        ("webdataset.compat", "WebDataset", "Read its tar files by index: spmdtrain.WebData"),
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
