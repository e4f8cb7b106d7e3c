"""The compiler: kept programs and whom they are trusted from, options of collectives, presets."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOUND, REPOSITORY, command, environment, metrics, small_experiment, together
from jax._src.compilation_cache import reset_cache
from jax.nn import initializers
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from processes import free_port

from spmdtrain import RunConfig, UserError
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.record.user_folders import keep_file
from spmdtrain.sharding.placement import Placement, make_placement
from spmdtrain.step import functions
from spmdtrain.step.functions import describe_preset, step_options
from spmdtrain.xla import compiler
from spmdtrain.xla.chips import CHIPS
from spmdtrain.xla.compiler import (
    MPI_LIBRARY,
    PRESETS,
    CacheFolder,
    Flag,
    Parameters,
    check_reduce_dtype,
    compiler_options,
    configure_collectives,
    keep_programs,
    merge_compiler_options,
    preset_flags,
)


def train(
    folder: Path, name: str, *options: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Train the small experiment in a run of its own."""
    path = folder / "small.py"
    path = path if path.exists() else small_experiment(folder)
    ended = subprocess.run(
        command(path, "--workdir", folder / name, *options),
        env=environment(1) | {"XDG_CACHE_HOME": str(folder / "home")} | variables,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def programs(folder: Path) -> dict[str, int]:
    """Files of a cache and when they were last of use."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    logs = {"JAX_EXPLAIN_CACHE_MISSES": "1"}
    first = train(tmp_path, "first", **logs)
    kept = programs(tmp_path / "home" / "spmdtrain" / "programs")
    assert any(name.startswith("jit_train_step") for name in kept)
    assert any(name.startswith("jit__init-") for name in kept)
    assert "jit_train_step" in first.stderr
    assert "CACHE MISS" in first.stderr or "Not writing" in first.stderr
    assert re.search(r"step compiled in [\d.]+ s: ", first.stdout)
    second = train(tmp_path, "second", **logs)
    now = programs(tmp_path / "home" / "spmdtrain" / "programs")
    assert now.keys() == kept.keys()
    assert all(
        now[name] > kept[name] for name in kept if name.startswith(("jit__", "jit_train_step"))
    )
    assert "jit_train_step" not in second.stderr
    assert re.search(r"step traced in [\d.]+ s, read from the cache in [\d.]+ s: ", second.stdout)
    assert metrics(tmp_path / "first") == metrics(tmp_path / "second")


def test_a_program_that_runs_once_computes_the_same_with_less_optimization() -> None:
    split = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))

    def init(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        draws = (
            initializers.lecun_normal(),
            initializers.truncated_normal(),
            initializers.uniform(),
        )
        return [draw(key, (64, 48)) for draw, key in zip(draws, keys, strict=True)]

    options = compiler.options_for_one_run("cpu")
    assert options == {"xla_backend_optimization_level": 1}
    quick, usual = (
        jax.jit(init, out_shardings=split, compiler_options=given)(jax.random.key(3))
        for given in (options, None)
    )
    for one, other in zip(quick, usual, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.nightly
def test_where_programs_are_kept_can_be_said(tmp_path: Path) -> None:
    named, own = tmp_path / "named", tmp_path / "own"
    together(
        lambda: train(tmp_path, "a", "--compilation-cache", named),
        lambda: train(tmp_path, "b", JAX_COMPILATION_CACHE_DIR=str(own)),
    )
    assert programs(named) and not (tmp_path / "home").exists()
    assert named.stat().st_mode & 0o777 == 0o700
    train(tmp_path, "c", "--compilation-cache", "off")
    assert not (tmp_path / "home").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_folder_that_cannot_be_there_and_a_corrupted_file_only_cost_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    ended = train(tmp_path, "a", "--compilation-cache", tmp_path / "file")
    assert f"the compilation cache is not used: {tmp_path}/file: Not a directory" in ended.stderr
    folder = tmp_path / "programs"
    train(tmp_path, "b", "--compilation-cache", folder)
    (step,) = folder.glob("jit_train_step*")
    whole = step.read_bytes()
    step.write_bytes(whole[: len(whole) // 2])
    ended = train(tmp_path, "c", "--compilation-cache", folder)
    assert f"the cached program {step} is corrupted or renamed: compiling again" in ended.stderr
    assert step.stat().st_size > len(whole) * 0.9  # it has been put right
    assert train(tmp_path, "d", "--compilation-cache", folder).stderr == ""
    assert metrics(tmp_path / "a") == metrics(tmp_path / "c") == metrics(tmp_path / "d")


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler.CacheFolder(tmp_path)
    assert folder.get("a") is None
    folder.put("a", b"1" * 1000)
    assert folder.get("a") == b"1" * 1000
    folder.put("a", b"2" * 10)
    assert folder.get("a") == b"2" * 10

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    folder.put("a", b"3")
    folder.put("b", b"3")
    assert folder.get("a") == b"2" * 10 and folder.get("b") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_was_of_no_use_for_the_longest_time_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler.CacheFolder(tmp_path)
    names = [f"jit_{letter}-{letter * 64}" for letter in "abcd"]
    for number, name in enumerate([*names, "input.txt", ".new-half_1"]):
        folder.put(name, bytes(100))
        os.utime(tmp_path / name, (number, number))
    assert folder.get(names[0]) is not None  # which is of use again
    monkeypatch.setattr(compiler, "MAX_BYTES", 380)
    compiler.evict(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {names[0], ".new-half_1", "input.txt"}  # the last is none of ours


def test_a_read_only_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiler.CacheFolder(tmp_path)
    folder.put("a", b"1")

    def refused(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    assert folder.get("a") == b"1"


def test_hosts_of_other_processors_do_not_share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiler.processor()
    assert here == compiler.processor()
    read_text = Path.read_text

    def other(path: Path, *args: object) -> str:
        text = read_text(path)
        return text.replace("flags\t", "flags\tavx9000 ") if "cpuinfo" in str(path) else text

    monkeypatch.setattr(Path, "read_text", other)
    assert compiler.processor() != here


@pytest.mark.nightly
def test_eight_devices_and_one_keep_programs_of_their_own(tmp_path: Path) -> None:
    for devices in (1, 2, 1, 2):
        train(tmp_path, f"{devices}", JAX_NUM_CPU_DEVICES=str(devices))
    found = [[line["loss"] for line in metrics(tmp_path / str(n))] for n in (1, 2)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


# -- corrupted programs, and caches that others can write to: none of them is used -----------------


def test_a_program_under_the_name_of_another_is_not_run(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    folder.put("a", b"the program a")
    folder.put("b", b"the program b")
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    with pytest.warns(UserWarning, match="corrupted"):
        assert folder.get("a") is None
    folder.put("a", b"the program a")
    assert folder.get("a") == b"the program a"


@pytest.fixture
def own_cache() -> Any:
    """The cache as it was, afterward."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


@pytest.mark.slow
def test_a_cache_that_was_moved_is_of_use(tmp_path: Path, own_cache: None) -> None:
    def compile_one() -> None:
        jax.clear_caches()
        jax.jit(lambda x: 3 * x + 1).lower(jnp.ones(3)).compile()

    keep_programs(str(tmp_path / "here"))
    compile_one()
    names = {path.name for path in (tmp_path / "here").iterdir()}
    shutil.move(tmp_path / "here", tmp_path / "there")
    keep_programs(str(tmp_path / "there"))
    compile_one()
    assert {path.name for path in (tmp_path / "there").iterdir()} == names and names


@pytest.mark.parametrize("fault", ["of another user", "writable by others", "closed"])
def test_a_cache_that_others_can_write_to_is_not_used(
    fault: str, tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_programs(None)
    folder = Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    says = "Permission denied"
    if fault == "of another user":
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
        says = "belongs to user"
    elif fault == "writable by others":
        folder.parent.chmod(0o775)
        says = f"{folder.parent}: others can write to it"
    else:

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refused)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.warns(UserWarning, match=f"not used: .*{says}"):
        keep_programs(None)
    assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]


def test_only_the_user_can_write_into_any_folder_of_the_cache(
    tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        keep_file(tmp_path / "cache" / "spmdtrain" / "plans" / "x.json", b"{}")
        keep_programs(None)
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700} and len(folders) >= 5


# -- options of the collectives --------------------------------------------------------------------
#
# The GPU's and the TPU's part needs their compilers, and no device: SPMDTRAIN_GPU_PYTHON and
# SPMDTRAIN_TPU_PYTHON may name interpreters that have `jax[cuda12]` and `libtpu`.

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
NONE = CollectiveOptions()

# -- what is refused, and why ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "platforms", "reason"),
    [
        (
            CollectiveOptions(combine_threshold_bytes=1),
            ["cpu"],
            "combine_threshold_bytes is not supported on CPU",
        ),
        (
            CollectiveOptions(reduce_dtype="bfloat16"),
            ["cpu"],
            "reduce_dtype=bfloat16 has no effect on CPU, where XLA reduces bfloat16 in float32",
        ),
        (
            CollectiveOptions(cpu_implementation="gloo"),
            ["gpu", "cuda", "rocm", "tpu"],
            "cpu_implementation is gloo, but platform",
        ),
        (
            CollectiveOptions(timeout=9),
            ["gpu", "cuda", "rocm", "tpu"],
            "timeout is not supported on ",
        ),
    ],
)
def test_what_a_platform_cannot_do_is_an_error_there_alone(
    options: CollectiveOptions, platforms: list[str], reason: str
) -> None:
    for platform in PLATFORMS:
        if platform in platforms:
            with pytest.raises(UserError, match=re.escape(f"collectives.{reason}")):
                compiler_options(options, platform)
        else:
            compiler_options(options, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_asked_is_nothing_set(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    configure_collectives(NONE, 2)
    assert compiler_options(NONE, platform) == {}
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"


@pytest.mark.parametrize(
    "options",
    [
        CollectiveOptions(reduce_dtype="float16"),
        CollectiveOptions(combine_threshold_bytes=8),
        CollectiveOptions(cpu_implementation="gloo"),
        CollectiveOptions(timeout=9),
    ],
)
def test_on_an_unknown_platform_nothing_is_promised(options: CollectiveOptions) -> None:
    assert compiler_options(NONE, "neural") == {}
    with pytest.raises(UserError, match="platform neural"):
        compiler_options(options, "neural")


def test_an_implementation_is_for_several_processes() -> None:
    for name in ("gloo", "mpi"):
        with pytest.raises(UserError, match=f"is {name}"):
            configure_collectives(CollectiveOptions(cpu_implementation=name), 1)
    configure_collectives(
        CollectiveOptions(cpu_implementation="gloo"), 2
    )  # what JAX has chosen already


def test_mpi_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    options = CollectiveOptions(cpu_implementation="mpi")
    monkeypatch.delenv(MPI_LIBRARY, raising=False)
    with pytest.raises(UserError, match="MPITRAMPOLINE_LIB"):
        configure_collectives(options, 2)
    monkeypatch.setenv(MPI_LIBRARY, "libmpiwrapper.so")
    with pytest.raises(UserError, match="cpu_implementation=mpi"):
        configure_collectives(options, 2)


def test_a_timeout_comes_before_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    options = CollectiveOptions(timeout=9)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match="timeout=9"):
        configure_collectives(options, 1)
    assert os.environ["XLA_FLAGS"] == ""
    monkeypatch.setenv("XLA_FLAGS", "/a/file")
    with pytest.raises(UserError, match=r"XLA_FLAGS.*/a/file"):
        configure_collectives(options, 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=8")
    with pytest.raises(UserError, match=r"9, .*--xla_cpu_collective"):
        configure_collectives(options, 1)
    with pytest.raises(UserError, match=r"timeout is 1e\+10: it must be at most"):
        configure_collectives(CollectiveOptions(timeout=1e10), 1)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(UserError, match="timeout"):
            CollectiveOptions(timeout=seconds)


@pytest.mark.parametrize(
    ("timeout", "between", "until_warning", "after"),
    [(0.1, 1, 1, 0), (1, 1, 1, 0), (1.01, 2, 1, 1), (9, 9, 5, 4), (600, 600, 20, 580)],
)
def test_a_timeout_is_rounded_up_and_split(
    monkeypatch: pytest.MonkeyPatch, timeout: float, between: int, until_warning: int, after: int
) -> None:
    name = "spmdtrain.xla.compiler._check_not_initialized"
    monkeypatch.setattr(name, lambda option: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    expected = [
        "--xla_a=1",
        f"--xla_cpu_collective_timeout_seconds={between}",
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={until_warning}",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={after}",
    ]
    for _ in range(2):  # again, by a second trainer, is no change
        configure_collectives(CollectiveOptions(timeout=timeout), 1)
        assert os.environ["XLA_FLAGS"].split() == expected


def test_mpi_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "spmdtrain.xla.compiler._check_not_initialized"
    monkeypatch.setattr(name, lambda option: None)
    monkeypatch.setenv(MPI_LIBRARY, "libmpiwrapper.so")
    before = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
    try:
        with pytest.raises(UserError, match="by MPI"):
            configure_collectives(CollectiveOptions(cpu_implementation="mpi", timeout=5), 2)
        assert jax.config.jax_cpu_collectives_implementation == "mpi"  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)


# -- XLA on CPU does what the refusals say ---------------------------------------------------------


def reductions(hlo: str) -> list[str]:
    """The dtype of the first array of each all-reduce in optimized HLO."""
    return re.findall(r"= \(?(\w+)\[[^=]*? all-reduce(?:-start)?\(", re.sub(r"/\*.*?\*/", "", hlo))


def summed(dtype: Any) -> Any:
    """Four arrays summed over eight devices in this dtype, lowered."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")

    def reduce(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.psum(x.astype(dtype), "data").astype(jnp.float32) for x in arrays]

    one = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=NamedSharding(mesh, split))
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    return jax.jit(mapped).lower([one] * 4)


def test_cpu_reduces_float16_and_not_bfloat16() -> None:
    found = {dtype: reductions(summed(dtype).compile().as_text()) for dtype in ("f2", "bfloat16")}
    assert found == {"f2": ["f16"], "bfloat16": ["f32"]}
    check_reduce_dtype(CollectiveOptions(reduce_dtype="float16"), "cpu")


def test_cpu_combines_whatever_the_threshold() -> None:
    options = compiler_options(CollectiveOptions(combine_threshold_bytes=1), "gpu")
    assert len(reductions(summed("f4").compile(options).as_text())) == 1


# -- the timeout, with a participant that comes too late -------------------------------------------

VIRTUAL = """
import sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from spmdtrain.xla.compiler import compiler_options, configure_collectives
from spmdtrain.config.options import CollectiveOptions

options = CollectiveOptions(timeout=float(sys.argv[1]) or None)
configure_collectives(options, 1)
mesh, late = jax.make_mesh((4,), ("data",)), [False]

def hold(index, x):
    if late[0] and index == 1:
        time.sleep(5)
    return x

def step(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = jax.pure_callback(hold, shape, jax.lax.axis_index("data"), x)
    return jax.lax.psum(x, "data")

step = jax.jit(
    jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False),
    compiler_options=compiler_options(options, jax.devices()[0].platform),
)
x = jax.device_put(np.ones((4, 2), np.float32), NamedSharding(mesh, P("data")))
print("first", float(step(x).sum()), flush=True)
late[0] = True
began = time.time()
print("began", began, flush=True)
print("second", float(step(x).sum()), time.time() - began, flush=True)
"""


def virtual(timeout: float) -> tuple[subprocess.CompletedProcess[str], float]:
    """Returns the exit and the seconds since the step with the late participant began."""
    ended = subprocess.run(
        [sys.executable, "-c", VIRTUAL, str(timeout)],
        env=environment(4),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    now = time.time()
    (began,) = re.findall(r"^began (\S+)", ended.stdout, re.M) or [ended.stderr]
    return ended, now - float(began)


@pytest.mark.slow
def test_a_collective_of_one_process_ends_it_when_the_timeout_is_over() -> None:
    (patient, _), (limited, seconds) = together(lambda: virtual(0), lambda: virtual(1.5))
    assert patient.returncode == 0, patient.stderr
    assert "second 8.0" in patient.stdout
    assert limited.returncode == -6 and "first 8.0" in limited.stdout, limited.stderr
    assert "Termination timeout for `all reduce" in limited.stderr
    assert "second" not in limited.stdout and 1.9 < seconds < 5


# -- MPI: as far as one comes without it -----------------------------------------------------------

MPI = """
import os, sys
import jax
from spmdtrain.xla.compiler import MPI_LIBRARY, configure_collectives
from spmdtrain.config.options import CollectiveOptions

os.environ[MPI_LIBRARY] = "libmpiwrapper.so"  # too late for JAX to find it
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
configure_collectives(CollectiveOptions(cpu_implementation="mpi"), 2)
print("prepared", flush=True)
jax.devices()
"""


@pytest.mark.slow
def test_mpi_is_what_jax_then_looks_for() -> None:
    env = environment(1)
    env.pop(MPI_LIBRARY, None)
    ended = subprocess.run(
        [sys.executable, "-c", MPI, str(free_port())],
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode != 0 and ended.stdout == "prepared\n", ended.stderr
    assert ended.stderr.startswith("MPItrampoline: "), ended.stderr


# -- compiled for accelerators that are not here ---------------------------------------------------

# Jax issue 28376 has the description of an H100.
H100 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""

ELSEWHERE = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from spmdtrain.xla.compiler import compiler_options
from spmdtrain.config.options import CollectiveOptions

topology = topologies.get_topology_desc(**json.loads(sys.argv[1]))
count = len(topology.devices)
mesh = Mesh(np.array(topology.devices), ("data",), axis_types=(AxisType.Auto,))
whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
WEIGHT = 128 * 128 * 4
weights = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 6
x = jax.ShapeDtypeStruct((2 * count, 128), jnp.float32)

def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()

def step(weights, x):
    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

def found(lowered, kind="all-reduce", **options):
    options = compiler_options(CollectiveOptions(**options), topology.devices[0].platform)
    text = re.sub(r"/\\*.*?\\*/", "", lowered.compile(compiler_options=options).as_text())
    start = rf"= (\\(*\\w+)\\[[^=]*? {kind}(?:-start)?\\("
    return [dtype.lstrip("(") for dtype in re.findall(start, text)]

def mapped(function, into):
    local = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=into, check_vma=False)
    wide = [jax.ShapeDtypeStruct((128 * count, 128), jnp.float32)] * 6
    return jax.jit(local).lower(wide)

automatic = jax.jit(step, in_shardings=(whole, split), out_shardings=whole).lower(weights, x)
packs = [None, 1, WEIGHT, 2 * WEIGHT, 6 * WEIGHT]
kinds = {
    "all-reduce": automatic,
    "all-gather": mapped(
        lambda ws: [jax.lax.all_gather(w[:16], "data", tiled=True) for w in ws], P()
    ),
    "reduce-scatter": mapped(
        lambda ws: [jax.lax.psum_scatter(w, "data", tiled=True) for w in ws], P("data")
    ),
}
report = {kind: [len(found(kinds[kind], kind, combine_threshold_bytes=n)) for n in packs]
          for kind in sys.argv[2:]}
for dtype in ("bfloat16", "float16"):
    low = mapped(
        lambda ws: [jax.lax.psum(w.astype(dtype), "data").astype(w.dtype) for w in ws], P()
    )
    report[dtype] = found(low, reduce_dtype=dtype)
print("REPORT", json.dumps(report))
"""


def elsewhere(python: str, module: str, topology: dict[str, str], *kinds: str) -> Any:
    """Returns the program of another platform's compiler; skips if that is not installed."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", code], capture_output=True).returncode:
        pytest.skip(f"{module} is not installed for {python}")
    env = environment() | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another test may plan for a TPU now
        "PYTHONPATH": str(REPOSITORY),
    }
    ended = subprocess.run(
        [python, "-c", ELSEWHERE, json.dumps(topology), *kinds],
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    (line,) = re.findall(r"^REPORT (.*)$", ended.stdout, re.M) or [ended.stderr]
    return json.loads(line)


def test_gpu_packs_and_dtypes_in_the_compiled_step() -> None:
    python = os.environ.get("SPMDTRAIN_GPU_PYTHON", sys.executable)
    topology = {"platform": "cuda", "topology_name": "h100", "topology": "1x1x8"}
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    found = elsewhere(python, "jax_plugins.xla_cuda12", topology | {"target_config": H100}, *kinds)
    assert found["all-reduce"] == [1, 6, 6, 3, 1]
    assert found["all-gather"] == [1, 6, 6, 3, 1]
    assert found["reduce-scatter"][:2] == [1, 6]  # it counts the results, an eighth
    assert (found["bfloat16"], found["float16"]) == (["bf16"], ["f16"])


@pytest.mark.slow
def test_tpu_packs_and_dtypes_in_the_compiled_step() -> None:
    python = os.environ.get("SPMDTRAIN_TPU_PYTHON", sys.executable)
    topology = {"platform": "tpu", "topology_name": "v5e:4x4"}
    found = elsewhere(python, "libtpu", topology, "all-reduce")
    assert found["all-reduce"] == [1, 6, 6, 3, 1]
    assert found["bfloat16"] == ["bf16"]
    assert found["float16"] == ["u32"]  # pairs of float16 in a word: still half the bytes


# -- XLA presets: which options a run takes, and which replace them --------------------------------

# XLA:CPU accepts both.
VECTORS, DEPTH = "xla_cpu_prefer_vector_width", "xla_cpu_parallel_codegen_split_count"


def test_each_preset_is_of_a_known_chip_and_each_flag_has_a_reason() -> None:
    assert {chip for chip, _ in PRESETS} <= set(CHIPS)
    for flags in PRESETS.values():
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(flag.name.startswith("xla_") and flag.reason for flag in flags)


def test_a_preset_is_chosen_by_chip_and_placement_of_the_parameters() -> None:
    flags = preset_flags("TPU v5 lite", Parameters.REPLICATED)
    assert flags == PRESETS["v5e", Parameters.REPLICATED]
    assert preset_flags("TPU v5", Parameters.REPLICATED) != flags
    assert preset_flags("cpu", Parameters.REPLICATED) == ()


def test_other_options_replace_those_of_a_preset_and_unknown_ones_are_omitted() -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    preset = {VECTORS: 128, DEPTH: 8, "xla_no_such_option": 1}
    options = merge_compiler_options([f"{DEPTH}=16"], {}, sharding, preset)
    assert options == {VECTORS: 128, DEPTH: 16}
    assert merge_compiler_options([], {VECTORS: 256}, sharding, preset) == {VECTORS: 256, DEPTH: 8}
    with pytest.raises(UserError, match="xla_no_such_option"):
        merge_compiler_options(["xla_no_such_option=1"], {}, sharding)


def test_a_run_takes_its_preset_unless_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(kind: str, parameters: Parameters) -> tuple[Flag, ...]:
        assert kind == jax.devices()[0].device_kind
        value = 128 if parameters == Parameters.REPLICATED else 256
        return (Flag(VECTORS, value, "a test"),)

    def found(**options: str) -> tuple[dict[str, object], str]:
        config = RunConfig(**options)  # type: ignore[arg-type]
        placement: Placement = make_placement(config)
        chosen = step_options(config, placement)
        return dict(chosen), describe_preset(config, placement, chosen)

    monkeypatch.setattr(functions, "preset_flags", flags)
    assert found() == ({VECTORS: 128}, f"XLA preset: {VECTORS}")
    assert found(strategy="fully_sharded")[0] == {VECTORS: 256}
    assert found(xla_preset="none") == ({}, "")
    assert found(strategy="one_device") == ({}, "")
