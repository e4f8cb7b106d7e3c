"""The command `python -m spmdtrain.sweep`."""

import sys

from spmdtrain.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
