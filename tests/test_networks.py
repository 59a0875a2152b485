"What all networks for images do alike: labels, images, empty batches, transforms."

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close
from capsnb import BaselineCNN, CapsNet, DStepNet, EfficientCapsNet
from capsnb import MatrixCapsNet, RoutingNet, SmallNORBNet

small = dict(channels=8, n_types=2, decoder=(8,))
makers = {
    'CapsNet': lambda k=3: (CapsNet(k, **small), 28),
    'EfficientCapsNet': lambda k=3: (EfficientCapsNet(k, decoder=(8,)), 28),
    'MatrixCapsNet': lambda k=3: (MatrixCapsNet(8, 2, 2, 2, k, in_channels=1), 32),
    'MatrixCapsNet, paper': lambda k=3: (
        MatrixCapsNet(8, 2, 2, 2, k, in_channels=1, preset='paper'),
        32,
    ),
    'DStepNet': lambda k=3: (DStepNet(k), 28),
    'SmallNORBNet': lambda k=3: (SmallNORBNet(k, 8, 8, 1), 32),
    'BaselineCNN': lambda k=3: (BaselineCNN(k, 1, 28), 28),
    'RoutingNet': lambda k=3: (RoutingNet(k), 28),
}


@pytest.fixture(params=list(makers))
def net(request):
    torch.manual_seed(0)
    n, size = makers[request.param]()
    n.size_here = size
    return n.eval()


def draw(net, b=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return torch.rand(b, 1, net.size_here, net.size_here, generator=g).to(dtype)


def test_labels_of_every_form_ask_for_the_same_loss(net):
    x, y = draw(net), torch.tensor([2, 0, 1, 2])
    one = F.one_hot(y, 3)
    want = net(x, y)['loss']
    for labels in (y.int(), y.to(torch.uint8), one, one.bool(), one.int(), one.float(), one.half()):
        assert_close(net(x, labels)['loss'], want)
    soft = 0.75 * one + 0.25 * one.roll(1, 0)
    mixed = 0.75 * want + 0.25 * net(x, y.roll(1, 0))['loss']
    if getattr(net, 'decoder', None) is None:  # drawings are not linear in the labels
        assert_close(net(x, soft)['loss'], mixed)
    assert net(x, soft)['loss'].isfinite()


@pytest.mark.parametrize(
    'labels, told',
    [
        (torch.tensor([0, 1, 2, 3]), r'class numbers must lie in \[0, 3\), got 0 to 3'),
        (torch.tensor([-1, 1, 2, 0]), r'class numbers must lie in \[0, 3\), got -1 to 2'),
        (torch.tensor([0.0, 1, 2, 0]), r'expected class numbers \[4\] or weights \[4, 3\]'),
        (torch.tensor([True] * 4), r'expected class numbers \[4\]'),
        (torch.tensor([0, 1, 2]), r'got torch.int64 \[3\]'),
        (torch.tensor([[0, 1, 2]] * 4), r'weights of classes must lie in \[0, 1\], got 0 to 2'),
        (torch.tensor([[0.5, 0.5, -0.1]] * 4), r'weights of classes must lie in \[0, 1\]'),
        ([0, 1, 2, 0], 'labels must be a tensor, got list'),
    ],
    ids=str,
)
def test_labels_that_say_nothing_are_refused_by_all_alike(net, labels, told):
    with pytest.raises(ValueError, match=told):
        net(draw(net), labels)


def test_images_of_other_dtypes_are_cast_or_refused_by_all_alike(net):
    x = draw(net)
    want = net(x)[0]
    assert_close(net(torch.from_numpy(x.numpy().astype(np.float64)))[0], want)
    with pytest.raises(ValueError, match='got torch.uint8: divide bytes by 255'):
        net((255 * x).byte())
    with pytest.raises(ValueError, match='got ndarray: torch.as_tensor'):
        net(x.numpy())
    with pytest.raises(ValueError, match='expected images .b, 1, .*got shape'):
        net(x[0])
    with pytest.raises(ValueError, match='expected images .b, 1, .*got shape'):
        net(x.expand(-1, 3, -1, -1))
    with pytest.raises(ValueError, match='finite, got NaN or inf'):
        net(torch.where(torch.arange(net.size_here) == 3, torch.nan, x))


def test_nothing_to_learn_from_is_told_by_all_alike(net):
    x, y = draw(net, 0), torch.zeros(0, dtype=torch.long)
    assert net(x)[0].shape == (0, 3)
    with pytest.raises(ValueError, match='at least one sample to learn from, got an empty batch'):
        net(x, y)


def test_gradients_of_each_sample(net):
    if isinstance(net, RoutingNet):
        pytest.skip('as DStepNet')
    x, y = draw(net, 2), torch.tensor([2, 0])
    p, b = {k: v.detach() for k, v in net.named_parameters()}, dict(net.named_buffers())
    loss = lambda p, x, y: functional_call(net, (p, b), (x[None], y[None]))['loss']
    each, one = vmap(grad(loss), (None, 0, 0))(p, x, y), grad(loss)(p, x[1], y[1])
    for k, want in one.items():
        assert (each[k][1] - want).abs().max() <= 1e-3 * want.abs().max() + 1e-8


@pytest.mark.filterwarnings('ignore')
def test_a_trace_serves_another_batch(net):
    if getattr(net, 'decoder', None) is not None:
        net.decoder = None
    traced, x = torch.jit.trace(net, draw(net, 2), check_trace=False), draw(net, 3)
    assert_close(traced(x)[0], net(x)[0], rtol=1e-3, atol=1e-4)
