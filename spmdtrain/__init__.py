"""Train a JAX model on one device or many with the same script.

Names are imported when they are first used, so that `import spmdtrain` alone starts no backend.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # `_HOMES` is read from these lines, which are not executed
    from spmdtrain.adapters.as_adapter import FunctionModel as FunctionModel
    from spmdtrain.adapters.as_adapter import as_adapter as as_adapter
    from spmdtrain.adapters.base import Adapter as Adapter
    from spmdtrain.adapters.base import Mode as Mode
    from spmdtrain.adapters.base import Variables as Variables
    from spmdtrain.adapters.equinox import EquinoxModel as EquinoxModel
    from spmdtrain.adapters.linen import LinenModel as LinenModel
    from spmdtrain.adapters.lora import LoraModel as LoraModel
    from spmdtrain.adapters.lora import LoraRule as LoraRule
    from spmdtrain.checkpoints.manifest import Manifest as Manifest
    from spmdtrain.checkpoints.restore import export_huggingface as export_huggingface
    from spmdtrain.checkpoints.restore import export_params as export_params
    from spmdtrain.checkpoints.restore import load_model as load_model
    from spmdtrain.checkpoints.restore import load_params as load_params
    from spmdtrain.checkpoints.restore import load_variables as load_variables
    from spmdtrain.checkpoints.restore import read_manifest as read_manifest
    from spmdtrain.checkpoints.weights.weight_map import WeightRule as WeightRule
    from spmdtrain.config.experiment import Experiment as Experiment
    from spmdtrain.config.options import CollectiveOptions as CollectiveOptions
    from spmdtrain.config.options import ContextOptions as ContextOptions
    from spmdtrain.config.options import ExpertOptions as ExpertOptions
    from spmdtrain.config.options import MeshSpec as MeshSpec
    from spmdtrain.config.options import ParameterServerOptions as ParameterServerOptions
    from spmdtrain.config.options import ShardingOptions as ShardingOptions
    from spmdtrain.config.run_config import RunConfig as RunConfig
    from spmdtrain.data.chat import Chat as Chat
    from spmdtrain.data.datasets import ArrayDataset as ArrayDataset
    from spmdtrain.data.datasets import Dataset as Dataset
    from spmdtrain.data.datasets import MappedDataset as MappedDataset
    from spmdtrain.data.datasets import Subset as Subset
    from spmdtrain.data.images import ImageFolder as ImageFolder
    from spmdtrain.data.images import find_idx as find_idx
    from spmdtrain.data.images import read_idx as read_idx
    from spmdtrain.data.mixture import Mixture as Mixture
    from spmdtrain.data.sources.array_record import ArrayRecordSource as ArrayRecordSource
    from spmdtrain.data.sources.numpy_files import NumpyFiles as NumpyFiles
    from spmdtrain.data.sources.parquet import ParquetSource as ParquetSource
    from spmdtrain.data.sources.text_files import JsonLinesSource as JsonLinesSource
    from spmdtrain.data.sources.text_files import TextSource as TextSource
    from spmdtrain.data.sources.tf_record import RecordFeature as RecordFeature
    from spmdtrain.data.sources.tf_record import TFRecordSource as TFRecordSource
    from spmdtrain.data.sources.token_files import TokenDocuments as TokenDocuments
    from spmdtrain.data.sources.token_files import TokenFile as TokenFile
    from spmdtrain.data.sources.web_dataset import SampleField as SampleField
    from spmdtrain.data.sources.web_dataset import WebDatasetSource as WebDatasetSource
    from spmdtrain.data.streams import Stream as Stream
    from spmdtrain.data.text import Packed as Packed
    from spmdtrain.data.text import Tokenized as Tokenized
    from spmdtrain.data.training_data import SkipBadRecords as SkipBadRecords
    from spmdtrain.distributed.initialize import initialize as initialize
    from spmdtrain.errors import BadRecordError as BadRecordError
    from spmdtrain.errors import DeviceFaultError as DeviceFaultError
    from spmdtrain.errors import NonFiniteError as NonFiniteError
    from spmdtrain.errors import PreemptedExit as PreemptedExit
    from spmdtrain.errors import ReplicaError as ReplicaError
    from spmdtrain.errors import StorageError as StorageError
    from spmdtrain.errors import UserError as UserError
    from spmdtrain.keras.model import KerasModel as KerasModel
    from spmdtrain.kernels.attention import attention as attention
    from spmdtrain.kernels.experts import ExpertOutput as ExpertOutput
    from spmdtrain.kernels.experts import experts as experts
    from spmdtrain.kernels.linear_cross_entropy import TokenLosses as TokenLosses
    from spmdtrain.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from spmdtrain.parameter_server.coordinator import Coordinator as Coordinator
    from spmdtrain.parameter_server.partition import FixedShards as FixedShards
    from spmdtrain.parameter_server.partition import MaxSize as MaxSize
    from spmdtrain.parameter_server.partition import MinSize as MinSize
    from spmdtrain.record.run import Run as Run
    from spmdtrain.record.run import open_run as open_run
    from spmdtrain.sharding.mesh import BATCH_AXES as BATCH_AXES
    from spmdtrain.sharding.placement import constrain_sharding as constrain_sharding
    from spmdtrain.sharding.placement import current_strategy as current_strategy
    from spmdtrain.sharding.placement import has_strategy as has_strategy
    from spmdtrain.sharding.placement import resolve_config as resolve_config
    from spmdtrain.sharding.rules import AxisRules as AxisRules
    from spmdtrain.sharding.rules import GatherPolicy as GatherPolicy
    from spmdtrain.sharding.rules import Rule as Rule
    from spmdtrain.step.layer_loop import remat as remat
    from spmdtrain.step.metrics import Combination as Combination
    from spmdtrain.step.metrics import PredictionMetric as PredictionMetric
    from spmdtrain.step.metrics import Scalar as Scalar
    from spmdtrain.step.metrics import SumMetric as SumMetric
    from spmdtrain.step.metrics import WeightedValues as WeightedValues
    from spmdtrain.step.metrics import batch_coupled as batch_coupled
    from spmdtrain.step.metrics import weighted_mean as weighted_mean
    from spmdtrain.step.per_replica import PerReplica as PerReplica
    from spmdtrain.step.per_replica import per_replica as per_replica
    from spmdtrain.step.per_replica import reduce as reduce
    from spmdtrain.step.state import TrainState as TrainState
    from spmdtrain.trackers.base import Figure as Figure
    from spmdtrain.trackers.base import Histogram as Histogram
    from spmdtrain.trackers.base import Image as Image
    from spmdtrain.trackers.base import RunInfo as RunInfo
    from spmdtrain.trackers.base import Table as Table
    from spmdtrain.trackers.base import Text as Text
    from spmdtrain.trackers.base import Tracker as Tracker
    from spmdtrain.train.callbacks import CallbackContext as CallbackContext
    from spmdtrain.train.callbacks import CallbackEvent as CallbackEvent
    from spmdtrain.train.loop import Loop as Loop
    from spmdtrain.train.schedule import FitResult as FitResult
    from spmdtrain.train.serving import ExportedModel as ExportedModel
    from spmdtrain.train.serving import export_predict as export_predict
    from spmdtrain.train.serving import load_exported as load_exported
    from spmdtrain.train.shipped_callbacks import EarlyStopping as EarlyStopping
    from spmdtrain.train.shipped_callbacks import LogSamples as LogSamples
    from spmdtrain.train.shipped_callbacks import ReduceOnPlateau as ReduceOnPlateau
    from spmdtrain.train.shipped_callbacks import StopAtThreshold as StopAtThreshold
    from spmdtrain.train.shipped_callbacks import UploadCheckpoints as UploadCheckpoints
    from spmdtrain.train.shipped_metrics import balanced_accuracy as balanced_accuracy
    from spmdtrain.train.shipped_metrics import confusion_counts as confusion_counts
    from spmdtrain.train.shipped_metrics import confusion_table as confusion_table
    from spmdtrain.train.shipped_metrics import macro_f1 as macro_f1
    from spmdtrain.train.shipped_metrics import perplexity as perplexity
    from spmdtrain.train.shipped_metrics import roc_auc as roc_auc
    from spmdtrain.train.shipped_metrics import value_histogram as value_histogram
    from spmdtrain.train.trainer import Trainer as Trainer

_HOMES = {
    name: module
    for module, name in re.findall(
        r"^    from spmdtrain\.([\w.]+) import \w+ as (\w+)$",
        Path(__file__).read_text("utf-8"),
        re.M,
    )
}
"""The exported names, and the modules that define them."""

if not TYPE_CHECKING:  # type checkers take the aliases above as exports
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spmdtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"spmdtrain.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
