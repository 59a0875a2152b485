"""One thread, however many PyTorch would start: the tests are small, and processes that they start inherit it."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')       # read when torch is loaded, hence before any test imports it
