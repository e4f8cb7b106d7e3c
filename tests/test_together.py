"""Programs that several processes compile, at different speeds, and find again."""

import re
from pathlib import Path

import pytest
from processes import drill, job

pytestmark = pytest.mark.drill


SLOW_COMPILER = '''
from jax._src import compiler
from jax.experimental import multihost_utils

compile_at_once = compiler.backend_compile_and_load


def compile_slowly(backend, module, *rest):
    """XLA's compiler, which takes long in process 1, as on a host that is busy."""
    name = module.operation.attributes["sym_name"].value
    if name in ("jit__train", "jit__evaluate"):
        print("compiles", name, flush=True)
        time.sleep(SECONDS * spmdtrain_processes.rank())
    return compile_at_once(backend, module, *rest)


def build(config):
    compiler.backend_compile_and_load = compile_slowly
    multihost_utils.sync_global_devices("connected")  # from here on the timeout of gloo counts
'''


def test_processes_that_compile_for_longer_than_a_collective_may_take_go_on(tmp_path: Path) -> None:
    """The step and the first batch of an evaluation wait until all have compiled them."""
    slow = SLOW_COMPILER.replace("SECONDS", "5")
    options = ("--workdir", tmp_path / "run", "--steps", 4, "--compilation-cache", "off")
    ended = job(
        drill(tmp_path, ("\ndef build(config):\n", slow)), *options, "--collectives.timeout", 2
    )
    for one in ended:  # which has compiled each program once
        assert [line for line in one.output.splitlines() if line.startswith("compiles")] == [
            "compiles jit__train",
            "compiles jit__evaluate",
        ]


def test_in_a_warm_start_no_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
    config, options = drill(tmp_path), ("--steps", 2, "--compilation-cache", tmp_path / "programs")
    cold, warm = (
        [
            set(re.findall("COMPILATION CACHE MISS for '([^']+)'", one.output))
            for one in job(config, *options, "--workdir", tmp_path / name)
        ]
        for name in ("cold", "warm")
    )
    for compiled in cold:
        assert {"jit__init", "jit__train", "jit__evaluate"} <= compiled
    assert warm == [set(), set()]
