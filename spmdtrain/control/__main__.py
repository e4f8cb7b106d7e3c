"""The command `python -m spmdtrain.control`."""

import sys

from spmdtrain.control.command import main

if __name__ == "__main__":
    sys.exit(main())
