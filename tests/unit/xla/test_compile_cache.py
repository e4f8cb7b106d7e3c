"""Compiled programs that are kept: for later starts, whole or not at all, and never in the way."""

import os
import re
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import command, environment, metrics, small_experiment, together
from jax.nn import initializers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmdtrain.xla import compiler


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
        timeout=200,
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
