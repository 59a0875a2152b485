"""Dynamic routing: dtypes, shapes, properties and memory that read badly in prose."""
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from capsnb.core import assert_as_exact
from capsnb.dynamic import _Maps, dynamic_routing, dynamic_routing_ref, route_capsules, squash

def maps(*lead, i=6, j=3, d=4, h=5, seed=0, dtype=torch.float64, scale=1.):
    g = torch.Generator().manual_seed(seed)
    u, W = (scale*torch.randn(s, generator=g, dtype=dtype) for s in ((*lead, i, d), (i, j, d, h)))
    return u.requires_grad_(), W.requires_grad_()
def votes(u, W): return torch.einsum('...id,ijdh->...ijh', u, W)

@settings(deadline=None, max_examples=30)
@given(lead=st.lists(st.integers(1, 3), max_size=2), i=st.integers(1, 7), j=st.integers(1, 4), d=st.integers(1, 4), h=st.integers(1, 4), T=st.integers(1, 5),
       seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1., 10.]))
def test_fast_is_the_reference(lead, i, j, d, h, T, seed, scale):
    u, W = maps(*lead, i=i, j=j, d=d, h=h, seed=seed, scale=scale); V = votes(u, W)
    ref = dynamic_routing_ref(V, T); w = torch.randn(ref.v.shape, dtype=V.dtype)
    g_ref = torch.autograd.grad((ref.v*w).sum(), (V, u, W), retain_graph=True)
    for out, wrt, want in ((dynamic_routing(V, T, return_R=True), V, g_ref[:1]), (route_capsules(u, W, T, return_R=True), (u, W), g_ref[1:])):
        for x, y in zip(out, ref): assert_close(x, y)
        for x, y in zip(torch.autograd.grad((out.v*w).sum(), wrt, retain_graph=True), want): assert_close(x, y, atol=1e-9, rtol=1e-6)
        assert_close(out.R.sum(-1), torch.ones_like(out.R.sum(-1))); assert (out.a < 1).all()

@pytest.mark.parametrize('n_iters', (1, 3, 6))
def test_float32_is_as_exact_as_the_reference(n_iters):
    u64, W64 = maps(4, i=200, j=5, d=8, h=16, scale=.3)
    def run(f, dtype):
        u, W = (x.detach().to(dtype).requires_grad_() for x in (u64, W64)); out = f(u, W)
        return out.v.detach(), *torch.autograd.grad(out.v.sum(), (u, W))
    ref = lambda u, W: dynamic_routing_ref(votes(u, W), n_iters)
    for f in (lambda u, W: route_capsules(u, W, n_iters), lambda u, W: dynamic_routing(votes(u, W), n_iters)):
        for x, y, z in zip(run(f, torch.float32), run(ref, torch.float32), run(ref, torch.float64)): assert_as_exact(x, y, z, factor=3., ulps=8.)

@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16))
def test_half_precision_is_routed_in_float32(dtype):
    u, W = (x.detach().to(dtype) for x in maps(2))
    out = route_capsules(u, W); assert out.v.dtype == dtype
    assert_close(out.v, dynamic_routing_ref(votes(u.float(), W.float())).v.to(dtype))

def test_autocast_changes_nothing():
    u, W = (x.detach().float() for x in maps(2))
    with torch.autocast('cpu', dtype=torch.bfloat16): out = route_capsules(u, W)
    assert_close(out.v, route_capsules(u, W).v, rtol=0, atol=0)

def test_tiles_change_nothing():
    u, W = (x.detach() for x in maps(3, j=7)); v = torch.randn(3, 7, 5, dtype=u.dtype); R = torch.rand(3, 7, 6, dtype=u.dtype)
    whole, tiled = _Maps(u, W), _Maps(u, W, tile=1)
    assert len(whole.tiles) == 1 and len(tiled.tiles) == 7
    assert_close(tiled.score(v), whole.score(v)); assert_close(tiled.gather(R), whole.gather(R))
    for a, b in zip(tiled.grads(), whole.grads()): assert a.shape == b.shape
    ga, gb = tiled.grads(), whole.grads()
    assert_close(tiled.spread(ga, R, v, 2*R, 3*v), whole.spread(gb, R, v, 2*R, 3*v))
    for a, b in zip(ga, gb): assert_close(a, b)

def test_saved_for_backward_does_not_hold_weights():
    "what the graph keeps grows by the sums only, j*h numbers per sample and iteration"
    def kept(T):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x): route_capsules(*maps(2, i=500), T).v
        return sum(sizes)
    assert kept(9) - kept(3) == kept(15) - kept(9) <= 6*2*3*5*3

@given(st.floats(0, 1e15), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_squash_stays_in_the_ball(r, h):
    s = torch.full((h,), r, dtype=torch.float64, requires_grad=True); v = squash(s); v.sum().backward()
    assert v.norm() <= 1 + 1e-12 and torch.isfinite(s.grad).all() and (v >= 0).all()

@pytest.mark.parametrize('detach', (False, True))
def test_zero_votes_have_zero_gradients(detach):
    V = torch.zeros(2, 4, 3, 5, requires_grad=True); out = dynamic_routing(V, detach=detach)
    assert out.a.equal(torch.zeros(2, 3)); (out.v.sum() + out.a.sum()).backward(); assert V.grad.equal(torch.zeros_like(V))

def test_detached_gradient_is_that_of_fixed_weights():
    u, W = maps(2); V = votes(u, W); R = dynamic_routing(V, return_R=True).R
    want = torch.autograd.grad(squash((R[..., None]*V).sum(-3)).square().sum(), (u, W), retain_graph=True)
    for x, y in zip(torch.autograd.grad(route_capsules(u, W, detach=True).v.square().sum(), (u, W)), want): assert_close(x, y)

def test_order_of_parents_and_parts():
    V = votes(*maps()); p, q = torch.randperm(6), torch.randperm(3); out = dynamic_routing(V, return_R=True)
    moved = dynamic_routing(V[p][:, q], return_R=True)
    assert_close(moved.v, out.v[q]); assert_close(moved.R, out.R[p][:, q])

@pytest.mark.parametrize('call, what', [(lambda: dynamic_routing(torch.zeros(2, 2)), r'\[\.\.\., i, j, h\]'), (lambda: dynamic_routing(torch.zeros(2, 2, 2, dtype=torch.long)), 'int64'),
    (lambda: dynamic_routing(torch.zeros(2, 2, 2), True), 'n_iters'), (lambda: dynamic_routing(torch.zeros(2, 2, 2), 2.5), '2.5'), (lambda: route_capsules(torch.zeros(3, 4), torch.zeros(3, 2, 5, 6)), r'\(3, 2, 5, 6\)')])
def test_errors(call, what):
    with pytest.raises(ValueError, match=what): call()
