"""The fast paths as ops: registered, twice differentiable, whole in graphs and transforms."""

import itertools
import math
from functools import partial
import pytest
import torch
from torch.export import Dim, export
from torch.func import functional_call, grad, vmap
from torch.library import opcheck
from torch.testing import assert_close
from capsnb import ClassCaps, ConvCaps, Routing, dynamic_routing, route_capsules
from capsnb.engine import dynamic, em, fields, layers, moments, numerics
from capsnb.engine.numerics import FastOp, error_to, import_error
from capsnb.routing.em import as_floor

f64 = torch.float64


def seeded(*shapes, dtype=f64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=f64).to(dtype) for s in shapes]


def of_statistics(n=2, i=4, c=2, d=2):
    return seeded((n, c, d, i), (n, c, d)), (True,)


def of_moments(n=2, i=5, j=3, c=1, d=2, narrow=0.0, shares=True, numbers=1 << 18, absent=0):
    x, x0, f = seeded((n, c, d, i), (n, c, d), (n, i))
    (theta,) = seeded((n, moments._n_stats(c, d), j))
    f = f.sigmoid()
    f[:, :absent] = 0
    phi = moments._phi(x - x0[..., None])
    return [f, x, x0, phi, theta, x.new_full((), narrow)], (shares, numbers)


def of_votes(n=2, i=4, j=3, c=1, d=2, h=2, own=False, model=True, absent=0, **how):
    k, m = i if own else 1, j if model else 0
    shapes = (n, i), (n, i, c, d), (k, d, h, j), (k, c, h, j), (k, j), (k, j)
    f, *fixed = seeded(*shapes)
    score, mu, v = seeded((n, m), (n, c, h, m), (n, c, h, m))
    f = f.sigmoid()
    f[:, :absent] = 0
    how = dict(shares=True, row=1 << 14, numbers=1 << 18, chunk=1024) | how
    return [f, *fixed, score, mu, 0.2 * v.exp()], (*how.values(),)


def of_dynamic_votes(n=2, i=4, j=3, h=2, n_iters=3, detach=False, shares=True):
    return seeded((n, i, j, h)), (n_iters, detach, shares)


def of_dynamic_maps(n=2, i=4, j=3, d=2, h=2, n_iters=3, detach=False, shares=True):
    return seeded((n, i, d), (i, j, d, h)), (n_iters, detach, shares)


def of_fields(
    n=2,
    field=(2, 1, 0),
    n_iters=2,
    eps='30%',
    act='logistic',
    damping=0.0,
    how='tiles',
    shares=True,
):
    table, _ = fields.field_table((3, 3), 1, *field)
    shapes = (n, 9), (n, 9, 2, 2), (table.shape[1], 2, 2, 2), (2,), (2,)
    a, *rest = seeded(*shapes)
    loop = [0.3] * n_iters, [*as_floor(eps, 4)], act, damping
    more = [*fields._Tiling(shares=1 << 20 if how == 'compiled' else 0)], shares
    return [0.1 + 0.8 * a.sigmoid(), *rest, table], (how, *loop, *more)


def of_given_votes(n=2, i=5, g=2, j=16, model=True, own=False):
    k, m = i if own else 1, j if model else 0
    given = seeded((n, i, g, j), (n, i), (n, m), (n, g, m), (n, g, m), (k, j), (k, j))
    given[1], given[4] = given[1].sigmoid(), 0.2 * given[4].exp()
    return given, (j,)


of_compiled = partial(of_fields, how='compiled')
tilings = dict(numbers=4), dict(row=1), dict(numbers=1, row=2)
small = dict(i=1), dict(j=1), dict(i=1, j=1), dict(n=1)
cases = [
    (moments._statistics_of, of_statistics, kw) for kw in ({}, dict(c=1, d=3), dict(d=1), dict(i=1))
]
cases += [
    (moments._moments, of_moments, kw)
    for kw in ({}, *small, dict(numbers=4), dict(absent=2), dict(absent=5), dict(shares=False))
]
cases += [
    (moments._votes, of_votes, dict(own=own, **kw))
    for own in (False, True)
    for kw in ({}, *small, *tilings, dict(absent=2), dict(model=False), dict(shares=False))
]
agree = [
    *({}, *small, dict(shares=False)),
    *(dict(n_iters=t, detach=d) for t, d in itertools.product((1, 2), (False, True))),
]
on_fields = [
    *({}, dict(act='pi', damping=0.2), dict(n_iters=1, eps=0.1), dict(eps='auto', damping=0.3)),
    *(dict(field=(3, 2, 1)), dict(field=((1, 2), (3, 2), 0), act='pi')),
]
ops = [
    (dynamic._of_votes, of_dynamic_votes, agree),
    (dynamic._of_maps, of_dynamic_maps, agree),
    (fields._op, of_fields, [*on_fields, dict(shares=False)]),
]
if not import_error('numba'):
    from capsnb.engine import compiled

    ops.append((fields._op, of_compiled, [*on_fields, dict(shares=False)]))
    ops.append((compiled._agreement, of_dynamic_maps, agree))
    ops.append((compiled._votes, of_given_votes, [{}, dict(own=True), dict(model=False)]))
cases += [(op, make, kw) for op, make, each in ops for kw in each]
all_cases = pytest.mark.parametrize(
    'op, make, kw', cases, ids=[f'{op.name} {kw}' for op, make, kw in cases]
)
simple = [c for c in cases if c[2] in ({}, dict(own=True), dict(own=False, row=1))]
few_cases = pytest.mark.parametrize(
    'op, make, kw', simple, ids=[f'{op.name} {kw}' for op, make, kw in simple]
)
shares_fixed = dynamic._of_votes.name, dynamic._of_maps.name, 'compiled_maps'


def variables(op, tensors):
    "The tensors that a gradient is for."
    fixed = (1,) if op is moments._statistics_of else ()
    if op is moments._moments:
        fixed = (2, 5, 3 if tensors[5] else 1)  # x if a whole is narrow, or else phi
    real = [t.is_floating_point() and t.numel() for t in tensors]
    return [k for k, r in enumerate(real) if k not in fixed and r]


@pytest.mark.slow
@few_cases
def test_registered_rightly(op, make, kw):
    tensors, settings = make(**kw)
    tensors = [t.requires_grad_(k in variables(op, tensors)) for k, t in enumerate(tensors)]
    opcheck(op.forward, (*tensors, *settings), test_utils=cheap)
    with torch.no_grad():
        outs = op.forward(*tensors, *settings)
        grads = [torch.rand_like(o) for o in outs[: op.n_out]]
    opcheck(op.backward, (*tensors, outs, grads, *settings), test_utils=cheap)


cheap = 'test_schema', 'test_autograd_registration', 'test_faketensor'  # graphs are made below


def bound(op, tensors, settings, run):
    "What `run` makes of the variables; outputs that have a gradient."
    free = variables(op, tensors)

    def f(*x):
        x = [x[free.index(k)] if k in free else t for k, t in enumerate(tensors)]
        outs = run(*x, *settings)
        return tuple(o for o in outs if o.requires_grad and o.numel())

    return f, [tensors[k].clone().requires_grad_() for k in free]


@all_cases
def test_as_the_definition(op, make, kw):
    "Values, gradients, and those of a gradient penalty."
    tensors, settings = make(**kw)
    found = []
    for run in (op, op.definition):
        f, x = bound(op, tensors, settings, run)
        outs = f(*x)[:1] if op.name in shares_fixed else f(*x)
        loss = sum((o * (1 + torch.arange(o.numel()).view_as(o))).sin().sum() for o in outs)
        g = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
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


# ---- layers and functions


def routing(n=3, dtype=f64, **kw):
    layer = Routing(2, 3, 2, n_out=4, **kw)
    a, mu = seeded((n, 9), (n, 9, 2, 3), dtype=dtype)
    a[0, :2] = -math.inf  # absent
    return layer, (a, mu)


def on_grid(make, n=3, dtype=f64):
    a, mu = seeded((n, 4, 4, 2), (n, 4, 4, 2, 2, 2), dtype=dtype)
    return make(), (0.1 + 0.8 * a.sigmoid(), mu)


def conv(plan, **kw):
    how = dict(K=2, lam=0.3, plan=plan) | kw
    return partial(on_grid, lambda: ConvCaps(2, 2, d_cov=2, d_inp=2, d_out=2, **how))


def classes(**kw):
    return partial(on_grid, lambda: ClassCaps(2, 3, 2, 2, 2, lam=0.3, **kw))


def by_em(n=3, dtype=f64, **kw):
    how = dict(eps='30%', damping=0.1, lam=0.3, free_energy=True) | kw
    a, V, *betas = seeded(
        (n, 6), (n, 2, 3, 3, 2, 2) if 'fields' in kw else (n, 6, 3, 2, 2), (3,), (3,)
    )
    f = lambda *x: [o for o in em.em_routing(*x, **how) if o is not None]
    return f, [t.to(dtype) for t in (a.sigmoid(), V, *betas)]


def function(f, *shapes, n=3, dtype=f64):
    first, *more = shapes
    return f, seeded((n, *first), *more, dtype=dtype)


some = (torch.arange(18) % 4 > 0).view(6, 3)
table = torch.tensor([[0, 1, 2], [2, 3, -1]])  # children 4 and 5: in no field
nets = {
    'votes': partial(routing, plan='votes'),
    'moments': partial(routing, plan='moments'),
    'moments skm': partial(routing, plan='moments', p_model='skm'),
    'moments pooled': partial(routing, plan='moments', pooled=True),
    'stream': partial(routing, plan='stream'),
    'stream own': partial(routing, plan='stream', n_inp=9),
    'stream skm pooled': partial(routing, plan='stream', p_model='skm', pooled=True),
    'auto': routing,
    'conv votes': conv('votes', stride=2),
    'conv tiles': conv('tiles'),
    'conv tiles pi': conv('tiles', K=3, stride=2, padding=1, act='pi', damping=0.2),
    'conv auto': conv('auto'),
    'classes': classes(),
    'classes pi': classes(coordinates=False, act='pi', eps=0.1),
    'em': by_em,
    'em parents': partial(by_em, parents=some),
    'em fields': partial(by_em, fields=table, act='pi'),
    'dynamic_routing': partial(function, lambda V: dynamic_routing(V)[:2], (6, 4, 2)),
    'route_capsules': partial(function, lambda *x: route_capsules(*x)[:2], (6, 2), (6, 4, 2, 2)),
}
of_a_kind = (
    'dynamic_routing',
    'stream',
    'conv tiles',
)  # the others' graphs are made before a release
marks = dict.fromkeys(of_a_kind, pytest.mark.slow)
in_graphs = [pytest.param(n, marks=marks.get(n, pytest.mark.long)) for n in nets]


def made(name, n=3, dtype=f64):
    torch.manual_seed(0)
    f, x = nets[name](n=n, dtype=dtype)
    if isinstance(f, torch.nn.Module):
        f = f.to(dtype)
        with torch.no_grad():
            for p in f.parameters():
                p.add_(torch.randn_like(p) * 0.2)
    return f, [*x]


def params(f):
    return list(f.parameters()) if isinstance(f, torch.nn.Module) else []


def loss_of(out):
    return sum(o.square().sum() for o in out[:3])


def step(f, x, own=()):
    x = [t.detach().clone().requires_grad_() for t in x]
    out = [o for o in f(*x) if o is not None]
    return [*out, *torch.autograd.grad(loss_of(out), [*x, *own], materialize_grads=True)]


def same(found, wanted, **tol):
    for got, want in zip(found, wanted, strict=True):
        assert_close(got, want, **tol)


@pytest.mark.graphs
@pytest.mark.parametrize('name', in_graphs)
def test_one_graph_forward_and_back(name):
    torch._dynamo.reset()
    f, _ = made(name)
    whole = torch.compile(f, backend='aot_eager', fullgraph=True)
    for n in (2, 3):  # the second batch makes its size a symbol
        _, x = made(name, n)
        same(step(whole, x, params(f)), step(f, x, params(f)))


class Net(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *x):
        return tuple(o for o in self.f(*x) if o is not None)


@pytest.mark.graphs
@pytest.mark.parametrize('name', in_graphs)
def test_exported_for_any_size_of_batch(name):
    f, x = made(name)
    own = len(x) - (name == 'route_capsules') - 2 * name.startswith('em')
    b = Dim('b', max=64)  # a plan may be for batches up to some size
    shapes = tuple({0: b} if k < own else None for k in range(len(x)))
    graph = export(Net(f), tuple(x), dynamic_shapes=(shapes,)).module()
    for n in (1, 2, 5):
        x = made(name, n)[1][:own] + x[own:]
        same(graph(*x), Net(f)(*x))


@pytest.mark.parametrize('name', nets)
def test_transforms(name):
    "vmap, gradients by functional_call of all samples and of each, against a loop"
    f, x = made(name)
    own = len(x) - (name == 'route_capsules') - 2 * name.startswith('em')
    dims = tuple(0 if k < own else None for k in range(len(x)))
    same(vmap(lambda *x: tuple(Net(f)(*x)), in_dims=dims)(*x), Net(f)(*x))
    each = vmap(grad(lambda *x: loss_of(Net(f)(*x)), 1 % len(x)), in_dims=dims)(*x)
    at = x[1 % len(x)].requires_grad_()
    for k in range(3):
        one = [t[k] if d == 0 else t for t, d in zip(x, dims)]
        (want,) = torch.autograd.grad(loss_of(Net(f)(*one)), at)
        assert_close(each[k], want[k] if dims[1 % len(x)] == 0 else want)
    if isinstance(f, torch.nn.Module):
        x = [t.detach() for t in x]
        weights, (W, *_) = dict(f.named_parameters()), f.parameters()
        loss = lambda p, *x: loss_of(functional_call(f, p, x))
        total = grad(loss)(weights, *x)
        each = vmap(grad(loss), in_dims=(None, *dims))(weights, *x)
        (want,) = torch.autograd.grad(loss_of(f(*x)), W)
        first = next(iter(weights))
        assert_close(total[first], want)
        assert_close(each[first].sum(0), want)


@pytest.mark.parametrize('in_dims', [(0, None), (None, 0), (0, 1)])
def test_vmap_over_some_of_the_arguments(in_dims):
    f, x = made('conv tiles')
    one = [t if d is not None else t[0] for t, d in zip(x, in_dims)]
    args = [t.movedim(0, d) if d else t for t, d in zip(one, in_dims)]
    got = vmap(lambda a, mu: tuple(f(a, mu)[:3]), in_dims)(*args)
    for k in range(3):
        want = f(*(t[k] if d is not None else t for t, d in zip(one, in_dims)))
        same([g[k] for g in got], want[:3])


@pytest.mark.parametrize('name', [n for n in nets if n.startswith('conv')])
def test_the_path_of_a_gpu_gives_the_same_and_reads_no_value(name, monkeypatch):
    f, x = made(name)
    want = step(f, x, params(f))
    for module in (layers, em, numerics):
        monkeypatch.setattr(module, 'may_look', lambda t: False)
    same(step(f, x, params(f)), want, rtol=0, atol=0)
    f.tiling = fields._Tiling(tile=1 << 25, group=1 << 25)  # no cache to fit in
    same(step(f, x, params(f)), want)
    if name in ('conv votes', 'conv tiles'):
        x[1][0, 0, 0, 0] = torch.nan
        out = f(*x)
        assert out.mu[0].isnan().any() and out.mu[1].isfinite().all()


@pytest.mark.parametrize('name', [n for n in nets if n[:4] in ('conv', 'em')])
def test_shapes_and_gradients_on_meta(name):
    f, x = made(name)
    want = step(f, x, params(f))
    if isinstance(f, torch.nn.Module):
        f.to('meta')
    for g, w in zip(step(f, [t.to('meta') for t in x], params(f)), want):
        assert g.is_meta and g.shape == w.shape and g.stride() == w.stride()


@pytest.mark.parametrize('name', [n for n in nets if n.startswith(('moments', 'stream', 'conv'))])
@pytest.mark.parametrize('n_iters', [1, 3])
def test_a_gradient_penalty_is_that_of_the_definition(name, n_iters):
    "also where a sample is all padding"
    f, x = made(name)
    if not name.startswith('conv'):
        x[0][:, :2] = x[0][0] = -math.inf
    f.n_iters = n_iters
    wrt, found = [x[1].requires_grad_(), *f.parameters()], []
    for f.plan in (f.plan, 'votes'):
        (g,) = torch.autograd.grad(loss_of(f(*x)), x[1], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), wrt, materialize_grads=True))
    assert all(got.isfinite().all() for got in found[0])
    same(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(bool(import_error('numba')), reason='needs numba')
def test_votes_in_any_layout():
    "an op may be called with any strides"
    (V, *X), how = of_given_votes()

    def grads(V):
        Y = [V.requires_grad_(), *(x.clone().requires_grad_() for x in X)]
        return torch.autograd.grad(sum(o.sin().sum() for o in compiled._votes(*Y, *how)), Y)

    same(grads(V.movedim(-1, 0).contiguous().movedim(0, -1)), grads(V))


def test_a_cell_that_runs_again_leaves_the_first_op_alone():
    "PyTorch frees an op whose name is registered again: who still held it read freed memory"

    def scaled(by):
        scale = lambda x, *_: [x * by]
        return FastOp('again', 1, '', scale, lambda x, _, g: [g[0] * by], scale, scale)

    x = torch.ones(3, requires_grad=True)
    ops = {by: scaled(by) for by in (2.0, 3.0)}
    for by, op in ops.items():
        (g,) = torch.autograd.grad(op(x)[0].sum(), x, create_graph=True)
        assert_close(g, torch.full((3,), by))
