"""Efficient-CapsNet: the authors' answers, with seeded and published weights; what it refuses."""

from pathlib import Path
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from capsnb.lab import efficient as lab
from capsnb.lab.digits import Digits
from capsnb.lab.efficient import EfficientCapsNet, middle_of_norb, published_norb

told = np.load(Path(__file__).parent / 'data' / 'mazzia2021_efficient.npz')
theirs = np.load(Path(__file__).parent / 'data' / 'mazzia2021_weights.npz')
near = dict(atol=2e-5, rtol=1e-4)  # theirs is float32


def seeded(seed, n_classes, channels, kernels, left, batch):
    "Weights that the authors' code was run on, in the order of Keras's layers; of a useful size."
    dice = np.random.RandomState(seed)
    draw = lambda *shape: dice.standard_normal(shape)
    out = []
    for a, b, k in zip(channels, channels[1:], kernels):
        out += [(2 / (k * k * a)) ** 0.5 * draw(k, k, a, b), 0.1 * draw(b)]
        out += [1 + 0.1 * draw(b), 0.1 * draw(b)]
        out += [0.1 * draw(b), 0.5 + draw(b) ** 2] if batch else []
    out += [(2 / left**2) ** 0.5 * draw(left, left, 1, channels[-1]), 0.1 * draw(channels[-1])]
    out += [0.5 * draw(n_classes, 16, 8, 16), 0.1 * draw(n_classes, 16, 1)]
    return [torch.tensor(w.astype('float32')) for w in out]


def pictures(n, side, channels, seed=0):
    x = np.random.RandomState(seed).standard_normal((n, side, side, channels))
    return torch.tensor(x.astype('float32')).movedim(-1, 1)


def agrees(net, images, name):
    out = net.double().eval()(images.double())
    assert_close(out.v.float(), torch.tensor(told[f'{name}_v']), **near)
    assert_close(out.a.float(), torch.tensor(told[f'{name}_a']), **near)


def test_smallnorb_network_with_seeded_weights():
    net = EfficientCapsNet(**published_norb)
    lab._fill(net, seeded(1, 5, (2, 32, 64, 64, 128), (7, 3, 3, 3), 8, False))
    agrees(net, pictures(4, 48, 2), 'norb')


def mnist_network(**kw):
    net, kept = EfficientCapsNet(**kw), []
    each = seeded(2, 10, (1, 32, 64, 64, 128), (5, 3, 3, 3), 9, True)
    for k, block in enumerate(net.features):
        kept += each[6 * k : 6 * k + 4]
        block[2].running_mean, block[2].running_var = each[6 * k + 4 : 6 * k + 6]
    lab._fill(net, kept + each[24:])
    return net


def test_mnist_network_with_seeded_weights():
    agrees(mnist_network(), pictures(4, 28, 1), 'mnist')


def test_its_loss():
    net, y = mnist_network(decoder=None).double().eval(), torch.tensor([3, 1, 4, 1])
    out = net(pictures(4, 28, 1).double(), y)
    assert_close(out['loss'].float(), torch.tensor(told['mnist_loss']), **near)
    net, x = mnist_network().eval(), pictures(4, 28, 1)
    with torch.no_grad():
        mse = (net.draw(net(x).v, y) - x).square().mean((1, 2, 3)).mean()
        assert_close(net(x, y)['loss'] - torch.tensor(told['mnist_loss']), 0.392 * mse)


def test_middle_of_norb_is_theirs():
    x = 7 + 3 * pictures(5, 96, 2, seed=1).double()
    got = middle_of_norb(x)[..., ::5, ::5].movedim(1, -1)
    assert_close(got, torch.tensor(told['middle']), **near)


def write_h5(path, weights):
    "A file as Keras writes it: names in the order of the layers, an array under each."
    h5py = pytest.importorskip('h5py')
    with h5py.File(path, 'w') as f:
        group = f.create_group('CapsNet')
        group.attrs['weight_names'] = [k.encode() for k in weights]
        for k, w in weights.items():
            group[k] = w


def test_published_weights(tmp_path):
    write_h5(path := tmp_path / 'x.h5', {k.replace('|', '/'): w for k, w in theirs.items()})
    net = EfficientCapsNet.from_published(path)
    assert not net.training
    agrees(net, pictures(4, 48, 2), 'published')


def test_files_that_are_no_weights(tmp_path, monkeypatch):
    path = tmp_path / 'x.h5'
    with pytest.raises(FileNotFoundError, match='there is no file'):
        EfficientCapsNet.from_published(path)
    path.write_bytes(b'no')
    with pytest.raises(ValueError, match="no file of Efficient-CapsNet's weights"):
        EfficientCapsNet.from_published(path)
    write_h5(path, {'W': np.zeros((5, 16, 8, 16), 'f'), 'b': np.zeros((5, 16, 1), 'f')})
    with pytest.raises(ValueError, match='weights of another network'):
        EfficientCapsNet.from_published(path)
    monkeypatch.setitem(__import__('sys').modules, 'h5py', None)
    with pytest.raises(ImportError, match='pip install h5py'):
        EfficientCapsNet.from_published(path)


def test_small_digits_are_too_small_for_it():
    with pytest.raises(ValueError, match="got 'efficient'"):
        Digits('digits').make('efficient')


@pytest.mark.parametrize(
    'wrong, said',
    [
        (dict(norm='layer'), "norm must be 'batch' or 'instance', got 'layer'"),
        (dict(image_shape=(1, 10, 28)), 'images of 10x28 are too small'),
        (dict(d_inp=7), 'parts of 7 numbers'),
        (dict(kernels=(3, 3)), 'a kernel and a stride for each'),
    ],
)
def test_options_that_fit_no_network(wrong, said):
    with pytest.raises(ValueError, match=said):
        EfficientCapsNet(**wrong)
