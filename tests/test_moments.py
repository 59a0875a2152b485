"""The fast plans against the definition: exact, as exact as it is in float32, bounded in memory."""

import itertools
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.engine import moments
from capsnb.engine.numerics import error_to
from capsnb.engine.dstep import Problem, Sizes, plans
from capsnb.routing.em import as_floor

define = plans['votes'].run
names = 'a mu sig2 d_a_inp d_mu_inp d_W d_B d_beta_use d_beta_ign R'.split()


def inputs(s, mean=0.0, scale=1.0, seed=0, dtype=torch.float64):
    g, k = torch.Generator().manual_seed(seed), 1 if s.shared else s.i
    parts = (s.n, s.i), (s.n, s.i, s.c, s.d)
    maps = (k, s.j, s.d, s.h), (k, s.j, s.c, s.h), (k, s.j), (k, s.j)
    X = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in (*parts, *maps)]
    X[1] = (X[1] + mean) * scale
    X[2] /= s.d
    X[3] *= 0.1 * scale
    X[4] *= 5 / max(1, s.i)
    X[5] *= 5 / max(1, s.i)
    return [x.float().to(dtype).requires_grad_() for x in X]  # values that float32 holds exactly


def step(run, X, n_iters=3, p_model='gaussian', eps='auto', pooled=False, need_R=False, **kw):
    "Outputs and their gradients; the shares last, if they are wanted."
    floor = as_floor(eps, X[3].shape[-2] * X[3].shape[-1])
    out = run(Problem(*X, n_iters, p_model, floor, pooled, need_R), **kw)[: 3 + need_R]
    g = torch.Generator().manual_seed(1)
    w = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o) for o in out]
    grads = torch.autograd.grad(sum((o * v).sum() for o, v in zip(out, w)), X)
    return [o.detach() for o in out[:3]] + [*grads, *(o.detach() for o in out[3:])]


sizes = st.tuples(
    st.integers(1, 3),
    st.integers(0, 30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
)


@settings(max_examples=40, deadline=None)
@given(
    sizes,
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from(['gaussian', 'skm']),
    st.sampled_from(['auto', 1e-2]),
    st.booleans(),
    st.booleans(),
)
def test_same_numbers_in_float64(size, shared, n_iters, p_model, eps, pooled, need_R):
    s = Sizes(*size, shared)
    kw = dict(n_iters=n_iters, p_model=p_model, eps=eps, pooled=pooled, need_R=need_R)
    want = step(define, inputs(s), **kw)
    for plan in ('moments', 'stream'):
        if plans[plan].refuses(s):
            continue
        for name, p, q in zip(names, step(plans[plan].run, inputs(s), **kw), want):
            assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m: f'{plan} {name}: {m}')


exact_sizes = [
    Sizes(1, 40, 5, 2, 3, 4, True),
    Sizes(3, 300, 8, 4, 4, 4, True),
    Sizes(4, 64, 5, 4, 4, 4, False),
]


def assert_as_exact_in_total(plan, s, n_iters, mean, scale, eps, seeds):
    "At most twice the definition's error, in total over draws, for every value and gradient."
    fast, ref, kw = torch.zeros(9), torch.zeros(9), dict(n_iters=n_iters, eps=eps)
    for seed in range(seeds):
        X, X32 = inputs(s, mean, scale, seed), inputs(s, mean, scale, seed, torch.float32)
        truth, r = step(define, X, **kw), step(define, X32, **kw)
        f = step(plans[plan].run, X32, **kw)
        fast += torch.tensor([error_to(p, t) for p, t in zip(f, truth)])
        ref += torch.tensor([error_to(p, t) for p, t in zip(r, truth)])
    for name, ef, er in zip(names, fast.tolist(), ref.tolist()):
        assert ef <= 2 * er + 4 * seeds * 1.2e-7, (
            f'{name} {n_iters=} {mean=} {scale=}: {ef:.1e} against {er:.1e}'
        )


@pytest.mark.slow
@pytest.mark.parametrize('s', exact_sizes, ids=str)
@pytest.mark.parametrize('plan', ['moments', 'stream'])
@pytest.mark.parametrize('eps', ['auto', 1e-5])
def test_float32_is_as_exact_as_the_definition(s, plan, eps):
    if plans[plan].refuses(s):
        pytest.skip('needs shared maps')
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1e-3, 1.0, 1e3)):
        assert_as_exact_in_total(plan, s, n_iters, mean, scale, eps, seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize('plan', ['moments', 'stream'])
@pytest.mark.parametrize('eps', ['auto', 1e-5])
def test_float32_is_as_exact_where_it_is_not_done_in_float64(plan, eps, monkeypatch):
    "Large problems do their products in float32; here that path runs on a medium one."
    monkeypatch.setattr(moments, '_FREE', 0)
    monkeypatch.setattr(moments, '_FEW', 0)
    s = Sizes(2, 800, 16, 4, 4, 4, True)
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1.0, 1e3)):
        assert_as_exact_in_total(plan, s, n_iters, mean, scale, eps, 3)


def test_memory_stays_within_a_tile():
    "Saved for the backward pass: nothing of size inputs × outputs."
    s = Sizes(1, 4000, 50, 2, 3, 2, True)
    for plan in ('moments', 'stream'):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            X = inputs(s, dtype=torch.float32)
            plans[plan].run(Problem(*X, 5, 'gaussian', as_floor('auto', 4), False))
        assert kept and max(kept) < s.i * s.j


def squares(run, X, p_model, **kw):
    "Gradients of the sum of the squares of scores, capsules and variances."
    floor = as_floor('auto', X[3].shape[-2] * X[3].shape[-1])
    out = run(Problem(*X, 3, p_model, floor, True), **kw)[:3]
    return torch.autograd.grad(sum(o.square().sum() for o in out), X)


def far(dtype, i, scale, seed=0):
    return inputs(
        Sizes(2, i, 16, 4, 4, 4, True), mean=seed % 2, scale=scale, seed=seed, dtype=dtype
    )


@pytest.mark.parametrize('plan', [p for p in plans if not p.startswith('triton')])
def test_an_output_that_nobody_uses_makes_no_gradient_nan(plan):
    X, X64 = (far(t, 1600, 3e6) for t in (torch.float32, torch.float64))  # too large for float64
    problem = Problem(*X64, 3, 'skm', as_floor('auto', 16), True, need_R=True)
    assert (plans[plan].run(problem)[3].sum(-2) == 0).any()
    got, want = squares(plans[plan].run, X, 'skm'), squares(define, X64, 'skm')
    for name, g, w in zip(names[3:], got, want):
        assert g.isfinite().all(), name
        assert error_to(g, w) < (1e-3 if name in ('d_a_inp', 'd_mu_inp', 'd_W') else 1), name


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize('p_model', ['gaussian', 'skm'])
@pytest.mark.parametrize('plan', [p for p in plans if not p.startswith('triton')])
def test_gradients_are_finite_at_any_scale(plan, p_model, dtype):
    for power, seed, i in itertools.product(range(-6, 7, 3), range(2), (1, 60)):
        got = squares(plans[plan].run, far(dtype, i, 10.0**power, seed), p_model)
        for name, g in zip(names[3:], got):
            assert g.isfinite().all(), f'{name} {power=} {seed=} {i=}'
