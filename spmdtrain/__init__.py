"""Train a JAX model on one device or many with the same script.

Names are imported when they are first used, so that `import spmdtrain` alone starts no backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Adapter": "adapters.base",
    "ArrayDataset": "data.datasets",
    "ArrayRecordSource": "data.sources.array_record",
    "AxisRules": "sharding.annotations",
    "BATCH_AXES": "sharding.mesh",
    "BadRecordError": "errors",
    "CallbackContext": "train.callbacks",
    "CallbackEvent": "train.callbacks",
    "CollectiveOptions": "config.option_groups",
    "Combination": "step.outputs",
    "Coordinator": "parameter_server.coordinator",
    "Dataset": "data.datasets",
    "DeviceFaultError": "errors",
    "EarlyStopping": "train.stopping",
    "Experiment": "train.experiment",
    "ExpertOutput": "kernels.experts",
    "Figure": "trackers.media",
    "FitResult": "train.epochs",
    "FixedShards": "parameter_server.partition",
    "FunctionModel": "adapters.functional",
    "GatherPolicy": "sharding.rules",
    "Histogram": "trackers.media",
    "Image": "trackers.media",
    "ImageFolder": "data.image_folder",
    "JsonLinesSource": "data.sources.text_files",
    "KerasModel": "adapters.keras",
    "LinenModel": "adapters.linen",
    "LogSamples": "train.log_samples",
    "Loop": "train.loop",
    "LoraModel": "adapters.lora",
    "LoraRule": "adapters.lora",
    "Manifest": "checkpoints.manifest",
    "MappedDataset": "data.datasets",
    "MaxSize": "parameter_server.partition",
    "MeshSpec": "config.option_groups",
    "MinSize": "parameter_server.partition",
    "Mixture": "data.mixture",
    "Mode": "adapters.base",
    "NonFiniteError": "errors",
    "Packed": "data.packing",
    "ParameterServerOptions": "config.option_groups",
    "ParquetSource": "data.sources.parquet",
    "PerReplica": "step.per_replica",
    "PredictionMetric": "step.outputs",
    "PreemptedExit": "errors",
    "ReduceOnPlateau": "train.reduce_on_plateau",
    "ReplicaError": "errors",
    "Rule": "sharding.rules",
    "RunConfig": "config.run_config",
    "RunInfo": "trackers.base",
    "Scalar": "step.outputs",
    "ShardingOptions": "config.option_groups",
    "SkipBadRecords": "data.bad_records",
    "StopAtThreshold": "train.stopping",
    "StorageError": "errors",
    "Stream": "data.streams",
    "Subset": "data.datasets",
    "SumMetric": "step.outputs",
    "Table": "trackers.media",
    "Text": "trackers.media",
    "TextSource": "data.sources.text_files",
    "TokenDocuments": "data.sources.token_files",
    "TokenFile": "data.sources.token_files",
    "TokenLosses": "kernels.linear_cross_entropy",
    "Tokenized": "data.text",
    "Tracker": "trackers.base",
    "TrainState": "step.state",
    "Trainer": "train.trainer",
    "UploadCheckpoints": "train.upload_checkpoints",
    "UserError": "errors",
    "Variables": "adapters.base",
    "WeightRule": "weights.weight_map",
    "WeightedValues": "step.metrics",
    "as_adapter": "adapters.as_adapter",
    "attention": "kernels.attention",
    "balanced_accuracy": "train.shipped_metrics",
    "batch_coupled": "step.outputs",
    "confusion_counts": "train.shipped_metrics",
    "confusion_table": "train.shipped_metrics",
    "constrain_sharding": "sharding.placement",
    "current_strategy": "sharding.placement",
    "has_strategy": "sharding.placement",
    "experts": "kernels.experts",
    "export_params": "checkpoints.export",
    "find_idx": "data.idx",
    "initialize": "distributed.initialize",
    "linear_cross_entropy": "kernels.linear_cross_entropy",
    "load_model": "checkpoints.load_model",
    "load_params": "checkpoints.restore",
    "load_variables": "checkpoints.restore",
    "macro_f1": "train.shipped_metrics",
    "per_replica": "step.per_replica",
    "perplexity": "train.shipped_metrics",
    "read_idx": "data.idx",
    "read_manifest": "checkpoints.restore",
    "reduce": "step.per_replica",
    "remat": "step.remat",
    "resolve_config": "sharding.placement",
    "roc_auc": "train.shipped_metrics",
    "value_histogram": "train.shipped_metrics",
    "weighted_mean": "step.metrics",
}

__all__ = [
    "BATCH_AXES",
    "Adapter",
    "ArrayDataset",
    "ArrayRecordSource",
    "AxisRules",
    "BadRecordError",
    "CallbackContext",
    "CallbackEvent",
    "CollectiveOptions",
    "Combination",
    "Coordinator",
    "Dataset",
    "DeviceFaultError",
    "EarlyStopping",
    "Experiment",
    "ExpertOutput",
    "Figure",
    "FitResult",
    "FixedShards",
    "FunctionModel",
    "GatherPolicy",
    "Histogram",
    "Image",
    "ImageFolder",
    "JsonLinesSource",
    "KerasModel",
    "LinenModel",
    "LogSamples",
    "Loop",
    "LoraModel",
    "LoraRule",
    "Manifest",
    "MappedDataset",
    "MaxSize",
    "MeshSpec",
    "MinSize",
    "Mixture",
    "Mode",
    "NonFiniteError",
    "Packed",
    "ParameterServerOptions",
    "ParquetSource",
    "PerReplica",
    "PredictionMetric",
    "PreemptedExit",
    "ReduceOnPlateau",
    "ReplicaError",
    "Rule",
    "RunConfig",
    "RunInfo",
    "Scalar",
    "ShardingOptions",
    "SkipBadRecords",
    "StopAtThreshold",
    "StorageError",
    "Stream",
    "Subset",
    "SumMetric",
    "Table",
    "Text",
    "TextSource",
    "TokenDocuments",
    "TokenFile",
    "TokenLosses",
    "Tokenized",
    "Tracker",
    "TrainState",
    "Trainer",
    "UploadCheckpoints",
    "UserError",
    "Variables",
    "WeightRule",
    "WeightedValues",
    "as_adapter",
    "attention",
    "balanced_accuracy",
    "batch_coupled",
    "confusion_counts",
    "confusion_table",
    "constrain_sharding",
    "current_strategy",
    "experts",
    "export_params",
    "find_idx",
    "has_strategy",
    "initialize",
    "linear_cross_entropy",
    "load_model",
    "load_params",
    "load_variables",
    "macro_f1",
    "per_replica",
    "perplexity",
    "read_idx",
    "read_manifest",
    "reduce",
    "remat",
    "resolve_config",
    "roc_auc",
    "value_histogram",
    "weighted_mean",
]

if TYPE_CHECKING:
    from spmdtrain.adapters.as_adapter import as_adapter
    from spmdtrain.adapters.base import Adapter, Mode, Variables
    from spmdtrain.adapters.functional import FunctionModel
    from spmdtrain.adapters.keras import KerasModel
    from spmdtrain.adapters.linen import LinenModel
    from spmdtrain.adapters.lora import LoraModel, LoraRule
    from spmdtrain.checkpoints.export import export_params
    from spmdtrain.checkpoints.load_model import load_model
    from spmdtrain.checkpoints.manifest import Manifest
    from spmdtrain.checkpoints.restore import load_params, load_variables, read_manifest
    from spmdtrain.config.option_groups import (
        CollectiveOptions,
        MeshSpec,
        ParameterServerOptions,
        ShardingOptions,
    )
    from spmdtrain.config.run_config import RunConfig
    from spmdtrain.data.bad_records import SkipBadRecords
    from spmdtrain.data.datasets import ArrayDataset, Dataset, MappedDataset, Subset
    from spmdtrain.data.idx import find_idx, read_idx
    from spmdtrain.data.image_folder import ImageFolder
    from spmdtrain.data.mixture import Mixture
    from spmdtrain.data.packing import Packed
    from spmdtrain.data.sources.array_record import ArrayRecordSource
    from spmdtrain.data.sources.parquet import ParquetSource
    from spmdtrain.data.sources.text_files import JsonLinesSource, TextSource
    from spmdtrain.data.sources.token_files import TokenDocuments, TokenFile
    from spmdtrain.data.streams import Stream
    from spmdtrain.data.text import Tokenized
    from spmdtrain.distributed.initialize import initialize
    from spmdtrain.errors import (
        BadRecordError,
        DeviceFaultError,
        NonFiniteError,
        PreemptedExit,
        ReplicaError,
        StorageError,
        UserError,
    )
    from spmdtrain.kernels.attention import attention
    from spmdtrain.kernels.experts import ExpertOutput, experts
    from spmdtrain.kernels.linear_cross_entropy import TokenLosses, linear_cross_entropy
    from spmdtrain.parameter_server.coordinator import Coordinator
    from spmdtrain.parameter_server.partition import FixedShards, MaxSize, MinSize
    from spmdtrain.sharding.annotations import AxisRules
    from spmdtrain.sharding.mesh import BATCH_AXES
    from spmdtrain.sharding.placement import (
        constrain_sharding,
        current_strategy,
        has_strategy,
        resolve_config,
    )
    from spmdtrain.sharding.rules import GatherPolicy, Rule
    from spmdtrain.step.metrics import WeightedValues, weighted_mean
    from spmdtrain.step.outputs import (
        Combination,
        PredictionMetric,
        Scalar,
        SumMetric,
        batch_coupled,
    )
    from spmdtrain.step.per_replica import PerReplica, per_replica, reduce
    from spmdtrain.step.remat import remat
    from spmdtrain.step.state import TrainState
    from spmdtrain.trackers.base import RunInfo, Tracker
    from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text
    from spmdtrain.train.callbacks import CallbackContext, CallbackEvent
    from spmdtrain.train.epochs import FitResult
    from spmdtrain.train.experiment import Experiment
    from spmdtrain.train.log_samples import LogSamples
    from spmdtrain.train.loop import Loop
    from spmdtrain.train.reduce_on_plateau import ReduceOnPlateau
    from spmdtrain.train.shipped_metrics import (
        balanced_accuracy,
        confusion_counts,
        confusion_table,
        macro_f1,
        perplexity,
        roc_auc,
        value_histogram,
    )
    from spmdtrain.train.stopping import EarlyStopping, StopAtThreshold
    from spmdtrain.train.trainer import Trainer
    from spmdtrain.train.upload_checkpoints import UploadCheckpoints
    from spmdtrain.weights.weight_map import WeightRule


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"spmdtrain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
