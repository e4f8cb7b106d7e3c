"""Options of the collectives: in the compiled step, in what happens, or in an error that says why.

The GPU's and the TPU's part needs their compilers, and no device: SPMDTRAIN_GPU_PYTHON and
SPMDTRAIN_TPU_PYTHON may name interpreters that have `jax[cuda12]` and `libtpu`.
"""

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import REPOSITORY, environment, together
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import free_port

from spmdtrain import UserError
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.xla.compiler import (
    MPI_LIBRARY,
    check_reduce_dtype,
    compiler_options,
    configure_collectives,
)

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
        timeout=100,
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


def test_mpi_is_what_jax_then_looks_for() -> None:
    env = environment(1)
    env.pop(MPI_LIBRARY, None)
    ended = subprocess.run(
        [sys.executable, "-c", MPI, str(free_port())],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
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
        "PYTHONPATH": str(REPOSITORY),
    }
    ended = subprocess.run(
        [python, "-c", ELSEWHERE, json.dumps(topology), *kinds],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
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
