"""Every fast path on the CPU where surroundings differ: autocast, batches of 0, many gradients."""

import sys
import pytest
import torch
from torch import nn
from capsnb.engine import numerics
from capsnb.engine.dstep import Routing, Sizes, choose_plan, plans
from capsnb.engine.dynamic import dynamic_routing, route_capsules
from capsnb.engine.layers import ClassCaps, ConvCaps, field_plans


class Agreement(nn.Module):
    "Dynamic routing, of votes or by maps."

    def __init__(self, *shape):
        super().__init__()
        self.W = nn.Parameter(torch.randn(shape))

    def forward(self, x, n_iters=3):
        if self.W.ndim == 4:
            return route_capsules(x, self.W, n_iters)[:2]
        return dynamic_routing(x * self.W, n_iters)[:2]


def of_grid(n):
    return torch.rand(n, 4, 4, 2), torch.randn(n, 4, 4, 2, 4, 4)


def of_set(n):
    return torch.randn(n, 5), torch.randn(n, 5, 2, 3)


# name -> layer, what it takes for n samples
paths = {
    'maps': (lambda: Agreement(6, 3, 4, 5), lambda n: [torch.randn(n, 6, 4)]),
    'votes': (lambda: Agreement(5), lambda n: [torch.randn(n, 6, 3, 5)]),
    'classes': (lambda: ClassCaps(2, 3), of_grid),
}
for plan in [k for k in field_plans if not k.startswith('triton')]:
    paths[f'fields {plan}'] = (lambda plan=plan: ConvCaps(2, 3, plan=plan)), of_grid
for plan in [k for k in plans if not k.startswith('triton')]:
    for n_inp in (None, 5)[: 1 + (plan != 'moments')]:
        how = dict(plan=plan, n_inp=n_inp, n_out=4)
        paths[f'set {plan} {n_inp}'] = (lambda how=how: Routing(2, 3, 2, **how)), of_set

others = {  # that choose for themselves
    'fields auto': (lambda: ConvCaps(2, 3), of_grid),
    'set auto': (lambda: Routing(2, 3, 2, n_out=4), of_set),
}
every_path = pytest.mark.parametrize('name', paths)


def made(name, n=3):
    torch.manual_seed(0)
    make, take = paths[name]
    layer, x = make(), take(n)
    x[-1].requires_grad_()
    return layer, x


def penalty(layer, x, *more):
    "Values, gradients, and gradients of a penalty on them."
    out = [o for o in layer(*x, *more)[:3] if o is not None]
    wrt = [x[-1], layer.W]
    g = torch.autograd.grad(sum(o.sin().sum() for o in out), wrt, create_graph=True)
    return *out, *g, *torch.autograd.grad(sum(v.square().sum() for v in g), wrt)


@pytest.mark.parametrize(
    'name, more',
    [('maps', ()), ('maps', (1,)), ('votes', ())]
    + [(k, ()) for k in ('classes', 'fields tiles', 'fields compiled')],
)
def test_autocast_changes_nothing(name, more):
    if name not in paths:
        pytest.skip("numba is not installed")
    layer, x = made(name, 13)
    want = penalty(layer, x, *more)
    with torch.autocast('cpu', torch.bfloat16):
        got = penalty(layer, x, *more)
    for p, q in zip(got, want):
        assert torch.equal(p, q)


def test_plans_refuse_where_numba_is_broken(monkeypatch):
    pytest.importorskip('numba')
    monkeypatch.delitem(sys.modules, 'capsnb.engine.kernels', raising=False)
    monkeypatch.setattr(numerics, '_import_errors', {})
    monkeypatch.setitem(sys.modules, 'numba', None)
    for name in ('maps', 'classes', 'fields auto', 'set auto'):
        make, take = others[name] if name in others else paths[name]
        layer, x = make(), take(13)
        layer(*x)
        if name.endswith('auto'):
            layer.plan = 'compiled'
            with pytest.raises(ValueError, match='kernels cannot be imported.*numba'):
                layer(*x)
    assert choose_plan(Sizes(5, 1850, 64, 1, 64, 2, True)) == 'stream'


@pytest.mark.filterwarnings('ignore:compiled kernels cannot be kept')
def test_kernels_need_no_place_on_disk(monkeypatch):
    caching = pytest.importorskip('numba.core.caching')
    monkeypatch.setattr(caching.FunctionCache._impl_class, '_locator_classes', [])
    numerics._tell_that_nothing_is_kept.cache_clear()
    with pytest.warns(UserWarning, match='NUMBA_CACHE_DIR') as told:
        kernels = [numerics.jit()(f) for f in (lambda x: x + 1, lambda x: x + 2)]
    assert len(told) == 1 and [f(3) for f in kernels] == [4, 5]


@every_path
def test_no_samples(name):
    layer, x = made(name, 0)
    n_iters = [1, 3] if name.startswith('set') else [3]
    for layer.n_iters in n_iters:
        how = dict(return_R=True) if name.startswith('set') else {}
        out = [o for o in layer(*x, **how) if o is not None]
        sum(o.sum() for o in out).backward()
        assert [o.shape[1:] for o in out] == [
            o.shape[1:] for o in layer(*made(name, 2)[1], **how) if o is not None
        ]
        assert all(len(o) == 0 for o in out) and not layer.W.grad.any()
    none = torch.func.vmap(lambda *x: tuple(o for o in layer(*x) if o is not None))(*x)
    assert [o.shape for o in none] == [o.shape for o in out[: len(none)]]
