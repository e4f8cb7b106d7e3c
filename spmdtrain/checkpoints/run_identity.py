"""What a run computes, and whether it may go on from what another has computed."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

from spmdtrain.config import RunConfig, as_json
from spmdtrain.errors import UserError, foreign
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

# Whatever else changes, these would change what is being computed.
_FIXED = ("seed", "global_batch_size", "shuffle")
_INSTEAD = {"global_batch_size": " (and no --batch-size-per-device)"}
_LONGEST = 4000  # characters of a message: it may list two optimizers
_COMMON = frozenset(f.name for f in dataclasses.fields(RunConfig))
_NO_CHANGE = ("workdir", "resume", "init_from", "checkpoint", "data_dir", "compilation_cache")


@dataclass(frozen=True)
class Identity:
    """What tells one run from another. Kept in its checkpoints; plain JSON."""

    config: Mapping[str, Any]
    """The resolved configuration."""
    dataset: Mapping[str, Any]
    """Length, shapes, dtypes and a check sum of the training data; classes, where it has names of
    them."""
    leaves: Mapping[str, str]
    """Every array of the state by its path, as `float32[784,128]`."""
    optimizer: str
    """The optimizer's transformations by the names of their states, those without arrays too."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """The injected hyperparameters that the optimizer starts with, by path in its state."""

    @property
    def classes(self) -> Sequence[str]:
        """The classes trained on, in the order of their labels; empty where they have no names."""
        found: Sequence[str] = self.dataset.get("classes", ())
        return found


def describe_leaves(state: TrainState) -> dict[str, str]:
    """Shape and dtype of every leaf by its path: what tells one model from another."""
    return {name: describe(leaf) for name, leaf in named_leaves(state).items()}


def describe(leaf: Any) -> str:
    """An array as `float32[784,128]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def describe_optimizer(opt_state: Any) -> str:
    """An optimizer's state as the names of its transformations' states."""
    if not isinstance(opt_state, tuple):
        return "_"
    return f"{type(opt_state).__name__}({', '.join(map(describe_optimizer, opt_state))})"


def check_same_run(saved: Identity, now: Identity, source: str) -> None:
    """Raise `UserError` where going on from `source` would change what is being computed.

    Names the field or parameter, both values, and the option that would make it right.
    """
    for name in _FIXED:
        there, here = saved.config[name], now.config[name]
        if there != here:
            _refuse(
                f"{source} was trained with {name}={there}, this run has {here}: give "
                f"{_option(name, there)}{_INSTEAD.get(name, '')}, or another workdir"
            )
    remedy = _remedy(saved.config, now.config, "data_dir")
    check_same_classes(saved.classes, now.classes, f"{source} was", f"; {remedy}")
    for name, here in now.dataset.items():
        if name != "classes" and saved.dataset.get(name) != here:
            _refuse(
                f"{source} was trained on other data: {name} was {saved.dataset.get(name)}, and "
                f"is {here} now; {remedy}"
            )
    remedy = _remedy(saved.config, now.config)
    _check_same_leaves(saved.leaves, now.leaves, source, remedy)
    if saved.optimizer != now.optimizer:
        _refuse(
            f"{source} is of another optimizer: opt_state is {saved.optimizer} there and "
            f"{now.optimizer} here; {remedy}{_start_from(source)}"
        )


def _refuse(message: str) -> NoReturn:
    """Raises `UserError`; text of a manifest is escaped and cut: anyone may have written it."""
    raise UserError(foreign(message, _LONGEST))


def check_same_classes(
    trained: Sequence[str], here: Sequence[str], who: str, remedy: str = ""
) -> None:
    """Raise `UserError` where labels mean other classes; where either has no names, they may not.

    `who` begins the message: "the model was".
    """
    if not trained or not here or list(trained) == list(here):
        return
    pairs = zip_longest(trained, here, fillvalue="nothing")
    before, now = next((one, other) for one, other in pairs if one != other)
    raise UserError(
        f"{who} trained on the classes {_in_short(trained)}; this data has {_in_short(here)} (the "
        f"first that differs: {foreign(before, 200)}, here {foreign(now, 200)}){remedy}"
    )


def _in_short(names: Sequence[str]) -> str:
    shown = names if len(names) <= 5 else [*names[:3], f"... ({len(names)})"]
    return foreign(", ".join(shown), _LONGEST)


def check_same_model(
    saved: Identity, config: Mapping[str, Any], leaves: Mapping[str, str], source: str
) -> None:
    """Raise `UserError` where the parameters or the model state are not those of this model.

    `config` and `leaves` are this run's, as in its `Identity`.
    """
    there, here = (
        {n: x for n, x in of.items() if n.split("/")[0] in ("params", "model_state")}
        for of in (saved.leaves, leaves)
    )
    _check_same_leaves(there, here, source, _remedy(saved.config, config))


def _check_same_leaves(
    saved: Mapping[str, str], now: Mapping[str, str], source: str, remedy: str
) -> None:
    for name in [*now, *saved]:
        if saved.get(name) != now.get(name):
            part = name.split("/")[0]
            kind = {"opt_state": "optimizer", "averaged": "moving average"}.get(part, "model")
            _refuse(
                f"{source} is of another {kind}: {name} is {saved.get(name, 'absent')} there and "
                f"{now.get(name, 'absent')} here; {remedy}"
                + ("" if kind == "model" else _start_from(source))
            )


def changes(saved: Identity, now: Identity) -> list[str]:
    """Returns the differences between two configurations, each as `name: before -> after`.

    A field that was added since had its default before.
    """
    before, after = _fields(as_json(RunConfig())) | _fields(saved.config), _fields(now.config)
    return [
        foreign(f"{name}: {before.get(name)} -> {value}", _LONGEST)
        for name, value in after.items()
        if name not in _NO_CHANGE and before.get(name) != value
    ]


def _remedy(saved: Mapping[str, Any], now: Mapping[str, Any], *suspects: str) -> str:
    """Which of the experiment's own options would have to be as they were."""
    there, here = _fields(saved), _fields(now)
    suspects = (*suspects, "ema_decay", "freeze")
    own = [n for n in there if n.split(".")[0] not in _COMMON or n in suspects]
    given = " ".join(_option(name, there[name]) for name in own if there[name] != here.get(name))
    return f"give {given or 'the same'}, or another workdir"


def _fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration's values by the names of their options: nested ones with a dot."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        nested = isinstance(value, dict)
        found |= _fields(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def _start_from(source: str) -> str:
    return f", or take its parameters alone: --init-from {shlex.quote(source)} and another workdir"


def _option(name: str, value: Any) -> str:
    """How the command line is told a value."""
    *group, own = name.replace("_", "-").split(".")
    if value is False:
        own = f"no-{own}"
    flag = f"--{'.'.join([*group, own])}"
    if isinstance(value, bool):
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *(shlex.quote(str(item)) for item in values)])
