"""The file of an HTML page, checked before what it shows is computed."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from etils import epath

from spmdtrain.errors import UserError, import_extra
from spmdtrain.record import no_follow
from spmdtrain.record.storage import failures, folder_of, is_url, one_line

_LIBRARIES = ("altair", "jinja2", "vl_convert")


@dataclass(frozen=True)
class PageFile:
    """A file that can be written."""

    path: epath.Path

    def write(self, html: str) -> None:
        """Writes the page and replaces an earlier one; `UserError` if it cannot be written."""
        with _explaining(self.path):
            no_follow.write(
                self.path.parent, self.path.name, lambda file: file.write(html.encode())
            )


def open_page_file(path: str) -> PageFile:
    """Returns a file for a page after a check that the page can be made and written.

    `path` is a local path or URL. A file that exists keeps its content.

    Raises:
      UserError: If a library is missing or the file cannot be written.
    """
    for library in _LIBRARIES:
        import_extra(library, "report", "HTML pages")
    target = folder_of(path)
    name = target.name
    with _explaining(target):
        if not name or (target.exists() and not target.is_file()):
            raise UserError(f"--html {path} is not a file: give the name of a file to write")
        if not is_url(target):  # `folder_of` has accessed the bucket of a URL
            probe = f".{name}.check"
            no_follow.write(target.parent, probe, lambda file: None)
            no_follow.remove(target.parent, probe)
    return PageFile(target)


@contextlib.contextmanager
def _explaining(target: epath.Path) -> Iterator[None]:
    """Raises errors of the storage as a `UserError` that names the file."""
    try:
        yield
    except UserError:
        raise
    except failures(target) as error:
        why = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise UserError(
            f"--html {target} cannot be written: {why}; give a file in a folder that exists and is "
            "writable"
        ) from error
