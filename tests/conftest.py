"""One thread, however many PyTorch would start; the tests are small, and pass it on."""

import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # read when torch is loaded: before any test is
