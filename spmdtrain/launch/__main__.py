"""The command `python -m spmdtrain.launch`."""

import sys

from spmdtrain.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
