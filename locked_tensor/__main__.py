"""`python -m locked_tensor`."""

import sys

from locked_tensor.cli import main

sys.exit(main())
