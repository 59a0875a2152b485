"""Dynamic routing: dtypes, shapes, properties and memory that read badly in prose."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.engine.numerics import assert_as_exact
from capsnb.engine.dynamic import _agree, _agree_back, _Maps, _squash_back
from capsnb.engine.dynamic import dynamic_routing, route_capsules
from capsnb.routing.dynamic import dynamic_routing_ref, squash


def maps(*lead, i=6, j=3, d=4, h=5, seed=0, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    u, W = (scale * torch.randn(s, generator=g, dtype=dtype) for s in ((*lead, i, d), (i, j, d, h)))
    return u.requires_grad_(), W.requires_grad_()


def votes(u, W):
    return torch.einsum('...id,ijdh->...ijh', u, W)


@settings(deadline=None, max_examples=30)
@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    i=st.integers(1, 7),
    j=st.integers(1, 4),
    d=st.integers(1, 4),
    h=st.integers(1, 4),
    T=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
)
def test_fast_is_the_reference(lead, i, j, d, h, T, seed, scale):
    u, W = maps(*lead, i=i, j=j, d=d, h=h, seed=seed, scale=scale)
    V = votes(u, W)
    ref = dynamic_routing_ref(V, T)
    w = torch.randn(ref.v.shape, dtype=V.dtype)
    g_ref = torch.autograd.grad((ref.v * w).sum(), (V, u, W), retain_graph=True)
    for out, wrt, want in (
        (dynamic_routing(V, T, return_R=True), V, g_ref[:1]),
        (route_capsules(u, W, T, return_R=True), (u, W), g_ref[1:]),
    ):
        for x, y in zip(out, ref):
            assert_close(x, y)
        for x, y in zip(torch.autograd.grad((out.v * w).sum(), wrt, retain_graph=True), want):
            assert_close(x, y, atol=1e-9, rtol=1e-6)
        assert_close(out.R.sum(-1), torch.ones_like(out.R.sum(-1)))
        assert (out.a < 1).all()


@pytest.mark.parametrize('n_iters', (1, 3, 6))
def test_float32_is_as_exact_as_the_reference(n_iters):
    u64, W64 = maps(4, i=200, j=5, d=8, h=16, scale=0.3)

    def run(f, dtype):
        u, W = (x.detach().to(dtype).requires_grad_() for x in (u64, W64))
        out = f(u, W)
        return out.v.detach(), *torch.autograd.grad(out.v.sum(), (u, W))

    ref = lambda u, W: dynamic_routing_ref(votes(u, W), n_iters)
    for f in (
        lambda u, W: route_capsules(u, W, n_iters),
        lambda u, W: dynamic_routing(votes(u, W), n_iters),
    ):
        for x, y, z in zip(run(f, torch.float32), run(ref, torch.float32), run(ref, torch.float64)):
            assert_as_exact(x, y, z, factor=3.0, ulps=8.0)


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    'one, two, wide', [(f32, f64, f64), (bf16, f32, f32), (f64, f32, f64), (f16, f16, f32)]
)
def test_it_is_computed_in_float32_or_the_wider_precision(one, two, wide):
    u, W = (x.detach().to(t).requires_grad_() for x, t in zip(maps(2), (one, two)))
    out, want = route_capsules(u, W), route_capsules(u.to(wide), W.to(wide))
    assert out.v.dtype == out.a.dtype == torch.promote_types(one, two)
    assert_close(out.v, want.v.to(out.v.dtype), rtol=0, atol=0)
    out.v.sum().backward()
    assert u.grad.dtype == one and W.grad.dtype == two


@pytest.mark.parametrize(
    'dtype, huge',
    ((torch.float16, 6e4), (torch.bfloat16, 1e38), (torch.float32, 1e38), (torch.float64, 1e300)),
)
def test_huge_vectors(dtype, huge):
    unit = torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64)
    s = (unit.to(dtype) * huge).requires_grad_()
    v = squash(s)
    v.sum().backward()
    assert_close(v.detach(), unit.to(dtype), atol=2e-3, rtol=2e-3)
    V = (unit.expand(2, 1, 3) * min(huge, 1e30)).to(dtype).requires_grad_()
    out = dynamic_routing(V)
    out.v.sum().backward()
    assert s.grad.isfinite().all() and V.grad.isfinite().all() and abs(out.a.item() - 1) < 1e-2


def test_squash_is_its_formula_on_both_sides_of_one():
    s = torch.logspace(-6, 6, 25).double()[:, None] * torch.tensor([0.6, -0.8]).double()
    r = s.norm(dim=1, keepdim=True)
    assert_close(squash(s), s * r / (1 + r * r))
    assert_close(squash(s.T, 0), squash(s).T)
    zero = torch.zeros(2, 3, requires_grad=True)
    assert torch.autograd.grad(squash(zero).sum(), zero)[0].isfinite().all()
    near = torch.tensor([[1 - 1e-4, 0.2], [1 + 1e-4, 0.2], [5.0, -7.0]]).double().requires_grad_()
    assert torch.autograd.gradcheck(squash, near)
    s = torch.tensor([[300.0]])  # of one number: (s²/(1 + s²))', which is nearly 0
    exact = 2 * s.double() / (1 + s.double() ** 2) ** 2
    assert_close(_squash_back(s, torch.ones(1, 1)).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize('n_iters', (1, 3))
def test_tiles_change_nothing(n_iters):
    u, W = (x.detach() for x in maps(3, j=7))
    g, found = torch.randn(3, 7, 5, dtype=u.dtype), []
    for tile in (1, 250, 2**21):
        votes = _Maps(u, W, tile)
        v, R, sums = _agree(votes, n_iters, True)
        found.append([v, R, *_agree_back(votes, sums, g, False)])
    assert len(_Maps(u, W, 1).tiles) == 7
    for one, few, all_ in zip(*found):
        assert_close((one, few), (all_, all_))


def test_saved_for_backward_does_not_hold_weights():
    "what the graph keeps grows by the sums only, j*h numbers per sample and iteration"

    def kept(T):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            route_capsules(*maps(2, i=500), T).v
        return sum(sizes)

    assert kept(9) - kept(3) == kept(15) - kept(9) <= 6 * 2 * 3 * 5 * 3


def test_detached_gradient_is_that_of_fixed_weights():
    u, W = maps(2)
    V = votes(u, W)
    R = dynamic_routing(V, return_R=True).R
    fixed = squash((R[..., None] * V).sum(-3)).square().sum()
    want = torch.autograd.grad(fixed, (u, W), retain_graph=True)
    got = torch.autograd.grad(route_capsules(u, W, detach=True).v.square().sum(), (u, W))
    assert_close(got, want)


@pytest.mark.parametrize('detach', (False, True))
def test_zero_votes_have_zero_gradients(detach):
    V = torch.zeros(2, 4, 3, 5, requires_grad=True)
    out = dynamic_routing(V, detach=detach)
    (out.v.sum() + out.a.sum()).backward()
    assert not out.a.any() and not V.grad.any()


zeros = torch.zeros
refused = {
    r'\[\.\.\., i, j, h\]': lambda: dynamic_routing(zeros(2, 2)),
    'got torch.int64': lambda: dynamic_routing(zeros(2, 2, 2).long()),
    r'\(3, 2, 5, 6\)': lambda: route_capsules(zeros(3, 4), zeros(3, 2, 5, 6)),
    'at least one part': lambda: dynamic_routing(zeros(2, 0, 3, 2)),
    'at least one part.*': lambda: route_capsules(zeros(2, 4, 2), zeros(4, 3, 2, 0)),
    'int64 and torch.float32': lambda: route_capsules(zeros(3, 4).long(), zeros(3, 2, 4, 6)),
    r'\(3, 0\)': lambda: squash(zeros(3, 0)),
}


@pytest.mark.parametrize('message', refused)
def test_errors(message):
    with pytest.raises(ValueError, match=message):
        refused[message]()
