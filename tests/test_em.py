"""EM routing: its invariants, its limits, and the pitfalls of other implementations."""

import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributions import Independent, Normal
from torch.testing import assert_close
from capsnb.routing import mixture
from capsnb.engine.em import as_damping, em_routing, free_energy, share_out
from capsnb.routing.em import (
    Floor,
    activation_logit,
    as_floor,
    as_schedule,
    e_step,
    em_routing_ref,
    inverse_temperature,
    log_normal,
    m_step,
    sig2_floor,
)

f64 = torch.float64


def problem(b=2, i=7, j=3, c=2, h=3, seed=0, dtype=f64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    a, V = (
        torch.rand(b, i, generator=g, dtype=f64),
        scale * torch.randn(b, i, j, c, h, generator=g, dtype=f64),
    )
    return (
        a.to(dtype),
        V.to(dtype),
        torch.randn(j, generator=g, dtype=f64).to(dtype),
        torch.randn(j, generator=g, dtype=f64).to(dtype),
    )


def mask(i, j, seed):
    m = torch.rand(i, j, generator=torch.Generator().manual_seed(seed)) < 0.6
    m[torch.arange(j) % i, torch.arange(j)] = True  # every parent has a child
    return m


def as_fields(m, V):
    "One parent per group; V [b, i, j, c, h] -> fields [j, n], gathered votes [b, j, n, 1, c, h]."
    fields = torch.full((m.shape[1], int(m.sum(0).max())), -1)
    for j in range(m.shape[1]):
        fields[j, : m[:, j].sum()] = m[:, j].nonzero().flatten()
    return fields, torch.stack([V[:, fields[j].clamp_min(0), j] for j in range(m.shape[1])], 1)[
        :, :, :, None
    ]


sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 8), st.integers(1, 5), st.integers(1, 2), st.integers(1, 4)
)


def procedure_1(a, V, beta_a, beta_u, lams, parents, eps, damping):
    "Hinton 2018, Procedure 1, line by line, of nothing but arithmetic; and the authors' damping."
    h, may = V.shape[-2] * V.shape[-1], torch.ones(V.shape[-4:-2], dtype=V.dtype)
    may = may if parents is None else parents.to(V.dtype)
    pose, V = V.shape[-2:], V.flatten(-2)  # V [b, i, j, h]
    R, mu = (may / may.sum(1, keepdim=True).clamp_min(1)).expand(V.shape[:-1]), 0.0
    for t, lam in enumerate(lams):
        r = (R * a[..., None])[..., None]
        w = r + (1e-12 * (a[..., None] + 1e-8) * may)[..., None]  # a parent without votes
        mu = (1 - damping) * (w * V).sum(1) / w.sum(1) + damping * mu
        s = (w * (V - mu[:, None]) ** 2).sum(1) / w.sum(1)
        if t == 0:
            spread = s.mean((1, 2), keepdim=True)
            size = spread + (mu**2).mean((1, 2), keepdim=True)
            rel = max(h**0.5 - 1, 0.1) if eps == 'auto' else 0.1
            floor = eps if isinstance(eps, float) else rel * spread + 1e-6 * size + 1e-12
        sigma = (s + floor).sqrt()
        cost = (beta_u[:, None] + sigma.log()) * r.sum(1)
        logit = lam * (beta_a - cost.sum(2))
        out = logit.sigmoid(), mu.unflatten(-1, pose), (sigma**2).unflatten(-1, pose), R
        log_p = Independent(Normal(mu[:, None], sigma[:, None]), 1).log_prob(V)
        log_ap = torch.nn.functional.logsigmoid(logit)[:, None] + log_p
        R = (log_ap.masked_fill(may == 0, -1e30)).softmax(-1) * may
    return out


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    st.integers(1, 5),
    st.integers(0, 999),
    st.booleans(),
    st.sampled_from([1e-4, '10%', 0.5, 'auto']),
    st.sampled_from([1.0, 0.1, inverse_temperature]),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_is_procedure_1(size, n_iters, seed, masked, eps, lam, damping):
    a, V, ba, bu = problem(*size, seed=seed)
    m = mask(*size[1:3], seed) if masked else None
    got = em_routing(a, V, ba, bu, lam, n_iters, m, eps=eps, damping=damping)
    wants = [procedure_1(a, V, ba, bu, as_schedule(lam, n_iters), m, eps, damping)]
    if not damping:
        wants.append(em_routing_ref(a, V, ba, bu, lam, n_iters, m, eps))
    for want in wants:
        for x, w in zip(got[:4], want):
            assert_close(x, w, rtol=1e-6, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    sizes,
    st.integers(1, 4),
    st.integers(0, 999),
    st.sampled_from(['logistic', 'pi']),
    st.sampled_from([1e-4, '10%']),
)
def test_fields_are_a_mask(size, n_iters, seed, act, eps):
    a, V, ba, bu = problem(*size, seed=seed)
    m = mask(*size[1:3], seed)
    fields, G = as_fields(m, V)
    kw = dict(lam=0.5, n_iters=n_iters, eps=eps, act=act, free_energy=True)
    want, got = (
        em_routing(a, V, ba, bu, parents=m, **kw),
        em_routing(a, G, ba[:, None], bu[:, None], fields=fields, **kw),
    )
    # floors from the votes' spread are a mean over parents, masked or not
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(got, name)[:, :, 0], getattr(want, name), rtol=1e-6, atol=1e-9)
    assert_close(got.F, want.F, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 5), st.integers(0, 999), st.booleans())
def test_shares_of_a_child_sum_to_one_over_its_parents(size, n_iters, seed, masked):
    a, V, ba, bu = problem(*size, seed=seed, scale=10.0)
    m = mask(*size[1:3], seed)
    R = em_routing(a, V, ba, bu, 0.5, n_iters, m if masked else None).R
    want = m.any(1).to(f64).expand(R.shape[:2]) if masked else torch.ones(R.shape[:2], dtype=f64)
    assert_close(R.sum(-1), want)
    if masked:
        assert (R[:, ~m] == 0).all()


def assert_finite(a, V, ba, bu, lam, n_iters, eps, **kw):
    leaves = [t.clone().requires_grad_() for t in (a, V, ba, bu)]
    out = em_routing(*leaves, lam, n_iters, eps=eps, free_energy=True, **kw)
    for o in out:
        assert o.isfinite().all()
    grads = torch.autograd.grad(
        out.a.sum() + out.mu.sin().sum() + out.mu.sum() + out.sig2.log().sum(),
        leaves,
        materialize_grads=True,
    )
    for g in grads:
        assert g.isfinite().all()
    return out


@settings(max_examples=80, deadline=None)
@given(
    sizes,
    st.integers(1, 5),
    st.integers(0, 999),
    st.sampled_from(['identical', 'huge', 'tiny', 'far', 'zero']),
    st.sampled_from(['0', '1', 'half of them', 'any']),
    st.sampled_from(['logistic', 'pi']),
    st.sampled_from([1e-4, '10%', '0.1%']),
)
def test_finite_at_the_extremes(size, n_iters, seed, votes, acts, act, eps):
    a, V, ba, bu = problem(*size, seed=seed, dtype=torch.float32)
    V = {
        'identical': V[:, :1].expand_as(V) + 1e4,
        'huge': 1e4 * V,
        'tiny': 1e-6 * V,
        'far': V + 1e4,
        'zero': 0 * V,
    }[votes]
    a = {
        '0': 0 * a,
        '1': 0 * a + 1,
        'half of them': (torch.arange(a.shape[1]) % 2).float().expand_as(a),
        'any': a,
    }[acts]
    assert_finite(a, V, 10 * ba, 10 * bu, 1.0, n_iters, eps, act=act)


def test_parents_at_different_positions_compete():
    "child 1 is in both fields: what one position takes, the other lacks"
    fields = torch.tensor([[0, 1], [1, 2]])
    L = torch.randn(2, 2, 4, dtype=f64)
    R = share_out(L, fields=fields, n=1 + int(fields.max()))
    both = torch.softmax(torch.cat([L[0, 1], L[1, 0]]), 0)
    assert_close(torch.cat([R[0, 1], R[1, 0]]), both)
    a, V = torch.ones(3, dtype=f64), torch.randn(2, 2, 4, 2, 2, dtype=f64)
    start = em_routing(a, V, 0.0, 0.0, 1.0, 1, fields=fields).R
    assert_close(
        start, torch.tensor([[1 / 4, 1 / 8], [1 / 8, 1 / 4]], dtype=f64)[..., None].expand(2, 2, 4)
    )
    none = torch.tensor([[0, 1], [1, -1]])
    assert (em_routing(a, V, 0.0, 0.0, 1.0, fields=none).R[1, 1] == 0).all()


@pytest.mark.parametrize('act', ['logistic', 'pi'])
def test_order_of_children_does_not_matter(act):
    a, V, ba, bu = problem()
    p = torch.randperm(7)
    one, two = (
        em_routing(x, v, ba, bu, 0.5, 3, act=act, free_energy=True)
        for x, v in ((a, V), (a[:, p], V[:, p]))
    )
    assert_close(two.R, one.R[:, p])
    for name in ('a', 'mu', 'sig2', 'F'):
        assert_close(getattr(two, name), getattr(one, name))


@pytest.mark.parametrize('eps', [1e-4, '10%'])
def test_a_sample_is_routed_by_itself(eps):
    a, V, ba, bu = problem(b=5)
    V = V * torch.logspace(-2, 2, 5, dtype=f64)[:, None, None, None, None]
    many = em_routing(a, V, ba, bu, 0.5, eps=eps, free_energy=True)
    for k in range(5):
        for got, want in zip(
            em_routing(a[k : k + 1], V[k : k + 1], ba, bu, 0.5, eps=eps, free_energy=True), many
        ):
            assert_close(got, want[k : k + 1])
    for got, want in zip(em_routing(a[0], V[0], ba, bu, 0.5, eps=eps, free_energy=True), many):
        assert_close(got, want[0])


def test_an_absent_child_changes_nothing():
    a, V, ba, bu = problem()
    a[:, 3] = 0
    keep = torch.arange(7) != 3
    got, want = em_routing(a, V, ba, bu, 0.5), em_routing(a[:, keep], V[:, keep], ba, bu, 0.5)
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize(
    'kw',
    [dict(), dict(act='pi'), dict(eps='20%'), dict(parents=mask(4, 3, 1)), dict(free_energy=True)],
    ids=str,
)
def test_gradcheck(kw):
    a, V, ba, bu = problem(b=1, i=4, c=1, h=2)
    a = 0.1 + 0.8 * a
    f = lambda *x: (
        em_routing(*x, lam=0.5, n_iters=3, **{'eps': 1e-2, **kw})[:3]
        + (
            (em_routing(*x, lam=0.5, n_iters=3, eps=1e-2, free_energy=True).F,)
            if 'free_energy' in kw
            else ()
        )
    )
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in (a, V, ba, bu)])


def test_gradcheck_fields():
    fields = torch.tensor([[0, 1, -1], [1, 2, 0]])
    g = torch.Generator().manual_seed(0)
    a, V = (
        torch.rand(1, 3, generator=g, dtype=f64) * 0.8 + 0.1,
        torch.randn(1, 2, 3, 2, 1, 2, generator=g, dtype=f64),
    )
    beta = torch.zeros(2, dtype=f64)
    f = lambda a, V, ba, bu: em_routing(a, V, ba, bu, 0.5, 3, fields=fields, eps=1e-2)[:3]
    assert torch.autograd.gradcheck(
        f, [t.requires_grad_() for t in (a, V, beta.clone(), beta.clone())]
    )


def test_votes_shared_by_all_parents_give_the_mixture():
    "the mixture's steps, when all parents see the same points and all activations are 1"
    x = torch.randn(50, 4, dtype=f64)
    R = torch.rand(50, 3, dtype=f64).softmax(-1)
    V = x[:, None, None].expand(50, 3, 1, 4)
    pi, mu, sig2 = mixture.m_step(x[:, None], R)
    got_mu, got_s = m_step(R * torch.ones(50, dtype=f64)[:, None], V)
    assert_close(got_mu[:, 0], mu)
    assert_close(got_s[:, 0], sig2)
    assert_close(e_step(V, pi.log(), got_mu, got_s), mixture.e_step(x[:, None], pi, mu, sig2)[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(2, 5), st.integers(0, 999))
def test_with_mixing_proportions_the_mixture_energy_never_rises(i, j, seed):
    a, V, _, _ = problem(1, i, j, seed=seed)
    last = math.inf
    for t in range(1, 7):
        o = em_routing(a, V, 0.0, 0.0, 1.0, t, act='pi', eps=1e-10)
        r = o.R * a[..., None]
        if (o.sig2 < 1e-8).any():
            return  # a lone child, held by the floor
        F = (
            (r * (o.R.clamp_min(1e-300).log() - o.a.log()[:, None] - log_normal(V, o.mu, o.sig2)))
            .sum()
            .item()
        )
        assert F <= last + 1e-6
        last = F


def energy_by_loops(a_in, V, R, a, mu, sig2, beta_a, beta_u):
    "eq. 4 of one problem, betas by parent"
    (I, J, C, H), total = V.shape, 0.0
    for j in range(J):
        total += -a[j] * beta_a[j] + a[j] * math.log(a[j]) + (1 - a[j]) * math.log(1 - a[j])
        for i in range(I):
            price = C * H * (beta_u[j] - 0.5 - 0.5 * math.log(2 * math.pi)) - Independent(
                Normal(mu[j], sig2[j].sqrt()), 2
            ).log_prob(V[i, j])
            total += a_in[i] * R[i, j] * (price + math.log(R[i, j]))
    return total


@settings(max_examples=15, deadline=None)
@given(sizes, st.integers(0, 999))
def test_free_energy_is_eq_4(size, seed):
    b, i, j, c, h = size
    a_in, V, ba, bu = problem(*size, seed=seed)
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: 0.05 + 0.9 * torch.rand(b, *s, generator=g, dtype=f64)
    X = a_in, V, (3 * draw(i, j)).softmax(-1), draw(j), draw(j, c, h), draw(j, c, h)
    by_loops = lambda ba, bu: torch.stack(
        [energy_by_loops(*(x[k] for x in X), ba, bu) for k in range(b)]
    )
    assert_close(free_energy(*X, ba, bu), by_loops(ba, bu))
    assert_close(free_energy(*X, 2.0, 0.7), by_loops([2.0] * j, [0.7] * j))
    assert_close(free_energy(*X, 2.0, bu[:1]), by_loops([2.0] * j, bu[:1].expand(j)))
    ba, bu = draw(j), draw(j)  # betas of each problem's own
    assert_close(
        free_energy(*X, ba, bu),
        torch.stack([energy_by_loops(*(x[k] for x in X), ba[k], bu[k]) for k in range(b)]),
    )


@pytest.mark.parametrize('act', ['logistic', 'pi'])
def test_F_is_the_free_energy_of_what_is_returned(act):
    a, V, ba, bu = problem()
    fields = torch.tensor([[0, 1, 2], [2, 3, 4]])
    G = V[:, fields]
    for t in (1, 3):
        out = em_routing(a, V, ba, bu, 0.5, t, act=act, free_energy=True)
        assert out.F.shape == (2, t)
        assert_close(
            out.F[:, -1],
            free_energy(a, V, *(getattr(out, k) for k in ('R', 'a', 'mu', 'sig2')), ba, bu),
        )
        out = em_routing(a, G, ba, bu, 0.5, t, fields=fields, act=act, free_energy=True)
        want = sum(
            free_energy(
                a[:, fields[p]],
                G[:, p],
                *(getattr(out, k)[:, p] for k in ('R', 'a', 'mu', 'sig2')),
                ba,
                bu,
            )
            for p in range(2)
        )
        assert_close(out.F[:, -1], want)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_low_precision_inputs_and_autocast(dtype):
    a, V, ba, bu = problem(dtype=torch.float32)
    want = em_routing(a.to(dtype).float(), V.to(dtype).float(), ba, bu, 0.5)
    got = em_routing(a.to(dtype), V.to(dtype), ba, bu, 0.5)
    assert got.mu.dtype == dtype
    assert_close(got.mu.float(), want.mu, rtol=1e-2, atol=1e-2)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        amp = em_routing(a.to(dtype), V.to(dtype), ba, bu, 0.5)
    assert amp.mu.dtype == torch.float32
    assert_close(amp.mu, want.mu)


@pytest.mark.parametrize(
    'c, h, percent', [(4, 4, '300%'), (1, 16, '300%'), (2, 2, '100%'), (1, 1, '10%')]
)
def test_auto_floor_follows_the_components(c, h, percent):
    a, V, ba, bu = problem(c=c, h=h)
    m = mask(7, 3, 0)
    fields, G = as_fields(m, V)
    for kw in (dict(), dict(parents=m)):
        for got, want in zip(
            em_routing(a, V, ba, bu, 0.5, eps='auto', **kw)[:4],
            em_routing(a, V, ba, bu, 0.5, eps=percent, **kw),
        ):
            assert_close(got, want)
    for x in (
        em_routing(a, V, ba, bu, 0.5, eps='auto', parents=m),
        em_routing(a, G, ba[:, None], bu[:, None], 0.5, eps='auto', fields=fields),
    ):
        assert_close(
            x.sig2.flatten(),
            em_routing_ref(a, V, ba, bu, 0.5, parents=m, eps='auto').sig2.flatten(),
        )
    assert as_floor('auto', c * h).rel == max(math.sqrt(c * h) - 1, 0.1)


def test_variances_of_half_precision_poses_do_not_overflow():
    a, V, ba, bu = problem(dtype=torch.float32)
    out = em_routing(a.half(), (1e4 * V).half(), ba, bu, 0.01, eps='auto', free_energy=True)
    assert (
        out.sig2.dtype == out.F.dtype == torch.float32
        and out.sig2.max() > 65504
        and all(o.isfinite().all() for o in out)
    )
    want = em_routing(a.half().float(), (1e4 * V).half().float(), ba, bu, 0.01, eps='auto')
    assert_close(out.sig2, want.sig2)
    assert out.a.dtype == out.mu.dtype == out.R.dtype == torch.float16


a2, V2 = torch.rand(4), torch.randn(4, 3, 2, 2)


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: em_routing(a2, V2[0], 0.0, 0.0), r'must have shapes \[\.\.\., i\] and'),
        (lambda: em_routing(a2[:3], V2, 0.0, 0.0), r'got \(3,\) and \(4, 3, 2, 2\)'),
        (lambda: em_routing(2 * a2 + 1, V2, 0.0, 0.0), r'a must lie in \[0, 1\]'),
        (lambda: em_routing(a2 * math.nan, V2, 0.0, 0.0), r'a must lie in \[0, 1\], got NaN$'),
        (lambda: em_routing(2 * a2 + 1, V2, 0.0, 0.0), r'\(activations, not logits\)'),
        (
            lambda: em_routing(a2, V2, math.nan, 0.0),
            'beta_a must be a number or one per parent, .3., got nan',
        ),
        (
            lambda: em_routing(a2, V2, torch.tensor([0.0, math.nan, 0.0]), 0.0),
            'beta_a must be finite, got NaN or inf',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, torch.tensor(math.inf)),
            'beta_u must be finite, got NaN or inf',
        ),
        (
            lambda: em_routing(a2, V2, torch.zeros(2), 0.0),
            r'beta_a must be a number or one per parent, \[3\], got torch.float32 of shape \(2,\)',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, torch.zeros(5, 3)),
            r'beta_u must be .* got torch.float32 of shape \(5, 3\)',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, torch.zeros(3).long()),
            r'beta_u must be .* got torch.int64 of shape \(3,\)',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, '1'),
            r'beta_u must be a number or one per parent, \[3\], got 1',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, n_iters=2.0),
            'n_iters must be an integer >= 1, got 2.0',
        ),
        (lambda: em_routing(a2, V2 / 0, 0.0, 0.0), 'V must be finite'),
        (
            lambda: em_routing(a2, V2.long(), 0.0, 0.0),
            'floating point, got torch.float32 and torch.int64',
        ),
        (lambda: em_routing(a2, V2, 0.0, 0.0, n_iters=0), 'n_iters must be an integer >= 1, got 0'),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, lam=[1.0, 2.0]),
            'lam must be a positive number, 3 of them',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, eps='wide'),
            "eps must be a positive number, a percentage .*, got 'wide'",
        ),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, act='softmax'),
            "act must be 'logistic' or 'pi', got 'softmax'",
        ),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, parents=torch.ones(4, 2, dtype=torch.bool)),
            r'parents must be a bool tensor of shape \(4, 3\)',
        ),
        (
            lambda: em_routing(a2, V2, 0.0, 0.0, parents=torch.tensor([[True, True, False]] * 4)),
            'every parent needs at least one child',
        ),
        (
            lambda: em_routing(a2, V2[None], 0.0, 0.0, fields=torch.tensor([[0, 1, 2, 4]])),
            'fields must be a long tensor',
        ),
        (
            lambda: em_routing(a2, V2[None], 0.0, 0.0, fields=torch.tensor([[-1] * 4])),
            'fields must be a long tensor',
        ),
        (
            lambda: em_routing(
                a2,
                V2,
                0.0,
                0.0,
                parents=torch.ones(4, 3, dtype=torch.bool),
                fields=torch.zeros(1, 4),
            ),
            'not both',
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    'eps',
    ['10', '-3%', 'wide%', 'none', 0.0, -1.0, math.inf, math.nan, None, True, Floor(-5, 0, 0)],
)
def test_floors_that_are_refused(eps):
    with pytest.raises(ValueError, match=r'eps must be .*got ') as e:
        as_floor(eps, 16)
    assert str(e.value).endswith(f'got {eps!r}')


def test_auto_floor_needs_the_number_of_components():
    with pytest.raises(ValueError, match="eps='auto' depends on the number of components"):
        as_floor('auto')


def test_floors_as_written():
    assert as_floor('auto', 16).rel == 3 and as_floor('auto', 1).rel == 0.1
    assert as_floor('10%') == as_floor('10%', 16) == Floor(0.1, 1e-12, 1e-12)
    assert as_floor('paper') == as_floor(1e-5) == Floor(0.0, 1e-5, 1e-5)
    mine = Floor(0.5, 1e-3, 1.0)
    assert as_floor(mine) is mine
    s, mu = torch.tensor([1.0, 3.0], dtype=f64).view(2, 1, 1), torch.full((2, 1, 1), 2.0, dtype=f64)
    assert_close(sig2_floor(s, mu, mine).item(), 0.5 * 2 + 1e-6 * (2 + 4) + 1e-3)
    assert sig2_floor(s, mu, as_floor(1e-4)).item() == 1e-4
    both = torch.stack([s, 3 * s])
    assert sig2_floor(both, both, mine).shape == (2, 1, 1, 1)
    assert sig2_floor(both, both, mine, (-4, -3, -2, -1)).shape == (1, 1, 1, 1)


@pytest.mark.parametrize('eps', ['30%', 'auto', 0.5])
def test_a_floor_may_be_given_as_read(eps):
    a, V, ba, bu = problem()
    want = em_routing(a, V, ba, bu, 0.5, eps=eps)
    for route in (em_routing, em_routing_ref):
        got = route(a, V, ba, bu, 0.5, eps=as_floor(eps, 6))
        assert_close(got.sig2, want.sig2, rtol=1e-9, atol=0)


@pytest.mark.parametrize('lam', [0, -1.0, math.nan, math.inf, [0.1], 'cold', True, lambda t: t - 1])
def test_temperatures_that_are_refused(lam):
    with pytest.raises(ValueError, match='lam must be a positive number, 2 of them'):
        as_schedule(lam, 2)


@pytest.mark.parametrize('damping', [-0.1, 1, 1.5, True, '0.1', None, math.nan])
def test_dampings_that_are_refused(damping):
    with pytest.raises(ValueError, match=r'damping must be a number in \[0, 1\), got '):
        as_damping(damping)


def test_the_logistic_minimises_the_free_energy_of_two_choices():
    cost0, cost1, lam = 3.0, 1.5, 0.8
    a = torch.linspace(1e-4, 1 - 1e-4, 100_001, dtype=f64)
    entropy = -(torch.xlogy(a, a) + torch.xlogy(1 - a, 1 - a))
    best = a[(a * cost1 + (1 - a) * cost0 - entropy / lam).argmin()]
    assert abs(best - torch.sigmoid(torch.tensor(lam * (cost0 - cost1)))) < 1e-4


def test_votes_in_smaller_units_win_unless_determinants_are_counted():
    "what the paper leaves out (appendix A.2)"
    g = torch.Generator().manual_seed(0)
    M, W = (torch.randn(12, *s, 4, 4, generator=g, dtype=f64) for s in ((), (1,)))
    for k in (0.1, 0.5, 3.0):
        both = torch.cat([W, k * W], 1)  # parent 1 is parent 0 in other units
        V = torch.einsum('icd,ijdh->ijch', M, both)
        L = log_normal(V, *m_step(torch.ones(12, 2, dtype=f64), V))
        honest = L + 4 * torch.linalg.det(both).abs().log()
        assert_close((L[:, 1] - L[:, 0]).mean().item(), -16 * math.log(k))
        assert (honest[:, 1] - honest[:, 0]).abs().max() < 1e-9


def energy_of_shares(R, a_in, a, L, beta_hat):
    "What eq. 4, the two choices of section 3 and the mixture charge for shares, nats."
    r = R * a_in[:, None]
    left = torch.xlogy(r, R).sum()
    mdl = -(r * (a * L + (1 - a) * beta_hat)).sum()
    return (left - (r * L).sum(), left + mdl, left - (r * (L + a.log())).sum())


def test_best_shares_of_three_energies():
    "E minimises the mixture's energy; eq. 4 and MDL have best shares of their own"
    a_in, V, _, _ = problem(b=1, i=12, j=4)
    a_in, V = a_in[0], V[0]
    mu, s = m_step(torch.ones(12, 4, dtype=f64), V)
    a = torch.tensor([0.9, 0.6, 0.3, 0.01], dtype=f64)
    L, beta_hat = log_normal(V, mu, s), 2.3
    best = L.softmax(-1), (a * (L - beta_hat)).softmax(-1), e_step(V, a.log(), mu, s)
    g = torch.Generator().manual_seed(0)
    for k in range(3):
        least = energy_of_shares(best[k], a_in, a, L, beta_hat)[k]
        noise = 0.1 * torch.randn(100, 12, 4, generator=g, dtype=f64)
        near = [(best[k].log() + n).softmax(-1) for n in noise]
        for R in [best[m] for m in range(3) if m != k] + near:
            assert least < energy_of_shares(R, a_in, a, L, beta_hat)[k]


def test_m_step_with_a_floor_is_best_for_votes_with_noise():
    "s + eps minimises the cost of the votes plus that of noise of variance eps"
    a, V, _, _ = problem(b=1)
    r, eps = a[0][:, None].expand(7, 3), 0.3
    mu, s = m_step(r, V[0])

    def price(sig2):
        return (
            -(r * log_normal(V[0], mu, sig2)).sum()
            + (r.sum(0) * (eps / (2 * sig2)).sum((1, 2))).sum()
        )

    for k in (0.9, 1.1):
        assert price(s + eps) < price(k * (s + eps)) and price(s + eps) < price(s + k * eps)


def largest_gradient(a, V, by_logits):
    leaves = [a.logit(1e-30) if by_logits else a.clone(), V.clone()]
    for x in leaves:
        x.requires_grad_()
    out = em_routing(leaves[0].sigmoid() if by_logits else leaves[0], leaves[1], 0.0, 0.0)
    grads = torch.autograd.grad(sum(o.sum() for o in out[:3]), leaves)
    assert all(g.isfinite().all() for g in grads)
    return max(g.abs().max().item() for g in grads)


@pytest.mark.parametrize('scale', [1.0, 1e4])
def test_absent_children_are_steep_by_activations_and_not_by_logits(scale):
    _, V, _, _ = problem(b=1, i=9, dtype=torch.float32, scale=scale)
    none, some = torch.zeros(1, 9), (torch.arange(9) % 2).float()[None]
    assert largest_gradient(none, V, False) > 1e9
    assert largest_gradient(none, V, True) <= largest_gradient(some, V, True)


def test_activation_logit_by_hand():
    "two parts, sigma = 1/e in 16 components, beta_u = .5: cost -16, logit .1 (4 + 16)"
    got = activation_logit(torch.tensor([2.0]), torch.full((1, 4, 4), math.exp(-2)), 4.0, 0.5, 0.1)
    assert_close(got, torch.tensor([2.0]))
