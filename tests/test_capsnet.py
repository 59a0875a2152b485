"""CapsNet and Efficient-CapsNet: definitions, drawings, weights."""

from pathlib import Path
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from capsnb.lab.capsnet import CapsNet, EfficientCapsNet
from capsnb.lab.capsnet import _fill, published_norb
from capsnb.lab.capsnet import margin_loss
from capsnb.routing.dynamic import dynamic_routing_ref

tiny = dict(n_classes=3, image_shape=(1, 8, 8), channels=8, kernels=(3, 3), stride=2)
tiny |= dict(n_types=2, d_inp=4, d_out=5, decoder=(16, 16))


def net(scale=100, **kw):
    "Maps so large that routing and drawings show: at first, lengths are below a thousandth."
    torch.manual_seed(0)
    n = CapsNet(**{**tiny, **kw})
    with torch.no_grad():
        n.W.mul_(scale)
    return n


def test_the_class_capsules_are_those_of_the_definition():
    n = net().double()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    V = torch.einsum('bid,ijdh->bijh', n.primary(torch.relu(n.conv(x))), n.W)
    assert_close(n(x).v, dynamic_routing_ref(V, 3).v)
    assert 0.02 < n(x).a.min() and n(x).a.max() < 0.99
    for n_iters in (1, 2, 4):  # it shows how often it was routed
        assert (n(x).v - dynamic_routing_ref(V, n_iters).v).abs().max() > 1e-3


def test_loss_by_hand():
    n = net(recon=0.01)
    x, y = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    out = n(x)
    want = margin_loss(out.a, y) + 0.01 * ((n.draw(out.v, y) - x) ** 2).sum() / 4
    assert_close(n(x, labels=y)['loss'], want)
    plain = net(decoder=None)
    assert_close(plain(x, labels=y)['loss'], margin_loss(plain(x).a, y))


def test_pairs_draw_each_its_own():
    n = net(recon=1.0)
    x, y, o = torch.rand(2, 1, 8, 8), torch.tensor([[0, 2], [1, 0]]), torch.rand(2, 2, 1, 8, 8)
    out = n(x)
    drawn = [n.draw(out.v, y[:, k]) for k in (0, 1)]
    want = margin_loss(out.a, torch.tensor([[1.0, 0, 1], [1, 1, 0]]))
    want += sum(((d - o[:, k]) ** 2).sum() for k, d in enumerate(drawn)) / 4  # samples, drawings
    assert_close(n(x, labels=y, originals=o)['loss'], want)
    assert_close(n(x, labels=y.flip(1), originals=o.flip(1))['loss'], want)
    assert (n(x, labels=y, originals=o.flip(1))['loss'] - want).abs() > 1e-3
    for dtype in (torch.int32, torch.uint8):
        assert_close(n(x, labels=y.to(dtype), originals=o)['loss'], want)


@pytest.mark.parametrize('black', (False, True))
def test_all_parameters_learn(black):
    n, x = net(), torch.zeros(4, 1, 8, 8) if black else torch.rand(4, 1, 8, 8)
    n(x, labels=torch.tensor([0, 1, 2, 0]))['loss'].backward()
    assert all(p.grad.isfinite().all() for p in n.parameters())
    assert black or all(p.grad.abs().sum() > 0 for p in n.parameters())


x2, pairs = torch.rand(2, 1, 8, 8), torch.tensor([[0, 1], [2, 0]])


@pytest.mark.parametrize(
    'call, what',
    [
        (lambda: CapsNet(image_shape=(1, 8, 8)), '8x8 are too small'),
        (lambda: net()(x2, pairs[0], torch.rand(2, 2, 1, 8, 8)), 'originals'),
        (lambda: net()(x2, torch.tensor([[0, 5], [1, 2]])), 'got 0 to 5'),
        (lambda: net()(x2, pairs, torch.rand(2, 2, 1, 1, 1)), r'1, 8, 8\].*\(2, 2, 1, 1, 1\)'),
        (lambda: net(decoder=None).draw(torch.rand(2, 3, 5)), 'has no decoder'),
        (lambda: net().draw(torch.rand(4, 3, 5), torch.tensor([1])), r'class numbers \[4\]'),
    ],
)
def test_errors(call, what):
    with pytest.raises(ValueError, match=what):
        call()


# ---- Efficient-CapsNet: the authors' answers, with seeded and published weights

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
    _fill(net, seeded(1, 5, (2, 32, 64, 64, 128), (7, 3, 3, 3), 8, False))
    agrees(net, pictures(4, 48, 2), 'norb')


def mnist_network(**kw):
    net, kept = EfficientCapsNet(**kw), []
    each = seeded(2, 10, (1, 32, 64, 64, 128), (5, 3, 3, 3), 9, True)
    for k, block in enumerate(net.features):
        kept += each[6 * k : 6 * k + 4]
        block[2].running_mean, block[2].running_var = each[6 * k + 4 : 6 * k + 6]
    _fill(net, kept + each[24:])
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
    with pytest.raises(FileNotFoundError):
        EfficientCapsNet.from_published(path)
    path.write_bytes(b'no')
    with pytest.raises(ValueError, match="no file of Efficient-CapsNet's weights"):
        EfficientCapsNet.from_published(path)
    write_h5(path, {'W': np.zeros((5, 16, 8, 16), 'f'), 'b': np.zeros((5, 16, 1), 'f')})
    with pytest.raises(ValueError, match='weights of another network'):
        EfficientCapsNet.from_published(path)
    monkeypatch.setitem(__import__('sys').modules, 'h5py', None)
    with pytest.raises(ImportError, match='pip install'):
        EfficientCapsNet.from_published(path)
