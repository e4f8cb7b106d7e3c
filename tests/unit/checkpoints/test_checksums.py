"""The checksum of an array: the same wherever it lies, and another for any other array."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.checkpoints.checksums import (
    format_sums,
    host_sum,
    read_parts,
    start_sums,
    sums,
    sums_on_devices,
)

P = PartitionSpec

SUB_BYTE = (jnp.int2, jnp.int4, jnp.uint4, jnp.float4_e2m1fn)
EIGHT = (jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float8_e5m2)
WIDER = (jnp.bfloat16, jnp.float16, jnp.int16, jnp.uint16, jnp.float32, jnp.int32, jnp.uint32)
DTYPES = [jnp.dtype(x) for x in (jnp.bool_, *SUB_BYTE, *EIGHT, *WIDER, jnp.complex64)]
WIDE = [np.dtype(x) for x in (np.float64, np.int64, np.uint64, np.complex128)]  # with x64 alone
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 5), (1, 1, 9)]

dtypes = st.sampled_from(DTYPES)


def bits_of(dtype: np.dtype) -> int:
    """How many bits tell one element from another."""
    return 1 if dtype == np.bool_ else int(jax.dtypes.itemsize_bits(dtype))


def decoded(raw: bytes, dtype: np.dtype) -> np.ndarray:
    """Elements of these very bits: infinities and every NaN among them."""
    codes = np.frombuffer(raw, np.uint8)
    if dtype == np.bool_:
        return codes & 1 == 1
    if (bits := bits_of(dtype)) < 8:
        codes = codes & (2**bits - 1)
        if dtype.name.startswith("int"):  # its own code holds the sign in all eight bits
            codes = ((codes ^ 2 ** (bits - 1)) - 2 ** (bits - 1)).astype(np.uint8)
    return codes.view(dtype)


def on_device(x: jax.Array) -> int:
    """The sum that is taken where the array lives, however small it is."""
    return read_parts({"": sums_on_devices(x)})[""] % 2**32


@st.composite
def raw_elements(draw: st.DrawFn, dtype: np.dtype, count: int) -> bytes:
    size = count * dtype.itemsize
    return draw(st.binary(min_size=size, max_size=size))


@st.composite
def arrays(draw: st.DrawFn, of: st.SearchStrategy[np.dtype] = dtypes) -> np.ndarray:
    dtype, shape = draw(of), draw(st.sampled_from(SHAPES))
    return decoded(draw(raw_elements(dtype, math.prod(shape))), dtype).reshape(shape)


# -- the host and the devices ----------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(arrays())
def test_host_and_device_agree_on_any_bits_of_any_dtype(x: np.ndarray) -> None:
    assert host_sum(x) == on_device(jnp.asarray(x))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(arrays(st.sampled_from(WIDE)))
def test_host_and_device_agree_on_eight_and_sixteen_bytes(x: np.ndarray) -> None:
    with jax.enable_x64(True):
        placed = jnp.asarray(x)
        assert placed.dtype == x.dtype
        assert host_sum(x) == on_device(placed)


def test_the_sum_of_what_is_saved_today_is_what_it_will_be() -> None:
    # The sums in checkpoints already written: another sum would call all of them corrupted.
    assert sums(
        {"a": np.array([1, -2, 0.5], np.float32), "b": [jnp.arange(5), np.bool_(True)]}
    ) == {
        "a": "612a81bb",
        "b/0": "8350717a",
        "b/1": "688990c0",
    }
    assert sums(np.zeros(0, np.float32)) == {"": "00000000"}


def test_a_view_that_is_not_contiguous_sums_as_its_copy() -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert sums(x.T) == sums(x.T.copy()) == sums(jnp.asarray(x).T) != sums(x)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_sum_as_the_numbers_they_are_made_of(implementation: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=implementation), 16)
    expected = sums(np.asarray(jax.random.key_data(keys)))
    assert sums(keys) == expected != sums(keys[::-1])
    mesh = Mesh(np.array(jax.devices()), ("a",))
    assert sums(jax.device_put(keys, NamedSharding(mesh, P("a")))) == expected


# -- every sharding --------------------------------------------------------------------------------

MESHES = {
    "8": Mesh(np.array(jax.devices()), ("a",)),
    "2x4": Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")),
    "4x2": Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("a", "b")),
}
SPECS = [
    *(("8", spec) for spec in (P(), P("a"), P(None, "a"), P(None, None, "a"))),
    *(("2x4", spec) for spec in (P("a", "b"), P("b", None, "a"), P(("a", "b")), P("b"))),
    *(("4x2", spec) for spec in (P("b", "a"), P(None, ("b", "a")), P(None, "b", "a"))),
]
SHARDED = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.bool_, jnp.complex64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.dtype(x) for x in SHARDED], ids=str)
def test_every_sharding_gives_the_same_sum(dtype: np.dtype) -> None:
    shape = (16, 8, 24)
    raw = np.random.default_rng(5).bytes(math.prod(shape) * dtype.itemsize)
    x = decoded(raw, dtype).reshape(shape)
    expected = host_sum(x)
    for mesh, spec in SPECS:
        placed = jax.device_put(x, NamedSharding(MESHES[mesh], spec))
        assert on_device(placed) == expected, (mesh, spec)
        assert sums([placed]) == {"0": f"{expected:08x}"}, (mesh, spec)
    # On two devices out of eight; and what lies in another order is another array.
    some = Mesh(np.array(jax.devices()[3:5]), ("a",))
    assert on_device(jax.device_put(x, NamedSharding(some, P("a")))) == expected
    assert host_sum(np.concatenate([x[8:], x[:8]])) != expected


# -- what changes it -------------------------------------------------------------------------------


@st.composite
def flipped(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """An array, and one that differs in a single bit."""
    dtype = draw(st.sampled_from([*DTYPES, *WIDE]))
    count = draw(st.integers(1, 40))
    raw = draw(raw_elements(dtype, count))
    at, bit = draw(st.integers(0, count - 1)), draw(st.integers(0, bits_of(dtype) - 1))
    changed = bytearray(raw)
    changed[at * dtype.itemsize + bit // 8] ^= 1 << bit % 8
    return decoded(raw, dtype), decoded(bytes(changed), dtype)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(flipped())
def test_one_flipped_bit_of_any_element_changes_it(pair: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = pair
    assert host_sum(before) != host_sum(after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_of_each_element_counts_also_on_devices(dtype: np.dtype) -> None:
    raw = np.random.default_rng(7).bytes(5 * dtype.itemsize)
    seen = {on_device(jnp.asarray(decoded(raw, dtype)))}
    bits = bits_of(dtype)
    for at in range(5):
        for bit in range(bits):
            changed = bytearray(raw)
            changed[at * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            seen.add(on_device(jnp.asarray(decoded(bytes(changed), dtype))))
    assert len(seen) == 1 + 5 * bits


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(dtypes, st.data())
def test_exchanging_two_unequal_elements_changes_it(dtype: np.dtype, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 40))
    raw = data.draw(raw_elements(dtype, count))
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    x = decoded(raw, dtype)
    exchanged = x.copy()
    exchanged[[one, other]] = exchanged[[other, one]]
    assert (host_sum(x) == host_sum(exchanged)) == (x.tobytes() == exchanged.tobytes())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
def test_zeros_of_either_sign_and_nans_of_any_payload_have_different_checksums(dtype: Any) -> None:
    dtype = jnp.dtype(dtype)
    assert sums(np.zeros(3, dtype)) != sums(-np.zeros(3, dtype))
    ones = (1 << bits_of(dtype) - 1) - 1  # exponent and mantissa all ones: a NaN
    code = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    nans = [np.array([ones - low], code).view(dtype) for low in (0, 1)]
    assert all(np.isnan(x.astype(np.float32)) for x in nans)
    found = [host_sum(x) for x in nans]
    assert found == [on_device(jnp.asarray(x)) for x in nans] and found[0] != found[1]


def test_a_length_and_a_place_are_part_of_it() -> None:
    zeros = [host_sum(np.zeros(n, np.float32)) for n in range(50)]
    assert len(set(zeros[1:])) == 49  # of which place 0 is no matter: a lone zero hashes to 0
    one_hot = {host_sum(row) for row in np.eye(50, dtype=np.float32)}
    assert len(one_hot) == 50


# -- donation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P("a"), P()], ids=["split", "replicated"])
@pytest.mark.parametrize("rows", [8, 4096], ids=["small", "large"])
def test_a_sum_begun_is_that_of_the_values_before_the_array_was_donated(
    spec: PartitionSpec, rows: int
) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    # A copy: what is put on a device may still be NumPy's own memory, which no one overwrites.
    x = jnp.copy(jax.device_put(values, NamedSharding(MESHES["8"], spec)))
    places = {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    started = start_sums({"x": x})
    overwritten = overwrite(x)
    now = {shard.data.unsafe_buffer_pointer() for shard in overwritten.addressable_shards}
    assert x.is_deleted() and now == places  # the new values stand where the old ones stood
    np.testing.assert_array_equal(overwritten, np.full_like(values, -7))
    assert format_sums(read_parts(started)) == {"x": f"{host_sum(values):08x}"}
    assert sums({"x": overwritten}) != format_sums(read_parts(started))


def test_arrays_in_host_memory_and_in_pieces_have_the_same_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(7).normal(size=(64, 1024)).astype(np.float32)
    expected = sums([x])
    for spec in (P(), P("a"), P(None, "a")):
        host = NamedSharding(MESHES["8"], spec, memory_kind="pinned_host")
        assert sums([jax.device_put(x, host)]) == expected
    monkeypatch.setattr("spmdtrain.checkpoints.checksums.CHUNK", 1000)  # not a whole number of rows
    assert sums([x]) == expected
    assert sums([x.reshape(4, 16, 32, 32)]) == expected
