"""Digests of the functions and models of a user, by which a later start sees that they changed.

A digest depends on code and on the values that it uses, not on files, lines, comments, docstrings,
names of local variables, or the numbers in a model's arrays.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.xla.source_files import is_library

# Limits of one digest; what is beyond them is left out.
_MOST = 20_000  # objects
_MOST_TEXTS = 200_000  # with the numbers and texts in lists, for example
_DEEPEST = 100  # references from one object to the next
_LARGEST_ARRAY = 2**20  # bytes of an array whose values count
_PLAIN = (bool, int, float, complex, bytes, type(None), type(Ellipsis), np.dtype, np.generic)
# Private attributes of Keras: the arguments of a loss, the layers of a model.
_OF_KERAS = ("_fn_kwargs", "_layers")
# Attributes that do not count: seeds that Keras draws and names that it counts, the arrays of an
# adapter (`Adapter.given`), and the optimizer, which has a record of its own.
_LEFT_OUT = {
    "keras.": ("seed", "output_names", "optimizer"),
    "spmdtrain.": ("given", "_names", "optimizer"),
}
_OF_PROCESS = ("logging", "os")  # loggers and `os.environ`, which count by their class
_OF_RUN = "spmdtrain.train."  # loops and trainers, whose attributes differ at each start
_JITTED = type(jax.jit(lambda: None))
_SPECIAL = {  # of a class: what Python adds itself
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__"),
    *("__firstlineno__", "__static_attributes__", "__slots__", "__match_args__", "__hash__"),
    *("__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__parameters__"),
    *("__annotate__", "__annotate_func__", "__annotations_cache__", "__orig_bases__"),
}


def code_digest(function: Any) -> str:
    """Returns a digest of a function, a class or an object with functions, a model for example.

    The code of the user counts, in whichever module it is, with the global variables and the
    variables of outer functions that it uses. A function or class of a library counts by its name,
    and an object by its class and public attributes. Arrays of JAX count by shape and dtype, and
    configurations, loops and trainers by their class: options are compared by name.

    Args:
      function: The function or object.
    """
    content = hashlib.blake2b(digest_size=6)
    for text in itertools.islice(_Reader().texts(function), _MOST_TEXTS):
        content.update(text.encode(errors="surrogatepass") + b"\0")
    return content.hexdigest()


class _Reader:
    """Yields texts of an object and of what it refers to."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice
        self._depth = 0

    def texts(self, x: Any) -> Iterator[str]:
        if isinstance(x, str):
            # A path may differ from machine to machine.
            yield "path" if os.path.isabs(x) else f"str {x}"
        elif isinstance(x, enum.Enum):
            yield f"{_name(type(x))}.{x.name}"
        elif isinstance(x, _PLAIN):
            yield f"{type(x).__name__} {x!r}"
        elif isinstance(x, PurePath):
            yield "path"
        elif isinstance(x, ModuleType):
            yield f"module {x.__name__}"
        elif id(x) in self._seen:
            yield f"again {self._seen[id(x)]}"
        elif len(self._seen) < _MOST and self._depth < _DEEPEST:
            self._seen[id(x)] = len(self._seen)
            self._kept.append(x)
            self._depth += 1
            yield from self._of_object(x)
            self._depth -= 1

    def _all(self, items: Any) -> Iterator[str]:
        yield "("
        for item in items:
            yield from self.texts(item)
        yield ")"

    def _of_object(self, x: Any) -> Iterator[str]:
        if type(x).__module__ in _OF_PROCESS:
            yield type(x).__name__
        elif isinstance(x, (tuple, list)):
            yield from self._all(x)
        elif isinstance(x, (set, frozenset)):
            yield from sorted(map(_short, x))
        elif isinstance(x, Mapping):
            for key in sorted(x, key=str):
                yield f"key {key}"
                yield from self.texts(x[key])
        elif isinstance(x, functools.partial):
            yield from self._all((x.func, x.args, x.keywords))
        elif isinstance(x, MethodType):
            yield from self._all((x.__func__, x.__self__))
        elif isinstance(x, FunctionType):
            yield from self._of_function(x)
        elif isinstance(x, type):
            yield from self._of_class(x)
        elif isinstance(x, (staticmethod, classmethod)):
            yield from self.texts(x.__func__)
        elif isinstance(x, property):
            yield from self._all((x.fget, x.fset))
        elif isinstance(x, _JITTED):
            function: Any = x
            yield from self.texts(function.__wrapped__)
        elif isinstance(x, np.ndarray) and x.nbytes <= _LARGEST_ARRAY and x.dtype != object:
            yield f"{x.dtype}{x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}"
        elif hasattr(type(x), "shape") and hasattr(type(x), "dtype"):
            yield f"{x.dtype}{x.shape}"
        elif isinstance(x, BuiltinFunctionType) or (callable(x) and not hasattr(x, "__dict__")):
            yield f"builtin {getattr(x, '__qualname__', type(x).__name__)}"
        else:
            yield from self._of_instance(x)

    def _of_function(self, function: FunctionType) -> Iterator[str]:
        code = function.__code__
        is_own = not is_library(code.co_filename)
        if is_own:
            yield from self._of_code(code, function.__doc__)
            yield from self._all((function.__defaults__, function.__kwdefaults__))
        else:
            yield f"{function.__module__}.{function.__qualname__}"
        for cell in function.__closure__ or ():
            try:
                yield from self.texts(cell.cell_contents)
            except ValueError:  # a variable without a value yet
                yield "empty"
        if is_own:
            yield from self._of_globals(function, set(_names(code)))

    def _of_globals(self, function: FunctionType, names: set[str]) -> Iterator[str]:
        """Yields texts of the global variables that a function uses by these names."""
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            yield f"global {name}"
            yield from self.texts(value)
            if isinstance(value, ModuleType) and _is_own(value):
                for part in sorted(names & vars(value).keys()):
                    yield from self.texts(vars(value)[part])

    def _of_code(self, code: CodeType, doc: str | None = None) -> Iterator[str]:
        yield code.co_code.hex()
        yield " ".join(code.co_names)
        for number, constant in enumerate(code.co_consts):
            if isinstance(constant, CodeType):
                first = constant.co_consts[:1]
                yield from self._of_code(constant, first[0] if _is_doc(constant) else None)
            elif not (number == 0 and doc is not None and constant == doc):
                yield from self.texts(constant)

    def _of_class(self, kind: type) -> Iterator[str]:
        yield _name(kind)
        if not _is_own_class(kind):
            return
        yield from self._all(kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            own = inspect.isroutine(value) or isinstance(value, (property, *_PLAIN, str, tuple))
            if name not in _SPECIAL and own:
                yield f"attribute {name}"
                yield from self.texts(value)

    def _of_instance(self, x: Any) -> Iterator[str]:
        yield from self.texts(type(x))
        modules = [base.__module__ for base in type(x).__mro__]
        if isinstance(x, RunConfig) or any(name.startswith(_OF_RUN) for name in modules):
            return
        if dataclasses.is_dataclass(x):
            names = [f.name for f in dataclasses.fields(x) if f.name not in ("parent", "name")]
            values = {name: getattr(x, name, None) for name in names}
        else:
            values = getattr(x, "__dict__", {})
        has_private = _has_private_arguments(type(x))
        left_out = {
            name
            for start, names in _LEFT_OUT.items()
            for name in names
            if any(module.startswith(start) for module in modules)
        }
        for name, value in sorted(values.items(), key=lambda item: str(item[0])):
            is_private = str(name).startswith("_") and not has_private
            is_counted = name not in left_out and name != "name"
            if name in _OF_KERAS or (is_counted and not is_private):
                yield f"attribute {name}"
                yield from self.texts(value)


def _has_private_arguments(kind: type) -> bool:
    """Returns whether private attributes of an object are what it was made with.

    Those of libraries are caches, counters and identifiers.
    """
    if kind.__module__.startswith("spmdtrain."):
        return True
    of_libraries = ("flax.", "keras.", "torch.")
    return _is_own_class(kind) and not any(
        base.__module__.startswith(of_libraries) for base in kind.__mro__
    )


def _short(x: Any) -> str:
    return repr(x) if isinstance(x, (str, *_PLAIN)) else type(x).__name__


def _is_own(module: ModuleType) -> bool:
    """Returns whether a module is the user's; one without a file is, as in a notebook."""
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else not is_library(file)


def _is_own_class(kind: type) -> bool:
    """Returns whether a class is the user's."""
    files = {x.__code__.co_filename for x in vars(kind).values() if isinstance(x, FunctionType)}
    files.discard("<string>")  # of the methods of a dataclass
    if files:
        return not all(map(is_library, files))
    module = sys.modules.get(kind.__module__)
    return module is None or _is_own(module)


def _is_doc(code: CodeType) -> bool:
    """Returns whether the first constant of a function may be its docstring."""
    return code.co_consts[:1] != () and isinstance(code.co_consts[0], str)


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of global variables and attributes in a function and those within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _name(kind: type) -> str:
    """Returns the name of a class, without its module if that is the user's."""
    return kind.__qualname__ if _is_own_class(kind) else f"{kind.__module__}.{kind.__qualname__}"
