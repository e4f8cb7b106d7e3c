"""The command `python -m spmdtrain.report`."""

import sys

from spmdtrain.report.command import main

if __name__ == "__main__":
    sys.exit(main())
