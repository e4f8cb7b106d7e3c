"""Digests of the code of users, by which a later start sees that it changed."""

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.machinery
import inspect
import itertools
import linecache
import os
import sys
from collections import ChainMap, Counter, UserDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import is_library

# -- Digests of the functions and models of a user, by which a later start sees that they changed
#
# A digest depends on code and on the values that it uses, not on files, lines, comments,
# docstrings, names of local variables, or the numbers in a model's arrays.

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
# Loops and trainers, whose attributes differ at each start.
_OF_RUN = ("spmdtrain.train.", "spmdtrain.keras.callbacks", "spmdtrain.config.experiment")
_JITTED = type(jax.jit(lambda: None))
_CACHED = type(functools.cache(lambda: None))
_CHANGEABLE = (dict, list, set, deque, bytearray, int, float, str, type(None), np.ndarray)
_IN_MEMORY = (dict, MappingProxyType)  # other mappings may read a file when they are read
_CHANGING = {  # methods that change a list, a dictionary or a set
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "reverse", "setdefault", "sort", "update"),
}
_FIRST = ("__init__", "__post_init__", "__new__", "__setstate__", "setup", "build")  # of an object
_SPECIAL = {  # of a class: what Python adds itself
    *("__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__annotations__"),
    *("__firstlineno__", "__static_attributes__", "__slots__", "__match_args__", "__hash__"),
    *("__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__parameters__"),
    *("__annotate__", "__annotate_func__", "__annotations_cache__", "__orig_bases__"),
}


@dataclasses.dataclass(frozen=True)
class CodeRecord:
    """The digests of a function or object of the user, which a later start compares.

    `parts` has the digest and the place, `FILE:LINE`, of each function reached, by its name.
    """

    digest: str
    parts: Mapping[str, str]


def code_record(function: Any) -> CodeRecord:
    """Returns the digests of a function, a class or an object with functions, such as a model.

    Code of the user counts, in any module, with the global variables and the variables of outer
    functions that it uses, except for variables that a function changes, such as a cache. A
    function or class of a library counts by its name, and an object by its class and public
    attributes. Arrays of JAX count by shape and dtype. Configurations, loops and trainers count by
    their class only, because options are compared by name.
    """
    reader, content = _Reader(), hashlib.blake2b(digest_size=6)
    with reader.part(function):
        for text in itertools.islice(reader.texts(function), _MOST_TEXTS):
            encoded = text.encode(errors="surrogatepass") + b"\0"
            content.update(encoded)
            # An object that is used again has a number, which depends on what comes before.
            reader.around[-1].update(b"again" if encoded.startswith(b"again ") else encoded)
    parts: dict[str, str] = {}
    numbers: Counter[str] = Counter()  # of functions of the same name
    for (name, place), found in reader.parts.items():
        numbers[name] += 1
        unique = name if numbers[name] == 1 else f"{name} #{numbers[name]}"
        parts[unique] = f"{found.hexdigest()} {place}"
    return CodeRecord(content.hexdigest(), parts)


@dataclasses.dataclass
class _Reader:
    """Reads an object and everything that it refers to as texts."""

    parts: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Digests of what each function alone consists of, by name and place."""
    around: list[Any] = field(default_factory=list)
    """The digests of those that are being read."""
    _seen: dict[int, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # so that no id is used twice
    _depth: int = 0

    @contextmanager
    def part(self, x: Any) -> Iterator[None]:
        """Adds the texts that are read while entered to the digest of a function or a class."""
        name = getattr(x, "__qualname__", type(x).__qualname__).replace("<locals>.", "")
        new = hashlib.blake2b(digest_size=6)
        self.around.append(self.parts.setdefault((name, _place(x)), new))
        yield
        self.around.pop()

    def texts(self, x: Any) -> Iterator[str]:
        if isinstance(x, str):
            # A path may differ from machine to machine.
            yield "path" if os.path.isabs(x) else f"str {x}"
        elif isinstance(x, enum.Enum):
            yield f"{_name(type(x))}.{x.name}"
            yield from self.texts(x.value)
        elif isinstance(x, _PLAIN):
            yield f"{type(x).__name__} {x!r}"
        elif isinstance(x, PurePath):
            yield "path"
        elif isinstance(x, ModuleType):
            yield f"module {_origin(x.__name__)}"
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
        elif isinstance(x, _IN_MEMORY) or (isinstance(x, Mapping) and _is_of(type(x), "flax.")):
            for key in sorted(x, key=str):
                yield f"key {key}"
                yield from self.texts(x[key])
        elif isinstance(x, Mapping) and not (
            isinstance(x, (UserDict, ChainMap)) or _is_own_class(type(x))
        ):
            yield _name(type(x))
            yield from sorted(map(_short, itertools.islice(x, _MOST)))
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
        elif isinstance(x, (_JITTED, _CACHED)):
            function: Any = x
            yield from self.texts(function.__wrapped__)
        elif isinstance(x, np.ndarray) and x.nbytes <= _LARGEST_ARRAY and x.dtype != object:
            yield f"{x.dtype}{x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}"
        elif _is_array(x):
            yield f"{x.dtype}{x.shape}"
        elif isinstance(x, BuiltinFunctionType) or (callable(x) and not hasattr(x, "__dict__")):
            yield f"builtin {getattr(x, '__qualname__', type(x).__name__)}"
        else:
            yield from self._of_instance(x)

    def _of_function(self, function: FunctionType) -> Iterator[str]:
        code = function.__code__
        is_own = not is_library(code.co_filename)
        changed = _changed_names(code.co_filename) if is_own else frozenset()
        with self.part(function) if is_own else nullcontext():
            if is_own:
                yield from self._of_code(code)
                defaults = (function.__defaults__, function.__kwdefaults__)
                if f"{function.__name__}()" not in changed:
                    yield from self._all(defaults)
            else:
                yield f"{_origin(function.__module__)}.{function.__qualname__}"
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                try:
                    value = cell.cell_contents
                except ValueError:  # a variable without a value yet
                    yield "empty"
                else:
                    yield from self._of_variable(name, value, changed)
            if is_own:
                yield from self._of_globals(function, changed)

    def _of_variable(self, name: str, value: Any, changed: frozenset[str]) -> Iterator[str]:
        """Yields texts of a variable outside of a function, unless a function changes it."""
        if name not in changed or not isinstance(value, _CHANGEABLE):  # not `optimizer.update`
            yield from self.texts(value)

    def _of_globals(self, function: FunctionType, changed: frozenset[str]) -> Iterator[str]:
        """Yields texts of the global variables that a function uses."""
        names = set(_names(function.__code__))
        for name in sorted(set(_global_names(function.__code__)) & function.__globals__.keys()):
            value = function.__globals__[name]
            yield f"global {name}"
            yield from self._of_variable(name, value, changed)
            if isinstance(value, ModuleType) and _is_own(value):
                of_module = _changed_names(getattr(value, "__file__", None) or "")
                for part in sorted(names & vars(value).keys()):
                    yield from self._of_variable(part, vars(value)[part], of_module)

    def _of_code(self, code: CodeType) -> Iterator[str]:
        steps = [x for x in dis.get_instructions(code) if x.opcode != dis.EXTENDED_ARG]
        is_constant = [x.opcode in dis.hasconst for x in steps]
        # A docstring shifts the positions of constants, which count by their values instead.
        places = ("" if known else x.arg for x, known in zip(steps, is_constant, strict=True))
        yield " ".join(f"{x.opcode} {n}" for x, n in zip(steps, places, strict=True))
        yield " ".join(code.co_names)
        for x in itertools.compress(steps, is_constant):
            is_code = isinstance(x.argval, CodeType)
            yield from self._of_code(x.argval) if is_code else self.texts(x.argval)

    def _of_class(self, kind: type) -> Iterator[str]:
        yield _name(kind)
        if not _is_own_class(kind):
            return
        with self.part(kind):
            yield from self._all(kind.__bases__)
            if issubclass(kind, enum.Enum):
                yield from self._all(kind)
            for name, value in sorted(vars(kind).items()):
                own = inspect.isroutine(value) or isinstance(value, (property, *_PLAIN, str, tuple))
                # Libraries keep registries of their own in private attributes.
                own |= isinstance(value, (list, dict, np.ndarray)) and not name.startswith("_")
                if name not in _SPECIAL and own:
                    yield f"attribute {name}"
                    yield from self.texts(value)

    def _of_instance(self, x: Any) -> Iterator[str]:
        yield from self.texts(type(x))
        modules = [base.__module__ for base in type(x).__mro__]
        if isinstance(x, RunConfig) or any(name.startswith(_OF_RUN) for name in modules):
            return
        has_private = _has_private_arguments(type(x))
        # Libraries count names and link their objects with others.
        has_name = has_private and not type(x).__module__.startswith("spmdtrain.")
        if dataclasses.is_dataclass(x):
            names = [
                f.name
                for f in dataclasses.fields(x)
                if has_name or f.name not in ("parent", "name")
            ]
            values = {name: getattr(x, name, None) for name in names}
        else:
            values = getattr(x, "__dict__", {})
        left_out = {
            name
            for start, names in _LEFT_OUT.items()
            for name in names
            if any(module.startswith(start) for module in modules)
        }
        changed = _changed_attributes(type(x))
        for name, value in sorted(values.items(), key=lambda item: str(item[0])):
            is_private = str(name).startswith("_") and not has_private
            is_counted = name not in left_out and (has_name or name != "name")
            is_counted &= not (name in changed and isinstance(value, _CHANGEABLE))
            if name in _OF_KERAS or (is_counted and not is_private):
                yield f"attribute {name}"
                yield from self.texts(value)


def _has_private_arguments(kind: type) -> bool:
    """Returns whether the private attributes of an object are arguments of its constructor.

    In objects of libraries they are caches, counters and identifiers.
    """
    if kind.__module__.startswith("spmdtrain."):
        return True
    of_libraries = ("flax.", "keras.", "torch.")
    return _is_own_class(kind) and not any(
        base.__module__.startswith(of_libraries) for base in kind.__mro__
    )


def _is_array(x: Any) -> bool:
    """Returns whether an object is an array, a variable of a model, or the shape of one."""
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    converts = hasattr(type(x), "__array__") or hasattr(type(x), "__jax_array__")
    return converts and hasattr(type(x), "shape") and hasattr(type(x), "dtype")


def _place(x: Any) -> str:
    """Returns the file and line of a function, or of the first function of an object's class."""
    inner = inspect.unwrap(x) if callable(x) else x
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = inner if isinstance(inner, type) else type(inner)
    inner = getattr(inner, "__func__", inner)
    code = getattr(inner, "__code__", None)
    for value in () if isinstance(code, CodeType) else vars(kind).values():
        code = getattr(value, "__code__", None)
        if isinstance(code, CodeType) and code.co_filename != "<string>":
            break
    if not isinstance(code, CodeType):
        return ""
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


@functools.lru_cache(maxsize=1000)
def _changed_names(file: str) -> frozenset[str]:
    """Returns what the functions of a source file change besides their local variables.

    These are global variables and variables of outer functions by name, attributes as `CLASS.NAME`,
    and `FUNCTION()` if a function changes the default of an argument. Empty without the source.
    """
    changes = _Changes()
    try:
        changes.visit(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    return frozenset(changes.found)


def _changed_attributes(kind: type) -> set[str]:
    """Returns the attributes that methods of the user change after the construction."""
    found = set()
    for base in kind.__mro__ if _is_own_class(kind) else ():
        for file in _files(base):
            names = (name.partition(".") for name in _changed_names(file))
            found |= {attribute for owner, _, attribute in names if owner == base.__name__}
    return found - {""}


@dataclasses.dataclass
class _Changes(ast.NodeVisitor):
    """Collects what functions change besides their local variables; see `_changed_names`."""

    found: set[str] = field(default_factory=set)
    _kind: str = ""  # the class
    # The functions around a node: name, variables, arguments with defaults, and "self".
    _around: list[tuple[str, set[str], set[str], str]] = field(default_factory=list)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._kind = self._kind, node.name
        self.generic_visit(node)
        self._kind = outer

    def visit_FunctionDef(self, node: Any) -> None:
        within = list(ast.walk(node))
        variables = {x.id for x in within if isinstance(x, ast.Name) and _is_set(x)}
        for each in within:
            if isinstance(each, (ast.Global, ast.Nonlocal)):
                variables -= set(each.names)
        of_node = node.args
        places = [*of_node.posonlyargs, *of_node.args]
        arguments = [x.arg for x in places]
        defaults = set(arguments[len(arguments) - len(of_node.defaults) :])
        keywords = [x.arg for x in of_node.kwonlyargs]
        first = arguments[0] if self._kind and arguments and not self._around else ""
        name = getattr(node, "name", "<lambda>")
        variables |= {*arguments, *keywords}
        self._around.append((name, variables, defaults | set(keywords), first))
        self.generic_visit(node)
        self._around.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_Name(self, node: ast.Name) -> None:
        if _is_set(node) and self._around and node.id not in self._around[-1][1]:
            self.found.add(node.id)  # declared as global or nonlocal

    def visit_Attribute(self, node: Any) -> None:
        if _is_set(node):
            self._change(node)
        self.generic_visit(node)

    visit_Subscript = visit_Attribute

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            self._change(node.func.value)
        self.generic_visit(node)

    def _change(self, node: ast.expr) -> None:
        """Adds the variable or attribute that an expression refers to."""
        attribute = ""
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            attribute = node.attr if isinstance(node, ast.Attribute) else attribute
            node = node.value
        if not isinstance(node, ast.Name) or not self._around:
            return
        method, _, _, itself = self._around[0]
        name, variables, defaults, _ = self._around[-1]
        if node.id == itself:
            if method not in _FIRST:
                self.found.add(f"{self._kind}.{attribute}")
        elif node.id in defaults:
            self.found.add(f"{name}()")
        elif node.id not in variables:
            self.found.add(node.id)


def _is_set(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    """Returns whether a statement assigns or deletes a variable, an attribute or an item."""
    return isinstance(node.ctx, (ast.Store, ast.Del))


def _short(x: Any) -> str:
    return repr(x) if isinstance(x, (str, *_PLAIN)) else type(x).__name__


def _is_own(module: ModuleType) -> bool:
    """Returns whether a module is the user's. Without a file, only `__main__` is (a notebook)."""
    file = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if file is None else not is_library(file)


def _is_own_class(kind: type) -> bool:
    """Returns whether a class is the user's."""
    if files := _files(kind):
        return not all(map(is_library, files))
    module = sys.modules.get(kind.__module__)
    return module is None or _is_own(module)


def _files(kind: type) -> set[str]:
    """Returns the source files of the methods of a class."""
    functions = [x for x in vars(kind).values() if isinstance(x, FunctionType)]
    files = {function.__code__.co_filename for function in functions}
    return files - {"<string>"}  # of the methods of a dataclass


def _is_of(kind: type, library: str) -> bool:
    return any(base.__module__.startswith(library) for base in kind.__mro__)


def _names(code: CodeType) -> Iterator[str]:
    """Yields the names of global variables and attributes in a function and its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yields the names of global variables that a function and its inner functions read."""
    for x in dis.get_instructions(code):
        if x.opname == "LOAD_NAME" or (x.opname.startswith("LOAD_") and "GLOBAL" in x.opname):
            yield x.argval
        elif isinstance(x.argval, CodeType):
            yield from _global_names(x.argval)


def _name(kind: type) -> str:
    """Returns the name of a class, without its module if that is the user's."""
    if _is_own_class(kind):
        return kind.__qualname__
    return f"{_origin(kind.__module__)}.{kind.__qualname__}"


def _origin(module: str) -> str:
    """Returns the module of a library; of this package its name alone, because its code moves."""
    return "spmdtrain" if module.startswith("spmdtrain.") else module


# -- Modules of the user: those that another process cannot import, and digests of their source ----

_MAX_COMPARED = 5_000  # modules; reading that many files takes about 1 s


def user_modules(path: Sequence[str]) -> list[ModuleType]:
    """Returns the imported modules of the user that a process with this `sys.path` cannot import.

    An experiment is one of them, because it is loaded from its file. Functions and classes of these
    modules must be pickled by value. Modules of libraries are not among them.
    """
    return [module for _, module in _imported() if not _is_importable(module, path)]


def source_digests() -> dict[str, str]:
    """Returns digests of the source files of the user's modules, to compare between processes.

    All processes call it at the same points. The modules are the ones that process 0 has imported.
    A process that has not imported one of them returns the digest of process 0, because a module
    that only some processes import, such as one that draws figures, is no difference. With one
    process there are none.
    """
    if process_group.count() == 1:
        return {}
    own = {
        f"module {module.__name__}": f"{_path_in_root(module.__name__, file)} {file_digest(file)}"
        for file, module in _imported()
        if file.suffix == ".py" and file.is_file()
    }
    # Of too many, the last ones: libraries are imported before what uses them.
    first = process_group.broadcast(dict(list(own.items())[-_MAX_COMPARED:]))
    return {name: own.get(name, digest) for name, digest in first.items()}


def _imported() -> list[tuple[Path, ModuleType]]:
    """Returns the imported modules that belong to no library, with their files."""
    return [
        (Path(file), module)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and (file := vars(module).get("__file__"))  # not `getattr`, which may import lazily
        and not is_library(file)
    ]


def _is_importable(module: ModuleType, path: Sequence[str]) -> bool:
    """Returns whether a process with this `sys.path` can import a module by its name."""
    top = module.__name__.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, list(path)) is not None


def _path_in_root(name: str, file: Path) -> str:
    """Returns the path of a module's file in the folder from which the module is imported."""
    depth = name.count(".") + (file.name == "__init__.py")
    return "/".join(file.parts[-1 - depth :])


@functools.cache  # the first digest is the closest to what was imported
def file_digest(file: Path) -> str:
    """Returns a digest of a file's content at the first call."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
