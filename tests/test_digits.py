"""Digits, garments, small photographs: pictures, networks, runs that are read or refused."""

import json
import pytest
import torch
from hypothesis import given, settings, strategies as st

from capsnb.data.mnist import format_idx, idx_names
from capsnb.lab.tasks import Digits, as_seen, evenly, sides
from capsnb.lab.capsnet import CapsNet
from capsnb.lab.tasks import evaluate, load_run, train
from capsnb.lab.train import check_recipe

splits = ('train', 'validation', 'test')


def opened(*args, **kw):
    task = Digits(*args, **kw)
    return {s: task.open(s) for s in splits}


def trained(out, net='cnn', options=None, limit=60, n_test=None, **kw):
    usual = dict(epochs=2, device='cpu', progress=False)
    return train(Digits(limit=limit, n_test=n_test), net, out, options=options, **{**usual, **kw})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    "Four files of noise in MNIST's format."
    monkeypatch.delenv('CAPSNB_DATA', raising=False)
    place = tmp_path / 'files'
    place.mkdir()
    g = torch.Generator().manual_seed(0)
    for k, n in ((0, 5100), (2, 60)):
        (place / idx_names[k]).write_bytes(
            format_idx(torch.randint(256, (n, 28, 28), generator=g, dtype=torch.uint8))
        )
        (place / idx_names[k + 1]).write_bytes(
            format_idx((torch.arange(n) // 7 % 10).to(torch.uint8))
        )
    return place


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 70))
def test_every_class_keeps_its_share(labels, limit):
    y = torch.tensor(labels)
    k = evenly(y, limit)
    n, l = len(y), min(limit, len(y))
    assert (
        len(k) == l == len(k.unique()) and k.equal(k.sort().values) and 0 <= k.min() and k.max() < n
    )
    assert (y[k].bincount(minlength=5) - y.bincount(minlength=5) * l / n).abs().max() < 1


def test_splits_share_nothing_and_limits_are_kept(folder):
    parts = opened('mnist', 30, folder=folder, official=False, n_test=7)
    assert {k: len(v['label']) for k, v in parts.items()} == dict(train=30, validation=10, test=7)
    whole = opened('mnist', folder=folder, official=False)
    assert {k: len(v['label']) for k, v in whole.items()} == dict(
        train=100, validation=5000, test=60
    )
    rows = [set(map(tuple, v['image'].flatten(1)[:, :9].tolist())) for v in whole.values()]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]
    assert set(map(tuple, parts['train']['image'].flatten(1)[:, :9].tolist())) <= rows[0]


every = [(d, net) for d in sides for net in Digits(d).networks]
large = [pytest.param(*o, marks=pytest.mark.slow if o[0] == 'cifar10' else ()) for o in every]


@pytest.mark.parametrize('data, net', large)
def test_every_network_fits_every_set(data, net):
    task = Digits(data)
    model = task.make(net)
    x = as_seen(net, torch.rand(2, 3 if data == 'cifar10' else 1, sides[data], sides[data]))
    out = model(x, labels=torch.tensor([0, 9]))
    out['loss'].backward()
    assert out['logits'].shape == (2, 10) and type(model) is task.networks[net].cls
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    check_recipe(**task.recipe(net), seed=0)


def test_a_run_with_every_note(tmp_path):
    few = dict(n_types=4, channels=8)
    m = trained(tmp_path, 'capsnet', few, n_test=100, seed=3)
    note = dict(data='digits', arch='capsnet', limit=60, n_test=100, official=True, validate=True)
    note['options'] = few
    assert json.loads((tmp_path / 'task.json').read_text()) == note
    net, task, read = load_run(tmp_path, 'cpu')
    assert read == note and (task.limit, task.n_test) == (60, 100)
    assert net.primary.conv.out_channels == 32 and not net.training and m['network'] == 'CapsNet'
    assert evaluate(tmp_path, device='cpu')['n'] == 100
    found = evaluate(tmp_path, 'validation', device='cpu')['accuracy']
    assert found == pytest.approx(m['valid_accuracy'])


@pytest.mark.slow
def test_the_test_decides_nothing(tmp_path, monkeypatch):
    whole = Digits.open
    a = trained(tmp_path / 'a')

    def other(task, split):
        part = whole(task, split)
        return part | (dict(label=(part['label'] + 1) % 10) if split == 'test' else {})

    monkeypatch.setattr(Digits, 'open', other)
    b = trained(tmp_path / 'b')
    assert a['history'] == b['history'] and a['best_epoch'] == b['best_epoch']
    assert a['test_accuracy'] != b['test_accuracy']


@pytest.mark.parametrize(
    'change, said',
    [
        (dict(n_iters=10**9), 'n_iters to be at most 100'),
        (dict(n_types=10**9), 'n_types to be at most 65,536'),
        (dict(d_out=17), 'by config.json'),
        (dict(decoder=[1] * 65), 'no list of over 64'),
    ],
)
def test_a_config_of_another_network_is_refused(change, said, tmp_path, monkeypatch):
    "before it is made"
    own = dict(n_types=2, channels=4, kernels=(3, 3), image_shape=(1, 8, 8), decoder=None)
    CapsNet(**own).save_pretrained(tmp_path)
    note = dict(data='digits', arch='capsnet', limit=None, n_test=5, official=True)
    (tmp_path / 'task.json').write_text(json.dumps(note))
    assert load_run(tmp_path, 'cpu').task.n_test == 5
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({**config, **change}))
    monkeypatch.setattr(CapsNet, 'from_pretrained', None)
    with pytest.raises(ValueError, match=said):
        load_run(tmp_path, 'cpu')
