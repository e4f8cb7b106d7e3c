"""Runs with the clients of W&B, MLflow and Trackio, offline: what their own files hold."""

import importlib
import json
import sqlite3
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import BOUND, command, environment, metrics, small_experiment

MEDIA = """
def media(model, batch):
    x, y = batch
    return {
        "pixels": Image(jnp.abs(x[:4].reshape(2, 2)), ["corner"]),
        "answers": Table({"x": x[:2, 0], "y": y[:2, 0]}),
        "spread": Histogram(y, bins=4),
        "said": Text(jnp.arange(3), str),
        "wide": Text("a line"),
    }


def drawn(event):
    event.metrics["found@1"] = 0.5
    event.log({"drawn": Figure("<svg xmlns='http://www.w3.org/2000/svg'></svg>")})


def build(config):
"""
CHANGES = [
    ("import numpy as np\n", "import jax.numpy as jnp\nimport numpy as np\n"),
    ("import Experiment", "import Experiment, Figure, Histogram, Image, Table, Text"),
    ("\ndef build(config):\n", MEDIA),
    ("validation=data,", 'validation=data, media=media, callbacks={"evaluation": drawn},'),
]
NAMES = ("wandb", "mlflow", "trackio")
Point = tuple[str, int]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 2 steps that was resumed up to step 4."""
    folder = tmp_path_factory.mktemp("tracked")
    config = small_experiment(folder, *CHANGES)
    env = environment() | {
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        # Anything that left this machine would fail, and be printed as the failure of a tracker.
        **dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
        "no_proxy": "127.0.0.1,localhost",
    }
    for name in ("MLFLOW_TRACKING_URI", "WANDB_DIR", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        env.pop(name, None)
    for steps in (2, 4):
        options = ("--workdir", "run", "--log-every", 1, "--eval-every-steps", 2, "--steps", steps)
        ended = subprocess.run(
            command(config, *options, "--trackers", *NAMES),
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        assert ended.returncode == 0, ended.stderr
        assert "continues without it" not in ended.stdout and "lost" not in ended.stdout
    assert not (folder / "run" / "tensorboard").exists()
    return folder


def expected(folder: Path) -> dict[Point, float]:
    lines = metrics(folder / "run")
    return {
        (f"{line['split']}/{name}", line["step"]): value
        for line in lines
        for name, value in line.items()
        if name not in ("split", "step")
    }


def check_points(found: dict[Point, float], folder: Path) -> None:
    """The points of a tracker are those of the metrics file, to the bit, and the speeds."""
    points = expected(folder)
    assert {("train/loss", step) for step in (1, 2, 3, 4)} <= points.keys()
    assert {("eval/loss", 2), ("eval/found@1", 4)} <= points.keys()
    assert {point: found[point] for point in points} == points
    assert ("speed/examples_per_second", 4) in found
    assert {found["job/processes", step] for step in (0, 1, 2, 3, 4)} == {1}  # 0: at the start


def ids(folder: Path) -> dict[str, str]:
    content: dict[str, str] = json.loads((folder / "run" / "trackers.json").read_text())
    return content


def wandb_records(path: Path) -> Iterator[Any]:
    """Yields the records of a W&B file: blocks of 32 KiB in the log format of LevelDB."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb_has_the_metrics_the_configuration_and_media_of_one_run(tracked: Path) -> None:
    run = ids(tracked)["wandb"]
    folders = sorted(path for path in (tracked / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in folders] == [run, run]
    found: dict[Point, float] = {}
    rows, configs, steps = [], [], []
    for folder in folders:
        for record in wandb_records(folder / f"run-{run}.wandb"):
            if record.HasField("run"):
                assert record.run.run_id == run
                config = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
                configs.append(config)
            if record.HasField("metric"):
                steps.append((record.metric.glob_name, record.metric.step_metric))
            if record.HasField("history"):
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append(row)
                found |= {
                    (tag, row["step"]): x for tag, x in row.items() if type(x) in (int, float)
                }
    check_points(found, tracked)
    assert ("*", "step") in steps  # curves over `step`, which may go back
    assert configs[0]["learning_rate"] == 0.1 and configs[0]["steps"] == 2
    by_name = {tag: value for row in rows if row["step"] == 4 for tag, value in row.items()}
    assert by_name["eval/pixels/captions"] == ["corner"]
    assert by_name["eval/spread/_type"] == "histogram"
    assert sum(by_name["eval/spread/values"]) == 32
    assert by_name["eval/answers/ncols"] == 2 and by_name["eval/said/nrows"] == 1
    for folder in folders:
        assert len(list((folder / "files" / "media" / "images" / "eval").glob("pixels*.png"))) == 1
        assert len(list((folder / "files" / "media" / "html" / "eval").glob("drawn*.html"))) == 1


def test_mlflow_has_the_metrics_the_configuration_and_media_of_one_run(tracked: Path) -> None:
    run = ids(tracked)["mlflow"]
    (meta,) = (tracked / "mlruns").glob("*/*/meta.yaml")
    folder = meta.parent
    assert folder.name == run and "status: 3" in meta.read_text()  # finished
    found: dict[Point, float] = {}
    for path in (folder / "metrics").rglob("*"):
        if path.is_file():
            for line in path.read_text().splitlines():
                _, value, step = line.split()
                tag = str(path.relative_to(folder / "metrics"))
                # MLflow refuses "@" in a name.
                found[tag.replace("found_1", "found@1"), int(step)] = float(value)
    check_points(found, tracked)
    assert (folder / "params" / "learning_rate").read_text() == "0.1"
    assert (folder / "params" / "steps").read_text() == "2"  # of the first start
    assert json.loads((folder / "artifacts" / "config.json").read_text())["steps"] == 4
    artifacts = {path.name for path in (folder / "artifacts").rglob("*")}
    assert {f"drawn-0000000{step}.svg" for step in (2, 4)} <= artifacts
    assert {f"said-0000000{step}.txt" for step in (2, 4)} <= artifacts
    assert {name.split("+")[2] for name in artifacts if name.startswith("eval~pixels")} == {
        "2",
        "4",
    }
    table = json.loads(
        (folder / "artifacts" / "tables" / "eval" / "answers-00000004.json").read_text()
    )
    assert table["columns"] == ["x", "y"] and table["data"][0] == [-1.0, -1.0]


def test_trackio_has_the_metrics_the_configuration_and_media_of_one_run(tracked: Path) -> None:
    with sqlite3.connect(tracked / "trackio" / "spmdtrain.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    database.close()
    assert len({row[0] for row in rows}) == 1 and {row[1] for row in rows} == {
        ids(tracked)["trackio"]
    }
    found: dict[Point, Any] = {}
    for _, _, step, content in rows:
        found |= {(tag, step): value for tag, value in json.loads(content).items()}
    check_points(found, tracked)
    assert json.loads(config)["learning_rate"] == 0.1
    assert (tracked / "trackio" / "media" / found["eval/pixels", 4]["file_path"]).is_file()
    assert found["eval/spread", 4]["_type"] == "trackio.histogram"
    assert found["eval/wide", 2]["_value"] == "a line"
