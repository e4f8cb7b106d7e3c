"""Versions of libraries, and libraries that only some users need, imported on first use."""

import importlib
import importlib.metadata
from typing import Any

import spmdtrain
from spmdtrain.errors import UserError

NOT_INSTALLED = "not installed"


def version_of(package: str) -> str:
    """Returns the installed version of a package such as "orbax-checkpoint", or `NOT_INSTALLED`.

    spmdtrain has a version without an installation, too: if its folder is on the path.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return spmdtrain.__version__ if package == "spmdtrain" else NOT_INSTALLED


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of an optional library.

    Args:
      module: The module's full name, such as `pyarrow.parquet`.
      extra: The extra of pyproject.toml that installs the library.
      purpose: What needs the library, a noun in the plural for the message: `Parquet files`.

    Raises:
      UserError: If the library is not installed, or cannot be imported.
    """
    library = module.partition(".")[0]
    try:
        importlib.import_module(library)
        return importlib.import_module(module)
    except ImportError as error:
        why = f"cannot be imported ({' '.join(str(error).split())})"
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            why = "is not installed"
        raise UserError(
            f"{purpose} need {library}, which {why}: pip install 'spmdtrain[{extra}]'"
        ) from error
