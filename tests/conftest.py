"""One thread, however many PyTorch would start; and no GPU, no test that needs one."""

import os

os.environ.setdefault('OMP_NUM_THREADS', '1')  # read when torch is loaded: before any test is


def pytest_configure(config):
    line = 'cuda: needs a GPU; skipped where there is none'
    config.addinivalue_line('markers', line)


def pytest_collection_modifyitems(items):
    import pytest

    marked = [o for o in items if o.get_closest_marker('cuda')]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason='there is no GPU'))
