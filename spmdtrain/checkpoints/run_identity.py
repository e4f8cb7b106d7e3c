"""The identity of a run, and differences between the programs of two starts."""

import dataclasses
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn, TypedDict

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.weights.weight_map import WeightMap, WeightRule
from spmdtrain.config.options import OnResume
from spmdtrain.config.run_config import OPTIONS, RunConfig, SkippedBatches, config_as_json
from spmdtrain.data.mixture import examples_per_period
from spmdtrain.distributed import numeric_settings
from spmdtrain.errors import UserError, foreign, option
from spmdtrain.step.optimizer_record import OptimizerRecord, changed_arguments, changed_constants
from spmdtrain.step.state import TrainState, renewed_leaves
from spmdtrain.tree import named_leaves

# -- Differences between the programs of two starts of a run: optimizer, code, settings, versions

_MOST_NAMED = 3  # functions in one line
# Libraries on whose version the digests of functions depend.
_OF_DIGESTS = ("python", "jax", "flax", "optax", "keras", "spmdtrain")


def anyway() -> str:
    """Returns the advice to continue with another program."""
    return f"continue with other numbers ({option('resume_anyway', True)})"


def setting_problem(saved: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Returns the setting that gives results another meaning, and how to restore its value."""
    for name, (before, here, is_meaning) in numeric_settings.differences(saved, now).items():
        if is_meaning:
            # The key in the state has the shape of its generator.
            onward = "" if name == "jax_default_prng_impl" else f", {anyway()}"
            return (
                f"{name}={before}, and this process has {here}, which gives other numbers: "
                f"{numeric_settings.way_back(name, before)}{onward}"
            )
    return None


def optimizer_problem(saved: "Identity", now: "Identity") -> str | None:
    """Returns how optimizers with equal arrays differ in their operations; None if they do not."""
    before, here = saved.update, now.update
    if before.kind == here.kind or _why_not_compared(saved, now) is not None:
        return None
    changed = "; ".join(changed_arguments(before, here))
    difference = f" ({changed})" if changed else ", with other operations"
    return f"{before.name} there and {here.name} here{difference}"


def program_changes(saved: "Identity", now: "Identity") -> list[str]:
    """Returns the differences between the programs of two runs, each as `name: before -> after`."""
    found = [f"optimizer: {text}" for text in _optimizer_changes(saved, now)]
    found += changed_functions(saved, now)
    settings = numeric_settings.differences(saved.settings, now.settings)
    found += [f"{name}: {before} -> {here}" for name, (before, here, _) in settings.items()]
    return found + [
        f"version of {name}: {before} -> {now.versions[name]}"
        for name, before in saved.versions.items()
        if name in now.versions and now.versions[name] != before
    ]


def changed_functions(saved: "Identity", now: "Identity") -> list[str]:
    """Returns the user's functions that differ between two runs, as `name: before -> after`."""
    both = saved.functions.keys() & now.functions.keys()
    names = sorted(name for name in both if saved.functions[name] != now.functions[name])
    for library in _OF_DIGESTS if names else ():
        if saved.versions.get(library) != now.versions.get(library):
            reason = f"the version of {library} differs"
            return [f"code of {', '.join(names)}: not compared, because {reason}"]
    return [
        f"code of {name}{_changed_parts(saved.parts.get(name, {}), now.parts.get(name, {}))}: "
        f"{saved.functions[name]} -> {now.functions[name]}"
        for name in names
    ]


def _changed_parts(saved: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns the names and places of functions that differ; "" if they are not known."""
    changed = {}
    for name in [*now, *(name for name in saved if name not in now)]:
        before, _, old_place = saved.get(name, "").partition(" ")
        here, _, new_place = now.get(name, "").partition(" ")
        if before != here:
            kind = "" if before and here else ("new " if here else "removed ")
            place = new_place or old_place
            changed[name] = f"{kind}{name}" + f" ({place})" * bool(place)
    # A changed function says more than the functions that the change adds or removes.
    shown = sorted(changed, key=lambda name: name not in saved or name not in now)[:_MOST_NAMED]
    more = f" and {len(changed) - len(shown)} more" * (len(changed) > len(shown))
    return f", {', '.join(changed[name] for name in shown)}{more}" if saved and changed else ""


def _optimizer_changes(saved: "Identity", now: "Identity") -> list[str]:
    before, here, why_not = saved.update, now.update, _why_not_compared(saved, now)
    if why_not == "":
        return []
    found = changed_arguments(before, here)
    if why_not is not None:
        differs = (before.kind, before.schedule) != (here.kind, here.schedule)
        return found + ([f"its operations are not compared, because {why_not}"] if differs else [])
    if before.kind != here.kind:
        found.insert(0, f"{before.name} -> {here.name}, with other operations")
    elif before.schedule != here.schedule:
        found.insert(0, "another schedule")
    else:
        found += changed_constants(before, here)
    return found


def _why_not_compared(saved: "Identity", now: "Identity") -> str | None:
    """Returns why the operations of two optimizers cannot be compared; None if they can.

    "" means that the operations of one of them are not known.
    """
    before, here = saved.update, now.update
    if not before.kind or not here.kind:
        return ""
    of_keras = before.name.startswith("keras.") and here.name.startswith("keras.")
    for name in ("keras",) if of_keras else ("jax", "optax"):
        if saved.versions.get(name) != now.versions.get(name):
            return f"the version of {name} differs"
    # Some operations, such as the norm of all gradients, depend on which parameters are trained.
    return "freeze differs" if saved.config["freeze"] != now.config["freeze"] else None


# -- The record of a low-rank adaptation in checkpoints, and the base weights that they leave out


class RuleRecord(TypedDict):
    """The fields of a `WeightRule`."""

    source: str
    target: str
    dims: str
    fill: float | None


@dataclass(frozen=True)
class LoraRecord:
    """The base model of a run that trains low-rank factors. Stored in its checkpoints as JSON."""

    alpha: float = 0.0
    """The scale of the factors; 0 in a run without factors."""
    source: str = ""
    """The file of weights, or the checkpoint of a run, with the frozen weights that checkpoints
    leave out; empty if checkpoints contain them."""
    rules: Sequence[RuleRecord] = ()
    """The rules by which arrays of the file become those of the model."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Shape and dtype of the weights that are left out, by path in the state."""
    sums: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the weights that are left out, by path in the state."""

    @property
    def weight_map(self) -> WeightMap:
        """`rules`, as the rules of a weight map."""
        return [WeightRule(**rule) for rule in self.rules]


def record_rules(weight_map: WeightMap) -> list[RuleRecord]:
    """Returns the rules of a map as in `LoraRecord.rules`."""
    return [
        RuleRecord(source=rule.source, target=rule.target, dims=rule.dims, fill=rule.fill)
        for rule in weight_map
    ]


# -- The identity of a run, and checks of whether it can resume from a checkpoint ------------------

_ALONE = {"global_batch_size": "batch_size_per_device"}  # the other one must be left out
_KINDS = {name: row.kind for name, row in TrainState.FIELDS.items()}
_OTHER_WORKDIR = "another workdir"
_MAX_MESSAGE = 4000  # characters, because a message can list two optimizers
_COMMON = frozenset(f.name for f in dataclasses.fields(RunConfig))


def _names(what: OnResume) -> list[str]:
    return [name for name, row in OPTIONS.items() if row.option.on_resume is what]


@dataclass(frozen=True)
class Identity:
    """The properties that identify a run. Stored in its checkpoints as JSON."""

    config: Mapping[str, Any]
    """The resolved configuration."""
    dataset: Mapping[str, Any]
    """The fingerprint of the training data: length, shapes, dtypes, a checksum, the names of its
    classes, and the components and weights of a mixture."""
    leaves: Mapping[str, str]
    """Shape and dtype of every array of the state by its path, as `float32[784,128]`."""
    optimizer: str
    """Names of the states of the optimizer's transformations, including those without arrays."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Initial values of the injected hyperparameters, by their path in the optimizer's state."""
    lora: LoraRecord = field(default_factory=LoraRecord)
    """The base model of low-rank factors."""
    update: OptimizerRecord = field(default_factory=OptimizerRecord)
    """The optimizer's update; empty for a `Loop`, and without a workdir."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's functions by their use: model, objective, augment, ..."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each use, the digest and place (`FILE:LINE`) of each function reached, by name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of JAX, XLA and CUDA that change results."""
    trajectories: Mapping[str, int] = field(default_factory=dict)
    """Names of the trajectories that have led to the state, each with the step after which it
    began. A run that goes back to an earlier checkpoint, or starts again from step 0, begins
    another one, because it makes other states of the same steps."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries and of Python."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes in the order of their labels; empty if they have none."""
        names: Sequence[str] = self.dataset.get("classes", ())
        return names

    def trajectory_at(self, step: int) -> str:
        """Returns the name of the trajectory that led to the state of a step; "" if it has none.

        What is known of a state, such as its evaluation, is found by this name and the step.
        """
        began = [(start, name) for name, start in self.trajectories.items() if start < step]
        return max(began, default=(0, ""))[1]

    def branched(self, after: int) -> dict[str, int]:
        """Returns the trajectories of a run that leaves this one.

        `after` is the last step that they have in common; -1 if there is none.
        """
        kept = {name: start for name, start in self.trajectories.items() if start < after}
        return {**kept, secrets.token_hex(4): after}


def describe_leaves(state: Any) -> dict[str, str]:
    """Returns the shape and dtype of every leaf by its path, as in `Identity.leaves`."""
    return {name: describe_leaf(leaf) for name, leaf in named_leaves(state).items()}


def describe_leaf(leaf: Any) -> str:
    """Returns the shape and dtype of an array as `float32[784,128]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def describe_optimizer(opt_state: Any) -> str:
    """Returns the names of the states of an optimizer's transformations."""
    if not isinstance(opt_state, tuple):
        return "_"
    return f"{type(opt_state).__name__}({', '.join(map(describe_optimizer, opt_state))})"


def check_same_run(
    saved: Identity,
    now: Identity,
    source: str,
    step: int,
    *,
    instead: str = _OTHER_WORKDIR,
    same_program: bool = True,
) -> None:
    """Checks that a run can continue from a checkpoint.

    Args:
      source: Name of the checkpoint in messages.
      step: Step of the checkpoint. The weights of a mixture may differ from there on.
      instead: What to do if the difference is intended, for messages.
      same_program: Whether to check the optimizer's update too, and settings of JAX that give
        results another meaning.

    Raises:
      UserError: If seed, batch size, data, model or optimizer differ. Names the field or parameter,
        both values, and the option that restores the saved one.
    """
    if same_program and (problem := setting_problem(saved.settings, now.settings)) is not None:
        _refuse(f"{source} was trained with {problem}, or {instead}")
    for name in _names(OnResume.REFUSED):
        before, here = saved.config[name], now.config[name]
        if before != here:
            other = _ALONE.get(name)
            without = f" (and no {option(other)})" if other else ""
            _refuse(
                f"{source} was trained with {name}={before}, this run has {here}: give "
                f"{option(name, before)}{without}, or {instead}"
            )
    remedy = _remedy(saved.config, now.config, "data_dir", instead=instead)
    check_same_classes(saved.classes, now.classes, f"{source} was", f"; {remedy}")
    _check_same_data(saved.dataset, now.dataset, source, remedy)
    _check_skipped(saved.config, now.config, source, step)
    position = _skipped(saved.config).position(step)
    _check_same_stages(saved.dataset, now.dataset, source, position, instead)
    _check_same_lora(saved, now, source, instead)
    remedy = _remedy(saved.config, now.config, instead=instead)
    renewed = renewed_leaves(saved.leaves, now.leaves)
    before, here = ({n: x for n, x in i.leaves.items() if n not in renewed} for i in (saved, now))
    _check_same_leaves(before, here, source, remedy)
    if saved.optimizer != now.optimizer:
        _refuse(
            f"{source} is of another optimizer: opt_state is {saved.optimizer} there and "
            f"{now.optimizer} here; {remedy}{_start_from(source, remedy)}"
        )
    if same_program and (problem := optimizer_problem(saved, now)) is not None:
        _refuse(
            f"{source} is of another optimizer, with the same state: {problem}; {remedy}, "
            f"{anyway()}{_start_from(source, remedy)}"
        )


def _check_same_lora(saved: Identity, now: Identity, source: str, instead: str) -> None:
    """Checks that the scale of low-rank factors and the place of their base model are the same."""
    before, here = saved.lora, now.lora
    if before.alpha and here.alpha and before.alpha != here.alpha:
        _refuse(
            f"{source} was trained with LoRA's alpha {before.alpha:g}, this run has "
            f"{here.alpha:g}: give alpha {before.alpha:g}, or {instead}"
        )
    if before.source and here.alpha and not now.config["init_from"]:
        _refuse(
            f"{source} holds LoRA factors alone, for the base weights {before.source}: give "
            f"{option('init_from', saved.config['init_from'])}"
        )
    if before.alpha and not before.source and now.config["init_from"]:
        _refuse(
            f"{source} holds its base weights, because it was trained without init_from: leave "
            f"{option('init_from', now.config['init_from'])} out, or {instead}"
        )


def _check_same_data(
    saved: Mapping[str, Any], now: Mapping[str, Any], source: str, remedy: str, component: str = ""
) -> None:
    """Checks that two fingerprints are of the same data, component by component."""
    before, here = _components_of(saved), _components_of(now)
    if set(before) != set(here):
        _refuse(
            f"{source} was trained on {_mixture_of(before)}, and this run has "
            f"{_mixture_of(here)}; {remedy}"
        )
    for name, part in here.items():
        _check_same_data(before[name], part, source, remedy, f" of component {name!r}")
    for name in {**now, **saved}:
        if name in ("classes", "components", "stages") or saved.get(name) == now.get(name):
            continue
        _refuse(
            f"{source} was trained on other data: {name}{component} was {saved.get(name)}, and is "
            f"{now.get(name)} now; {remedy}"
        )


def _components_of(dataset: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the fingerprints of the components of a mixture, as far as they are valid."""
    found = dataset.get("components")
    parts = found.items() if isinstance(found, Mapping) else ()
    return {name: part for name, part in parts if isinstance(part, Mapping)}


def _mixture_of(components: Mapping[str, Any]) -> str:
    return f"a mixture of {', '.join(sorted(components))}" if components else "no mixture"


def _check_same_stages(
    saved: Mapping[str, Any], now: Mapping[str, Any], source: str, step: int, instead: str
) -> None:
    """Checks that the weights of a mixture before a step are the same."""
    for start, before, here in _changed_stages(saved, now):
        if start < step:
            _refuse(
                f"{source} was trained with {_describe_weights(before)} from step {start} on, and "
                f"this run has {_describe_weights(here)}: weights may change from step {step} on; "
                f"or use {instead}"
            )


def _skipped(config: Mapping[str, Any]) -> SkippedBatches:
    """Returns the batches that a configuration of JSON values leaves out."""
    return SkippedBatches.parse(config["skip_steps"])


def all_skipped(saved: Identity, now: Identity) -> tuple[str, ...]:
    """Returns `skip_steps` of a run that continues another one: the ranges of both runs."""
    return SkippedBatches.parse([*_skipped(saved.config).texts, *now.config["skip_steps"]]).texts


def _check_skipped(
    saved: Mapping[str, Any], now: Mapping[str, Any], source: str, step: int
) -> None:
    """Checks that no batch that is now left out was used before a step."""
    before = _skipped(saved)
    batch, position = _skipped(now).first_not_in(before), before.position(step)
    if batch is not None and batch < position:
        _refuse(
            f"skip_steps leaves out batch {batch}, and {source} has used batches up to "
            f"{position - 1}: give ranges from {position} on, or fork an earlier checkpoint into "
            f"another workdir ({option('fork_from', 'RUN@STEP')})"
        )


def _changed_stages(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[int, Mapping[str, float] | None, Mapping[str, float] | None]]:
    """Returns the stages that differ: their first step, and the weights in both."""
    before, here = _stages_of(saved), _stages_of(now)
    return [
        (start, before.get(start), here.get(start))
        for start in sorted({**before, **here})
        if _shares(before.get(start)) != _shares(here.get(start))
    ]


def _stages_of(dataset: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Returns the stages of a mixture's fingerprint, checked because anyone may have written it."""
    stages = dataset.get("stages") or {}
    try:
        found = {
            int(start): {str(name): float(weight) for name, weight in weights.items()}
            for start, weights in stages.items()
        }
    except (AttributeError, TypeError, ValueError):
        found = {0: {}}
    for weights in found.values():
        if not all(0 <= x < math.inf for x in weights.values()) or not any(weights.values()):
            _refuse(f"the weights of the mixture in a checkpoint are not valid: {stages}")
    return found


def _shares(weights: Mapping[str, float] | None) -> list[int] | None:
    """Returns the proportions of weights: (2, 1) and (4, 2) have the same."""
    return None if weights is None else examples_per_period(weights).tolist()


def _describe_weights(weights: Mapping[str, float] | None) -> str:
    if weights is None:
        return "no other weights"
    return f"the weights {', '.join(f'{name} {weight:g}' for name, weight in weights.items())}"


def _refuse(message: str) -> NoReturn:
    """Raises `UserError`. Text of a manifest is escaped and cut: anyone may have written it."""
    raise UserError(foreign(message, _MAX_MESSAGE))


def check_same_classes(
    trained: Sequence[str], here: Sequence[str], who: str, remedy: str = ""
) -> None:
    """Checks that labels mean the same classes; without names on either side nothing is checked.

    `trained` are the classes that the model was trained on, `here` those of the data. `who` begins
    the message, such as "the model was", and `remedy` ends it. Raises `UserError` if they differ.
    """
    if not trained or not here or list(trained) == list(here):
        return
    pairs = zip_longest(trained, here, fillvalue="nothing")
    before, now = next((a, b) for a, b in pairs if a != b)
    raise UserError(
        f"{who} trained on the classes {_in_short(trained)}; this data has {_in_short(here)} (the "
        f"first that differs: {foreign(before, 200)}, here {foreign(now, 200)}){remedy}"
    )


def _in_short(names: Sequence[str]) -> str:
    shown = names if len(names) <= 5 else [*names[:3], f"... ({len(names)})"]
    return foreign(", ".join(shown), _MAX_MESSAGE)


def check_same_model(
    saved: Identity, config: Mapping[str, Any], leaves: Mapping[str, str], source: str
) -> None:
    """Checks that a checkpoint has the parameters and the model state of this run's model.

    `config` and `leaves` are as in this run's `Identity`; `source` names the checkpoint in
    messages. Raises `UserError` if an array differs.
    """
    before, here = (
        {n: x for n, x in all_leaves.items() if n.split("/")[0] in Variables._fields}
        for all_leaves in (saved.leaves, leaves)
    )
    _check_same_leaves(before, here, source, _remedy(saved.config, config))


def _check_same_leaves(
    saved: Mapping[str, str], now: Mapping[str, str], source: str, remedy: str
) -> None:
    if saved.keys() != now.keys() and _without_numbers(saved) == _without_numbers(now):
        before, here = (
            min(a.keys() - b.keys(), key=lambda name: (not name.startswith("params/"), name))
            for a, b in ((saved, now), (now, saved))
        )
        _refuse(
            f"{source} has the arrays of this model under other names: {before} there, {here} "
            "here. Keras numbers unnamed layers over the whole process: call "
            "keras.utils.clear_session() before the model is created, or name the model and its "
            "layers"
        )
    for name in [*now, *saved]:
        if saved.get(name) != now.get(name):
            part = name.split("/")[0]
            kind = _KINDS.get(part, "model")
            if name == "key":
                remedy = "give jax_default_prng_impl the value of that run: rbg has 4 words"
            _refuse(
                f"{source} is of another {kind}: {name} is {saved.get(name, 'absent')} there and "
                f"{now.get(name, 'absent')} here; {remedy}"
                + ("" if kind == "model" or name == "key" else _start_from(source, remedy))
            )


def _without_numbers(leaves: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the leaves without the numbers at the ends of names: `dense` for `dense_3`."""
    return sorted((re.sub(r"_\d+(?=/|$)", "", name), leaf) for name, leaf in leaves.items())


def changes(saved: Identity, now: Identity) -> list[str]:
    """Returns the differences between two runs, each as `name: before -> after`.

    These are options, the optimizer's arguments and constants, functions of the user, settings of
    JAX, versions of libraries, and the weights of a mixture by the step from which on they hold. A
    field that the saved configuration lacks had the default.
    """
    found = changed_options(saved.config, now.config)
    found += program_changes(saved, now)
    found += [
        f"mixture from step {start} on: {_describe_weights(old)} -> {_describe_weights(new)}"
        for start, old, new in _changed_stages(saved.dataset, now.dataset)
    ]
    return [foreign(text, _MAX_MESSAGE) for text in found]


def changed_options(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the options that differ between two configurations, as `name: before -> after`.

    Options that change nothing of what is computed are left out. The configurations are JSON
    values; a field that `saved` lacks had the default.
    """
    before, free = _fields(config_as_json(RunConfig())) | _fields(saved), _names(OnResume.FREE)
    return [
        foreign(f"{name}: {before.get(name)} -> {value}", _MAX_MESSAGE)
        for name, value in _fields(now).items()
        if name not in free and before.get(name) != value
    ]


def _remedy(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *suspects: str,
    instead: str = _OTHER_WORKDIR,
) -> str:
    """Returns the options of the experiment that differ, with their saved values."""
    before, here = _fields(saved), _fields(now)
    suspects = (*suspects, "ema_decay", "freeze")
    own = [n for n in before if n.split(".")[0] not in _COMMON or n in suspects]
    given = " ".join(option(name, before[name]) for name in own if before[name] != here.get(name))
    return f"give {given or 'the same'}, or {instead}"


def _fields(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of a configuration by option name; nested names have a dot."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        nested = isinstance(value, dict)
        fields |= _fields(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return fields


def _start_from(source: str, remedy: str) -> str:
    """Returns the hint to take the parameters alone, unless the remedy says so already."""
    if option("init_from") in remedy:
        return ""
    parameters = option("init_from", source)
    return f", or take its parameters alone: {parameters} and another workdir"
