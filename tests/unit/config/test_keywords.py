"""The options of a run in Python: completed by editors and notebooks, and shown by `help`."""

import dataclasses
import inspect
import pydoc
from typing import Any, get_args, get_type_hints

import jedi  # type: ignore[import-untyped]
import optax
import pytest
from flax import nnx

from spmdtrain import Loop, MeshSpec, RunConfig, Trainer, UserError
from spmdtrain.config.keywords import LoopOptions, TrainerOptions
from spmdtrain.config.options import default_of
from spmdtrain.document.terminal import Terminal
from spmdtrain.train.trainer import TrainerArguments

FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}

REFUSED: dict[type, dict[str, Any]] = {
    Trainer: {
        "learning_rate": 0.1,
        "learning_rate_scaling": "linear",
        "learning_rate_base_batch_size": 8,
        "learning_rate_table": {8: 0.1},
        "data_dir": "x",
    },
    Loop: {
        "uneven_batch": "pad",
        "steps_per_dispatch": 4,
        "microbatches": 2,
        "ema_decay": 0.5,
        "on_divergence": "rewind",
        "max_rewinds": 2,
        "freeze": ("x",),
        "data_on_device": True,
        "compute_dtype": "bfloat16",
        "remat": "full",
        "exact": 16,
        "batch_statistics": "replica",
        "jit": False,
        "eval_at_checkpoints": True,
        "evaluated_by": "evaluator",
        "init_from": "x",
        "checkpoint": "best",
        "init_from_strict": "matching",
        "sentinel_every": 2,
        "watch": ("x",),
        "profile_steps": "1:2",
    },
}


def make(of: type, **options: Any) -> None:
    """Makes a `Trainer` or a `Loop` with options."""
    if of is Loop:
        Loop(terminal=Terminal(quiet=True), **options)
    else:
        Trainer(
            model=lambda rngs: nnx.Linear(2, 1, rngs=rngs),
            objective=lambda model, x: {"loss": model(x)[:, 0]},
            optimizer=optax.sgd(0.1),
            terminal=Terminal(quiet=True),
            **options,
        )


@pytest.mark.parametrize(("of", "options"), [(Trainer, TrainerOptions), (Loop, LoopOptions)])
def test_each_field_is_a_keyword_unless_it_is_refused(of: type, options: type) -> None:
    keywords = get_type_hints(options)
    parameters = inspect.signature(of).parameters
    assert "options" not in parameters and keywords.keys() < parameters.keys()
    # A list is accepted for each option of several values, and its type says so.
    assert keywords["compiler_options"] == tuple[str, ...] | list[str]
    make(of, **{name: default_of(FIELDS[name]) for name in keywords})
    assert FIELDS.keys() - keywords.keys() - {"trackers"} == REFUSED[of].keys()
    for name, value in REFUSED[of].items():
        with pytest.raises(UserError, match=name.split("_")[0]):
            make(of, **{name: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Trainer(microb", ["microbatches="]),
        ("Loop(checkpoint_every", ["checkpoint_every_seconds=", "checkpoint_every_steps="]),
        ("Loop(microb", []),
        ("Trainer(learning", []),
        ("RunConfig(best_d", ["best_direction="]),
        ("MeshSpec(fs", ["fsdp="]),
    ],
)
def test_a_notebook_completes_the_options(text: str, expected: list[str]) -> None:
    names = {"Trainer": Trainer, "Loop": Loop, "RunConfig": RunConfig, "MeshSpec": MeshSpec}
    assert [each.name for each in jedi.Interpreter(text, [names]).complete()] == expected


def test_an_editor_reads_the_types_of_all_arguments() -> None:
    (of_trainer,) = get_args(get_type_hints(Trainer.__init__)["options"])
    (of_loop,) = get_args(get_type_hints(Loop.__init__)["options"])
    assert (of_trainer, of_loop) == (TrainerOptions, LoopOptions)
    optional = {
        name
        for name, each in inspect.signature(Trainer).parameters.items()
        if each.default is not each.empty
    }
    assert get_type_hints(TrainerArguments).keys() == optional - {"callbacks"}


class Own(Trainer):
    """A trainer with options of its own."""

    def __init__(self, width: int) -> None:
        make(Trainer)
        self.width = width


def test_a_subclass_has_the_signature_of_its_own() -> None:
    assert str(inspect.signature(Own)) == "(width: int) -> None"


@pytest.mark.slow
def test_help_shows_each_field_with_its_default() -> None:
    text = pydoc.render_doc(RunConfig, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    for name in FIELDS:
        assert f"\n |    {name} (" in text, name
    assert "keep_latest (int, default 3): " in text and "mesh (MeshSpec): see MeshSpec." in text
    assert "fsdp (int | None, default None): Number of devices along" in str(MeshSpec.__doc__)
