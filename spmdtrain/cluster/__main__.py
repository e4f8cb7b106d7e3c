"""The command `python -m spmdtrain.cluster`."""

import sys

from spmdtrain.cluster.command import main

if __name__ == "__main__":
    sys.exit(main())
