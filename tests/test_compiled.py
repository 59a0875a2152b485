"""Compiled fields: against the definition, brute force and other plans; what they refuse."""

from concurrent.futures import ThreadPoolExecutor
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from capsnb.engine import fields
from capsnb.engine.fields import field_plans, field_table
from capsnb.engine.layers import ClassCaps, ConvCaps
from capsnb.engine.numerics import error_to
from test_layers import draw, layer, step

pytest.importorskip('numba')
f64 = torch.float64


def same(l, a, mu, tol=1e-11):
    "Values and gradients of plan 'compiled' are those of 'votes', in the norm."
    l.plan = 'votes'
    want = step(l, a, mu)
    l.plan = 'compiled'
    for got, w in zip(step(l, a, mu), want):
        assert got.dtype == w.dtype
        assert error_to(got, w) <= tol or (got - w).abs().max() < 1e-15  # the rounding of a zero


@pytest.mark.parametrize(
    'pose, dtype',
    [
        ((1, 1, 1), f64),
        ((5, 4, 4), f64),
        ((3, 2, 7), torch.float32),
        ((1, 16, 16), torch.float32),
    ],
)
def test_poses_of_any_size(pose, dtype):
    "their numbers fill vectors, leave some over, or need more than one"
    c, d, h = pose
    torch.manual_seed(0)
    l = ConvCaps(3, 5, d_cov=c, d_inp=d, d_out=h, lam=0.1).to(dtype)
    a, mu = torch.rand(2, 5, 4, 3, dtype=dtype), torch.randn(2, 5, 4, 3, c, d, dtype=dtype)
    same(l, a, mu, 1e-11 if dtype == f64 else 1e-4)


def test_threads_share_the_fields_and_may_be_many():
    l, (a, mu) = layer('compiled'), draw(3, 6, 6, 2)
    want, before = step(l, a, mu), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(step, l, a, mu) for _ in range(4)]
        for run in runs:
            for got, w in zip(run.result(), want):
                assert_close(got, w)
    finally:
        torch.set_num_threads(before)


def inside(rng, *shape):
    "An array with NaN in front of it and behind it, and what is around it."
    n, pad = int(np.prod(shape)), 32
    buffer = np.full(n + 2 * pad, np.nan, np.float32)
    array = buffer[pad : pad + n].reshape(shape)
    array[:] = rng.random(shape)
    return array, (buffer[:pad], buffer[pad + n :])


@pytest.mark.parametrize('dims', [(4, 4, 4), (2, 3, 2), (3, 2, 7)])
def test_kernels_read_and_write_no_number_beyond_their_data(dims):
    kernels = pytest.importorskip('capsnb.engine.kernels')
    (c, d, h), (b, n_fields, J, S), rng = dims, (2, 3, 5, 48), np.random.default_rng(0)
    P, m, around = b * n_fields, c * h, []

    def new(*shape):
        array, edges = inside(rng, *shape)
        around.extend(edges)
        return array

    sizes, n = tuple((0,) * k for k in dims), S // 16
    x, W, a, least, mu, var = (
        new(*s) for s in ((P, n, c * d, 16), (J, n, d * h, 16), (P, S), (P, S), *[(P * J, m)] * 2)
    )
    R, L, U, g_R = (new(P * J, S) for _ in range(4))
    mass, g_a, one, two = new(P, J), new(P, S), new(P * J, m), new(P * J, m)
    table = rng.integers(-1, 7, (n_fields, S))
    values = new(b * 7, c * d)
    kernels._lay_out(0, P, values, table, x)
    kernels._gather(0, P, x, W, a, least, R, mu, var, mass, n_fields, sizes)
    kernels._score(0, P, x, W, mass, mu, var, L, sizes)
    kernels._compete(0, b, L, J, table, 7)
    kernels._worth(0, P, x, W, a, least, L, mu, var, mass, one, two, U, g_R, g_a, n_fields, sizes)
    kernels._centre(0, b, L, g_R, J, table, 7, g_a)
    g_k = new(P, J)
    kernels._score_back(0, P, x, W, L, g_R, g_a, mu, U, g_k, one, two, sizes)
    g_x, g_W, A, B, terms = new(*x.shape), new(*W.shape), *(new(2 * P * J, m) for _ in 'AB'), 2
    kernels._spread(0, P, x, W, mu, A, B, new(2 * P * J, S), terms, g_x, g_W, sizes)
    kernels._add_up(0, b, g_x, table, values)
    for array in (x, mu, var, mass, L, U, g_R, g_a, g_k, one, two, g_x, g_W, values):
        assert np.isfinite(array).all()
    assert all(np.isnan(edge).all() for edge in around)


def with_shares(l, a, mu, **kw):
    "Outputs, shares, and gradients of all."
    x, y, g = a.clone().requires_grad_(), mu.clone().requires_grad_(), torch.Generator()
    out = l(x, y, **kw)[:4]
    noise = [torch.randn(o.shape, generator=g.manual_seed(1), dtype=f64) for o in out]
    loss = sum((o * n).sum() for o, n in zip(out, noise))
    grads = torch.autograd.grad(loss, [x, y, *l.parameters()], materialize_grads=True)
    return [*out, *grads]


@pytest.mark.parametrize('pose', [(4, 4, 4), (1, 16, 16)])
@pytest.mark.parametrize('kw', [{}, dict(coordinates=False, act='pi'), dict(n_iters=1)])
def test_class_capsules_are_one_field(pose, kw, monkeypatch):
    "with coordinates as further columns of the poses; shares and their gradients too"
    l = ClassCaps(3, 5, *pose, lam=0.1, damping=0.2, **kw).double()
    a, mu = torch.rand(2, 1, 5, 6, 3, dtype=f64), torch.randn(2, 1, 5, 6, 3, *pose[:2], dtype=f64)
    found = with_shares(l, a, mu)
    monkeypatch.delitem(field_plans, 'compiled')
    for got, want in zip(found, with_shares(l, a, mu)):
        assert error_to(got, want) < 1e-12


@pytest.mark.parametrize('kw', [dict(padding=1), dict(n_iters=1), dict(act='pi', stride=2)])
def test_shares_are_those_of_the_definition(kw):
    "values and gradients, of several images"
    l, x = layer('votes', damping=0.3, **kw), draw(3, 5, 4, 2)
    want = with_shares(l, *x, return_R=True)
    for l.plan in ('compiled', 'auto'):
        for g, w in zip(with_shares(l, *x, return_R=True), want):
            assert g.shape == w.shape and error_to(g, w) < 1e-11


def test_auto_takes_it_on_the_cpu_and_it_says_what_it_refuses():
    table, loop = field_table((2, 3), 1, 2)[0], fields._Loop([0.1])
    shapes = (2, 6), (2, 6, 2, 2), (4, 2, 2, 1), (2,), (2,)
    parts = fields._Parts(*map(torch.zeros, shapes), table)
    assert fields._field_plan('auto', parts, loop) is field_plans['compiled']
    meta = fields._Parts(*(t.to('meta') for t in parts))
    half = fields._Parts(*(t.half() for t in parts[:5]), table)
    big = parts._replace(mu=torch.zeros(1, 6, 16, 16), W=torch.zeros(4, 2, 16, 16))
    told = ((meta, 'CPU, not on meta'), (half, 'not torch.float16'), (big, 'up to 1024'))
    for case, message in told:
        with pytest.raises(ValueError, match=message):
            fields._field_plan('compiled', case, loop)
        assert fields._field_plan('auto', case, loop) is field_plans['tiles']
