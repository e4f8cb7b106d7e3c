"""Orbax, imported when it is first used, and changed to save at `s3://` URLs if there are any."""

import os
import posixpath
from importlib.metadata import version
from typing import Any

from etils import epath, epy

from spmdtrain.errors import StorageError
from spmdtrain.record.storage import BEFORE_USE

__all__ = ["check_s3", "ocp", "s3_kvstore"]

_PREFIXES = ("gs://", "s3://")


def _add_s3() -> None:
    """Makes Orbax use `s3://` URLs as it uses `gs://` URLs.

    Orbax 0.12 accesses the files of both through epath, and TensorStore, which writes the arrays,
    has a driver for both. But Orbax takes an `s3://` URL for a relative local path, and has no
    public way to choose the driver. So this replaces the private names that recognize an object
    store and describe it to TensorStore. `gs://` URLs and local paths are used as before. A version
    of Orbax without these names is left as it is: see `check_s3`.
    """
    if _is_added() is not False:
        return
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    gcs, normal = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._normalize_path

    def kvstore(path: str) -> dict[str, Any]:
        return s3_kvstore(path) if path.startswith("s3://") else gcs(path)

    def normalized(path: str) -> str:
        if not path.startswith("s3://"):
            return normal(path)
        return f"s3://{posixpath.normpath(path.removeprefix('s3://'))}"

    gcs_utils._GCS_PATH_PREFIX = _PREFIXES
    gcs_utils.get_kvstore_for_gcs = kvstore
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(_PREFIXES)
    tensorstore_utils._normalize_path = normalized


BEFORE_USE["s3"] = _add_s3

with epy.lazy_imports():  # it takes long, and may not be needed
    import orbax.checkpoint as ocp


def check_s3(folder: epath.Path) -> None:
    """Raises `StorageError` if a folder is at an `s3://` URL, and Orbax cannot save there."""
    if not str(folder).startswith("s3://"):
        return
    _add_s3()
    if not _is_added():
        raise StorageError(
            f"{folder}: checkpoints at s3:// URLs need orbax-checkpoint 0.12, not "
            f"{version('orbax-checkpoint')}: install it, or use a local workdir and the callback "
            "UploadCheckpoints"
        )


def _is_added() -> bool | None:
    """Returns whether Orbax uses `s3://` URLs; None if it lacks the names that this takes."""
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:
        return None
    names = {
        gcs_utils: ("_GCS_PATH_PREFIX", "get_kvstore_for_gcs"),
        tensorstore_utils: ("_use_gcs_driver", "_normalize_path"),
    }
    if not all(hasattr(module, name) for module in names for name in names[module]):
        return None
    return bool(gcs_utils._GCS_PATH_PREFIX == _PREFIXES)


def s3_kvstore(url: str) -> dict[str, Any]:
    """Returns TensorStore's description of the objects below an `s3://` URL.

    TensorStore reads the credentials from AWS's environment variables and files, but neither the
    address of a compatible server, nor the region or the number of attempts. They are taken from
    the variables that s3fs reads.
    """
    bucket, _, path = url.removeprefix("s3://").partition("/")
    found: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}

    def variable(*names: str) -> str | None:
        return next((value for name in names if (value := os.environ.get(name))), None)

    if endpoint := variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        found["endpoint"] = endpoint.rstrip("/")
    if region := variable("AWS_REGION", "AWS_DEFAULT_REGION"):
        found["aws_region"] = region
    if (attempts := variable("AWS_MAX_ATTEMPTS")) and attempts.isdecimal():
        found["s3_request_retries"] = {"max_retries": max(1, int(attempts))}
    if variable("AWS_ACCESS_KEY_ID"):  # or AWS's library reports each file that does not exist
        found["aws_credentials"] = {"type": "environment"}
    return found
