"""Devices that are not at hand: shapes without values, and a GPU's path on the CPU."""

import itertools
import pytest
import test_cuda
import torch
from test_moments import assert_as_exact_in_total, exact_sizes, far, squares
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from capsnb import Routing, dynamic_routing, route_capsules
from capsnb.engine import dstep, dynamic, moments, numerics
from capsnb.engine.dstep import plans

rows = lambda *shape: torch.rand(*shape)
parts = lambda i=50: (rows(3, i), rows(3, i, 4, 4))
layers = {
    **{
        f'Routing {plan}': (lambda p=plan: Routing(4, 4, 4, n_out=8, plan=p), parts)
        for plan in plans
        if plan in ('votes', 'moments', 'stream')  # the others are for one device
    },
    'large': (lambda: Routing(4, 4, 4, n_out=64), lambda: parts(3000)),
    'own maps': (lambda: Routing(4, 4, 4, n_inp=50, n_out=8), parts),
    'skm, pooled': (lambda: Routing(4, 4, 4, n_out=8, p_model='skm', pooled=True), parts),
    'one iteration': (lambda: Routing(4, 4, 4, n_out=8, n_iters=1, plan='moments'), parts),
    'dynamic_routing': (lambda: dynamic_routing, lambda: (rows(2, 6, 3, 4),)),
    'route_capsules': (lambda: route_capsules, lambda: (rows(2, 6, 4), rows(6, 3, 4, 5))),
}


@pytest.mark.parametrize('shares', [False, True])
@pytest.mark.parametrize('name', layers)
def test_forward_back_and_back_again_on_meta(name, shares):
    make, x = layers[name]
    f, x = make(), [t.to('meta').requires_grad_() for t in x()]
    params = []
    if isinstance(f, torch.nn.Module):
        f = f.to('meta')
        params = list(f.parameters())
    out = [o for o in f(*x, return_R=shares) if o is not None]
    assert len(out) >= 2 and all(o.is_meta for o in out)
    loss = sum(o.square().sum() for o in out if o.requires_grad)
    g = torch.autograd.grad(loss, [*x, *params], create_graph=True, materialize_grads=True)
    for grad, t in zip(g, [*x, *params]):
        assert grad.is_meta and grad.shape == t.shape and grad.dtype == t.dtype
    sum(v.square().sum() for v in g).backward()
    assert all(t.grad.is_meta for t in x)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    "No value may be read: neither by a check, nor by an op."
    for module in (dstep, dynamic, numerics):
        monkeypatch.setattr(module, 'may_look', lambda t: False)
    monkeypatch.setattr(moments, '_on_cpu', lambda t: False)


@pytest.mark.slow
@pytest.mark.parametrize('s', exact_sizes[::2], ids=str)
@pytest.mark.parametrize('plan', ['moments', 'stream'])
@pytest.mark.parametrize('eps', ['auto', 1e-5])
def test_a_gpus_path_is_as_exact_as_the_definition(plan, s, eps, as_on_a_gpu):
    "The sweep of `test_moments`: narrow wholes, far from the origin, at any scale."
    if plans[plan].refuses(s):
        pytest.skip('needs shared maps')
    for n_iters, mean, scale in itertools.product((1, 3), (0.0, 100.0), (1e-3, 1.0, 1e3)):
        assert_as_exact_in_total(plan, s, n_iters, mean, scale, eps, seeds=2)


def test_a_gpus_gradients_are_finite_at_any_scale(as_on_a_gpu):
    for plan, power in itertools.product(('moments', 'stream'), range(-6, 7, 3)):
        for p_model in ('gaussian', 'skm'):
            got = squares(plans[plan].run, far(torch.float32, 60, 10.0**power), p_model)
            assert all(g.isfinite().all() for g in got), f'{plan} {power=} {p_model}'


class FromTheCPU(TorchDispatchMode):
    "Writes down what copies a tensor of the CPU to the device: there it would wait."

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if {t.device.type for t in tensors} == {'cpu', 'meta'}:
            self.found.append(str(f))
        return out


@pytest.mark.parametrize('name', [k for k in test_cuda.made if k != 'SSTNet'])
def test_a_step_copies_nothing_from_the_cpu(name):
    net, given = test_cuda.there(*test_cuda.made[name](), 'meta')
    net(*given)  # tables are made once
    with FromTheCPU() as seen:
        out = test_cuda.tuple_of(net(*given))
        sum(o.sum() for o in out).backward()
    assert not seen.found
