"""One thread and one seed for every test; those that need a GPU are skipped without one."""

import os
import time
import pytest

os.environ.setdefault('OMP_NUM_THREADS', '1')  # read when torch is loaded: before any test is
os.fsync = lambda handle: None  # processes are killed here, power never fails: no waiting for disks
for name in ('HF_HUB_OFFLINE', 'PYTHONIOENCODING'):  # a test says itself what it is about
    os.environ.pop(name, None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get('CAPSNB_UNTIL', 'inf')):
        pytest.skip('too late to begin')  # .ci/run says when
    seed()  # what fixtures draw


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    seed()  # what the test draws


def seed():
    "Whichever tests ran before in this process."
    import torch

    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda o: 'test_triton.py' not in o.nodeid)  # the kernels' proof comes first
    graphs = [o for o in items if o.get_closest_marker('graphs')]
    marked = [o for o in items if o.get_closest_marker('cuda')]
    if not (graphs or marked):
        return
    import torch

    if torch.torch_version.TorchVersion(torch.__version__) < (2, 10):
        for item in graphs:
            item.add_marker(pytest.mark.skip(reason='graphs of routings need PyTorch 2.10'))
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason='there is no GPU'))


@pytest.fixture
def no_machine(monkeypatch, tmp_path):
    "No test finds the data or the cache of the machine it runs on."
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
