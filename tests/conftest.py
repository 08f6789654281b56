"""One thread per process: the models of the tests are so small that threads only wait for each other."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that tests start
