"""Digests of the user's functions and modules: what changes them, and what does not."""

import functools
import importlib
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import Loop, RunConfig, weighted_mean
from spmdtrain.distributed import process_group
from spmdtrain.distributed.code_digest import code_record, source_digests
from spmdtrain.errors import is_library
from spmdtrain.keras.compile import CompiledKeras

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported

SOURCE = """
import dataclasses, enum, functools
import numpy as np
SCALE, NAMES, WEIGHTS = 2.0, {"a", "b"}, np.ones(3)

class Kind(enum.Enum):
    MEAN = "mean of all"
    def upper(self):
        return self.name.upper()

class Sizes:
    widths = [4, 5]
    def __len__(self):
        return 2

@dataclasses.dataclass
class Options:
    name: str = "huber"
    def __str__(self):
        return self.name

options = Options()

@functools.lru_cache
def cached():
    return 7

def helper(x):
    return x * SCALE

def choose(x):
    return x if options.name == Kind.MEAN else x * Sizes.widths[0] * cached()

class Table:
    def __init__(self, rate):
        self._rate = rate
    def __call__(self, x):
        return x * self._rate

def outer(rate):
    table = Table(rate)
    def objective(model, batch, power=2):
        "Returns a loss."
        value = choose(helper(model(batch)) ** power)
        inner = lambda x: [table(each) for each in x if each in {"loss", "other"}]
        return {"loss": value * WEIGHTS[0] + inner(NAMES)}
    return objective

function = outer(0.5)
"""

CHANGES: dict[str, tuple[str, str]] = {
    "constant": ("** power", "** 3"),
    "helper": ("x * SCALE", "x + SCALE"),
    "global number": ("= 2.0,", "= 3.0,"),
    "global array": ("np.ones(3)", "np.zeros(3)"),
    "default": ("power=2", "power=4"),
    "object within": ("outer(0.5)", "outer(0.25)"),
    "method": ("x * self._rate", "x / self._rate"),
    "lambda": ("table(each) for", "each for"),
    "name": ("helper(model", "abs(model"),
    "value of an enum": ("mean of all", "sum of all"),
    "list of a class": ("[4, 5]", "[4, 6]"),
    "field named name": ('"huber"', '"hinge"'),
    "cached function": ("return 7", "return 8"),
}
NO_CHANGES: dict[str, tuple[str, str]] = {
    "lines": ("def helper", "\n\n# a comment\n\ndef helper"),
    "docstring": ("Returns a loss.", "Returns another loss."),
    "new docstring": ("(x):\n    return x * SCALE", "(x):\n    'Scales.'\n    return x * SCALE"),
    "no docstring": ('        "Returns a loss."\n', ""),
    "local variable": ("value", "renamed"),
    "order": ('{"a", "b"}', '{"b", "a"}'),
    "unused": ("def outer", "OTHER = 3\n\ndef outer"),
}


def code_digest(x: Any) -> str:
    return code_record(x).digest


def digest(source: str, file: str = "here/mine.py") -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    return code_digest(names["function"])


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_function_uses_changes_its_digest(name: str) -> None:
    before, after = CHANGES[name]
    assert before in SOURCE and digest(SOURCE.replace(before, after)) != digest(SOURCE)


@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_is_not_computed_does_not(name: str) -> None:
    before, after = NO_CHANGES[name]
    assert before in SOURCE
    assert digest(SOURCE.replace(before, after), "elsewhere/other.py") == digest(SOURCE)


class Dropping(nnx.Module):
    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.layer, self.drop = nnx.Linear(4, 1, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(self.drop(x))


class Dense(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(self.width)(x)


def keras_model(rate: float) -> Any:
    keras = pytest.importorskip("keras")
    image = keras.Input((4,))
    return keras.Model(image, keras.layers.Dropout(rate)(keras.layers.Dense(1)(image)))


def compiled(delta: float) -> Any:
    model = keras_model(0.5)
    model.compile(loss=pytest.importorskip("keras").losses.Huber(delta), optimizer="adam")
    return CompiledKeras(model).objective


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Dropping(x, nnx.Rngs(int(8 * x))),
        lambda x: partial(Dropping, x),
        lambda x: Dense(int(8 * x)),
        pytest.param(keras_model, marks=pytest.mark.slow),
        pytest.param(compiled, marks=pytest.mark.slow),
        optax.adam,
        lambda x: jax.jit(lambda y: x * y),
        lambda x: np.full(3, x),
    ],
    ids=["nnx", "factory", "linen", "keras", "compiled", "optax", "jit", "array"],
)
def test_arguments_of_models_and_optimizers_count(make: Any) -> None:
    assert code_digest(make(0.5)) == code_digest(make(0.5)) != code_digest(make(0.25))


def test_initial_values_and_paths_do_not_count() -> None:
    seeds = [Dropping(0.5, nnx.Rngs(seed)) for seed in range(2)]
    assert len({code_digest(model) for model in seeds}) == 1
    places = [partial(print, "/data/a"), partial(print, "/mnt/b")]
    assert len({code_digest(place) for place in places}) == 1


@pytest.mark.slow
def test_a_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"{SOURCE}\nfrom spmdtrain.distributed.code_digest import code_record\n"
        "print(code_record(function))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and found.pop().strip()


class _Link:
    def __init__(self, following: "_Link | None") -> None:
        self.following = following


@pytest.mark.slow
def test_large_structures_of_the_user_are_cut_off() -> None:
    first: _Link | None = None
    for _ in range(5000):
        first = _Link(first)
    many = list(range(1_000_000))

    def linked() -> Any:
        return first

    def listed(last: int) -> Any:
        values = [*many, last]
        return lambda: values

    assert code_digest(linked) == code_digest(linked)
    assert code_digest(listed(1)) == code_digest(listed(2))


def test_options_and_the_loop_within_a_function_do_not_count() -> None:
    def objective(config: RunConfig) -> Any:
        return lambda batch: batch * (config.learning_rate or 1.0)

    def step(loop: Loop) -> Any:
        return lambda state: loop.gather_params(state)

    assert code_digest(objective(RunConfig())) == code_digest(objective(RunConfig(resume="must")))
    assert code_digest(step(Loop(steps=1))) == code_digest(step(Loop(steps=2)))


def test_loggers_and_the_environment_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    environment, log = os.environ, logging.getLogger("of_objective")

    def objective() -> Any:
        log.info("called")
        return environment.get("SCALE")

    before = code_digest(objective)
    monkeypatch.setenv("SCALE", "2")
    monkeypatch.setattr(log, "level", logging.DEBUG)
    assert code_digest(objective) == before


CACHES = """
import collections
CACHE, ROWS, SEEN, CALLS, TABLE, SCALES = {}, [], set(), 0, collections.Counter(), {"a": 2.0}

def of(x):
    return CACHE.setdefault(x, len(ROWS))

class Scaled:
    def __init__(self, rate):
        self.rate, self.calls, self.values = rate, 0, {}
    def __call__(self, x):
        self.calls += 1
        self.values[x] = x * self.rate
        return self.values[x]

def outer(rate):
    known, number, scaled = {}, 0, Scaled(rate)
    def objective(x, found=[]):
        global CALLS
        nonlocal number
        CALLS, number = CALLS + 1, number + 1
        TABLE[x] += 1
        SEEN.add(x)
        ROWS.append(x)
        known[x] = x
        found.append(x)
        return of(x) * scaled(x) * SCALES["a"]
    return objective

function = outer(0.5)
"""


def functions_of(source: str, file: Path) -> dict[str, Any]:
    file.write_text(source)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, str(file), "exec"), names)
    return names


def test_what_functions_change_does_not_count(tmp_path: Path) -> None:
    names = functions_of(CACHES, tmp_path / "mine.py")
    before = code_digest(names["function"])
    names["function"](3)
    assert names["CACHE"] and names["CALLS"] == 1
    assert code_digest(names["function"]) == before
    for number, (old, new) in enumerate({"2.0": "3.0", "outer(0.5)": "outer(0.25)"}.items()):
        other = functions_of(CACHES.replace(old, new), tmp_path / f"other{number}.py")
        assert code_digest(other["function"]) != before


def test_results_that_a_library_keeps_do_not_count_and_the_function_does() -> None:
    def cached(power: int) -> Any:
        return functools.cache(lambda x: x**power)

    function = cached(2)
    before = code_digest(function)
    function(3)
    assert code_digest(function) == before == code_digest(cached(2)) != code_digest(cached(3))


class Shaped:
    def __init__(self, rate: float) -> None:
        self.shape, self.dtype, self.rate = (2,), "float32", rate

    shape: Any = property(lambda self: (2,), lambda self, x: None)
    dtype: Any = property(lambda self: "float32", lambda self, x: None)


def test_a_function_of_this_package_is_known_wherever_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def objective(library_function: Any) -> Any:
        return lambda model, batch: library_function(model(batch), batch["weights"])

    ours, theirs = (code_record(objective(f)).digest for f in (weighted_mean, optax.l2_loss))
    assert ours is not None and ours != theirs
    for function, digest in ((weighted_mean, ours), (optax.l2_loss, theirs)):
        library = function.__module__.partition(".")[0]
        monkeypatch.setattr(function, "__module__", f"{library}.elsewhere")
        moved = code_record(objective(function)).digest
        assert (moved == digest) is (function is weighted_mean)


def test_an_object_with_a_shape_and_a_dtype_is_no_array() -> None:
    assert code_digest(Shaped(0.5)) == code_digest(Shaped(0.5)) != code_digest(Shaped(0.25))
    arrays = [jax.numpy.full(3, x) for x in (1.0, 2.0)]
    assert code_digest(arrays[0]) == code_digest(arrays[1]) != code_digest(jax.numpy.ones(4))


def test_a_mapping_that_reads_a_file_counts_by_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for name in ("a", "b"):
        np.savez(tmp_path / "mine.npz", **{name: np.ones(3)})  # type: ignore[arg-type]
        with np.load(tmp_path / "mine.npz") as values, monkeypatch.context() as patched:
            patched.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("read"))
            found[name] = [code_digest(lambda values=values: values) for _ in range(2)]
    assert found["a"] != found["b"] and len(set(found["a"])) == 1


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("x * SCALE", "x + SCALE", ["helper"]),
        ("= 2.0,", "= 3.0,", ["helper"]),
        ("x * self._rate", "x / self._rate", ["Table.__call__"]),
        ("** power", "** 3", ["outer.objective"]),
        ("def helper", "\n\n# a comment\ndef helper", []),
    ],
)
def test_the_functions_that_changed_are_known(
    old: str, new: str, changed: list[str], tmp_path: Path
) -> None:
    before, after = (
        code_record(functions_of(source, tmp_path / file)["function"]).parts
        for source, file in ((SOURCE, "a.py"), (SOURCE.replace(old, new), "b.py"))
    )
    assert before.keys() == after.keys()
    line = SOURCE[: SOURCE.index("def helper")].count("\n") + 1
    assert before["helper"].partition(" ")[2] == f"a.py:{line}"
    assert [n for n in after if before[n].split()[0] != after[n].split()[0]] == changed


def test_an_attribute_is_no_global_variable_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's `d = "runs/one"` does not count in `self.d`; as a variable it does."""

    def attribute(module: Any) -> Any:
        return [module.d for _ in range(2)]

    def variable() -> Any:
        return [d for _ in range(2)]  # type: ignore[name-defined]  # noqa: F821

    digests = []
    for value in ("runs/one", "runs/two"):
        monkeypatch.setitem(globals(), "d", value)
        digests.append((code_record(attribute).digest, code_record(variable).digest))
    assert digests[0][0] == digests[1][0] and digests[0][1] != digests[1][1]


# -- modules, which the processes of a job compare -------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imports a package of a user, in a process of two; returns its folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mine import scale")
    (folder / "scale.py").write_text("SCALE = 3.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_group, "count", lambda: 2)
    monkeypatch.setattr(process_group, "broadcast", lambda value: value)
    for name in ("mine", "mine.scale"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("mine")
    return folder


NAMES = {"module mine", "module mine.scale"}


def test_modules_that_a_script_imports_are_compared_by_their_source(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_digests()
    assert before.keys() >= NAMES
    other = package.parent / "there" / "mine" / "scale.py"
    other.parent.mkdir(parents=True)
    other.write_text("SCALE = 300.0")
    monkeypatch.setattr(sys.modules["mine.scale"], "__file__", str(other))
    after = source_digests()
    assert {name for name in before if before[name] != after[name]} == {"module mine.scale"}
    assert before["module mine.scale"].startswith("mine/scale.py ")


def test_a_module_that_only_some_processes_import_is_no_difference(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"module plots": "plots.py a1", "module mine.scale": "mine/scale/__init__.py b2"}
    monkeypatch.setattr(process_group, "broadcast", lambda own: first)
    found = source_digests()
    assert found.keys() == first.keys()
    assert found["module plots"] == first["module plots"]
    assert found["module mine.scale"] != first["module mine.scale"]


def test_libraries_and_python_itself_are_not_among_them(package: Path) -> None:
    assert is_library(pytest.__file__) and is_library(importlib.__file__)
    assert not is_library(str(package / "scale.py"))
    names = source_digests()
    assert not any(name in ("module json", "module numpy") for name in names)
