"""Numbers of every routing and layer: extremes, absent parts, order, company.

What a routing is compared with stands in its own room's tests; this is the sweep over all, see
tries.py.
"""

import math
from functools import partial
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from tries import tries
from capsnb.core import seed_everything
from capsnb.engine.dstep import Routing
from capsnb.engine.layers import ClassCaps, ConvCaps
from capsnb.zoo.routers import all_routings

kinds = dict(all_routings()) | {
    f'dstep, {plan}': partial(Routing, plan=plan) for plan in ('votes', 'moments', 'stream')
}
names = list(kinds)
wide = torch.float64


def sweep(few=2, cost=20):
    return settings(
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        max_examples=tries(few, cost),
        database=None,
    )


def layer(name, n_inp=None, n_out=3, seed=0, dtype=wide, **kw):
    "c = 2, d = 3, h = 2; with parameters that are not at their start."
    seed_everything(seed)
    net = kinds[name](2, 3, 2, n_inp, n_out, **kw).to(dtype).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def parts(b=2, i=5, seed=0, dtype=wide):
    g = torch.Generator().manual_seed(seed)
    a = 2 * torch.randn(b, i, generator=g, dtype=wide)
    return a.to(dtype), torch.randn(b, i, 2, 3, generator=g, dtype=wide).to(dtype)


def tensors(out):
    return [t for t in out if t is not None]


def close(found, wanted, tol=1e-9):
    for x, y in zip(tensors(found), tensors(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)


by_place = ('random',)  # its shares are drawn for each part and whole, once


def each(*strategies, but=()):
    "One test for every routing, hypothesis draws the rest."

    def wrap(attack):
        @pytest.mark.parametrize('name', [o for o in names if o not in but])
        def test(name):
            one = lambda drawn: attack(name, *drawn)
            sweep()(given(st.tuples(*strategies))(one))()

        test.__name__, test.__doc__ = attack.__name__, attack.__doc__
        return test

    return wrap


seeds, few = st.integers(0, 10**6), st.integers(1, 6)
extremes = st.sampled_from([0.0, 1e4, -1e4, 1e30, -1e30])
scales = st.sampled_from([0.0, 1e-30, 1e-6, 1e3, 1e6])


@each(seeds, few, extremes, scales)
def test_extremes_are_finite(name, seed, i, score, scale):
    "Scores and poses at the ends of their ranges."
    net, (a, mu) = layer(name, seed=seed, dtype=torch.float32), parts(2, i, seed, torch.float32)
    a[0, 0], mu = score, mu * scale
    a, mu = a.requires_grad_(), mu.requires_grad_()
    out = tensors(net(a, mu))
    assert all(t.isfinite().all() for t in out)
    loss = sum((t / t.detach().abs().max().clamp(min=1)).sum() for t in out)
    grads = torch.autograd.grad(loss, [a, mu, *net.parameters()], allow_unused=True)
    assert all(t.isfinite().all() for t in grads if t is not None)


@each(seeds, few, st.integers(1, 4), st.sampled_from([0.0, -4.0, -8.0]), but=by_place)
def test_padding_is_absence(name, seed, i, more, level):
    "Parts of score -inf, whatever stands there."
    net, (a, mu) = layer(name, seed=seed), parts(2, i, seed)
    a = a + level  # weak parts, too: absent ones count for less
    there = net(a, mu)
    pad = torch.full((2, more), -math.inf, dtype=wide)
    for size in (0.0, 1.0, 1e3):
        noise = size * torch.ones(2, more, 2, 3, dtype=wide)
        close(net(torch.cat([a, pad], 1), torch.cat([mu, noise], 1)), there, 1e-4)
        close(net(torch.cat([pad, a], 1), torch.cat([noise, mu], 1)), there, 1e-4)


@each(seeds, few, but=by_place)
def test_the_order_of_the_parts_changes_nothing(name, seed, i):
    "Parts in another order."
    net, (a, mu) = layer(name, seed=seed), parts(2, i, seed)
    order = torch.randperm(i)
    close(net(a[:, order], mu[:, order]), net(a, mu))


def turned(net, order):
    "Parameters with an axis of outputs in another order."
    n = len(order)
    with torch.no_grad():
        for p in net.parameters():
            at = next((k for k, size in enumerate(p.shape) if size == n), None)
            if at is not None:
                p.copy_(p.index_select(at, order))


@each(seeds, few, but=by_place)
def test_the_order_of_the_wholes_is_kept(name, seed, i):
    "Wholes in another order, with their parameters."
    net, (a, mu) = layer(name, seed=seed, n_out=7), parts(2, i, seed)
    order = torch.randperm(7)
    before = tensors(net(a, mu))
    turned(net, order)
    close(net(a, mu), [t[:, order] for t in before])


@each(seeds, few, st.integers(2, 5))
def test_alone_is_as_in_a_batch(name, seed, i, b):
    "A sample alone, and in any batch."
    net, (a, mu) = layer(name, seed=seed), parts(b, i, seed)
    together = tensors(net(a, mu))
    k = seed % b
    close(net(a[k : k + 1], mu[k : k + 1]), [t[k : k + 1] for t in together])
    close(net(a[k], mu[k]), [t[k] for t in together])
    close(net(a[None], mu[None]), [t[None] for t in together])


# ---- fields of capsules

fields = dict(
    conv=lambda: ConvCaps(3, 2, K=3, stride=2, d_inp=3, d_out=2, d_cov=2),
    dense=lambda: ConvCaps(3, 2, K=1, d_inp=3, d_out=2, d_cov=2),
    classes=lambda: ClassCaps(3, 2, d_inp=3, d_out=2, d_cov=2),
)


def on_grids(*strategies):
    "One test for every layer on a grid."

    def wrap(attack):
        @pytest.mark.parametrize('name', fields)
        def test(name):
            def one(drawn):
                seed, *drawn = drawn
                seed_everything(seed)
                net = fields[name]().double().eval()
                a = torch.rand(3, 5, 5, 3, dtype=wide)
                attack(net, a, torch.randn(3, 5, 5, 3, 2, 3, dtype=wide), *drawn)

            sweep()(given(st.tuples(seeds, *strategies))(one))()

        test.__name__, test.__doc__ = attack.__name__, attack.__doc__
        return test

    return wrap


@on_grids()
def test_a_grid_alone_is_as_in_a_batch(net, a, mu):
    "A grid alone, and in a batch."
    together = [t[1] for t in net(a, mu)[:3]]
    close(net(a[1], mu[1])[:3], together)
    close([t[0] for t in net(a[1:2], mu[1:2])[:3]], together)


@on_grids(st.sampled_from([0.0, 1.0, 10.0]))
def test_what_is_not_active_is_absent_from_a_grid(net, a, mu, size):
    "Parts of activation 0 on a grid, whatever their pose."
    a[..., 0] = 0
    other = mu.clone()
    other[..., 0, :, :] = size
    # EM weighs every vote by `TINY` at least: 1e-12 of 10², among wholes with little data
    close(net(a, other)[:3], net(a, mu)[:3], 1e-5)


@on_grids(scales)
def test_extremes_on_a_grid_are_finite(net, a, mu, scale):
    "Activations of 0 and 1 and poses of any size on a grid."
    net, a, mu = net.float(), a.round().float().requires_grad_(), (mu * scale).float()
    mu.requires_grad_()
    out = net(a, mu)[:3]
    assert all(t.isfinite().all() for t in out)
    loss = sum((t / t.detach().abs().max().clamp(min=1)).sum() for t in out)
    grads = torch.autograd.grad(loss, [a, mu, *net.parameters()], allow_unused=True)
    assert all(t.isfinite().all() for t in grads if t is not None)
