"""The output of a fit in the cells of a notebook, run by a real kernel."""

import re
from typing import Any

import nbformat
import pytest
from helpers import BOUND
from nbclient import NotebookClient

CELLS = {
    "begin": """
import os, signal, threading
os.environ |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
import numpy as np, optax
from flax import nnx
from spmdtrain import Trainer, open_run
x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
data = x, x.sum(1, keepdims=True)

def objective(model, batch):
    loss = (model(batch[0]) - batch[1]) ** 2
    return {"loss": loss[:, 0], "<b>": loss[:, 0]}

def interrupt(event):
    if event.step == INTERRUPTED_AT:
        os.kill(os.getpid(), signal.SIGINT)

INTERRUPTED_AT = 10**9
model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
trainer = Trainer(
    model=model, objective=objective, optimizer=optax.sgd(0.01), workdir="run",
    callbacks={"step": interrupt}, log_every=1,
)
""",
    "fit": "result = trainer.fit(data, validation=data, epochs=20, global_batch_size=32)",
    "result": "result",
    "table": "trainer.sharding_table()",
    "plan": "trainer.plan_step((x[:32], x[:32, :1]))",
    "run": "open_run('run')",
    "keras": "result.history['val_loss'], result.history['loss'], list(result.history)",
    "evaluate": "trainer.evaluate(data)",
    "interrupt": """INTERRUPTED_AT = 165
trainer.fit(data, validation=data, epochs=1000, global_batch_size=32)""",
    "after": "trainer.step, trainer.evaluate(data)['loss'] < 0.1",
    "again": """more = trainer.step + 3
trainer.fit(data, validation=data, steps=more, global_batch_size=32).step""",
    "interrupt without a workdir": """INTERRUPTED_AT = 7
bare = Trainer(
    model=model, objective=objective, optimizer=optax.sgd(0.01), callbacks={"step": interrupt}
)
bare.fit(data, epochs=1000, global_batch_size=32)""",
    "continued": """INTERRUPTED_AT = 10**9
at = bare.step
found = bare.fit(data, steps=20, global_batch_size=32)
whole = Trainer(model=model, objective=objective, optimizer=optax.sgd(0.01))
whole.fit(data, steps=20, global_batch_size=32)
at, (bare.state.params["kernel"] == whole.state.params["kernel"]).all().item()""",
    "loop": """from spmdtrain import Loop
import jax.numpy as jnp

def init(key):
    return {"params": jnp.zeros(4)}

def update(state, batch, key):
    loss = jnp.mean((batch[0] @ state.params - batch[1][:, 0]) ** 2)
    return state, {"loss": loss}

def run_loop(**options):
    with Loop(steps=50, workdir="loop", global_batch_size=32, log_every=1, **options) as loop:
        state = loop.start(init, train=data)
        step = loop.compile_step(update)
        for batch in loop.batches():
            state, output = step(state, batch)
            loop.end_step(state, output)
            if loop.step == INTERRUPTED_AT:
                os.kill(os.getpid(), signal.SIGINT)

INTERRUPTED_AT = 20
run_loop()""",
    "loop again": """INTERRUPTED_AT = 10**9
run_loop()""",
    "quiet": """options = {"optimizer": optax.sgd(0.01), "quiet": True}
quiet = Trainer(model=model, objective=objective, **options)
quiet.fit(data, validation=data, epochs=2, global_batch_size=32)
None""",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook: Any = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    )
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=BOUND, resources=resources, allow_errors=True).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


def printed(outputs: list[Any]) -> str:
    return "".join(each.text for each in outputs if each.output_type == "stream")


def shown(outputs: list[Any], kind: str = "text/html") -> list[str]:
    return [each.data[kind] for each in outputs if kind in each.get("data", {})]


def test_a_fit_is_one_display_with_its_curves_and_few_lines(outputs: dict[str, list[Any]]) -> None:
    display, results = shown(outputs["fit"])
    assert "train 160/160  loss " in display and "<progress" in display and "<script" not in display
    (text, _) = shown(outputs["fit"], "text/plain")
    assert text.startswith("train 160/160  loss ") and "\n" not in text
    assert [display.count(name) for name in ("train loss ", "epoch loss ", "eval loss ")] == [1] * 3
    # 160 logged steps, 20 epochs and 20 evaluations.
    points = [line.count(",") for line in re.findall('<polyline points="([^"]*)"', display)]
    assert points == [160, 20, 20]
    assert "&lt;b&gt;" in results and "<b>" not in display + results
    lines = printed(outputs["fit"])
    assert "2 x cpu, mirrored" in lines and "finished at step 160" in lines
    assert "eval at step" not in lines and "epoch 1" not in lines and "\x1b" not in lines
    assert sum(len(str(each)) for each in outputs["fit"]) < 30_000


def test_results_tables_plans_and_runs_are_shown_as_html(outputs: dict[str, list[Any]]) -> None:
    expected = {
        "result": ["step 160", "<svg", ">epoch loss"],
        "table": [">kernel<", "bytes per device", "each of 2 devices holds"],
        "plan": [">mesh<", ">data=2<"],
        "run": ["run: finished, step 160 saved", "<svg", ">eval loss"],
    }
    for name, parts in expected.items():
        (found,) = shown(outputs[name])
        assert [part for part in parts if part not in found] == [], name


def test_the_history_is_also_that_of_keras(outputs: dict[str, list[Any]]) -> None:
    (text,) = shown(outputs["keras"], "text/plain")
    evaluated, means, names = eval(text)
    assert (len(evaluated), len(means)) == (20, 20) and evaluated[0] > evaluated[-1]
    assert {"loss", "val_loss", "<b>", "val_<b>"} < {*names} and "step" not in names


def test_a_short_evaluation_shows_no_progress(outputs: dict[str, list[Any]]) -> None:
    assert [each.output_type for each in outputs["evaluate"]] == ["execute_result"]


def test_an_interrupted_cell_saves_and_leaves_the_trainer_usable(
    outputs: dict[str, list[Any]],
) -> None:
    lines = printed(outputs["interrupt"])
    assert re.search(r"SIGINT: saved step \d+; run it again to resume", lines)
    assert "Traceback" not in lines and "exit" not in lines
    ((step, is_small),) = [eval(text) for text in shown(outputs["after"], "text/plain")]
    assert 165 <= step < 1000 and is_small
    assert shown(outputs["again"], "text/plain")[-1] == str(step + 3)


def test_without_a_workdir_an_interrupted_fit_continues_to_the_same_bits(
    outputs: dict[str, list[Any]],
) -> None:
    lines = printed(outputs["interrupt without a workdir"])
    assert "SIGINT: nothing saved (no workdir); a Trainer keeps its state: call fit again" in lines
    at, is_same = eval(shown(outputs["continued"], "text/plain")[-1])
    assert 7 <= at < 20 and is_same
    # Also if the first point is that of an epoch. After an interrupt no time is left.
    assert "epoch loss " in shown(outputs["continued"])[0]
    assert " left" not in shown(outputs["interrupt without a workdir"])[0]


def test_a_loop_is_shown_and_interrupted_as_a_fit(outputs: dict[str, list[Any]]) -> None:
    (display,) = shown(outputs["loop"])
    assert re.search(r"train 2\d/50  loss ", display) and "train loss " in display
    lines = printed(outputs["loop"])
    assert re.search(r"SIGINT: saved step 2\d; run it again to resume", lines)
    assert "Traceback" not in lines and "SystemExit" not in str(outputs["loop"])
    assert "train 50/50  loss " in shown(outputs["loop again"])[0]
    assert "finished at step 50" in printed(outputs["loop again"])


def test_a_quiet_fit_prints_its_result_alone(outputs: dict[str, list[Any]]) -> None:
    assert shown(outputs["quiet"]) == []
    assert re.fullmatch(r"eval at step 16: loss .*\n", printed(outputs["quiet"]))
