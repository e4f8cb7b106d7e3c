"""Programs that several processes compile, at different speeds, and find again."""

import re
from pathlib import Path

import pytest
from helpers import status
from processes import codes, drill, job, show

pytestmark = pytest.mark.drill


SLOW_COMPILER = '''
from jax._src import compiler
from jax.experimental import multihost_utils

compile_at_once = compiler.backend_compile_and_load


def compile_slowly(backend, module, *rest):
    """XLA's compiler, which takes long in process 1, as on a host that is busy."""
    name = module.operation.attributes["sym_name"].value
    if name in ("jit_train_step", "jit_evaluate"):
        print("compiles", name, flush=True)
        time.sleep(SECONDS * process_group.rank())
    return compile_at_once(backend, module, *rest)


def build(config):
    compiler.backend_compile_and_load = compile_slowly
    multihost_utils.sync_global_devices("connected")  # from here on the timeout of gloo counts
'''


@pytest.mark.nightly
def test_a_compilation_may_take_longer_than_the_timeout_of_a_collective(tmp_path: Path) -> None:
    """The step and the first batch of an evaluation wait until all have compiled them."""
    slow = SLOW_COMPILER.replace("SECONDS", "20")
    options = ("--workdir", tmp_path / "run", "--steps", 4, "--compilation-cache", "off")
    ended = job(
        drill(tmp_path, ("\ndef build(config):\n", slow)), *options, "--collectives.timeout", 10
    )
    for one in ended:  # which has compiled each program once
        assert [line for line in one.output.splitlines() if line.startswith("compiles")] == [
            "compiles jit_train_step",
            "compiles jit_evaluate",
        ]


def test_processes_of_different_programs_are_refused_before_they_run_them(tmp_path: Path) -> None:
    """All processes apply the same sum of gradients: their copies of the state stayed equal."""
    other = "(1 if process_group.rank() else 3) * (model(x)[:, 0] - y) ** 2"
    config, workdir = drill(tmp_path, ("(model(x)[:, 0] - y) ** 2", other)), tmp_path / "run"
    ended = job(config, "--workdir", workdir, check=False)
    assert codes(ended) == [2, 2], show(ended)
    reason = status(workdir)["reason"]
    assert "worker 0 and chief compiled different programs: line " in reason, show(ended)
    assert "3.000000e+00" in reason and not (workdir / "checkpoints" / "5").exists()


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
        assert {"jit__init", "jit_train_step", "jit_evaluate"} <= compiled
    assert warm == [set(), set()]
