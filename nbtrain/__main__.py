"""`python -m nbtrain`, and what torchrun starts: `torchrun --nproc-per-node 2 -m nbtrain fit -f run.yaml`."""

import sys

from nbtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
