"""The command `python -m spmdtrain.replay`."""

import sys

from spmdtrain.replay.command import main

if __name__ == "__main__":
    sys.exit(main())
