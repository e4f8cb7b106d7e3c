"""Train a JAX model on one device or many with the same script.

Names are imported when they are first used, so that `import spmdtrain` alone starts no backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BATCH_AXES": "mesh",
    "Adapter": "adapters",
    "ArrayDataset": "data",
    "Collectives": "config",
    "Coordinator": "coordinator",
    "Dataset": "data",
    "Event": "callbacks",
    "Experiment": "experiment",
    "FitResult": "trainer",
    "FixedShards": "partitioners",
    "FunctionModel": "adapters",
    "Gather": "sharding",
    "ImageFolder": "images",
    "KerasModel": "keras_model",
    "LinenModel": "adapters",
    "Loop": "loop",
    "Manifest": "manifest",
    "Mapped": "data",
    "MaxSize": "partitioners",
    "MeshSpec": "config",
    "MinSize": "partitioners",
    "Mode": "adapters",
    "Moment": "callbacks",
    "NonFiniteError": "errors",
    "PerReplica": "replicas",
    "Preempted": "errors",
    "ReplicaError": "errors",
    "Rule": "sharding",
    "RunConfig": "config",
    "Servers": "config",
    "ShardingOptions": "config",
    "StorageError": "errors",
    "Subset": "data",
    "TrainState": "state",
    "Trainer": "trainer",
    "UserError": "errors",
    "Variables": "adapters",
    "Weighted": "metrics",
    "adapt": "adapting",
    "constrain": "placement",
    "current_strategy": "placement",
    "export_params": "export",
    "find_idx": "idx",
    "initialize": "distributed",
    "load_model": "loading",
    "load_params": "restore",
    "load_variables": "restore",
    "per_replica": "replicas",
    "read_idx": "idx",
    "read_manifest": "restore",
    "reduce": "replicas",
    "rematerialize": "remat",
    "resolve_on_devices": "placement",
    "weighted_mean": "metrics",
}

__all__ = [
    "BATCH_AXES",
    "Adapter",
    "ArrayDataset",
    "Collectives",
    "Coordinator",
    "Dataset",
    "Event",
    "Experiment",
    "FitResult",
    "FixedShards",
    "FunctionModel",
    "Gather",
    "ImageFolder",
    "KerasModel",
    "LinenModel",
    "Loop",
    "Manifest",
    "Mapped",
    "MaxSize",
    "MeshSpec",
    "MinSize",
    "Mode",
    "Moment",
    "NonFiniteError",
    "PerReplica",
    "Preempted",
    "ReplicaError",
    "Rule",
    "RunConfig",
    "Servers",
    "ShardingOptions",
    "StorageError",
    "Subset",
    "TrainState",
    "Trainer",
    "UserError",
    "Variables",
    "Weighted",
    "adapt",
    "constrain",
    "current_strategy",
    "export_params",
    "find_idx",
    "initialize",
    "load_model",
    "load_params",
    "load_variables",
    "per_replica",
    "read_idx",
    "read_manifest",
    "reduce",
    "rematerialize",
    "resolve_on_devices",
    "weighted_mean",
]

if TYPE_CHECKING:
    from spmdtrain.adapters import Adapter, FunctionModel, LinenModel, Mode, Variables
    from spmdtrain.adapting import adapt
    from spmdtrain.callbacks import Event, Moment
    from spmdtrain.config import Collectives, MeshSpec, RunConfig, Servers, ShardingOptions
    from spmdtrain.coordinator import Coordinator
    from spmdtrain.data import ArrayDataset, Dataset, Mapped, Subset
    from spmdtrain.distributed import initialize
    from spmdtrain.errors import NonFiniteError, Preempted, ReplicaError, StorageError, UserError
    from spmdtrain.experiment import Experiment
    from spmdtrain.export import export_params
    from spmdtrain.idx import find_idx, read_idx
    from spmdtrain.images import ImageFolder
    from spmdtrain.keras_model import KerasModel
    from spmdtrain.loading import load_model
    from spmdtrain.loop import Loop
    from spmdtrain.manifest import Manifest
    from spmdtrain.mesh import BATCH_AXES
    from spmdtrain.metrics import Weighted, weighted_mean
    from spmdtrain.partitioners import FixedShards, MaxSize, MinSize
    from spmdtrain.placement import constrain, current_strategy, resolve_on_devices
    from spmdtrain.remat import rematerialize
    from spmdtrain.replicas import PerReplica, per_replica, reduce
    from spmdtrain.restore import load_params, load_variables, read_manifest
    from spmdtrain.sharding import Gather, Rule
    from spmdtrain.state import TrainState
    from spmdtrain.trainer import FitResult, Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"spmdtrain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
