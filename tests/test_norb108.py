"NORB jittered-cluttered as a task; Sabour's network on pictures of objects"

import pytest
import torch
from capsnb.data.views import tiny_norb
from capsnb.lab.objects import NORB, PairCrops, Toys
from capsnb.lab.objects import Photographs
from capsnb.lab.tasks import evaluate, load_run, task_named, train

quiet = dict(device='cpu', progress=False)


pytestmark = pytest.mark.usefixtures('no_machine')


@pytest.mark.slow
def test_the_task_from_files_to_result(tmp_path):
    few = dict(elevations=(0, 3), azimuths=(0, 12), parts=dict(train=(1,), test=(1,)))
    tiny = tiny_norb(tmp_path / 'tiny', 36, **few)
    task = NORB(size=36, subset=100, official=False, folder=tiny)
    out = tmp_path / 'run'
    m = train(task, 'dstep', out, epochs=1, **quiet)
    assert [len(task.open(k)['category']) for k in ('train', 'validation')] == [80, 20]
    found = evaluate(out, device='cpu', folder=tiny)  # finds the task by its name
    assert found['accuracy'] == m['test_accuracy'] and found['n'] == 100
    assert found['names'][5] == 'none' and len(found['confusion']) == 6
    assert list(found['by_degrees']['azimuth']) == [0, 120]  # no angle where there is no toy
    assert task_named('norb').size == 108


@pytest.mark.slow
def test_sabours_network_learns_and_comes_back(tmp_path):
    task = Toys(size=48, subset=40, cache=tmp_path / 'toys')
    narrow = dict(channels=16, n_types=4)
    usual = dict(epochs=2, options=narrow, warmup=0.0, **quiet)
    m = train(task, 'capsnet', tmp_path / 'run', lr=(5e-3, 5e-3), **usual)
    assert m['history'][-1]['loss'] < m['history'][0]['loss']
    network = load_run(tmp_path / 'run', 'cpu', task).network
    assert network.image_shape == (2, 32, 32) and network.decoder is None
    x = task.open('test')
    middle = PairCrops(48).views(x['images'])[0]
    with torch.no_grad():
        right = network(middle).a.argmax(1) == x['category']
    assert evaluate(tmp_path / 'run', task=task, **quiet)['accuracy'] == right.double().mean()
    (view,) = task.views(network, None, x)
    assert view['images'].equal(middle)
    published = Toys(size=48, published=True)
    assert published.recipe('capsnet') == task.recipe('capsnet') | dict(lr=(1e-5, 1e-3))
    lit = [o.collator('capsnet').contrast for o in (task, published)]
    assert lit == [0.5, 0.0]
    assert published.make('capsnet').W.shape == (2048, 5, 8, 16)
    assert Photographs(colour=True).make('capsnet').image_shape == (3, 32, 32)
    assert Photographs().make('capsnet').W.shape[1] == 8
