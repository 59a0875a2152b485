"""Efficient-CapsNet: the authors' answers, with seeded and published weights; what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import efficient
from capsnb.core import need
from capsnb.lab import efficient as lab
from capsnb.lab.digits import Digits
from capsnb.lab.efficient import EfficientCapsNet, middle_of_norb, published_norb
from capsnb.lab.vision import n_params

told = np.load(Path(__file__).parent / 'data' / 'mazzia2021_efficient.npz')
near = dict(atol=2e-5, rtol=1e-4)  # theirs is float32
theirs = np.load(Path(__file__).parent / 'data' / 'mazzia2021_weights.npz')


def pictures(*args, **kw):
    return torch.tensor(efficient.pictures(*args, **kw)).movedim(-1, 1)


def agrees(net, images, name):
    out = net.double().eval()(images.double())
    assert_close(out.v.float(), torch.tensor(told[f'{name}_v']), **near)
    assert_close(out.a.float(), torch.tensor(told[f'{name}_a']), **near)


def test_smallnorb_network_with_seeded_weights():
    net = EfficientCapsNet(**published_norb)
    lab._fill(net, [torch.tensor(w) for w in efficient.weights(1, **efficient.norb)])
    agrees(net, pictures(4, 48, 2), 'norb')


def mnist_network(**kw):
    net, each = EfficientCapsNet(**kw), efficient.weights(2, **efficient.mnist)
    each, kept = [torch.tensor(w) for w in each], []
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
    assert out['logits'].shape == (4, 10)
    net = mnist_network().eval()
    x = pictures(4, 28, 1)
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
    net = EfficientCapsNet(**published_norb)
    lab._fill(net, [torch.tensor(w) for w in theirs.values()])
    agrees(net, pictures(4, 48, 2), 'published')
    write_h5(path := tmp_path / 'x.h5', {k.replace('|', '/'): w for k, w in theirs.items()})
    read = EfficientCapsNet.from_published(path)
    assert not read.training
    assert_close(dict(read.double().state_dict()), dict(net.state_dict()), rtol=0, atol=0)


def test_files_that_are_no_weights(tmp_path):
    path = tmp_path / 'x.h5'
    with pytest.raises(FileNotFoundError, match='there is no file'):
        EfficientCapsNet.from_published(path)
    path.write_bytes(b'no')
    with pytest.raises(ValueError, match="no file of Efficient-CapsNet's weights"):
        EfficientCapsNet.from_published(path)
    write_h5(path, {'W': np.zeros((5, 16, 8, 16), 'f'), 'b': np.zeros((5, 16, 1), 'f')})
    with pytest.raises(ValueError, match='weights of another network'):
        EfficientCapsNet.from_published(path)


def test_without_h5py(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__('sys').modules, 'h5py', None)
    with pytest.raises(ImportError, match='pip install h5py'):
        EfficientCapsNet.from_published(tmp_path / 'x.h5')


def test_sizes_and_the_task():
    with torch.device('meta'):
        assert n_params(EfficientCapsNet(decoder=None)) == 161_824
        assert n_params(EfficientCapsNet(**published_norb)) == 151_664
        for data in ('mnist', 'fashion-mnist'):
            net = Digits(data).make('efficient')
            assert n_params(net) - n_params(net.decoder) == 161_824
    with pytest.raises(ValueError, match="got 'efficient'"):
        Digits('digits').make('efficient')


@pytest.mark.parametrize(
    'wrong, said',
    [
        (dict(norm='layer'), "norm must be 'batch' or 'instance', got 'layer'"),
        (dict(image_shape=(1, 10, 28)), 'images of 10x28 are too small'),
        (dict(d_inp=7), 'parts of 7 numbers'),
        (dict(kernels=(3, 3)), 'a kernel and a stride for each'),
        (dict(n_classes=0), 'n_classes must be'),
    ],
)
def test_options_that_fit_no_network(wrong, said):
    with pytest.raises(ValueError, match=said):
        EfficientCapsNet(**wrong)


def test_pictures_that_do_not_fit_and_the_hub(tmp_path):
    need('huggingface_hub')
    net = EfficientCapsNet(2, (1, 9, 9), (4, 8), (3, 3), (1, 2), decoder=None).eval()
    with pytest.raises(ValueError, match=r'expected images \[b, 1, 9, 9\]'):
        net(torch.rand(1, 1, 8, 8))
    net.save_pretrained(tmp_path)
    again, x = EfficientCapsNet.from_pretrained(tmp_path), torch.rand(3, 1, 9, 9)
    assert_close(again.eval()(x).v, net(x).v)
