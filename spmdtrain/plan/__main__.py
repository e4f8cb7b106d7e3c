"""The command `python -m spmdtrain.plan`."""

import sys

from spmdtrain.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
