"""CapsNet: other sizes, the definition, drawings, an epoch with transformers' Trainer."""

import pytest
import torch
from torch.testing import assert_close
from capsnb.lab.capsnet import CapsNet, Decoder, VectorCaps
from capsnb.lab.losses import margin_loss
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


def test_maps_start_small():
    assert net(1, n_types=30).W.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize('shape', ((1, 8, 8), (2, 9, 14), (3, 11, 7)))
def test_any_size(shape):
    n = net(image_shape=shape)
    out = n(torch.rand(4, *shape))
    assert out.a.shape == (4, 3) and out.v.shape == (4, 3, 5) and n.draw(out.v).shape == (4, *shape)
    assert_close(out.a, out.v.norm(dim=-1))


def test_the_class_capsules_are_those_of_the_definition():
    n = net().double()
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    V = torch.einsum('bid,ijdh->bijh', n.primary(torch.relu(n.conv(x))), n.W)
    assert_close(n(x).v, dynamic_routing_ref(V, 3).v)
    assert 0.02 < n(x).a.min() and n(x).a.max() < 0.99
    for n_iters in (1, 2, 4):  # it shows how often it was routed
        assert (n(x).v - dynamic_routing_ref(V, n_iters).v).abs().max() > 1e-3


def test_each_capsule_is_masked():
    d = Decoder(3, 5, (1, 4, 4), (8,))
    v = torch.randn(2, 3, 5)
    other = v.clone()
    other[:, [0, 2]] = 99.0
    one = torch.tensor([[0.0, 1.0, 0.0]] * 2)
    assert_close(d(v, one), d(other, one), rtol=0, atol=0)
    assert not torch.allclose(d(v, one), d(v, one.roll(1, 1)))


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


def test_primary_capsules_are_short():
    assert (VectorCaps(3, 2, 4, 3)(1e3 * torch.randn(2, 3, 9, 9)).norm(dim=-1) <= 1 + 1e-6).all()


def test_trainer(tmp_path):
    from capsnb.lab.train import fit

    data = dict(image=torch.rand(40, 1, 8, 8), label=torch.arange(40) % 3)
    n, how = net(), dict(epochs=2, lr=(1e-4, 1e-2), mixup=0.2, device='cpu', progress=False)
    metrics = fit(n, data, data, tmp_path, **how)
    assert metrics['steps'] == 4 and len(metrics['history']) == 2
    assert_close(CapsNet.from_pretrained(tmp_path)(data['image'][:2]).v, n(data['image'][:2]).v)


x2, pairs = torch.rand(2, 1, 8, 8), torch.tensor([[0, 1], [2, 0]])


@pytest.mark.parametrize(
    'call, what',
    [
        (lambda: CapsNet(image_shape=(1, 8, 8)), '8x8 are too small'),
        (lambda: net()(x2, pairs[0], torch.rand(2, 2, 1, 8, 8)), 'originals'),
        (lambda: net()(x2, torch.tensor([[0, 5], [1, 2]])), 'got 0 to 5'),
        (lambda: net()(x2, pairs, torch.rand(2, 2, 1, 1, 1)), r'1, 8, 8\].*\(2, 2, 1, 1, 1\)'),
        (lambda: net(decoder=None).draw(torch.rand(2, 3, 5)), 'has no decoder'),
        (lambda: net().draw(torch.rand(4, 3, 5), torch.tensor([1])), r'\(4, 3, 5\) and \(1,\)'),
        (lambda: net(n_iters=True), 'n_iters must be an integer >= 1, got True'),
        (lambda: net(recon=float('nan')), 'recon must be a finite number >= 0, got nan'),
        (lambda: net(image_shape=(8, 8)), r'\(channels, rows, columns\), got \(8, 8\)'),
        (lambda: net(kernels=(3,)), 'two kernels'),
        (lambda: net(decoder=(16, 0)), r'decoder\[1\]'),
    ],
)
def test_errors(call, what):
    with pytest.raises(ValueError, match=what):
        call()
