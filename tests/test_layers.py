"""Layers of matrix capsules: against brute force, tiles against votes, and others' pitfalls."""

import copy
import importlib.util
import itertools
import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.engine import fields
from capsnb.engine.fields import field_table
from capsnb.engine.layers import ClassCaps, ConvCaps, PrimaryCaps, field_centres
from capsnb.engine.layers import _layer_floor
from capsnb.engine.numerics import error_to
from capsnb.routing.em import em_routing_ref, inverse_temperature

f64 = torch.float64
no_numba = importlib.util.find_spec('numba') is None
compiled = pytest.param('compiled', marks=pytest.mark.skipif(no_numba, reason='needs numba'))
numbers = st.integers


def draw(*shape, seed=0, dtype=f64):
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(*shape, generator=g, dtype=f64)
    return a.to(dtype), torch.randn(*shape, 2, 3, generator=g, dtype=f64).to(dtype)


def layer(plan='tiles', I=2, O=3, dtype=f64, seed=0, **kw):
    torch.manual_seed(seed)
    how = dict(d_cov=2, d_inp=3, d_out=2, plan=plan, lam=0.1, eps=1e-4) | kw
    l = ConvCaps(I, O, **how).to(dtype)
    with torch.no_grad():
        l.beta_a.normal_()
        l.beta_u.normal_()
    return l


def brute_force(l, a, mu, n_iters, eps):
    "All children and all parents as one dense problem, by loops, routed by the paper's procedure."
    (b, M, N, I), O, (Kr, Kc), (sr, sc), (pr, pc) = a.shape, l.n_out, l.kernel, l.stride, l.padding
    rows, cols = (M + 2 * pr - Kr) // sr + 1, (N + 2 * pc - Kc) // sc + 1
    V = torch.zeros(b, M * N * I, rows * cols * O, 2, l.d_out, dtype=mu.dtype)
    parents = torch.zeros(V.shape[1:3], dtype=torch.bool)
    for r, q, y, x in itertools.product(*map(range, (rows, cols, M, N))):
        kr, kc = y - r * sr + pr, x - q * sc + pc
        if not (0 <= kr < Kr and 0 <= kc < Kc):
            continue
        for i, o in itertools.product(range(I), range(O)):
            child, parent = (y * N + x) * I + i, (r * cols + q) * O + o
            parents[child, parent] = True
            V[:, child, parent] = mu[:, y, x, i] @ l.W[kr, kc, i, o]
    beta = [t.repeat(rows * cols) for t in (l.beta_a, l.beta_u)]
    out = em_routing_ref(a.flatten(1), V, *beta, l.lam, n_iters, parents, eps)
    return [o.unflatten(1, (rows, cols, O)) for o in out[:3]], parents


@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled])
@settings(max_examples=10, deadline=None)
@given(
    st.tuples(numbers(1, 5), numbers(1, 5)),
    st.tuples(numbers(1, 3), numbers(1, 3)),
    st.tuples(numbers(1, 3), numbers(1, 3)),
    st.tuples(numbers(0, 2), numbers(0, 2)),
    numbers(1, 4),
    st.sampled_from([1e-3, '10%']),
    numbers(0, 99),
)
def test_any_field_against_brute_force(plan, size, K, stride, padding, n_iters, eps, seed):
    padding = tuple(min(p, k - 1) for p, k in zip(padding, K))
    how = dict(K=K, stride=stride, padding=padding, n_iters=n_iters, eps=eps, seed=seed)
    l, (a, mu) = layer(plan, **how), draw(1, *size, 2, seed=seed)
    try:
        field_table(size, 2, K, stride, padding)
    except ValueError:
        return  # no room, or a field that sees nothing
    want, parents = brute_force(l, a, mu, n_iters, eps)
    if eps == 1e-3 or parents.any(0).all():
        for got, w in zip(l(a, mu)[:3], want):
            assert_close(got, w, rtol=1e-6, atol=1e-8)


def step(l, a, mu):
    a, mu = a.clone().requires_grad_(), mu.clone().requires_grad_()
    out, g = l(a, mu)[:3], torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=g, dtype=f64).to(o.dtype)).sum() for o in out)
    leaves = [a, mu, *l.parameters()]
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [*(o.detach() for o in out), *grads]


fast = pytest.mark.parametrize('plan', ['tiles', compiled])


@fast
@settings(max_examples=12, deadline=None)
@given(
    numbers(0, 3),
    st.tuples(numbers(3, 6), numbers(3, 6)),
    st.sampled_from([(1, 1), (2, 3), (5, 2)]),
    st.tuples(numbers(1, 3), numbers(1, 3), numbers(0, 2)),
    numbers(1, 4),
    st.sampled_from([1e-3, '10%', 'auto']),
    st.sampled_from(['logistic', 'pi']),
    st.sampled_from([0.0, 0.3]),
)
def test_values_and_gradients_of_votes(plan, b, size, types, field, n_iters, eps, act, damping):
    (I, O), (K, stride, padding) = types, field
    lam = inverse_temperature if b % 2 else 0.3
    kw = dict(K=K, stride=stride, padding=min(padding, K - 1), n_iters=n_iters, lam=lam)
    kw |= dict(I=I, O=O, eps=eps, act=act, damping=damping)
    for got, want in zip(*(step(layer(p, **kw), *draw(b, *size, I)) for p in (plan, 'votes'))):
        assert_close(got, want, rtol=1e-6, atol=1e-8)


@fast
@pytest.mark.parametrize(
    'tiling', [(1, 0, 0), (200, 1 << 20, 1 << 20), (2000, 2 * 2600, 1 << 20, 1 << 26)]
)
@pytest.mark.parametrize('kw', [dict(eps='10%', n_iters=4), dict(act='pi', padding=1, damping=0.2)])
def test_any_tiling_and_any_grouping_of_images_give_the_same(plan, tiling, kw):
    """An image has 12 fields of 18 places for 3 types, 2592 numbers: groups of 1, 2 and all 5.

    Shares are kept, or made again."""
    a, mu = draw(5, 5, 6, 2)
    mu = mu * torch.logspace(-1, 1, 5, dtype=f64)[:, None, None, None, None, None]
    want, tiled = step(layer('votes', **kw), a, mu), layer(plan, **kw)
    tiled.tiling = fields._Tiling(*tiling)
    for got, w in zip(step(tiled, a, mu), want):
        assert_close(got, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled, 'classes'])
@pytest.mark.parametrize('eps', [1e-4, '10%'])
def test_pitfall_1_finite_with_one_child_and_at_the_extremes(plan, eps):
    for K, I in ((1, 1), (3, 2)):
        how = dict(eps=eps, lam=1.0)
        l = ClassCaps(I, 3, 2, 3, 2, **how)
        l = l if plan == 'classes' else layer(plan, I=I, K=K, dtype=torch.float32, **how)
        a, mu = draw(2, 4, 4, I, dtype=torch.float32)
        for poses in (mu, 1e4 * mu, mu + 1e4, 0 * mu, mu[:, :1, :1, :1].expand_as(mu)):
            for acts in (a, 0 * a, 0 * a + 1, a.round()):
                assert all(o.isfinite().all() for o in step(l, acts, poses))


@pytest.mark.parametrize(
    'make, n',
    [
        (lambda **kw: ConvCaps(2, 3, **kw), 16),
        (lambda **kw: ClassCaps(2, 3, 3, 3, 3, **kw), 9),
        (lambda **kw: ConvCaps(2, 3, d_cov=1, d_inp=1, d_out=1, **kw), 1),
    ],
)
def test_the_default_floor_is_root_n_minus_1_times_the_spread_of_the_votes(make, n):
    "and not a small number, which makes the first guess final (70_floor)"
    once, bare, rel = make(n_iters=1), make(n_iters=1, eps=1e-12), max(n**0.5 - 1, 0.1)
    assert once.eps == 'auto' and _layer_floor('auto', n) == f'{100 * rel:.4g}%'
    g = torch.Generator().manual_seed(0)
    a, mu = torch.rand(2, 4, 4, 2, generator=g), (2, 4, 4, 2, once.d_cov, once.d_inp)
    mu = torch.randn(mu, generator=g)
    bare.load_state_dict(once.state_dict())
    s, sig2 = bare(a, mu).sig2, once(a, mu).sig2
    dims = tuple(range(1, s.ndim))
    assert_close(sig2 - s, (rel * s.mean(dims, keepdim=True)).expand_as(s), rtol=1e-3, atol=1e-5)


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
    for x, y in zip(got[:3], want):
        assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('size', [(1, 1), (3, 4)])
def test_pitfall_6_class_capsules_route_over_all_positions_at_once(size):
    l, (a, mu) = ClassCaps(2, 3, 2, 3, 2, lam=0.1, eps=1e-3).double(), draw(2, *size, 2)
    with torch.no_grad():
        l.beta_a.normal_()
        l.beta_u.normal_()
    V = torch.einsum('brqicd,ijdh->brqijch', mu, l.W)
    for r, q in itertools.product(*map(range, size)):  # coordinates, by hand
        V[:, r, q, :, :, 0, 1] += (r + 0.5) / size[0]
        V[:, r, q, :, :, 1, 1] += (q + 0.5) / size[1]
    V, beta = V.flatten(1, 3), (l.beta_a, l.beta_u)
    got, want = l(a, mu), em_routing_ref(a.flatten(1), V, *beta, 0.1, 3, eps=1e-3)
    for x, y in zip((*got[:3], got.R.flatten(1, 3)), want):
        assert_close(x, y, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize('plan', ['votes', 'tiles', compiled])
def test_float32_is_as_exact_as_votes_and_autocast_changes_nothing(plan):
    a, mu = draw(2, 6, 6, 2, dtype=torch.float32)
    want = step(layer('votes'), a.double(), mu.double())
    got = step(layer(plan, dtype=torch.float32), a, mu)
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


ok = draw(2, 5, 5, 2, dtype=torch.float32)
narrow = dict(dtype=torch.float32)
refused = {
    'stride must be an integer >= 1, or two of them': lambda: ConvCaps(2, 3, stride=(1, 2, 3)),
    r"plan must be one of \['auto', 'votes', .*\], got 'fast'": lambda: ConvCaps(2, 3, plan='fast'),
    "act must be 'logistic' or 'pi', got 'relu'": lambda: ConvCaps(2, 3, act='relu'),
    'padding must be smaller than K': lambda: layer(K=3, padding=3)(*ok),
    'has no room for a field of': lambda: layer(K=6)(*ok),
    r'a and mu must have shapes \[\.\.\., m, n, 3\]': lambda: layer(I=3, **narrow)(*ok),
    r'a must lie in \[0, 1\]': lambda: layer(**narrow)(ok[0] + 1, ok[1]),
    'mu must be finite': lambda: layer(**narrow)(ok[0], ok[1] / 0),
    'a must be finite, got NaN or inf': lambda: layer(**narrow)(ok[0] * math.nan, ok[1]),
    'got torch.uint8': lambda: PrimaryCaps(3, 2)(torch.zeros(2, 3, 5, 5, dtype=torch.uint8)),
    r'x must have shape \[\.\.\., 3, m, n\]': lambda: PrimaryCaps(3, 2)(torch.zeros(2, 4, 5, 5)),
    'centres must be 5 rows and 5 columns, got 5 and 4': lambda: ClassCaps(2, 3, 2, 3, 2)(
        *ok, centres=(torch.zeros(5), torch.zeros(4))
    ),
    'coordinates need a pose of at least 2 elements': lambda: ClassCaps(2, 3, 1, 1, 1),
}


@pytest.mark.parametrize('message', refused)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        refused[message]()


@pytest.mark.parametrize('make', [PrimaryCaps, ConvCaps, ClassCaps])
def test_what_is_not_a_tensor_is_refused_by_name(make):
    x = [torch.rand(1, 4, 4, 2).numpy()] * (1 if make is PrimaryCaps else 2)
    with pytest.raises(TypeError, match='(x|a) must be a tensor, got ndarray'):
        make(2, 3)(*x)


def errors_far_away(plan, K, I, eps, offset, scale=1.0, d=3):
    "Relative errors in float32 of a, mu, sig2 and of the gradients, for poses around `offset`."
    l = layer('votes', I=I, K=K, eps=eps, lam=1.0, d_inp=d).float()
    a, mu = draw(2, 5, 5, I, dtype=torch.float32)
    mu = scale * mu[..., :d] + offset
    truth = step(copy.deepcopy(l).double(), a.double(), mu.double())
    l.plan = plan
    return [error_to(g, t) for g, t in zip(step(l, a, mu), truth)]


@pytest.mark.parametrize('eps', [1e-8, 1.0, 'auto'])
@pytest.mark.parametrize('offset', [0.0, 1e3, -1e6])
@pytest.mark.parametrize('d', [1, 3])
@fast
def test_the_mean_of_one_vote_is_the_vote_wherever_it_lies(plan, d, eps, offset):
    votes, found = (errors_far_away(p, 1, 1, eps, offset, d=d) for p in ('votes', plan))
    assert max(found[:3]) < max(1e-6, 2 * max(votes[:3]))
    assert max(f / max(v, 1e-5) for f, v in zip(found, votes)) < 2


@pytest.mark.parametrize('scale', [1e-3, 1e3])
@pytest.mark.parametrize('offset', [0.0, 1e2, 1e4])
@fast
def test_far_from_the_origin_plans_are_as_exact_as_votes(plan, offset, scale):
    for K, I, eps in ((2, 1, '1%'), (3, 3, 'auto')):
        votes, found = (errors_far_away(p, K, I, eps, offset, scale) for p in ('votes', plan))
        assert all(f < 4 * v + 1e-4 for f, v in zip(found, votes)), (K, I, votes, found)


def test_the_table_of_a_grid_is_made_once_and_never_from_what_cannot_be_trained():
    layer = ConvCaps(2, 3)
    a, mu = torch.rand(1, 5, 5, 2), torch.randn(1, 5, 5, 2, 4, 4, requires_grad=True)
    with torch.inference_mode():
        layer(a, mu)
    layer(a, mu).mu.sum().backward()
    first = layer._table((5, 5), a.device)
    layer(a, mu)
    assert layer._table((5, 5), a.device) is first


def test_class_capsules_give_their_shares_if_asked_and_settings_may_hold_an_argument():
    from capsnb import RoutedPool

    a, mu = torch.rand(2, 3, 3, 4), torch.randn(2, 3, 3, 4, 4, 4)
    top = ClassCaps(4, 5)
    assert top(a, mu, return_R=True).R.shape == (2, 3, 3, 4, 5)
    assert top(a, mu, return_R=False).R is None
    assert RoutedPool(8, settings=dict(n_iters=2)).route.n_iters == 2
    assert RoutedPool(8, None)(torch.randn(2, 5, 8), n_out=3).shape == (2, 3, 8)
    with pytest.raises(ValueError, match=r'a bool mask \(2, 9\), got torch.int64'):
        RoutedPool(8)(torch.randn(2, 9, 8), torch.ones(2, 9).long())
    with pytest.raises(TypeError, match="K is the paper's letter for kernel"):
        ConvCaps(4, 5, kernel=3, K=3)
