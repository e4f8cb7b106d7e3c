"""Options of `Trainer`, `Trainer.fit` and `Loop` that replace fields of a configuration."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Never, get_type_hints

from spmdtrain.config.run_config import OPTIONS, RunConfig
from spmdtrain.data.sampling import Augment
from spmdtrain.errors import UserError, did_you_mean, field_meant
from spmdtrain.record.storage import FixedFolder
from spmdtrain.sharding.mesh import check_inherited
from spmdtrain.trackers.base import Tracker, find_tracker
from spmdtrain.trackers.run_trackers import check_trackers

INSTEAD = {
    "class_weight class_weights": "weights are a part of the data: give the weight of each example "
    "with it, such as weights[y], and return (values, weights) from the objective, or with a Keras "
    "model fit((x, y, weights[y]))",
    "sample_weight sample_weights": "weights are a part of the data: give the weight of each "
    "example with it, and return (values, weights) from the objective, or with a Keras model "
    "fit((x, y, weights))",
    "steps_per_epoch": "an epoch is one pass over the data: give the total number of steps, "
    "fit(train, steps=...)",
    "initial_epoch": "epochs=... is a total: a run that continues makes the epochs that are left",
    "validation_split": "split the data, and give fit(train, validation=...)",
    "validation_steps": "an evaluation counts each example once: give a part of the data, "
    "fit(train, validation=Subset(data, np.arange(n)))",
    "verbose": "a Trainer or Loop with quiet=True prints nothing",
    "x y": "inputs and targets are one dataset: fit((x, y), ...), or fit({'x': x, 'y': y}, ...)",
    "loss loss_fn criterion": 'the objective, in a Loop the step, returns it: {"loss": values}',
    "metrics compute_metrics eval_metrics": "the objective, in a Loop the step, returns them "
    'beside the loss: {"loss": values, "accuracy": hits}',
    "gradient_clip_val max_grad_norm clipnorm clip_grad_norm gradient_clipping": "clipping is a "
    "part of the optimizer: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.001))",
    "weight_decay": "it is a part of the optimizer: optax.adamw(0.001, weight_decay=0.01)",
    "lr_scheduler scheduler warmup_steps": "a schedule is a part of the optimizer: "
    "optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.001, 100, 1000))",
    "patience early_stopping_patience": "it is a callback of the Trainer: "
    'callbacks=[EarlyStopping("loss", patience=3)]',
    "fp16 bf16 amp": 'it is compute_dtype="bfloat16" of the Trainer',
    "gpus devices num_devices accelerator": "a run uses all devices of JAX: CUDA_VISIBLE_DEVICES "
    "or JAX_NUM_CPU_DEVICES changes their number",
}
"""Names of options of other frameworks, separated by spaces -> what to do instead."""
_ADVICE = {name: advice for names, advice in INSTEAD.items() for name in names.split()}
OF_BUILD = {
    "learning_rate": "give it to the optimizer, for example optimizer=optax.adam(0.001)",
    "data_dir": "give the data to fit",
}
"""Fields of `RunConfig` that a `Trainer` refuses -> what to do instead."""
USED_IN_BUILD = {"learning_rate_scaling", "learning_rate_base_batch_size", "learning_rate_table"}
"""Fields of `RunConfig` that have no effect in a `Trainer`, whose optimizer is built."""


def _refuse(of: str, name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> Never:
    """Raises `UserError` for an unknown keyword, with a proposal that is accepted.

    Args:
      of: The function or class.
      known: Keywords that it accepts.
      elsewhere: What to do with keywords that others accept.
    """
    field = field_meant(name, {*known, *elsewhere, *OF_BUILD}) or name
    if field in OF_BUILD and field not in known:
        hint = f" {OF_BUILD[field][0].upper()}{OF_BUILD[field][1:]}."
    elif field not in known and field in elsewhere:
        hint = f" {elsewhere[field]}."
    elif field not in known and name in _ADVICE:
        hint = f" {_advice(of, name)}."
    else:
        hint = did_you_mean(name, known)
    raise UserError(f"{of} has no option {name!r}.{hint}")


def _advice(of: str, name: str) -> str:
    """Returns what to do instead of giving an option of other frameworks, as a sentence."""
    advice = _ADVICE[name]
    if of in ("evaluate", "predict"):  # they take data as `fit` does
        advice = advice.replace("fit(", f"{of}(")
    return advice[0].upper() + advice[1:]


def _given_to(receiver: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the advice to give each of these keywords to another function."""
    return {name: f"Give {name!r} to {receiver}" for name in names}


def _keywords(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the keywords that a function or class takes."""
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind in named and each.name != "self"]


@dataclasses.dataclass(frozen=True)
class KeywordsSignature:
    """The signature of a class with the keywords of its `**options`, for notebooks and `help`.

    It is made when it is read. Editors and type checkers read the `TypedDict` instead.
    """

    options: type
    """A `TypedDict` of fields of `RunConfig`."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        of_init = inspect.signature(owner.__init__)  # type: ignore[misc]
        _, *own = of_init.parameters.values()  # without `self`
        keywords: list[inspect.Parameter] = []
        if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:  # of a subclass
            return of_init.replace(parameters=own)
        for name, kind in get_type_hints(self.options).items():
            default = OPTIONS[name].default if name in OPTIONS else _Code(f"{kind.__name__}()")
            only = inspect.Parameter.KEYWORD_ONLY
            keywords.append(inspect.Parameter(name, only, default=default, annotation=kind))
        return of_init.replace(parameters=[*own[:-1], *keywords])


class _Code(str):
    """A default value as it is written in code."""

    __repr__ = str.__str__


def with_options(
    config: RunConfig,
    options: Mapping[str, Any],
    of: type,
    *,
    begin: Callable[..., Any],
    refused: Collection[str],
) -> RunConfig:
    """Returns the configuration with some fields replaced.

    Args:
      options: New values by field name.
      of: The class that received `options`, for the error message.
      begin: The method of the class that begins a run, and takes other keywords.
      refused: Fields that the class refuses, which are not proposed.

    Raises:
      UserError: If an option is no field of `config`, or if the result is not valid.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            known = [field for field in fields if field not in refused]
            elsewhere = _given_to(begin.__name__, _keywords(begin)) | {
                field: f"{field!r} is an option of the Trainer's own step" for field in refused
            }
            _refuse(of.__name__, name, list(dict.fromkeys([*known, *_keywords(of)])), elsewhere)
    config = dataclasses.replace(config, **options)
    check_inherited(config)
    return config


def validate_trainer_options(
    config: RunConfig, options: Mapping[str, Any], trainer: type
) -> RunConfig:
    """Returns the configuration with the options of a `Trainer`, which has a built optimizer.

    Raises:
      UserError: If an option is unknown or not valid, or has an effect only before the model, the
        optimizer and the data are built (`learning_rate`, its scaling, `data_dir`).
    """
    for name, advice in OF_BUILD.items():
        if name in options:
            raise UserError(f"{name} is for the build(config) of an experiment: {advice}")
    fit = trainer.fit  # type: ignore[attr-defined]
    refused = {*OF_BUILD, *USED_IN_BUILD}
    config = with_options(config, options, trainer, begin=fit, refused=refused)
    is_scaled = config.learning_rate_scaling != "none" or config.learning_rate_table
    if is_scaled or options.get("learning_rate_base_batch_size") is not None:
        raise UserError(
            "learning_rate_scaling and learning_rate_table have no effect in a Trainer, because "
            "its optimizer is already built: call config = resolve_config(config) first, and build "
            "the optimizer with config.learning_rate"
        )
    return config


def with_trackers(
    config: RunConfig, given: Sequence[Tracker | str] | None
) -> tuple[RunConfig, list[Tracker]]:
    """Returns the configuration with the named trackers, and the trackers that are objects.

    Args:
      config: The configuration. Its `trackers` stay if only objects are given.
      given: Names and objects; None for the trackers of the configuration.

    Raises:
      UserError: If a name is unknown, or an object is no `Tracker`.
    """
    if given is None:
        return config, []
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(
            f"trackers is {given!r}: it must be a list of names and Trackers, for example "
            '["tensorboard", "wandb"]'
        )
    names = tuple(each for each in given if isinstance(each, str))
    own = [each for each in given if not isinstance(each, str)]
    for name in names:
        find_tracker(name)
    check_trackers(own)
    if names or not given:
        config = dataclasses.replace(config, trackers=names)
    return config, own


REQUIRED: Any = object()
"""The default of `train` in `fit`, so that a wrong keyword is named before a missing one."""


def check_arguments(
    method: Callable[..., Any], data: Any, others: Sequence[Any], unknown: Mapping[str, Any]
) -> None:
    """Raises `UserError`, with a suggestion, for arguments that a method does not take.

    Args:
      method: `fit`, `evaluate` or `predict` of a trainer.
      data: The dataset; an error if it is `REQUIRED` or None.
      others: The positional arguments after it.
      unknown: The unknown keywords.
    """
    assert isinstance(method, MethodType)
    of = method.__name__
    if others:
        raise UserError(
            f"{of} takes one dataset, and {1 + len(others)} positional arguments are given. "
            f"{_advice(of, 'x')}."
        )
    for name in unknown:
        fields = {field.name for field in dataclasses.fields(RunConfig)} - {*OF_BUILD}
        elsewhere = _given_to("the Trainer", [*_keywords(type(method.__self__)), *fields])
        _refuse(of, name, _keywords(method), elsewhere)
    if data is REQUIRED:
        needs = "training data: fit(train, steps=...), or epochs=..." if of == "fit" else "data"
        raise UserError(f"{of} needs {needs}")
    if data is None:
        raise UserError(
            f"{of}: the data is None: give a dataset, or arrays in a tuple or dictionary"
        )


def with_fixed_folder(config: RunConfig) -> RunConfig:
    """Returns a configuration whose workdir stays, even if the working directory changes."""
    if config.workdir is None:
        return config
    return dataclasses.replace(config, workdir=FixedFolder(config.workdir))


def with_totals(
    config: RunConfig,
    epochs: int | None,
    steps: int | None,
    global_batch_size: int | None,
    batch_size_per_device: int | None,
) -> RunConfig:
    """Returns a configuration whose fields are replaced by the keywords of `Trainer.fit`."""
    if epochs is not None or steps is not None:
        config = dataclasses.replace(config, epochs=epochs, steps=steps)
    if global_batch_size is not None or batch_size_per_device is not None:
        config = dataclasses.replace(
            config,
            global_batch_size=global_batch_size,
            batch_size_per_device=batch_size_per_device,
        )
    return config


def check_augment(augment: Augment | None, config: RunConfig) -> None:
    """Raises `UserError` if examples that are augmented are to stay on the devices."""
    if augment is not None and config.data_on_device:
        raise UserError(
            "data_on_device and augment exclude each other, because augment changes the examples "
            "on the host"
        )
