"""The imports of TensorBoard's event files."""

import subprocess
import sys

IMPORTS = """
import sys

from spmdtrain.files import tensorboard

tensorboard.import_writer()
assert "google.cloud.storage" not in sys.modules
import google.cloud.storage  # which others can still import
"""


def test_the_writer_does_not_import_the_client_of_google_cloud_storage() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
