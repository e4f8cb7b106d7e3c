"""Training on mixtures: losses by component, evaluation, resume, and what is refused."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import metrics
from linear_model import squared_error, trainer
from step_helpers import on

from spmdtrain import CollectiveOptions, Loop, Mixture, UserError
from spmdtrain.data.sampling import TrainBatches, all_rows
from spmdtrain.document.terminal import Terminal
from spmdtrain.parameter_server.partition import FixedShards, ServerPartition
from spmdtrain.parameter_server.server import Server
from spmdtrain.parameter_server.worker import Worker
from spmdtrain.tree import named_leaves

pytestmark = pytest.mark.slow

STEPS = 12
WEIGHTS = {"a": 0.7, "b": 0.25, "few": 0.05}
LATER = {"a": 0.0, "b": 1.0, "few": 1.0}


def data(number: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(number, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True) + np.float32(shift)


DATA = {"a": data(50, 0), "b": data(30, 5), "few": data(5, 9)}


def mixture(stages: Any = None, weights: Any = None) -> Mixture:
    weights = weights or WEIGHTS
    return Mixture({name: (DATA[name], weights[name]) for name in DATA}, stages)


def trained(workdir: Path, stages: Any = None, **options: Any) -> list[dict[str, Any]]:
    """The lines of metrics of a run."""
    made = trainer(**{"workdir": str(workdir), "log_every": 1, "steps": STEPS, "seed": 1} | options)
    made.fit(mixture({6: LATER} if stages is None else stages))
    return metrics(workdir, "train")


def losses(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name.startswith("loss")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    trained(folder)
    return folder


def test_the_loss_of_each_component_is_that_of_its_rows(tmp_path: Path) -> None:
    """At the initial parameters, which a learning rate of 0 keeps."""
    lines = trained(tmp_path, optimizer=optax.sgd(0.0))
    initial = trainer().functions.init(1).params
    parameters = {name: np.asarray(x) for name, x in named_leaves(initial).items()}
    batches = TrainBatches(mixture({6: LATER}), 8, 1, True, STEPS, all_rows(8))
    absent = 0
    for step, line in enumerate(lines):
        batch = batches[step]
        x, y = batch.rows
        errors = (x @ parameters["kernel"] + parameters["bias"] - y)[:, 0] ** 2
        expected = {"loss": errors.mean()}
        for number, name in enumerate(batch.names):
            if (of := errors[batch.component == number]).size:
                expected[f"loss/{name}"] = of.mean()
        absent += 4 - len(expected)
        assert losses(line) == pytest.approx(expected, rel=1e-5), step
    assert absent == 9  # components without rows are left out


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": on(1)},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"mesh": on(2), "microbatches": 2},
                {"mesh": on(3), "uneven_batch": "pad", "data_on_device": True},
                {"strategy": "fully_sharded"},
            )
        ),
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in (
                {"collectives": CollectiveOptions(reduction="automatic")},
                {"steps_per_dispatch": 3, "data_threads": 2},
                {"data_on_device": True},
                {"mesh": on(3), "uneven_batch": "pad", "steps_per_dispatch": 2},
            )
        ),
    ],
    ids=lambda options: "-".join(options),
)
def test_losses_of_components_are_those_of_eight_devices(
    tmp_path: Path, uninterrupted: Path, options: dict[str, Any]
) -> None:
    found, expected = trained(tmp_path, **options), metrics(uninterrupted, "train")
    assert len(found) == STEPS
    for line, other in zip(map(losses, found), map(losses, expected), strict=True):
        assert line == pytest.approx(other, rel=1e-3), options


def test_a_worker_of_parameter_servers_computes_the_losses_of_components() -> None:
    of = trainer(mesh=on(1), optimizer=optax.sgd(0.0))
    steps = of.functions
    state = jax.tree.map(np.asarray, steps.init(0))
    division = ServerPartition.of(steps.abstract_state, steps.update, 1, FixedShards(1))
    server = Server(division.on_server, division.held_by(0, state), step=0)
    options: Any = {"batch_size": 8, "seed": 0, "shuffle": True, "threads": 2, "augment": None}
    worker = Worker(steps, of.placement, division, mixture(), **options, key=state.key)
    computed = worker.compute(3, *division.pulled([server.pull()]))
    counts = {name: weight for name, (_, weight) in computed.sums.items()}
    batch = TrainBatches(mixture(), 8, 0, True, 4, all_rows(8))[3]
    expected = np.bincount(batch.component, minlength=3)
    assert [counts[f"loss/{name}"] for name in batch.names] == expected.tolist()
    total = sum(computed.sums[f"loss/{name}"][0] for name in batch.names)
    assert total == pytest.approx(computed.sums["loss"][0])


def test_an_evaluation_is_of_each_component_and_of_all() -> None:
    made = trainer(seed=1)
    made.fit(mixture(), steps=2)
    found = made.evaluate(mixture())
    alone = {f"loss/{name}": made.evaluate(DATA[name])["loss"] for name in DATA}
    sizes = {name: len(DATA[name][0]) for name in DATA}
    mean = sum(alone[f"loss/{n}"] * size for n, size in sizes.items()) / sum(sizes.values())
    assert found == pytest.approx({"loss": mean, **alone}, rel=1e-6)
    assert made.predict(mixture()).shape == (85, 1)


def test_the_best_checkpoint_can_be_chosen_by_a_component(tmp_path: Path) -> None:
    options: Any = {"workdir": str(tmp_path), "best_metric": "loss/few", "seed": 1}
    made = trainer(**options)
    found = made.fit(mixture(), validation=mixture(), steps=3)
    assert set(found.validation) == {"loss", "loss/a", "loss/b", "loss/few"}
    with pytest.raises(UserError, match="best_metric is 'loss/new', which no evaluation gives"):
        trainer(**options | {"best_metric": "loss/new"}).fit(
            mixture(), validation=mixture(), steps=3
        )


# --- Resume ---


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path
) -> None:
    # 4 and 7: within a block of positions, before and after the other weights.
    for steps in (4, 7, STEPS):
        trained(tmp_path, steps=steps)
    assert metrics(tmp_path, "train") == metrics(uninterrupted, "train")


def test_weights_may_change_from_the_restored_step_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, stages={}, steps=6)
    trained(tmp_path, terminal=Terminal())
    assert (
        "changed since: mixture from step 6 on: no other weights -> the weights a 0, b 1, few 1\n"
    ) in capsys.readouterr().out
    whole = trained(tmp_path / "whole")
    assert metrics(tmp_path, "train") == whole


def test_other_weights_before_the_restored_step_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, steps=7)
    with pytest.raises(UserError) as caught:
        trained(tmp_path, stages={6: WEIGHTS})
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints/7 was trained with the weights a 0, b 1, few 1 from step 6 on, "
        "and this run has the weights a 0.7, b 0.25, few 0.05: weights may change from step 7 on; "
        "or use another workdir"
    )
    for stages, named in (({}, "no other weights"), ({5: LATER}, "the weights a 0, b 1, few 1")):
        with pytest.raises(UserError, match=f"this run has {named}"):
            trained(tmp_path, stages=stages)
    # The same shares in other numbers.
    double = {name: 2 * weight for name, weight in WEIGHTS.items()}
    made = trainer(workdir=str(tmp_path), steps=8, seed=1, log_every=1)
    made.fit(mixture({6: LATER, 100: WEIGHTS}, double))
    assert made.step == 8


def test_other_components_are_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, steps=2)

    def resume(train: Any) -> None:
        trainer(workdir=str(tmp_path), steps=4, seed=1).fit(train)

    others = {name: (DATA[name], WEIGHTS[name]) for name in DATA}
    with pytest.raises(UserError, match=r"on a mixture of a, b, few, .* a mixture of a, b;"):
        resume(Mixture({name: others[name] for name in ("a", "b")}))
    with pytest.raises(UserError, match="crc32 of component 'b' was "):
        resume(Mixture(others | {"b": (data(30, 6), 0.25)}))
    with pytest.raises(UserError, match="on a mixture of a, b, few, and this run has no mixture"):
        resume(DATA["a"])


# --- What is refused ---


def test_a_mixture_has_no_epochs() -> None:
    with pytest.raises(UserError) as caught:
        trainer().fit(mixture(), epochs=3)
    assert str(caught.value) == (
        "epochs is 3, and a Mixture has no epochs, because each of its components repeats for "
        "itself: give steps"
    )


def test_a_metric_with_the_name_of_a_component_s_loss_is_refused() -> None:
    def objective(model: Any, batch: Any) -> Any:
        return {f"loss{end}": x for end in ("", "/b") for x in squared_error(model, batch).values()}

    with pytest.raises(UserError, match="'loss/b' has the name of a metric of a component"):
        trainer(objective=objective).fit(mixture(), steps=1)


def test_a_loop_receives_rows_alone() -> None:
    with Loop(steps=2, global_batch_size=8, terminal=Terminal(quiet=True)) as loop:
        loop.start(lambda key: {"params": jnp.ones(8)}, train=mixture())
        x, y = next(loop.batches())
    assert x.shape == (8, 4) and y.shape == (8, 1)
