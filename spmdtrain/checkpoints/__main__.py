"""The command `python -m spmdtrain.checkpoints`."""

import sys

from spmdtrain.checkpoints.command import main

if __name__ == "__main__":
    sys.exit(main())
