"""The fast paths as ops: registered, twice differentiable, whole in graphs and transforms."""

import itertools
import math
import pytest
import torch
from torch.autograd import forward_ad
from torch.export import Dim, export
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vjp, vmap
from torch.library import opcheck
from torch.testing import assert_close
from capsnb import Routing, dynamic_routing, route_capsules
from capsnb.engine import dynamic, moments
from capsnb.engine.numerics import error_to
from capsnb.routing.dynamic import dynamic_routing_ref


def seeded(*shapes, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def of_statistics(n=2, i=4, c=2, d=2):
    return seeded((n, c, d, i), (n, c, d)), (True,)


def of_moments(n=2, i=5, j=3, c=1, d=2, narrow=0.0, shares=True, numbers=1 << 18, absent=0):
    x, x0, f = seeded((n, c, d, i), (n, c, d), (n, i))
    (theta,) = seeded((n, moments.n_stats(c, d), j))
    f = f.sigmoid()
    f[:, :absent] = 0
    phi = moments._phi(x - x0[..., None])
    return [f, x, x0, phi, theta, x.new_full((), narrow)], (shares, numbers)


def of_votes(
    n=2,
    i=4,
    j=3,
    c=1,
    d=2,
    h=2,
    own=False,
    model=True,
    shares=True,
    row=1 << 14,
    numbers=1 << 18,
    absent=0,
):
    k, m = i if own else 1, j if model else 0
    shapes = (n, i), (n, i, c, d), (k, d, h, j), (k, c, h, j), (k, j), (k, j)
    f, *fixed = seeded(*shapes)
    score, mu, v = seeded((n, m), (n, c, h, m), (n, c, h, m))
    f = f.sigmoid()
    f[:, :absent] = 0
    return [f, *fixed, score, mu, 0.2 * v.exp()], (shares, 0.0, row, numbers, 1024)


def of_dynamic_votes(n=2, i=4, j=3, h=2, n_iters=3, detach=False, shares=True):
    return seeded((n, i, j, h)), (n_iters, detach, shares)


def of_dynamic_maps(n=2, i=4, j=3, d=2, h=2, n_iters=3, detach=False, shares=True):
    return seeded((n, i, d), (i, j, d, h)), (n_iters, detach, shares)


tilings = dict(numbers=4), dict(row=1), dict(numbers=1, row=2)
few = dict(i=1), dict(j=1), dict(i=1, j=1), dict(n=1)
cases = [
    (moments.statistics_of, of_statistics, kw) for kw in ({}, dict(c=1, d=3), dict(d=1), dict(i=1))
]
cases += [
    (moments._moments, of_moments, kw)
    for kw in ({}, *few, dict(numbers=4), dict(absent=2), dict(absent=5), dict(shares=False))
]
cases += [
    (moments._votes, of_votes, dict(own=own, **kw))
    for own in (False, True)
    for kw in ({}, *few, *tilings, dict(absent=2), dict(model=False), dict(shares=False))
]
cases += [
    (op, make, dict(n_iters=t, detach=detach))
    for op, make in (
        (dynamic._of_votes, of_dynamic_votes),
        (dynamic._of_maps, of_dynamic_maps),
    )
    for t, detach in itertools.product((1, 2, 3), (False, True))
]
cases += [
    (op, make, kw)
    for op, make in (
        (dynamic._of_votes, of_dynamic_votes),
        (dynamic._of_maps, of_dynamic_maps),
    )
    for kw in (*few, dict(shares=False))
]
all_cases = pytest.mark.parametrize(
    'op, make, kw', cases, ids=[f'{op.name} {kw}' for op, make, kw in cases]
)
undifferentiable = {moments.statistics_of: (1,)}
undifferentiable[moments._moments] = 1, 2, 3, 5  # but see below


def variables(op, tensors):
    "The tensors that a gradient is for."
    fixed = undifferentiable.get(op, ())
    if op is moments._moments:
        fixed = (2, 5, 3 if tensors[5] else 1)  # x if a whole is narrow, or else phi
    return [k for k, t in enumerate(tensors) if k not in fixed and t.numel()]


few_cases = pytest.mark.parametrize(
    'op, make, kw',
    [c for c in cases if c[2] in ({}, dict(own=True), dict(own=False, row=1))]
    + [(dynamic._of_votes, of_dynamic_votes, {}), (dynamic._of_maps, of_dynamic_maps, {})],
    ids=lambda v: getattr(v, 'name', None) or getattr(v, '__name__', str(v)),
)


@few_cases
def test_registered_rightly(op, make, kw):
    tensors, settings = make(**kw)
    tensors = [t.requires_grad_(k in variables(op, tensors)) for k, t in enumerate(tensors)]
    opcheck(op.forward, (*tensors, *settings))
    with torch.no_grad():
        outs = op.forward(*tensors, *settings)
        grads = [torch.rand_like(o) for o in outs[: op.n_out]]
    opcheck(op.backward, (*tensors, outs, grads, *settings))


def bound(op, tensors, settings, run):
    "What `run` makes of the variables; outputs that have a gradient."
    free = variables(op, tensors)

    def f(*x):
        x = [x[free.index(k)] if k in free else t for k, t in enumerate(tensors)]
        outs = run(*x, *settings)
        return tuple(o for o in outs if o.requires_grad and o.numel())

    return f, [tensors[k].clone().requires_grad_() for k in free]


@few_cases
def test_derivatives(op, make, kw):
    f, x = bound(op, *make(**kw), op)
    if make in (of_dynamic_votes, of_dynamic_maps):  # shares have no gradient
        f, every = lambda *x: every(*x)[0], f
    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x)


@few_cases
def test_forward_mode(op, make, kw):
    tensors, settings = make(**kw)
    free = variables(op, tensors)
    x = tuple(tensors[k] for k in free)
    moves = tuple(map(torch.randn_like, x))

    def every(run):
        def g(*x):
            given = [x[free.index(k)] if k in free else t for k, t in enumerate(tensors)]
            return run(*given, *settings)[0]

        return g

    found, want = (torch.func.jvp(every(run), x, moves)[1] for run in (op, op.definition))
    assert_close(found, want)


@few_cases
def test_forward_and_backward_mode_of_each_other(op, make, kw):
    "Every order of two derivatives, and none that would be wrong."
    tensors, settings = make(**kw)
    (k, *_) = variables(op, tensors)
    moves = torch.stack([torch.randn_like(tensors[k]) for _ in range(2)])

    def along(run):
        def f(t):
            x = tensors[k] + torch.einsum('m,m...->...', t, moves)
            outs = run(*tensors[:k], x, *tensors[k + 1 :], *settings)[0]
            return (outs * (1 + torch.arange(outs.numel()).view_as(outs))).sin().sum()

        return f

    at, f = torch.tensor([0.1, -0.2], dtype=torch.float64), along(op)
    want = jacrev(jacrev(along(op.definition)))(at)
    assert want.abs().min() > 0
    for found in (hessian(f), jacrev(jacfwd(f)), jacrev(jacrev(f))):
        assert_close(found(at), want)
    many = torch.ones(3, 1, dtype=torch.float64)
    assert_close(hessian(lambda t: vmap(f)(t * many).sum())(at), 3 * want)
    for wrong in (jacfwd(jacfwd(f)), jacfwd(jacfwd(jacrev(f)))):
        with pytest.raises(NotImplementedError, match=r'hessian\(f\)'):
            wrong(at)
    _, pull = vjp(f, at)
    with pytest.raises(NotImplementedError, match=r'hessian\(f\)'):
        jacfwd(jacfwd(lambda g: pull(g)[0].pow(3).sum()))(want.new_ones(()))


@few_cases
def test_forward_mode_over_a_plain_backward_pass(op, make, kw):
    "A dual tensor, and `autograd.grad` without `create_graph`, which leaves no trace of its own."
    tensors, settings = make(**kw)
    (k, *_) = variables(op, tensors)
    moves = torch.randn_like(tensors[k])
    found = []
    for run in (op, op.definition):
        with forward_ad.dual_level():
            x = forward_ad.make_dual(tensors[k].detach().requires_grad_(), moves)
            out = run(*tensors[:k], x, *tensors[k + 1 :], *settings)[0]
            (g,) = torch.autograd.grad(out.pow(3).sum(), x)
            found.append(forward_ad.unpack_dual(g).tangent)
    assert_close(*found)


@all_cases
def test_as_the_definition(op, make, kw):
    "Values, gradients, and those of a gradient penalty."
    tensors, settings = make(**kw)
    found = []
    for run in (op, op.definition):
        f, x = bound(op, tensors, settings, run)
        outs = f(*x)[:1] if make in (of_dynamic_votes, of_dynamic_maps) else f(*x)
        loss = sum((o * (1 + torch.arange(o.numel()).view_as(o))).sin().sum() for o in outs)
        g = torch.autograd.grad(loss, x, create_graph=True)
        penalty = sum(v.square().sum() for v in g)
        more = torch.autograd.grad(penalty, x, materialize_grads=True)
        found.append([*run(*tensors, *settings), *g, *more])
    for got, want in zip(*found, strict=True):
        assert_close(got, want)


def test_a_narrow_whole_takes_its_statistics_from_the_parts():
    "With phi in float32, and a flag that says whether it is enough."
    (f, x, x0, phi, theta, _), how = of_moments()
    want = moments._moments.definition(f, x, x0, phi, theta, x.new_zeros(()), *how)
    for flag, exact in ((0.0, False), (1.0, True)):
        args = f, x, x0, phi.float(), theta, x.new_full((), flag)
        for run in (moments._moments, moments._moments.definition):
            exact_now = error_to(run(*args, *how)[0], want[0]) < 1e-14
            assert exact_now == exact


layers = {
    'votes': dict(),
    'moments': dict(),
    'stream': dict(),
    'stream own': dict(n_inp=9),
    'moments skm': dict(p_model='skm'),
    'moments pooled': dict(pooled=True),
    'stream skm pooled': dict(p_model='skm', pooled=True),
    'auto': dict(),
}


def layer_and_inputs(name, dtype=torch.float64, n=3):
    torch.manual_seed(0)
    layer = Routing(2, 3, 2, n_out=4, plan=name.split()[0], **layers[name]).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    a, mu = torch.randn(n, 9, dtype=dtype), torch.randn(n, 9, 2, 3, dtype=dtype)
    a[0, :2] = -math.inf  # absent
    return layer, (a, mu)


def loss_of(out):
    return sum(o.square().sum() for o in out[:3])


def all_grads(f, x, **kw):
    return torch.autograd.grad(loss_of(f(*x)), x, materialize_grads=True, **kw)


routes = {
    'dynamic_routing': (lambda V: dynamic_routing(V)[:2], lambda: [torch.randn(3, 6, 4, 2)]),
    'route_capsules': (
        lambda u, W: route_capsules(u, W)[:2],
        lambda: [torch.randn(3, 6, 2), torch.randn(6, 4, 2, 2)],
    ),
}


@pytest.mark.graphs
@pytest.mark.parametrize(
    'name, backend',
    [
        *((name, 'aot_eager') for name in [*layers, *routes]),
        pytest.param('route_capsules', 'inductor', marks=pytest.mark.long),
    ],
)
def test_compiled_forward_and_back(name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    f, make = routes.get(name, (None, None))
    f, x = (f, make()) if f else layer_and_inputs(name, torch.float32)
    x = [t.requires_grad_() for t in x]
    whole = torch.compile(f, backend=backend, fullgraph=True)
    for got, want in zip(whole(*x), f(*x)):
        assert_close(got, want)
    for got, want in zip(all_grads(whole, x), all_grads(f, x)):
        assert_close(got, want)


@pytest.mark.graphs
@pytest.mark.parametrize('name', routes)
def test_exported_for_any_size_of_batch(name):
    class Net(torch.nn.Module):
        def forward(self, *x):
            return routes[name][0](*x)

    x = routes[name][1]()
    shapes = [{0: Dim('b')}, None][: len(x)]
    graph = export(Net(), tuple(x), dynamic_shapes=(tuple(shapes),)).module()
    for n in (1, 2, 7):
        x[0] = torch.randn(n, *x[0].shape[1:])
        for got, want in zip(graph(*x), routes[name][0](*x)):
            assert_close(got, want)


@pytest.mark.parametrize('name', layers)
def test_transforms(name):
    "functional_call, grad, vmap, and gradients of each sample, against a loop."
    layer, x = layer_and_inputs(name)
    params = dict(layer.named_parameters())
    loss = lambda p, a, mu: loss_of(functional_call(layer, p, (a, mu)))
    for got, want in zip(vmap(layer)(*x), layer(*x)):
        assert_close(got, want)
    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, *x)
    total = grad(loss)(params, *x)
    for k, (name, p) in enumerate(params.items()):
        (want,) = torch.autograd.grad(loss_of(layer(*x)), p)
        assert_close(total[name], want)
        assert_close(each[name].sum(0), want)
        one = torch.autograd.grad(loss_of(layer(x[0][1], x[1][1])), p)[0]
        assert_close(each[name][1], one)


@pytest.mark.parametrize('name', routes)
def test_transforms_of_functions(name):
    f, make = routes[name]
    x = [t.double() for t in make()]
    dims = (0, None)[: len(x)]
    for got, want in zip(vmap(f, in_dims=dims)(*x), f(*x)):
        assert_close(got, want)
    g = vmap(grad(lambda *x: loss_of(f(*x))), in_dims=dims)(*x)
    x[0].requires_grad_()
    assert_close(g, torch.autograd.grad(loss_of(f(*x)), x[0])[0])


@pytest.mark.parametrize('name', [n for n in layers if n not in ('votes', 'auto')])
@pytest.mark.parametrize('n_iters', [1, 2, 3])
def test_a_gradient_penalty_is_that_of_the_definition(name, n_iters):
    layer, x = layer_and_inputs(name)
    x[0][:, :2] = -math.inf
    layer.n_iters = n_iters
    wrt, found = [x[1].requires_grad_(), *layer.parameters()], []
    for layer.plan in (layer.plan, 'votes'):
        (g,) = torch.autograd.grad(loss_of(layer(*x)), x[1], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), wrt, materialize_grads=True))
    for got, want in zip(*found):
        assert got.isfinite().all()
        assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_second_derivatives_where_nothing_is_there():
    "A sample that is all padding."
    for name in ('moments', 'stream', 'votes'):
        layer, x = layer_and_inputs(name)
        x[0][0] = -math.inf
        x[1].requires_grad_()
        (g,) = torch.autograd.grad(loss_of(layer(*x)), x[1], create_graph=True)
        for v in torch.autograd.grad(g.square().sum(), [x[1], *layer.parameters()]):
            assert v.isfinite().all()


def test_a_penalty_of_dynamic_routing_is_that_of_the_reference():
    u, W = (t.double().requires_grad_() for t in routes['route_capsules'][1]())
    found = []
    for f in (
        lambda: route_capsules(u, W).v,
        lambda: dynamic_routing(torch.einsum('nid,ijdh->nijh', u, W)).v,
        lambda: dynamic_routing_ref(torch.einsum('nid,ijdh->nijh', u, W)).v,
    ):
        g = torch.autograd.grad(f().square().sum(), (u, W), create_graph=True)
        found.append(torch.autograd.grad(sum(v.square().sum() for v in g), (u, W)))
    for got in found[:2]:
        for p, q in zip(got, found[2]):
            assert_close(p, q)
