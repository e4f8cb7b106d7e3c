"""Compiled Keras models: whole fits and scripts, beside Keras' own `fit`."""

import contextlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import linear_model
import numpy as np
import optax
import pytest
from helpers import REPOSITORY

from spmdtrain import MeshSpec, NonFiniteError, ShardingOptions, Trainer, UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import PreemptedExit
from spmdtrain.run import main
from spmdtrain.tree import named_leaves

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")

# Keras copies arrays in a way that NumPy 2 will not know some day.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SCRIPTS = REPOSITORY / "tests" / "integration" / "keras_scripts"
_draw = np.random.default_rng(0)
X = _draw.normal(1.0, 2.0, (80, 4)).astype(np.float32)
Y = _draw.integers(0, 3, 80).astype(np.int32)
BATCH, EPOCHS = 16, 4


def made(optimizer: Any = None, *, normalizes: bool = True) -> Any:
    """A compiled model with batch statistics and a regularizer; the same values each time."""
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(momentum=0.9, name="norm")
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "relu", kernel_regularizer="l2", name="hidden"),
            *([norm] if normalizes else []),
            keras.layers.Dense(3, "softmax", name="out", kernel_constraint="max_norm"),
        ],
        name="net",
    )
    optimizer = optimizer or keras.optimizers.Adam(0.03, global_clipnorm=1.0)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def trainer(model: Any, devices: int = 1, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"shuffle": False, "log_every": 1, "terminal": Terminal(quiet=True)}
    defaults["mesh"] = MeshSpec(devices=tuple(range(devices)))
    return Trainer.from_keras(model, **defaults | options)


def watchers(file: Path) -> list[Any]:
    return [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=9.0),
        keras.callbacks.EarlyStopping("val_accuracy", patience=2, min_delta=2.0, mode="max"),
        keras.callbacks.CSVLogger(str(file)),
    ]


def test_losses_rates_and_values_are_those_of_keras_fit(tmp_path: Path) -> None:
    theirs = made()
    callbacks = watchers(tmp_path / "theirs.csv")
    keras_fit = theirs.fit(
        X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
        validation_data=(X[:37], Y[:37]), callbacks=callbacks,
    ).history  # fmt: skip
    assert len(keras_fit["loss"]) == 3  # stopped early
    assert keras_fit["learning_rate"][-1] < 4e-3
    for devices, rtol in {1: 1e-5, 8: 1e-4}.items():
        ours, seen = made(), tmp_path / f"{devices}.csv"
        fitted = trainer(ours, devices, callbacks=watchers(seen))
        result = fitted.fit(
            (X, Y), epochs=EPOCHS, global_batch_size=BATCH, validation=(X[:37], Y[:37])
        )
        for name in ("loss", "accuracy"):
            found = [epoch[name] for epoch in result.history.epochs]
            np.testing.assert_allclose(found, keras_fit[name], rtol=1e-5)
            found = [evaluation[name] for evaluation in result.history.evaluations]
            np.testing.assert_allclose(found, keras_fit[f"val_{name}"], rtol=1e-5)
        for variable, expected in zip(
            [*ours.weights, *ours.optimizer.variables],
            [*theirs.weights, *theirs.optimizer.variables],
            strict=True,
        ):
            np.testing.assert_allclose(variable.value, expected.value, rtol=rtol, atol=1e-6)
        rows = np.genfromtxt(seen, delimiter=",", names=True)
        expected_rows = np.genfromtxt(tmp_path / "theirs.csv", delimiter=",", names=True)
        assert rows.dtype.names == expected_rows.dtype.names
        for name in expected_rows.dtype.names or ():
            np.testing.assert_allclose(rows[name], expected_rows[name], rtol=rtol)


def test_a_resumed_run_has_the_bits_and_the_callbacks_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    """Also if a signal has interrupted the evaluation for which the callbacks wait."""

    def fit(name: str, *totals: int, interrupted: bool = False) -> Any:
        for epochs in totals:
            model, data = made(), linear_model.Interrupting(X, Y)
            options = {"strategy": "fully_sharded", "sharding": ShardingOptions(min_size=8)}
            falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1))
            is_armed = interrupted and epochs == 3
            arm = [{"epoch_end": partial(data.arm, 10)}] if is_armed else []
            callbacks = [falling, *watchers(tmp_path / f"{name}.csv")[1:], *arm]
            fitted = trainer(model, 2, callbacks=callbacks, workdir=str(tmp_path / name), **options)
            with pytest.raises(PreemptedExit) if is_armed else contextlib.nullcontext():
                fitted.fit((X, Y), epochs=epochs, global_batch_size=BATCH, validation=data)
            callbacks[2].csv_file.close()  # which Keras closes at the end of a training alone
        return model, fitted

    (whole, fitted), (resumed, _) = fit("whole", 4), fit("parts", 1, 3, 4, interrupted=True)
    assert fitted.step == 15  # stopped early
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()
    for variable, expected in zip(
        [*resumed.weights, *resumed.optimizer.variables],
        [*whole.weights, *whole.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(variable.value, expected.value)
    leaves = named_leaves(fitted.state.opt_state)
    specs = {n: x.sharding.spec for n, x in leaves.items() if n.endswith("net/hidden/kernel")}
    assert len(specs) == 2 and set(map(str, specs.values())) == {"P(None, 'fsdp')"}


@pytest.mark.nightly
def test_a_state_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    """Keras takes the first value as the best one, also if it is infinite."""

    def log_of_zero(y: Any, predicted: Any) -> Any:
        return keras.ops.log(0 * predicted[:, 0])

    for epochs in (1, 3):
        model = made()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[log_of_zero])
        watch = keras.callbacks.EarlyStopping("val_log_of_zero", patience=5, mode="max")
        fitted = trainer(model, callbacks=[watch], workdir=str(tmp_path))
        fitted.fit((X, Y), epochs=epochs, global_batch_size=BATCH, validation=(X, Y))
    assert watch.best == -np.inf and watch.wait == 2


@pytest.mark.nightly
def test_callbacks_get_the_epoch_of_the_history(tmp_path: Path) -> None:
    """Where batches reach over the ends of epochs, and after a resume within one."""
    begun, ended = list[int](), list[int]()

    def fit(**length: Any) -> Any:
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.5 if epoch == 2 else 0.25)
        files = keras.callbacks.ModelCheckpoint(
            str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True
        )
        seen = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begun.append(epoch),
            on_epoch_end=lambda epoch, logs: ended.append(epoch),
        )
        options: dict[str, Any] = {"workdir": str(tmp_path / "run")}
        options["callbacks"] = [rates, files, seen]
        return trainer(made(), **options).fit((X, Y), global_batch_size=30, **length).history

    fit(steps=7)  # epochs end at steps 3, 6, 8 and 11
    history = fit(epochs=4)
    assert [(epoch["step"], epoch["epoch"]) for epoch in history.epochs] == [
        *((3, 1), (6, 2), (8, 3), (11, 4))
    ]
    rates = [epoch["learning_rate"] for epoch in history.epochs]
    np.testing.assert_allclose(rates, [0.25, 0.25, 0.5, 0.25], rtol=1e-6)
    assert ended == [0, 1, 2, 3] and sorted(set(begun)) == [0, 1, 2, 3]
    files = sorted(path.name for path in tmp_path.glob("*.h5"))
    assert files == [f"{number}.weights.h5" for number in (1, 2, 3, 4)]


@pytest.mark.nightly
def test_the_best_values_are_restored(tmp_path: Path) -> None:
    stop = keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=9.0, restore_best_weights=True
    )
    first, model = made(), made()
    trainer(first).fit((X, Y), epochs=1, global_batch_size=BATCH)
    fitted = trainer(model, callbacks=[stop])
    assert fitted.fit((X, Y), epochs=4, global_batch_size=BATCH).step == 10
    for found in (model, fitted.model):
        np.testing.assert_allclose(found.get_weights()[0], first.get_weights()[0], rtol=1e-6)
    with pytest.raises(UserError, match="restore_best_weights keeps the values in memory"):
        trainer(made(), callbacks=[stop], workdir=str(tmp_path)).fit((X, Y), epochs=1)


@pytest.mark.parametrize("parts", [{}, {"microbatches": 2}])
def test_each_step_has_the_loss_of_one_device(parts: dict[str, Any]) -> None:
    def losses(devices: int, **options: Any) -> list[float]:
        seen: list[float] = []
        callbacks = [{"log": lambda event: seen.append(event.metrics["loss"])}]
        fitted = trainer(made(normalizes=not parts), devices, callbacks=callbacks, **options)
        fitted.fit((X, Y), steps=7, global_batch_size=BATCH)
        return seen

    one = losses(1)
    assert len(one) == 7
    np.testing.assert_allclose(losses(8, **parts), one, rtol=1e-5)


def test_files_calls_and_averages_are_those_of_keras_fit(tmp_path: Path) -> None:
    models, calls = [], []
    for number in range(2):
        seen: list[Any] = []
        model = made(keras.optimizers.AdamW(0.03, use_ema=True, ema_momentum=0.5))
        callbacks = [
            keras.callbacks.ModelCheckpoint(str(tmp_path / f"{number}_{{epoch}}.keras")),
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs, seen=seen: seen.append("begin"),
                on_epoch_begin=lambda epoch, logs, seen=seen: seen.append(epoch),
                on_epoch_end=lambda epoch, logs, seen=seen: seen.append((epoch, logs["loss"])),
                on_train_end=lambda logs, seen=seen: seen.append("end"),
            ),
            keras.callbacks.TerminateOnNaN(),
        ]
        if number:
            trainer(model, callbacks=callbacks).fit((X, Y), epochs=2, global_batch_size=BATCH)
        else:
            model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0,
                      callbacks=callbacks)  # fmt: skip
        files = [keras.saving.load_model(tmp_path / f"{number}_{epoch}.keras") for epoch in (1, 2)]
        models.append([model, *files])
        calls.append(seen)
    assert calls[1][::5] == ["begin", "end"] and calls[1][1::2] == calls[0][1::2] == [0, 1, "end"]
    np.testing.assert_allclose(
        [loss for _, loss in calls[1][2:5:2]], [loss for _, loss in calls[0][2:5:2]], rtol=1e-5
    )
    for theirs, ours in zip(*models, strict=True):
        for expected, found in zip(theirs.get_weights(), ours.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    (averaged, _, last), nan = models[1], np.full_like(X, np.nan)
    assert np.abs(averaged.get_weights()[0] - last.get_weights()[0]).max() > 1e-3
    with pytest.raises(NonFiniteError):
        trainer(made(), callbacks=callbacks[2:]).fit((nan, Y), epochs=1, global_batch_size=BATCH)


def fitted_with(model: Any, callbacks: list[Any], *, keras_fit: bool, **options: Any) -> Any:
    """Trains with a validation and the same batches; returns the epochs' metrics."""
    options = {"epochs": EPOCHS, **options}
    if keras_fit:
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks,
                  validation_data=(X, Y), **options)  # fmt: skip
        return model.evaluate(X, Y, verbose=0)[0]
    fitted = trainer(model, callbacks=callbacks)
    fitted.fit((X, Y), global_batch_size=BATCH, validation=(X, Y), **options)
    return fitted.evaluate((X, Y))["loss"]


def viewed(model: Any, seen: list[Any]) -> Any:
    """Returns a callback that records what a callback can read."""

    def view(hook: str, epoch: int, logs: Any) -> None:
        values = [np.array(v.value) for v in (*model.weights, *model.optimizer.variables)]
        rate = float(model.optimizer.learning_rate)
        seen.append(
            (hook, epoch, sorted(logs or {}), rate, int(model.optimizer.iterations), values)
        )

    return keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: view("train_begin", 0, logs),
        on_epoch_begin=lambda epoch, logs: view("epoch_begin", epoch, logs),
        on_epoch_end=lambda epoch, logs: view("epoch_end", epoch, logs),
        on_train_end=lambda logs: view("train_end", 0, logs),
    )


def halves(epoch: int, rate: float) -> float:
    return rate / 2


def plateau() -> Any:
    return keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.1, patience=1, min_delta=9.0)


def assigning(model: Any) -> Any:
    """Returns a callback that assigns a learning rate and weights."""

    def assign(epoch: int, logs: Any) -> None:
        model.optimizer.learning_rate = 0.01 / (epoch + 1)
        model.set_weights([0.9 * x for x in model.get_weights()])

    def begin(logs: Any) -> None:
        model.optimizer.learning_rate = 0.005
        model.set_weights([1.1 * x for x in model.get_weights()])

    return keras.callbacks.LambdaCallback(on_train_begin=begin, on_epoch_end=assign)


CALLBACKS: dict[str, Any] = {
    "none": lambda model: [],
    "scheduled": lambda model: [keras.callbacks.LearningRateScheduler(halves)],
    "on a plateau": lambda model: [plateau()],
    "stopped": lambda model: [keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=9.0)],
    "assigning": lambda model: [assigning(model)],
}


@pytest.mark.parametrize("case", CALLBACKS)
def test_a_callback_sees_the_model_and_the_optimizer_of_its_step(case: str, tmp_path: Path) -> None:
    """Before and after the others; files that are written in between continue as those of Keras."""
    views, losses, continued = [], [], []
    for number in range(2):
        model, seen = made(), []  # type: ignore[var-annotated]
        file = tmp_path / f"{number}.keras"
        save = keras.callbacks.ModelCheckpoint(str(file), "val_loss", save_best_only=True)
        weights = keras.callbacks.ModelCheckpoint(
            str(tmp_path / f"{number}_{{epoch}}.weights.h5"), save_weights_only=True
        )
        callbacks = [
            viewed(model, seen),
            *CALLBACKS[case](model),
            viewed(model, seen),
            save,
            weights,
        ]
        losses.append(fitted_with(model, callbacks, keras_fit=number == 0))
        views.append(seen)
        of_weights = made()
        of_weights.optimizer.build(of_weights.trainable_variables)
        of_weights.load_weights(tmp_path / f"{number}_2.weights.h5")
        for each in (keras.saving.load_model(file), of_weights):
            continued.append(int(each.optimizer.iterations))
            continued.append(fitted_with(each, [], keras_fit=True, epochs=1))
    assert len(views[1]) == len(views[0]) > 6
    for found, expected in zip(views[1], views[0], strict=True):
        assert found[:3] == expected[:3]
        np.testing.assert_allclose(found[3:5], expected[3:5], rtol=1e-6)
        for x, y in zip(found[5], expected[5], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert continued[0] >= 5
    np.testing.assert_allclose(continued[4:], continued[:4], rtol=1e-5)


def test_with_an_average_a_callback_assigns_a_rate_and_no_weights() -> None:
    """The model has the average, which must not replace the parameters."""

    def rate_of(model: Any) -> Any:
        def assign(epoch: int, logs: Any) -> None:
            model.optimizer.learning_rate = 0.03 / (epoch + 1)

        return keras.callbacks.LambdaCallback(on_epoch_begin=assign)

    scheduled = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.03 / (epoch + 1))
    params = []
    for own in (False, True):
        model = made()
        fitted = trainer(model, callbacks=[rate_of(model) if own else scheduled], ema_decay=0.9)
        fitted.fit((X, Y), epochs=2, global_batch_size=BATCH)
        assert fitted.state is not None
        params.append(named_leaves(fitted.state.params))
    for name, expected in params[0].items():
        np.testing.assert_allclose(params[1][name], expected, rtol=1e-5, atol=1e-7)
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    for make, words in (
        (assigning, "LambdaCallback assigns weights"),
        (lambda model: best, "best"),
    ):
        model = made()
        fitted = trainer(model, callbacks=[make(model)], ema_decay=0.9)
        with pytest.raises(UserError, match=rf"{words}.*ema_decay=0\.9.* average"):
            fitted.fit((X, Y), epochs=2, global_batch_size=BATCH)


def test_files_do_not_hold_another_optimizer_than_that_which_trains(tmp_path: Path) -> None:
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "x.keras"))
    with pytest.raises(
        UserError, match="ModelCheckpoint: its files would hold the optimizer 'adam"
    ):
        trainer(made(), callbacks=[save], optimizer=optax.sgd(0.1))


def test_a_callback_that_watches_a_missing_metric_is_an_error() -> None:
    fitted = trainer(made(), callbacks=[keras.callbacks.EarlyStopping("auc")])
    with pytest.raises(UserError, match="there is no metric 'auc': there are accuracy, loss"):
        fitted.fit((X, Y), epochs=1, global_batch_size=BATCH)
    fitted = trainer(made(), callbacks=[keras.callbacks.EarlyStopping("val_loss")])
    with pytest.raises(
        UserError, match=r"EarlyStopping uses a metric 'val_\.{3}', but .*accuracy, loss"
    ):
        fitted.fit((X, Y), epochs=1, global_batch_size=BATCH)


def test_a_callback_does_not_wait_for_the_metrics_of_an_evaluator(tmp_path: Path) -> None:
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    net.compile("sgd", "mse")
    x = np.ones((8, 4), np.float32)
    trainer = Trainer.from_keras(
        net,
        callbacks=[keras.callbacks.EarlyStopping("val_loss")],
        evaluated_by="evaluator",
        workdir=str(tmp_path / "run"),
    )
    with pytest.raises(UserError, match=r"EarlyStopping uses .* evaluated_by is 'evaluator'"):
        trainer.fit((x, x[:, :1]), validation=(x, x[:, :1]), epochs=1, global_batch_size=8)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""  # before the first step


def small(count: int = 2) -> Any:
    net = keras.Sequential(
        [keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(count)), keras.layers.Dense(1)]
    )
    net.compile("sgd", "mse")
    return net


SMALL = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
SMALL_DATA = SMALL, SMALL[:, :1]


@pytest.mark.parametrize("suffix", ["keras", "weights.h5"])
def test_a_file_of_the_same_layers_needs_no_map(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"net.{suffix}"
    saved = small()
    (saved.save if suffix == "keras" else saved.save_weights)(file)
    other = small()  # other values, under other names
    from_file = Trainer.from_keras(other, init_from=str(file), quiet=True)
    taken = from_file.model.get_weights()
    for one, two in zip(taken, saved.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    for count in (1, 3):
        with pytest.raises(UserError, match="of a model with other layers"):
            Trainer.from_keras(small(count), init_from=str(file), quiet=True).predict(SMALL)


@pytest.mark.parametrize("weights", [(), (np.linspace(0.1, 2, 40, dtype=np.float32),)])
def test_a_batch_that_does_not_divide_has_the_numbers_of_one_device(weights: Any) -> None:
    def fitted(devices: int, **options: Any) -> Trainer:
        net = small()
        net.set_weights([np.full(x.shape, 0.1) for x in net.get_weights()])
        mesh = MeshSpec(devices=tuple(range(devices)))
        trainer = Trainer.from_keras(net, mesh=mesh, quiet=True, **options)
        trainer.fit((*SMALL_DATA, *weights), epochs=1, global_batch_size=6)
        return trainer

    one, four = (fitted(devices).model.get_weights() for devices in (1, 4))
    for a, b in zip(one, four, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="6: it does not divide over 4 devices"):
        fitted(4, uneven_batch="refuse")
    with pytest.raises(UserError, match="6: it does not divide over 4 devices"):
        fitted(4, exact=8)


def test_files_of_every_n_steps_and_events_of_epochs(tmp_path: Path) -> None:
    def callbacks(folder: Path) -> list[Any]:
        file = str(folder / "{epoch}-{batch}.keras")
        return [
            keras.callbacks.ModelCheckpoint(file, save_freq=3),
            keras.callbacks.TensorBoard(str(folder / "events")),
        ]

    net = small()
    values = net.get_weights()
    folders = [tmp_path / name for name in ("keras", "ours")]
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    net.fit(*SMALL_DATA, **options, callbacks=callbacks(folders[0])[:1])
    net.set_weights(values)
    net.compile("sgd", "mse")
    trainer = Trainer.from_keras(net, callbacks=callbacks(folders[1]), shuffle=False, quiet=True)
    trainer.fit(SMALL_DATA, epochs=2, global_batch_size=8, validation=SMALL_DATA)
    theirs, ours = ({x.name for x in folder.glob("*.keras")} for folder in folders)
    assert ours == theirs == {"1-3.keras", "2-1.keras", "2-4.keras"}
    for name in ours:
        one, two = (keras.saving.load_model(folder / name).get_weights() for folder in folders)
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for part in ("train", "validation"):
        (file,) = (folders[1] / "events" / part).iterdir()
        assert b"epoch_loss" in file.read_bytes()


def test_the_error_for_a_model_under_other_names_names_clear_session(tmp_path: Path) -> None:
    for step in (1, 2):
        trainer = Trainer.from_keras(small(), workdir=str(tmp_path), quiet=True)
        if step == 1:
            trainer.fit(SMALL_DATA, steps=1, global_batch_size=8)
            continue
        with pytest.raises(UserError, match=r"under other names: params/.*clear_session\(\)"):
            trainer.fit(SMALL_DATA, steps=2, global_batch_size=8)


def test_the_command_trains_a_compiled_model(tmp_path: Path) -> None:
    file = SCRIPTS / "experiment.py"
    assert main(["--config", str(file), "--workdir", str(tmp_path), "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines if "auc" in x] == [5, 10]  # evaluations, not training
    assert lines[-1]["auc"] > 0.8


@pytest.mark.parametrize(
    "name",
    ["tickets", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("convnet", "timeseries"))],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras with JAX 0.12
def test_a_keras_script_needs_two_changed_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    changed = (SCRIPTS / f"{name}.py").read_text()
    plain = changed.replace("\nfrom spmdtrain import Trainer\n", "")
    plain, count = re.subn(r"# Keras: (.*)\nTrainer\.[^#]*\nscore", r"\1\nscore", plain)
    assert count == 1 and "Trainer" not in plain
    scores = []
    for number, code in enumerate((plain, changed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        shown: dict[str, Any] = {}
        exec(compile(code, name, "exec"), shown)
        scores.append(shown["score"])
    if name == "convnet":  # with dropout, whose masks differ, and shuffled
        assert min(score[1] for score in scores) > 0.85
        assert abs(scores[0][1] - scores[1][1]) < 0.06
    else:
        np.testing.assert_allclose(scores[1], scores[0], rtol=1e-4)
    if name == "timeseries":
        theirs, ours = (
            keras.saving.load_model(tmp_path / number / "best.keras").get_weights()[0]
            for number in ("0", "1")
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_code_of_the_page_trains_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (REPOSITORY / "docs" / "keras.md").read_text()
    (block,) = re.findall(r"^## Compiled models\n.*?^```python\n(.*?)^```", page, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    shown: dict[str, Any] = {}
    exec(compile(block, "keras.md", "exec"), shown)
    assert shown["score"][1] > 0.9
