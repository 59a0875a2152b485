"Inverted attention: the authors' layers and network agree, values and gradients; scores; checks."

import json
from pathlib import Path
import pytest
import torch
from torch.testing import assert_close
from capsnb.zoo.onestep import Concurrent, InvertedAttention, _inverted_attention

theirs = json.loads((Path(__file__).parent / 'data/inverted_attention.json').read_text('utf-8'))
as_theirs = dict(rtol=1e-8, atol=1e-9)  # they divide shares by 1 + 1e-10


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def as_maps(w):
    "Their weights, or gradients, as W [i, j, d, h]: inputs in the order (type, row, column)."
    if w.ndim == 6:  # [k, l, n, d', d, m]: a field of matrices
        return w.permute(2, 0, 1, 5, 3, 4).flatten(0, 2)
    matrices = w.shape[1] == w.shape[2]
    return w.permute(0, 3, 1, 2) if matrices else w.permute(0, 2, 1, 3)


def as_poses(x, c):
    "Their [b, n, (k, l,) a] as mu [b, i, c, d]."
    return x.flatten(1, -2).unflatten(-1, (c, -1))


def as_layer(case, c, n_iters=1):
    W = as_maps(tensor(case['w']))
    i, j, d, h = W.shape
    layer = InvertedAttention(c, d, h, i, j, n_iters=n_iters, bias=False).double()
    with torch.no_grad():
        layer.W.copy_(W)
        layer.norm.weight.copy_(tensor(case['gain']))
        layer.norm.bias.copy_(tensor(case['shift']))
    return layer


def surely(mu):
    return torch.full(mu.shape[:2], torch.inf, dtype=torch.float64)


@pytest.mark.parametrize('name, c', [('matrices', 3), ('vectors', 1), ('field', 2)])
def test_it_is_the_authors_layer(name, c):
    "CapsuleFC with both kinds of poses; CapsuleCONV where its kernel sees one field"
    case = theirs[name]
    layer, x = as_layer(case, c, case['n_iters']), tensor(case['x']).requires_grad_()
    mu = as_poses(x, c)
    out = layer(surely(mu), mu)
    probe = tensor(case['probe']).reshape(out.mu.shape)
    (out.mu * probe).sum().backward()
    assert_close(out.mu, tensor(case['out']).reshape(probe.shape), **as_theirs)
    assert_close(x.grad, tensor(case['grad_x']), **as_theirs)
    assert_close(layer.W.grad, as_maps(tensor(case['grad_w'])), **as_theirs)


@pytest.mark.parametrize('name', ['sequential', 'concurrent'])
def test_it_is_the_authors_network(name):
    "three layers above the primary capsules, one after the other, or each iteration together"
    case, n = theirs[name], theirs[name]['n_iters']
    one_by_one = name == 'sequential'
    layers = [as_layer(o, 2, n if one_by_one else 1) for o in case['layers']]
    with torch.no_grad():
        layers[-1].readout.weight.copy_(tensor(case['readout'][0])[None])
        layers[-1].readout.bias.copy_(tensor(case['readout'][1]))
    x = tensor(case['x']).requires_grad_()
    mu = as_poses(x, 2)
    if one_by_one:
        for layer in layers:
            out = layer(surely(mu), mu)
            mu = out.mu
    else:
        out = Concurrent(layers, n, scored=False)(surely(mu), mu)
    (out.scores * tensor(case['probe'])).sum().backward()
    assert_close(out.scores, tensor(case['out']), **as_theirs)
    assert_close(x.grad, tensor(case['grad_x']), **as_theirs)
    for layer, o in zip(layers, case['layers']):
        assert_close(layer.W.grad, as_maps(tensor(o['grad_w'])), **as_theirs)


@pytest.fixture
def some():
    torch.manual_seed(0)
    return torch.randn(2, 7, dtype=torch.float64), torch.randn(2, 7, 4, 4, dtype=torch.float64)


def two_layers(**scored):
    torch.manual_seed(0)
    sizes = ((7, 5), (5, 3))
    layers = [InvertedAttention(4, 4, 4, i, j).double() for i, j in sizes]
    return Concurrent(layers, 3, **scored)


def test_nobody_is_there(some):
    a, mu = torch.full_like(some[0], -torch.inf).requires_grad_(), some[1].requires_grad_()
    net = two_layers()
    out = net(a, mu)
    assert_close(out.mu, torch.zeros_like(out.mu))
    (out.mu.sum() + out.scores.sum()).backward()
    assert torch.isfinite(mu.grad).all() and torch.isfinite(net.layers[0].W.grad).all()


def test_inner_scores_count(some):
    "only where they are asked for, and then the gradient reaches them"
    outs = {}
    for scored in (True, False):
        net = two_layers(scored=scored)
        outs[scored] = net(*some)
        outs[scored].scores.square().sum().backward()
        inner = net.layers[0].readout.weight.grad
        assert (inner is not None and inner.abs().sum() > 0) if scored else inner is None
    assert (outs[True].mu - outs[False].mu).abs().max() > 1e-3


def test_poses_of_one_number_are_not_normed():
    layer = InvertedAttention(1, 3, 1, n_out=2).double()
    mu = torch.randn(5, 1, 3).double()
    V = layer.cast(mu)
    p, _ = _inverted_attention(torch.zeros(2, 1, 1).double(), V)
    assert_close(layer.step(None, torch.full((5,), torch.inf).double(), V).mu, p)
    assert_close(p, V.mean(0) * 5 / 2)
