"""An experiment: the real objects of a run, and the Python file that builds them."""

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import optax

from spmdtrain.adapters.base import Function
from spmdtrain.checkpoints.weights.weight_map import WeightMap
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import Augment
from spmdtrain.errors import (
    OwnExit,
    UserError,
    describe_sys_exit,
    did_you_mean,
    is_text,
    option,
    printable,
)
from spmdtrain.sharding.rules import AxisRules, Rule
from spmdtrain.step.gradients import Reduction
from spmdtrain.trackers.base import Tracker
from spmdtrain.train.callbacks import Callbacks

PyTree = Any

TRACEBACK_SWITCH = (
    "SPMDTRAIN_TRACEBACK"  # set to 1, errors in experiment files keep their traceback
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The objects of an experiment, as `build(config)` of its file returns them."""

    model: Any
    """An nnx module, or a function of `rngs` that makes one; an Equinox module; a LinenModel,
    EquinoxModel, KerasModel or FunctionModel."""
    objective: Function
    """(model, batch) -> per-example values by name, "loss" among them."""
    optimizer: optax.GradientTransformation
    train: Any
    """A dataset: arrays, or any object with __len__ and rows(indices)."""
    validation: Any = None
    test: Any = None
    predict: Function | None = None
    """(model, batch) -> predictions; by default the model's output."""
    augment: Augment | None = None
    """(example, NumPy generator) -> example, applied to training examples on the host."""
    rules: Sequence[Rule] = ()
    """Shardings of parameters, for every strategy; the first rule that matches counts. The strategy
    places the parameters that no rule matches."""
    axis_rules: AxisRules | None = None
    """Maps the names of the model's annotations to mesh axes. Rules win over annotations."""
    reduction: Reduction | None = None
    """(gradients, axes) -> gradients: reduces gradients under shard_map, instead of XLA."""
    prompts: Any = None
    """A dataset for --mode predict, instead of the test or validation split."""
    format_predictions: Callable[[PyTree], Iterable[str]] | None = None
    """Predictions -> the lines that --mode predict prints."""
    generate: Callable[[Any, Callable[[str], None]], PyTree] | None = None
    """(model, write) -> predictions: called by --mode predict without --split, instead of `predict`
    for `prompts`. `write` prints a piece of text at once."""
    callbacks: Callbacks = field(default_factory=dict)
    """Functions by event (see `CallbackEvent`), or a list of callback objects."""
    media: Function | None = None
    """(model, batch) -> media by name, to log at each evaluation for its first batch."""
    trackers: Sequence[Tracker] = ()
    """Trackers besides those of the option `trackers`."""
    weight_map: WeightMap = ()
    """Rules by which arrays of `init_from` become arrays of the model, for files of other programs;
    without rules, equal names are taken."""
    huggingface: Mapping[str, Any] = field(default_factory=dict)
    """JSON objects by file name, "config.json" among them, of Hugging Face's layout of the model,
    which `export --format huggingface` writes; its weights have the names of `weight_map`."""

    @classmethod
    def from_keras(
        cls,
        model: Any,
        *,
        train: Any,
        optimizer: optax.GradientTransformation | None = None,
        callbacks: Callbacks = (),
        **parts: Any,
    ) -> "Experiment":
        """Returns the experiment of a compiled Keras model; see `Trainer.from_keras`.

        Args:
          model: A Keras model on which `model.compile` was called.
          train: The training data: (x, y) or (x, y, sample_weight).
          optimizer: An optax optimizer instead of the model's.
          callbacks: Keras callbacks and those of an experiment, in a list.
          **parts: Other parts of the experiment.

        Raises:
          UserError: If a part of the model or a callback cannot be used.
        """
        # Imported here, because Flax, which the adapter uses, is slow to import.
        from spmdtrain.keras.compile import parts_of_compiled

        found = parts_of_compiled(
            model, optimizer=optimizer, callbacks=callbacks, steps_per_dispatch=None
        )
        return cls(train=train, **{**found, **parts})


@dataclass(frozen=True)
class ExperimentFile:
    """An experiment's Python file, loaded."""

    path: Path
    config_class: type[RunConfig]
    presets: Mapping[str, RunConfig]
    doc: str
    module: Any

    @property
    def name(self) -> str:
        """The file's name without .py."""
        return self.path.stem

    def preset(self, name: str | None) -> RunConfig:
        """Returns a preset by name; the defaults for None. Raises `UserError` if it is missing."""
        if name is None:
            return _guarded(self.path, self.config_class)
        if name not in self.presets:
            known = did_you_mean(name, self.presets) if self.presets else " It has none."
            raise UserError(f"{self.path} has no preset {name!r}.{known}")
        return self.presets[name]

    @property
    def has_own_loop(self) -> bool:
        """Whether the file has a training loop, `train(config, loop)`, and no `build`."""
        return not callable(getattr(self.module, "build", None))

    def build(self, config: RunConfig) -> Experiment:
        """Returns the experiment's objects for a configuration; raises `UserError`."""
        if self.has_own_loop:
            raise UserError(
                f"{self.path} has a loop of its own, train(config, loop), which can only train: "
                f"{option('mode', 'evaluate')}, {option('mode', 'predict')}, "
                f"{option('role', 'evaluate')} and {option('show_sharding')} are for files with "
                "build(config)"
            )
        experiment = _guarded(self.path, lambda: self.module.build(config))
        if not isinstance(experiment, Experiment):
            raise UserError(
                f"{self.path}: build(config) returned a {type(experiment).__name__}: it must "
                "return an Experiment"
            )
        return experiment


def load_experiment(name: str, reserved: frozenset[str]) -> ExperimentFile:
    """Imports and checks an experiment's file.

    Args:
      name: Path of the Python file, name of a module, or name that an installed package gives an
        experiment as an entry point.
      reserved: Names that fields of its `Config` must not have.

    Raises:
      UserError: If the file is missing, fails, or lacks a part.
    """
    path = Path(name) if os.path.isfile(name) else _file_of_module(name)
    if not is_text(str(path.resolve())):
        raise UserError(
            f"{printable(path.resolve())}: the path of an experiment must be text in UTF-8, "
            "because programs contain it: rename it"
        )
    module = _imported(path)
    config_class = getattr(module, "Config", None)
    if not (
        isinstance(config_class, type)
        and issubclass(config_class, RunConfig)
        and "__dataclass_fields__" in vars(config_class)  # its own, not the inherited ones
    ):
        raise UserError(f"{path}: has no dataclass Config(RunConfig)")
    _guarded(path, lambda: get_type_hints(config_class, include_extras=True))
    build, train = (getattr(module, name, None) for name in ("build", "train"))
    if not callable(build) and not callable(train):
        raise UserError(f"{path}: has no function build(config), and no train(config, loop)")
    if callable(build) and getattr(train, "__module__", None) == module.__name__:
        raise UserError(
            f"{path}: has both build(config) and train(config, loop), a loop of its own: one of "
            "the two"
        )
    if collisions := sorted(reserved & {f.name for f in dataclasses.fields(config_class)}):
        raise UserError(
            f"{path}: Config has a field {collisions[0]!r}, which is the command's own option"
        )
    presets = getattr(module, "PRESETS", {})
    if not isinstance(presets, Mapping) or not all(
        isinstance(p, config_class) for p in presets.values()
    ):
        raise UserError(
            f"{path}: PRESETS must be a dictionary of names to {config_class.__name__}s"
        )
    return ExperimentFile(path, config_class, presets, (module.__doc__ or "").strip(), module)


EXPERIMENTS = "spmdtrain.experiments"
"""The group of entry points by which a package names its experiments."""


def _file_of_module(name: str) -> Path:
    """Returns the file of a module, or of the module that an entry point names."""
    takes = f"{option('config')} takes an experiment's .py file, or the name of a module"
    entries = importlib.metadata.entry_points(group=EXPERIMENTS)
    named = {entry.name: entry.value for entry in entries}
    if name not in named:
        if os.path.isdir(name):
            raise UserError(f"{name}: is a folder; {takes}")
        if name.endswith(".py") or not all(map(str.isidentifier, name.split("."))):
            raise UserError(f"{name}: no such file; {takes}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` does
    target = named.get(name, name)

    def find() -> importlib.machinery.ModuleSpec | None:
        try:
            return importlib.util.find_spec(target)
        except ModuleNotFoundError as error:
            if f"{target}.".startswith(f"{error.name}."):  # a package above the module is missing
                return None
            raise

    spec = _guarded(Path(name), find)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        if name in named:
            raise UserError(f"{name}: its entry point names {target}, which is no module; {takes}")
        near = did_you_mean(name, named) if named else ""
        raise UserError(f"{name}: no such file or module; {takes}.{near}")
    return Path(spec.origin)


def _imported(path: Path) -> ModuleType:
    """Imports an experiment's file: as a part of its package, if its folder is one."""
    file = path.resolve()
    root, names = file.parent, [path.stem]
    while (root / "__init__.py").is_file():  # relative imports need the package
        root, names = root.parent, [root.name, *names]
    sys.path += dict.fromkeys([str(file.parent), str(root)])  # it may import modules of its folder
    if len(names) > 1:
        package = importlib.util.find_spec(names[0])
        found = [*map(os.path.realpath, (package and package.submodule_search_locations) or [])]
        if str(root / names[0]) not in found:
            raise UserError(
                f"{path}: is in the package {names[0]}, and Python imports another one of this "
                f"name, from {', '.join(found)}: rename the package"
            )
        module: ModuleType = _guarded(path, lambda: importlib.import_module(".".join(names)))
        return module
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: {option('config')} takes an experiment's .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    loader = spec.loader
    _guarded(path, lambda: loader.exec_module(module))
    return module


def _guarded(path: Path, call: Callable[[], Any]) -> Any:
    """Calls a function of the user's file; turns exceptions into one line with file and line."""
    try:
        return call()
    except (UserError, OwnExit):
        raise
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        raise UserError(f"{path}: {describe_sys_exit(stop)}") from stop
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else str(path)
        raise UserError(f"{where}: {error.msg}") from error
    except Exception as error:
        if os.environ.get(TRACEBACK_SWITCH) == "1":
            raise
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f for f in frames if f.filename == str(path.resolve())]
        where = f"{path}:{inside[-1].lineno}" if inside else str(path)
        within = f"in {inside[-1].name}; " if inside else ""
        message = " ".join(str(error).split())
        raise UserError(
            f"{where}: {type(error).__name__}: {message} "
            f"({within}{TRACEBACK_SWITCH}=1 shows the traceback)"
        ) from error
