"""Train a JAX model on one device or many with the same script.

Names are imported when they are first used, so that `import spmdtrain` alone starts no backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BATCH_AXES": "sharding.mesh",
    "Adapter": "adapters.base",
    "ArrayDataset": "data.datasets",
    "Collectives": "config",
    "Coordinator": "parameter_server.coordinator",
    "Dataset": "data.datasets",
    "Event": "train.callbacks",
    "Experiment": "train.experiment",
    "FitResult": "train.trainer",
    "FixedShards": "parameter_server.partition",
    "FunctionModel": "adapters.base",
    "Gather": "sharding.layout",
    "ImageFolder": "data.image_folder",
    "KerasModel": "adapters.keras",
    "LinenModel": "adapters.base",
    "Loop": "train.loop",
    "Manifest": "checkpoints.manifest",
    "Mapped": "data.datasets",
    "MaxSize": "parameter_server.partition",
    "MeshSpec": "config",
    "MinSize": "parameter_server.partition",
    "Mode": "adapters.base",
    "Moment": "train.callbacks",
    "NonFiniteError": "errors",
    "PerReplica": "step.per_replica",
    "Preempted": "errors",
    "ReplicaError": "errors",
    "Rule": "sharding.layout",
    "RunConfig": "config",
    "Servers": "config",
    "ShardingOptions": "config",
    "StorageError": "errors",
    "Subset": "data.datasets",
    "TrainState": "step.state",
    "Trainer": "train.trainer",
    "UserError": "errors",
    "Variables": "adapters.base",
    "Weighted": "step.metrics",
    "adapt": "adapters.as_adapter",
    "constrain": "sharding.placement",
    "current_strategy": "sharding.placement",
    "export_params": "checkpoints.export",
    "find_idx": "data.idx",
    "initialize": "distributed.initialize",
    "load_model": "checkpoints.load_model",
    "load_params": "checkpoints.restore",
    "load_variables": "checkpoints.restore",
    "per_replica": "step.per_replica",
    "read_idx": "data.idx",
    "read_manifest": "checkpoints.restore",
    "reduce": "step.per_replica",
    "rematerialize": "step.remat",
    "resolve_on_devices": "sharding.placement",
    "weighted_mean": "step.metrics",
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
    from spmdtrain.adapters.as_adapter import adapt
    from spmdtrain.adapters.base import Adapter, FunctionModel, LinenModel, Mode, Variables
    from spmdtrain.adapters.keras import KerasModel
    from spmdtrain.checkpoints.export import export_params
    from spmdtrain.checkpoints.load_model import load_model
    from spmdtrain.checkpoints.manifest import Manifest
    from spmdtrain.checkpoints.restore import load_params, load_variables, read_manifest
    from spmdtrain.config import Collectives, MeshSpec, RunConfig, Servers, ShardingOptions
    from spmdtrain.data.datasets import ArrayDataset, Dataset, Mapped, Subset
    from spmdtrain.data.idx import find_idx, read_idx
    from spmdtrain.data.image_folder import ImageFolder
    from spmdtrain.distributed.initialize import initialize
    from spmdtrain.errors import NonFiniteError, Preempted, ReplicaError, StorageError, UserError
    from spmdtrain.parameter_server.coordinator import Coordinator
    from spmdtrain.parameter_server.partition import FixedShards, MaxSize, MinSize
    from spmdtrain.sharding.layout import Gather, Rule
    from spmdtrain.sharding.mesh import BATCH_AXES
    from spmdtrain.sharding.placement import constrain, current_strategy, resolve_on_devices
    from spmdtrain.step.metrics import Weighted, weighted_mean
    from spmdtrain.step.per_replica import PerReplica, per_replica, reduce
    from spmdtrain.step.remat import rematerialize
    from spmdtrain.step.state import TrainState
    from spmdtrain.train.callbacks import Event, Moment
    from spmdtrain.train.experiment import Experiment
    from spmdtrain.train.loop import Loop
    from spmdtrain.train.trainer import FitResult, Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"spmdtrain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
