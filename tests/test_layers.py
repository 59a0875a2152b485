"""Layers of matrix capsules: against brute force, tiles against votes, and others' pitfalls."""

import copy
import importlib.util
import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import capsnb.engine.layers as layers
from capsnb.engine.numerics import error_to
from capsnb.routing.em import em_routing_ref, inverse_temperature
from capsnb.engine.layers import (
    ClassCaps,
    ConvCaps,
    PrimaryCaps,
    field_centres,
    field_table,
    layer_floor,
)

f64 = torch.float64
no_numba = importlib.util.find_spec('numba') is None
compiled = pytest.param('compiled', marks=pytest.mark.skipif(no_numba, reason='needs numba'))


def draw(*shape, seed=0, dtype=f64):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=f64).to(dtype), torch.randn(
        *shape, 2, 3, generator=g, dtype=f64
    ).to(dtype)


def layer(plan='tiles', I=2, O=3, dtype=f64, seed=0, **kw):
    torch.manual_seed(seed)
    l = ConvCaps(I, O, d_cov=2, d_inp=3, d_out=2, plan=plan, **{'lam': 0.1, 'eps': 1e-4, **kw}).to(
        dtype
    )
    with torch.no_grad():
        l.beta_a.normal_()
        l.beta_u.normal_()
    return l


def brute_force(l, a, mu, n_iters, eps):
    "All children and all parents as one dense problem, by loops, routed by the paper's procedure."
    (b, M, N, I), O, (Kr, Kc), (sr, sc), (pr, pc) = a.shape, l.n_out, l.K, l.stride, l.padding
    rows, cols = (M + 2 * pr - Kr) // sr + 1, (N + 2 * pc - Kc) // sc + 1
    V, parents = (
        torch.zeros(b, M * N * I, rows * cols * O, 2, l.d_out, dtype=mu.dtype),
        torch.zeros(M * N * I, rows * cols * O, dtype=torch.bool),
    )
    for r in range(rows):
        for q in range(cols):
            for y in range(M):
                for x in range(N):
                    kr, kc = y - r * sr + pr, x - q * sc + pc
                    if not (0 <= kr < Kr and 0 <= kc < Kc):
                        continue
                    for i in range(I):
                        for o in range(O):
                            child, parent = (y * N + x) * I + i, (r * cols + q) * O + o
                            parents[child, parent] = True
                            V[:, child, parent] = mu[:, y, x, i] @ l.W[kr, kc, i, o]
    beta = [t.repeat(rows * cols) for t in (l.beta_a, l.beta_u)]
    out = em_routing_ref(a.flatten(1), V, *beta, l.lam, n_iters, parents, eps)
    return [o.unflatten(1, (rows, cols, O)) for o in out[:3]], out.R, parents


@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled])
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(1, 4),
    st.sampled_from([1e-3, '10%']),
    st.integers(0, 99),
)
def test_any_field_against_brute_force(plan, M, N, K, stride, padding, n_iters, eps, seed):
    padding = tuple(min(p, k - 1) for p, k in zip(padding, K))
    l, (a, mu) = (
        layer(plan, K=K, stride=stride, padding=padding, n_iters=n_iters, eps=eps, seed=seed),
        draw(1, M, N, 2, seed=seed),
    )
    try:
        field_table((M, N), 2, K, stride, padding)
    except ValueError:
        return  # no room, or a field that sees nothing
    want, _, parents = brute_force(l, a, mu, n_iters, eps)
    if eps == 1e-3 or parents.any(0).all():
        for got, w in zip(l(a, mu)[:3], want):
            assert_close(got, w, rtol=1e-6, atol=1e-8)


def step(l, a, mu):
    a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
    out, g = l(a, mu)[:3], torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=g, dtype=f64).to(o.dtype)).sum() for o in out)
    return [o.detach() for o in out] + list(
        torch.autograd.grad(loss, [a, mu, *l.parameters()], materialize_grads=True)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(3, 6),
    st.integers(3, 6),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 5),
    st.sampled_from([1e-3, '10%', 0.5]),
    st.sampled_from(['logistic', 'pi']),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
)
def test_tiles_give_values_and_gradients_of_votes(
    b, M, N, stride, padding, n_iters, eps, act, scheduled, damping
):
    kw = dict(
        K=3,
        stride=stride,
        padding=padding,
        n_iters=n_iters,
        eps=eps,
        act=act,
        lam=inverse_temperature if scheduled else 0.3,
        damping=damping,
    )
    a, mu = draw(b, M, N, 2)
    for got, want in zip(step(layer('tiles', **kw), a, mu), step(layer('votes', **kw), a, mu)):
        assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_units_of_the_betas_are_factors():
    a, mu = draw(2, 5, 4, 2)
    l, scaled = layer(K=3), layer(K=3, beta_units=(-4.0, 0.5))
    with torch.no_grad():
        scaled.beta_a.copy_(l.beta_a / -4)
        scaled.beta_u.copy_(l.beta_u / 0.5)
    for got, want in zip(scaled(a, mu)[:3], l(a, mu)[:3]):
        assert_close(got, want)


@pytest.mark.parametrize(
    'tile, group, hold',
    [
        (1, 0, 0),
        (200, 0, 0),
        (200, 1 << 20, 1 << 20),
        (1 << 20, 1 << 20, 0),
        (2000, 2 * 2600, 1 << 20),
    ],
)
@pytest.mark.parametrize(
    'kw', [dict(eps='10%'), dict(act='pi'), dict(padding=1, damping=0.2)], ids=str
)
def test_any_tiling_and_any_grouping_of_images_give_the_same(tile, group, hold, kw):
    "an image has 12 fields of 18 places for 3 types, 2592 numbers: groups of 1, 2 and all 5"
    a, mu = draw(5, 5, 6, 2)
    mu = mu * torch.logspace(-1, 1, 5, dtype=f64)[:, None, None, None, None, None]
    want = step(layer('votes', **kw), a, mu)
    tiled = layer('tiles', **kw)
    tiled.tiling = layers._Tiling(tile, group, hold)
    for got, w in zip(step(tiled, a, mu), want):
        assert_close(got, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('eps', [1e-2, '10%'])
@pytest.mark.parametrize('kind', ['fields', 'classes'])
def test_gradcheck(kind, eps):
    l, (a, mu) = layer('tiles', K=2, I=1, O=2, eps=eps, n_iters=3), draw(1, 3, 2, 1)
    if kind == 'classes':
        l = ClassCaps(1, 2, 2, 3, 2, eps=eps, lam=0.1).double()
    names = [n for n, _ in l.named_parameters()]
    f = lambda a, mu, *ps: torch.func.functional_call(l, dict(zip(names, ps)), (a, mu))[:3]
    inputs = [0.1 + 0.8 * a, mu, *(p.detach().clone() for p in l.parameters())]
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize(
    'make',
    [
        lambda: layer('votes', K=2, I=1, O=2, eps='10%'),
        lambda: ClassCaps(1, 2, 2, 3, 2, eps='10%', lam=0.1).double(),
    ],
    ids=['votes', 'classes'],
)
def test_second_derivatives_where_autograd_does_the_routing(make):
    torch.manual_seed(0)
    l, (a, mu) = make(), draw(1, 3, 2, 1)
    f = lambda a, mu: l(a, mu)[:3]
    assert torch.autograd.gradgradcheck(f, [(0.1 + 0.8 * a).requires_grad_(), mu.requires_grad_()])
    torch.func.grad(lambda m: l(a, m).mu.square().sum())(mu.detach())


def test_class_capsules_are_finite_at_the_extremes():
    a, mu = draw(2, 3, 3, 2, dtype=torch.float32)
    for eps in (1e-4, '10%'):
        l = ClassCaps(2, 3, 2, 3, 2, eps=eps, lam=1.0)
        for poses in (mu, 1e4 * mu, 0 * mu, mu[:, :1, :1, :1].expand_as(mu)):
            for acts in (a, 0 * a, 0 * a + 1, a.round()):
                for o in step(l, acts, poses):
                    assert o.isfinite().all()


@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled])
@pytest.mark.parametrize('eps', [1e-4, '10%'])
def test_pitfall_1_finite_with_one_child_and_at_the_extremes(plan, eps):
    for K, I in ((1, 1), (3, 2)):
        l = layer(plan, I=I, K=K, dtype=torch.float32, eps=eps, lam=1.0)
        a, mu = draw(2, 4, 4, I, dtype=torch.float32)
        for poses in (mu, 1e4 * mu, mu + 1e4, 0 * mu, mu[:, :1, :1, :1].expand_as(mu)):
            for acts in (a, 0 * a, 0 * a + 1, a.round()):
                for o in step(l, acts, poses):
                    assert o.isfinite().all()


def test_an_image_is_routed_by_itself():
    a, mu = draw(4, 5, 5, 2)
    mu = mu * torch.logspace(-2, 2, 4, dtype=f64)[:, None, None, None, None, None]
    for plan in ('votes', 'tiles'):
        l = layer(plan, eps='10%')
        many = l(a, mu)
        for k in range(4):
            for got, want in zip(l(a[k : k + 1], mu[k : k + 1])[:3], many):
                assert_close(got, want[k : k + 1])
        for got, want in zip(l(a[0], mu[0])[:3], many):
            assert_close(got, want[0])
        for got, want in zip(l(a.view(2, 2, 5, 5, 2), mu.view(2, 2, 5, 5, 2, 2, 3))[:3], many):
            assert_close(got.flatten(0, 1), want)


@pytest.mark.parametrize(
    'make, n',
    [
        (lambda **kw: ConvCaps(2, 3, **kw), 16),
        (lambda **kw: ClassCaps(2, 3, **kw), 16),
        (lambda **kw: ConvCaps(2, 3, d_cov=2, d_inp=3, d_out=2, **kw), 4),
        (lambda **kw: ClassCaps(2, 3, 1, 9, 9, **kw), 9),
        (lambda **kw: ConvCaps(2, 3, d_cov=1, d_inp=1, d_out=1, **kw), 1),
    ],
)
def test_the_default_floor_is_root_n_minus_1_times_the_spread_of_the_votes(make, n):
    "and not a small number, which makes the first guess final (70_floor)"
    auto, rel = make(), max(n**0.5 - 1, 0.1)
    assert auto.eps == 'auto' and layer_floor('auto', n) == f'{100 * rel:.4g}%'
    g = torch.Generator().manual_seed(0)
    c, d = auto.d_cov, auto.d_inp
    a, mu = torch.rand(2, 4, 4, 2, generator=g), torch.randn(2, 4, 4, 2, c, d, generator=g)
    once, bare = make(n_iters=1), make(n_iters=1, eps=1e-12)
    bare.load_state_dict(once.state_dict())
    s, sig2 = bare(a, mu).sig2, once(a, mu).sig2
    dims = tuple(range(1, s.ndim))
    assert_close(sig2 - s, (rel * s.mean(dims, keepdim=True)).expand_as(s), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('plan', ['auto', 'tiles', 'votes'])
def test_an_empty_batch_gives_empty_capsules_and_gradients(plan):
    l = layer(plan, dtype=torch.float32, padding=1, eps='auto')
    top = ClassCaps(3, 4, 2, 2, 2)
    for lead in ((0,), (0, 3), (2, 0)):
        a, mu = (
            t.requires_grad_()
            for t in (torch.zeros(*lead, 5, 6, 2), torch.zeros(*lead, 5, 6, 2, 2, 3))
        )
        out = l(a, mu)
        assert out.a.shape == (*lead, 5, 6, 3) and out.mu.shape == out.sig2.shape == (
            *lead,
            5,
            6,
            3,
            2,
            2,
        )
        end = top(out.a, out.mu)
        assert end.a.shape == (*lead, 4)
        (end.a.sum() + end.mu.sum()).backward()
        assert (
            a.grad.shape == a.shape
            and mu.grad.shape == mu.shape
            and all(p.grad is not None and not p.grad.any() for p in l.parameters())
        )


@pytest.mark.parametrize('eps', [1e-4, '10%'])
@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled])
def test_where_absent_parts_lie_does_not_matter(plan, eps):
    "not even where all others are weak"
    a, mu = draw(2, 4, 5, 2)
    a = 1e-3 * a
    a[:, 1] = 0
    far = mu.clone()
    far[:, 1] *= 1e4
    got, want = (layer(plan, eps=eps, K=3)(a, x) for x in (far, mu))
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('make', [lambda: ConvCaps(2, 3), lambda: ClassCaps(2, 3)])
def test_pitfall_state_dict_holds_both_betas(make):
    l = make()
    assert {'W', 'beta_a', 'beta_u'} == set(l.state_dict()) == {n for n, _ in l.named_parameters()}
    other = make()
    other.load_state_dict(l.state_dict())
    assert_close(other.W, l.W)


def test_pitfall_6_class_capsules_route_over_all_positions_at_once():
    l = ClassCaps(2, 3, 2, 3, 2, lam=0.1, eps=1e-3).double()
    a, mu = draw(2, 3, 4, 2)
    with torch.no_grad():
        l.beta_a.normal_()
        l.beta_u.normal_()
    V = torch.zeros(2, 24, 3, 2, 2, dtype=f64)
    for r in range(3):
        for c in range(4):
            for i in range(2):
                for j in range(3):
                    V[:, (r * 4 + c) * 2 + i, j] = mu[:, r, c, i] @ l.W[i, j]
                    V[:, (r * 4 + c) * 2 + i, j, 0, 1] += (r + 0.5) / 3
                    V[:, (r * 4 + c) * 2 + i, j, 1, 1] += (c + 0.5) / 4
    got, want = l(a, mu), em_routing_ref(a.flatten(1), V, l.beta_a, l.beta_u, 0.1, 3, eps=1e-3)
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-7)
    assert_close(got.R.flatten(1, 3), want.R, rtol=1e-6, atol=1e-7)
    assert_close(got.R.sum(-1), torch.ones(2, 3, 4, 2, dtype=f64))


@pytest.mark.parametrize('size', [(1, 1), (4, 4), (7, 3)])
def test_pitfall_coordinates_for_any_size(size):
    l = ClassCaps(2, 3, 2, 3, 2)
    a, mu = draw(2, *size, 2, dtype=torch.float32)
    assert l(a, mu).mu.shape == (2, 3, 2, 2)
    plain = ClassCaps(2, 3, 2, 3, 2, coordinates=False)
    plain.load_state_dict(l.state_dict())
    assert (l(a, mu).mu - plain(a, mu).mu)[:, :, :, 1].min() > 0  # coordinates are positive


def test_field_centres_are_means_of_what_is_seen():
    "backtracking through the layers, pixel by pixel"
    for chain, size in (([(5, 2, 0), (3, 2, 0), (3, 1, 0)], 32), ([(3, 2, 1), (2, 3, 0)], 20)):
        seen = [{k} for k in range(size)]
        for K, stride, padding in chain:
            if padding:
                seen = [set() for _ in range(padding)] + seen + [set() for _ in range(padding)]
            seen = [set().union(*seen[r : r + K]) for r in range(0, len(seen) - K + 1, stride)]
        got = field_centres(len(seen), chain, size) * size
        for c, s in zip(got.tolist(), seen):
            if 0 not in s and size - 1 not in s:
                assert abs(c - (min(s) + max(s) + 1) / 2) < 1e-4


@pytest.mark.parametrize('plan', ['votes', 'tiles'])
def test_float32_is_as_exact_as_votes_and_autocast_changes_nothing(plan):
    a, mu = draw(2, 6, 6, 2, dtype=torch.float32)
    want, got = (
        step(layer('votes'), a.double(), mu.double()),
        step(layer(plan, dtype=torch.float32), a, mu),
    )
    for g, w in zip(got, want):
        assert_close(g.double(), w, rtol=2e-3, atol=2e-4 * max(1.0, w.abs().max().item()))
    l = layer(plan, dtype=torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        amp = l(a.bfloat16(), mu.bfloat16())
    assert amp.mu.dtype == torch.float32
    assert_close(amp.mu, l(a.bfloat16().float(), mu.bfloat16().float()).mu)


def test_kept_for_the_backward_pass_is_a_gaussian_and_its_data_per_parent_and_iteration():
    "no votes and no shares, besides what came in and what goes out"
    a, mu = draw(2, 8, 8, 2)
    mu.requires_grad_()
    sizes = []
    for n_iters in (1, 8):
        l, kept = layer('tiles', n_iters=n_iters), {}

        def keep(t):
            kept[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            l(a, mu)
        sizes.append(sum(kept.values()))
    per_parent = 2 * 36 * 3 * (2 * 4 + 1)  # mu, variance, data of 36 positions, 3 types, 2 images
    assert sizes[1] - sizes[0] == 7 * per_parent
    places = 36 * 18  # of the fields
    came, went = a.numel() + mu.numel() + l.W.numel() + 2 * 3, 2 * 36 * 3 * (2 * 4 + 1)
    assert sizes[0] <= came + places + went + per_parent and per_parent < 2 * 36 * 18 * 3 * 4


class Live(TorchDispatchMode):
    "Counts the bytes of tensors that are alive; `most`: at the worst moment."

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                s = t.untyped_storage()
                self.held[s.data_ptr()] = (StorageWeakRef(s), s.nbytes())
        self.held = {k: v for k, v in self.held.items() if not v[0].expired()}
        self.most = max(self.most, sum(n for _, n in self.held.values()))
        return out


def test_memory_of_a_step_grows_with_iterations_by_gaussians_only():
    "forward and backward; the places' vectors, 18 numbers a parent each, come nine at a time"
    a, mu = draw(1, 8, 8, 2)
    most = {}
    for n_iters in (6, 8, 16):
        l = layer('tiles', n_iters=n_iters)
        W, fields = l.W.detach().flatten(0, 2), field_table((8, 8), 2, 3)[0]
        parts = layers._Parts(a.flatten(1), mu.flatten(1, 3), W, *l.betas(f64), fields)
        with torch.no_grad(), Live() as live:  # inside of the op
            outs = layers._tiles(parts, l._loop())
            layers._tiles_back(parts, l._loop(), outs, outs[:3])
        most[n_iters] = live.most
    gaussian, places = 8 * 36 * 3 * (2 * 4 + 1), 8 * 36 * 3 * 18
    for n, k in ((6, 8), (8, 16)):
        assert most[k] - most[n] <= 1.2 * (k - n) * gaussian + 2000
    assert 1.2 * gaussian < places  # one vector over places more per iteration would be seen


@pytest.mark.parametrize('damping', [0.0, 0.3])
@pytest.mark.parametrize('terms', [1, 2, 3, 9])
def test_contributions_to_the_gradient_may_be_added_up_a_few_at_a_time(terms, damping):
    kw, (a, mu) = dict(K=3, n_iters=4, eps='10%', damping=damping), draw(2, 5, 4, 2)
    want = step(layer('votes', **kw), a, mu)
    tiled = layer('tiles', **kw)
    tiled.tiling = layers._Tiling(terms=terms)
    for got, w in zip(step(tiled, a, mu), want):
        assert_close(got, w)


ok = draw(2, 5, 5, 2, dtype=torch.float32)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: ConvCaps(0, 3), 'n_inp must be an integer >= 1, got 0'),
        (lambda: ConvCaps(2, 3, K=0), 'K must be an integer >= 1, or two of them, got 0'),
        (
            lambda: ConvCaps(2, 3, stride=(1, 2, 3)),
            'stride must be an integer >= 1, or two of them',
        ),
        (
            lambda: ConvCaps(2, 3, plan='fast'),
            r"plan must be one of \['auto', 'votes', .*\], got 'fast'",
        ),
        (lambda: ConvCaps(2, 3, act='relu'), "act must be 'logistic' or 'pi', got 'relu'"),
        (
            lambda: ConvCaps(2, 3, beta_units=(1, 0)),
            r'beta_units must be two numbers other than 0, got \(1, 0\)',
        ),
        (lambda: layer(K=3, padding=3)(*ok), 'padding must be smaller than K'),
        (
            lambda: layer(K=6)(*ok),
            r'a grid of \(5, 5\) with padding \(0, 0\) has no room for a field of \(6, 6\)',
        ),
        (
            lambda: layer(I=3, dtype=torch.float32)(*ok),
            r'a and mu must have shapes \[\.\.\., m, n, 3\]',
        ),
        (lambda: layer(dtype=torch.float32)(ok[0] + 1, ok[1]), r'a must lie in \[0, 1\]'),
        (lambda: layer(dtype=torch.float32)(ok[0], ok[1] / 0), 'mu must be finite'),
        (
            lambda: layer(dtype=torch.float32)(ok[0] * math.nan, ok[1]),
            'a must be finite, got NaN or inf',
        ),
        (
            lambda: ClassCaps(2, 3, 2, 3, 2)(ok[0] * math.nan, ok[1]),
            'a must be finite, got NaN or inf',
        ),
        (lambda: PrimaryCaps(0, 2), 'in_channels must be an integer >= 1, got 0'),
        (lambda: PrimaryCaps(3, 2.0), 'n_types must be an integer >= 1, got 2.0'),
        (
            lambda: PrimaryCaps(3, 2)(torch.zeros(2, 3, 5, 5, dtype=torch.uint8)),
            'x must be floating point, got torch.uint8',
        ),
        (
            lambda: layer('tiles', dtype=torch.float32)(*ok, return_R=True),
            "plan='tiles' does not return R; 'auto' and these do: 'votes'",
        ),
        (
            lambda: ClassCaps(2, 3, 2, 3, 2)(*ok, centres=(torch.zeros(5), torch.zeros(4))),
            'centres must be 5 rows and 5 columns, got 5 and 4',
        ),
        (lambda: ClassCaps(2, 3, 1, 1, 1), 'coordinates need a pose of at least 2 elements'),
        (
            lambda: PrimaryCaps(3, 2)(torch.zeros(2, 4, 5, 5)),
            r'x must have shape \[\.\.\., 3, m, n\]',
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def errors_far_away(plan, K, I, eps, offset, scale=1.0):
    "Relative errors in float32 of a, mu, sig2 and of the gradients, for poses around `offset`."
    l = layer('votes', I=I, K=K, eps=eps, lam=1.0).float()
    a, mu = draw(2, 5, 5, I, dtype=torch.float32)
    mu = scale * mu + offset
    truth = step(copy.deepcopy(l).double(), a.double(), mu.double())
    l.plan = plan
    return [error_to(g, t) for g, t in zip(step(l, a, mu), truth)]


@pytest.mark.parametrize('eps', [1e-8, 1e-4, 1e-2, 1.0, '1%', 'auto'])
@pytest.mark.parametrize('offset', [0.0, 1.0, 1e3, 1e5, -1e6])
@pytest.mark.parametrize('plan', ['tiles', compiled])
def test_the_mean_of_one_vote_is_the_vote_wherever_it_lies(plan, eps, offset):
    votes, found = (errors_far_away(p, 1, 1, eps, offset) for p in ('votes', plan))
    assert max(found[:3]) < max(1e-6, 2 * max(votes[:3]))
    assert max(f / max(v, 1e-5) for f, v in zip(found, votes)) < 2


@pytest.mark.parametrize('scale', [1e-3, 1.0, 1e3])
@pytest.mark.parametrize('offset', [0.0, 1e2, 1e4])
@pytest.mark.parametrize('eps', ['1%', 'auto'])
@pytest.mark.parametrize('plan', ['tiles', compiled])
def test_far_from_the_origin_plans_are_as_exact_as_votes(plan, eps, offset, scale):
    for K, I in ((2, 1), (3, 3)):
        votes, found = (errors_far_away(p, K, I, eps, offset, scale) for p in ('votes', plan))
        assert all(f < 4 * v + 1e-4 for f, v in zip(found, votes)), (K, I, votes, found)


def test_auto_with_shares_takes_the_first_that_returns_them(monkeypatch):
    plans, parts = layers.field_plans, layers._Parts(*[None] * 6)
    monkeypatch.setattr(layers, 'field_plans', {k: plans[k] for k in ('votes', 'tiles')})
    find = lambda name: layers._field_plan(name, parts, layers._Loop([0.1]), 'shares')
    assert find('auto') is find('votes') is plans['votes']
    layers.field_plans['triton'] = layers.FieldPlan(None, lambda parts, loop: '')
    layers.field_plans['compiled'] = layers.FieldPlan(None, lambda parts, loop: '', print)
    assert find('auto') is find('compiled') is layers.field_plans['compiled']
    with pytest.raises(ValueError, match="'triton' does not return R.*: 'votes', 'compiled'"):
        find('triton')


def test_a_layer_tells_its_field():
    told = repr(ConvCaps(8, 16, 3, 2, 1))
    assert 'K=(3, 3), stride=(2, 2), padding=(1, 1)' in told and 'stride' not in repr(
        ClassCaps(8, 5)
    )


@pytest.mark.parametrize(
    'make', [lambda: PrimaryCaps(2, 3), lambda: ConvCaps(2, 3), lambda: ClassCaps(2, 3)]
)
def test_what_is_not_a_tensor_is_refused_by_name(make):
    x = (torch.rand(1, 4, 4, 2).numpy(),) * (1 if isinstance(l := make(), PrimaryCaps) else 2)
    with pytest.raises(TypeError, match='(x|a) must be a tensor, got ndarray'):
        l(*x)


def test_plans_are_found_by_name_and_auto_takes_the_first_that_does_not_refuse(monkeypatch):
    plans, parts = layers.field_plans, layers._Parts(*[None] * 6)
    monkeypatch.setattr(layers, 'field_plans', {k: plans[k] for k in ('votes', 'tiles')})
    find = lambda name: layers._field_plan(name, parts, layers._Loop([0.1]))
    assert find('auto') is plans['tiles'] and find('votes') is plans['votes']
    for name, extra in (('compiled', 'fast'), ('triton', 'gpu')):
        with pytest.raises(ImportError, match=rf"pip install 'capsnb\[{extra}\]'"):
            find(name)
    for name in ('compiled', 'triton'):  # the better one last
        layers.field_plans[name] = layers.FieldPlan(None, lambda parts, loop: '')
        assert find('auto') is find(name) is layers.field_plans[name]
    layers.field_plans['triton'] = layers.FieldPlan(None, lambda parts, loop: 'no GPU')
    assert find('auto') is layers.field_plans['compiled']
    with pytest.raises(ValueError, match="plan='triton' cannot serve here: no GPU"):
        find('triton')


def test_the_table_of_a_grid_is_made_once_and_never_from_what_cannot_be_trained():
    layer = ConvCaps(2, 3)
    a, mu = torch.rand(1, 5, 5, 2), torch.randn(1, 5, 5, 2, 4, 4, requires_grad=True)
    with torch.inference_mode():
        layer(a, mu)
    layer(a, mu).mu.sum().backward()
    first = layer._table((5, 5), a.device)
    layer(a, mu)
    assert layer._table((5, 5), a.device) is first
    assert torch.equal(first[0], field_table((5, 5), 2, 3)[0])
    assert layer._table((6, 5), a.device)[1] == ((4, 3), [])


def test_what_class_capsules_and_logits_need_is_named():
    layer, (a, mu) = ClassCaps(2, 3), (torch.rand(1, 5, 5, 2), torch.randn(1, 5, 5, 2, 4, 4))
    flat = torch.zeros(5)
    with pytest.raises(TypeError, match='rows must be a tensor, got list'):
        layer(a, mu, ([0.0] * 5, [0.0] * 5))
    with pytest.raises(ValueError, match='centres must be finite'):
        layer(a, mu, (flat + torch.nan, flat))
    conv = ConvCaps(2, 3, compete='within')
    with pytest.raises(ValueError, match='return_R=True'):
        conv.logits(a, conv(a, mu))
    assert "compete='within'" in repr(conv)
    assert 'coordinates=False' in repr(ClassCaps(2, 3, coordinates=False))
    assert 'compete' not in repr(ConvCaps(2, 3))  # runs know their architecture by what is told
    for units in (1.0, (True, 1.0), (1.0,), (0.0, 1.0)):
        with pytest.raises(ValueError, match='beta_units must be two numbers'):
            ConvCaps(2, 3, beta_units=units)
