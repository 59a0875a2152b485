"""EM routing: against the paper's procedure, its energy, its limits, floors and refusals."""

import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributions import Independent, Normal
from torch.testing import assert_close
from capsnb.engine.em import em_routing, free_energy, _share_out
from capsnb.routing.em import Floor, as_floor, as_schedule, em_routing_ref
from capsnb.routing.em import inverse_temperature

f64 = torch.float64


def problem(b=2, i=7, j=3, c=2, h=3, seed=0, dtype=f64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    a = torch.rand(b, i, generator=g, dtype=f64)
    V, beta_a, beta_u = (
        torch.randn(s, generator=g, dtype=f64) for s in ((b, i, j, c, h), (j,), (j,))
    )
    return a.to(dtype), (scale * V).to(dtype), beta_a.to(dtype), beta_u.to(dtype)


def mask(i, j, seed):
    m = torch.rand(i, j, generator=torch.Generator().manual_seed(seed)) < 0.6
    m[torch.arange(j) % i, torch.arange(j)] = True  # every parent has a child
    return m


def as_fields(m, V):
    "One parent per group; V [b, i, j, c, h] -> fields [j, n], gathered votes [b, j, n, 1, c, h]."
    fields = torch.full((m.shape[1], int(m.sum(0).max())), -1)
    for j in range(m.shape[1]):
        fields[j, : m[:, j].sum()] = m[:, j].nonzero().flatten()
    G = torch.stack([V[:, fields[j].clamp_min(0), j] for j in range(m.shape[1])], 1)
    return fields, G[:, :, :, None]


numbers = st.integers
sizes = st.tuples(numbers(1, 3), numbers(1, 8), numbers(1, 5), numbers(1, 2), numbers(1, 4))
seeds = numbers(0, 999)


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


@settings(max_examples=40, deadline=None)
@given(
    sizes,
    numbers(1, 5),
    seeds,
    st.booleans(),
    st.sampled_from([1e-4, '10%', 'auto']),
    st.sampled_from([1.0, inverse_temperature]),
    st.sampled_from([0.0, 0.6]),
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
    has = torch.ones(size[1]) if m is None else m.any(1)
    assert_close(got.R.sum(-1), has.to(f64).expand(size[:2]))
    assert m is None or not got.R[:, ~m].any()


@settings(max_examples=20, deadline=None)
@given(
    sizes,
    numbers(1, 4),
    seeds,
    st.sampled_from(['logistic', 'pi']),
    st.sampled_from([1e-4, '10%', 'auto']),
)
def test_fields_are_a_mask(size, n_iters, seed, act, eps):
    "floors from the votes' spread are a mean over parents, masked or not"
    a, V, ba, bu = problem(*size, seed=seed)
    m = mask(*size[1:3], seed)
    fields, G = as_fields(m, V)
    kw = dict(lam=0.5, n_iters=n_iters, eps=eps, act=act, free_energy=True)
    want = em_routing(a, V, ba, bu, parents=m, **kw)
    got = em_routing(a, G, ba[:, None], bu[:, None], fields=fields, **kw)
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(got, name)[:, :, 0], getattr(want, name), rtol=1e-6, atol=1e-9)
    assert_close(got.F, want.F, rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    sizes,
    numbers(1, 5),
    seeds,
    st.sampled_from(['identical', 'huge', 'tiny', 'far', 'zero']),
    st.sampled_from(['0', '1', 'half of them', 'any']),
    st.sampled_from(['logistic', 'pi']),
    st.sampled_from([1e-4, '10%', '0.1%']),
)
def test_finite_at_the_extremes(size, n_iters, seed, votes, acts, act, eps):
    a, V, ba, bu = problem(*size, seed=seed, dtype=torch.float32)
    same = V[:, :1].expand_as(V) + 1e4
    V = {'identical': same, 'huge': 1e4 * V, 'tiny': 1e-6 * V, 'far': V + 1e4, 'zero': 0 * V}[votes]
    half = (torch.arange(a.shape[1]) % 2).float().expand_as(a)
    a = {'0': 0 * a, '1': 0 * a + 1, 'half of them': half, 'any': a}[acts]
    leaves = [t.clone().requires_grad_() for t in (a, V, 10 * ba, 10 * bu)]
    out = em_routing(*leaves, 1.0, n_iters, eps=eps, act=act, free_energy=True)
    loss = out.a.sum() + out.mu.sin().sum() + out.mu.sum() + out.sig2.log().sum()
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    assert all(x.isfinite().all() for x in (*out, *grads))


def test_parents_at_different_positions_compete():
    "child 1 is in both fields: what one position takes, the other lacks"
    fields = torch.tensor([[0, 1], [1, 2]])
    L = torch.randn(2, 2, 4, dtype=f64)
    R = _share_out(L, fields=fields, n=3)
    both = torch.softmax(torch.cat([L[0, 1], L[1, 0]]), 0)
    assert_close(torch.cat([R[0, 1], R[1, 0]]), both)
    a, V = torch.ones(3, dtype=f64), torch.randn(2, 2, 4, 2, 2, dtype=f64)
    start = em_routing(a, V, 0.0, 0.0, 1.0, 1, fields=fields).R
    even = torch.tensor([[1 / 4, 1 / 8], [1 / 8, 1 / 4]], dtype=f64)
    assert_close(start, even[..., None].expand(2, 2, 4))
    none = torch.tensor([[0, 1], [1, -1]])
    assert (em_routing(a, V, 0.0, 0.0, 1.0, fields=none).R[1, 1] == 0).all()


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


@settings(max_examples=10, deadline=None)
@given(sizes, seeds)
def test_free_energy_is_eq_4(size, seed):
    "betas by parent, by problem, or of all"
    b, i, j, c, h = size
    a_in, V, ba, bu = problem(*size, seed=seed)
    g = torch.Generator().manual_seed(seed)
    draw = lambda *s: 0.05 + 0.9 * torch.rand(b, *s, generator=g, dtype=f64)
    X = a_in, V, (3 * draw(i, j)).softmax(-1), draw(j), draw(j, c, h), draw(j, c, h)
    for given_a, given_u in ((ba, bu), (draw(j), draw(j)), (2.0, bu[:1])):
        each = [torch.as_tensor(x, dtype=f64).expand(b, j) for x in (given_a, given_u)]
        want = [energy_by_loops(*(x[k] for x in (*X, *each))) for k in range(b)]
        assert_close(free_energy(*X, given_a, given_u), torch.stack(want))


@pytest.mark.parametrize('act', ['logistic', 'pi'])
@pytest.mark.parametrize('t', [1, 3])
def test_F_is_the_free_energy_of_what_is_returned(act, t):
    a, V, ba, bu = problem()
    out = em_routing(a, V, ba, bu, 0.5, t, act=act, free_energy=True)
    assert out.F.shape == (2, t)
    assert_close(out.F[:, -1], free_energy(a, V, out.R, *out[:3], ba, bu))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    "and variances that are beyond float16 do not overflow"
    a, V, ba, bu = problem(dtype=torch.float32)
    for scale, lam in ((1.0, 0.5), (1e4, 0.01)):
        low = a.to(dtype), (scale * V).to(dtype)
        same, how = [x.float() for x in low], (ba, bu, lam)
        want, got = em_routing(*same, *how, eps='auto'), em_routing(*low, *how, eps='auto')
        assert got.a.dtype == got.mu.dtype == got.R.dtype == dtype
        assert_close(got.mu.float() / scale, want.mu / scale, rtol=1e-2, atol=1e-2)
        assert_close(got.sig2, want.sig2)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            amp = em_routing(*low, *how, eps='auto')
        assert_close(amp.mu, want.mu)
    assert got.sig2.max() > 65504


a2, V2 = torch.rand(4), torch.randn(4, 3, 2, 2)
no_child, whole = torch.tensor([[True, True, False]] * 4), torch.ones(4, 3).bool()
refused = {
    r'must have shapes \[\.\.\., i\] and': dict(V=V2[0]),
    r'got \(3,\) and \(4, 3, 2, 2\)': dict(a=a2[:3]),
    'a must be finite, got NaN or inf': dict(a=a2 * math.nan),
    r'\(activations, not logits\)': dict(a=2 * a2 + 1),
    'V must be finite': dict(V=V2 / 0),
    'floating point, got torch.float32 and torch.int64': dict(V=V2.long()),
    'beta_a must be a number or one per parent, .3., got nan': dict(beta_a=math.nan),
    r'beta_a must be .* got torch.float32 of shape \(2,\)': dict(beta_a=torch.zeros(2)),
    'beta_u must be finite, got NaN or inf': dict(beta_u=torch.tensor(math.inf)),
    r'parents must be a bool tensor of shape \(4, 3\)': dict(parents=whole[:, :2]),
    'every parent needs at least one child': dict(parents=no_child),
    'fields must be a long': dict(V=V2[None], fields=torch.tensor([[0, 1, 2, 4]])),
    'not both': dict(parents=whole, fields=torch.zeros(1, 4)),
}


@pytest.mark.parametrize('message', refused)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        em_routing(**dict(a=a2, V=V2, beta_a=0.0, beta_u=0.0) | refused[message])


@pytest.mark.parametrize(
    'eps', ['10', '-3%', 'none', 0.0, -1.0, math.inf, math.nan, None, True, Floor(-5, 0, 0)]
)
def test_floors_that_are_refused(eps):
    with pytest.raises(ValueError, match=r'eps must be .*got ') as e:
        as_floor(eps, 16)
    assert str(e.value).endswith(f'got {eps!r}')


@pytest.mark.parametrize('lam', [0, -1.0, math.nan, math.inf, [0.1], 'cold', True, lambda t: t - 1])
def test_temperatures_that_are_refused(lam):
    with pytest.raises(ValueError, match='lam must be a positive number, 2 of them'):
        as_schedule(lam, 2)
