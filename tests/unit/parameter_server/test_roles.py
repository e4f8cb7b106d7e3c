"""One unchanged script in every role: TF_CONFIG and the strategy decide what each process does."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from helpers import metrics

from spmdtrain import Loop, Trainer, UserError
from spmdtrain.cluster.command import check_servers
from spmdtrain.cluster.spec import from_tf_config
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.launch.task_env import tf_configs
from spmdtrain.parameter_server.ray_nodes import run_task_role

# -- in this process -------------------------------------------------------------------------------

X = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def test_fit_in_an_evaluator_task_evaluates_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objective(model: Any, x: Any) -> dict[str, Any]:
        return {"loss": (model(x) - 3 * x) ** 2}

    def fit(**options: Any) -> None:
        trainer = Trainer(
            model=partial(nnx.Linear, 1, 1),
            objective=objective,
            optimizer=optax.sgd(0.1),
            workdir=str(tmp_path),
            strategy="mirrored",
            checkpoint_every_steps=2,
        )
        trainer.fit(X, validation=X, **options)

    fit(steps=4, global_batch_size=32)
    trained = {line["step"]: line["loss"] for line in metrics(tmp_path, "eval")}
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TF_CONFIG", tf_configs(["chief", "evaluator"])["evaluator"])
    with pytest.raises(SystemExit) as stop:
        fit(steps=4, global_batch_size=32)
    assert stop.value.code == 0
    lines = (tmp_path / "metrics.evaluator.jsonl").read_text().splitlines()
    found = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    assert list(found) == [2, 4] and found[4] == pytest.approx(trained[4], rel=1e-6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="evaluator 0"):
        Loop(steps=1)


@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ({"worker": ["a:1", "b:1"], "ps": ["c:1"]}, None),
        ({"chief": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
        ({"worker": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
    ],
)
def test_the_doctor_refuses_what_a_run_refuses(
    monkeypatch: pytest.MonkeyPatch, jobs: dict[str, list[str]], missing: str | None
) -> None:
    task = {"type": next(iter(jobs)), "index": 0}
    text = json.dumps({"cluster": jobs, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setattr(CONTEXT, "initialized", False)  # restored after the test
    (finding,) = check_servers(from_tf_config(text))
    if missing is None:
        assert finding.level == "ok"
        run_task_role(1.0)
        return
    assert finding.level == "error" and missing in finding.text
    with pytest.raises(UserError, match=missing):
        run_task_role(1.0)
