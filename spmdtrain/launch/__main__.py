"""The command `python -m spmdtrain.launch`."""

import sys

from spmdtrain.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
