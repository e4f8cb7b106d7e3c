"""Tests use public names: a private name of the package may change without a change of behavior."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Where a test needs a private name, and why. Do not add to this list: test the behavior, or make
# the function or constant public.
ALLOWED = {
    # Signals that a second thread waits for a picture, which has no effect that can be observed.
    ("test_image_cache.py", "_decoded"): 2,
    # Simulates a sharding rule that initialization violates; the layout prevents it otherwise.
    ("test_layout.py", "_jit_init"): 1,
    ("test_layout.py", "_init"): 1,
    # `fit` must leave no compilation pending, and its end cannot be observed from outside.
    ("test_compile.py", "_programs"): 2,
    # The modules of the exported names, of which the package itself is the only reader.
    ("test_prose.py", "_HOMES"): 1,
    ("test_layers.py", "_HOMES"): 1,
    # That nothing listens at an address, whatever runs on the machine of the test.
    ("test_ray_nodes.py", "_listens"): 1,
    # The wait for the lock of another process takes two minutes.
    ("test_free_ports.py", "_SECONDS_FOR_OTHERS"): 1,
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields private names that are read from, imported from or replaced in other objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdtrain"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr")):
            for argument in node.args[:2]:  # monkeypatch.setattr("package.module._name", ...)
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    name = argument.value.rpartition(".")[2]
                    if is_private(name):
                        yield name


def test_private_names_are_found() -> None:
    code = """
from spmdtrain.a import _b
x._c; self._d; x.__dict__; monkeypatch.setattr("spmdtrain.e._f", 1); setattr(x, "_g", 1)
"""
    assert sorted(private_names(ast.parse(code))) == ["_b", "_c", "_f", "_g"]


def test_tests_use_public_names() -> None:
    found: dict[tuple[str, str], int] = {}
    for path in TESTS.rglob("*.py"):
        for name in private_names(ast.parse(path.read_text())):
            if name != "_replace":  # public, of named tuples
                found[path.name, name] = found.get((path.name, name), 0) + 1
    assert found == ALLOWED
