"CIFAR-10 as a task, and its command"

import pytest
import torch
from typer.testing import CliRunner
from capsnb.cli import make_app
from capsnb.data.mnist import tiny_cifar10
from capsnb.lab.digits import Pictures
from capsnb.lab.tasks import evaluate, load_run, task_named, train


def test_the_task(tmp_path):
    "found by its name, trained, tested again from another folder"
    data = tiny_cifar10(tmp_path / 'data', 20)
    task = Pictures(folder=data, n_valid=30, official=False, limit=40)
    assert [len(task.open(k)['label']) for k in ('train', 'validation', 'test')] == [40, 14, 20]
    found = train(task, 'cnn', tmp_path / 'run', epochs=1, device='cpu', progress=False)
    assert found['limit'] == 40
    moved = data.rename(tmp_path / 'moved')
    seen = evaluate(tmp_path / 'run', device='cpu', folder=moved)
    assert seen['n'] == 20 and seen['accuracy'] == found['test_accuracy']
    opened = load_run(tmp_path / 'run', 'cpu').task
    assert (opened.name, opened.n_valid, opened.limit) == ('cifar10', 30, 40)
    assert task_named('cifar10').networks == Pictures.networks


@pytest.mark.slow
def test_every_network_takes_the_pictures():
    for net in Pictures.networks:
        network = task_named('cifar10').make(net).eval()
        with torch.no_grad():
            assert network(torch.rand(1, 3, 32, 32)).a.shape == (1, 10)
        if net == 'matrix-caps':
            assert network.conv.weight.shape == (256, 3, 5, 5)


@pytest.mark.parametrize('wrong', (dict(limit=0), dict(n_test=True), dict(limit=2.5)))
def test_wrong_options(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f'{name} must be an integer >= 1 or None'):
        Pictures(**wrong)


def test_the_command(tmp_path):
    "names the option for files that are not the real ones, and what is missing"
    data, run = tiny_cifar10(tmp_path / 'data', 20), tmp_path / 'run'
    command = ['train', 'cifar10', '--out', str(run), '--data', str(data), '--no-progress']
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'data_batch_1.bin: expected MD5' in r.output, r.output
    assert '--any-files' in r.output and not run.exists()
    (data / 'test_batch.bin').unlink()
    r = CliRunner().invoke(make_app(), command)
    assert r.exit_code == 1 and 'test_batch in' in r.output, r.output
