"Vector routing: the author's numbers, memory, masks, composed credit."

import json
from pathlib import Path
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from capsnb.zoo.vectors import VectorRouting, definable_routing, end_to_end

f64 = torch.float64
author = json.loads((Path(__file__).parent / 'data' / 'heinsen2022.json').read_text())


def tensor(stored):
    return torch.tensor(stored['values'], dtype=f64).view(stored['shape'])


def state(case):
    return {name: tensor(v) for name, v in case['state'].items()}


def hidden(case):
    return None if case['mask'] is None else torch.tensor(case['mask']).bool()


def check(case, out, x, parameters):
    "Values and gradients, where those of `parameters` have the author's names."
    for got, name in ((out.x, 'x_out'), (out.phi, 'phi')):
        assert_close(got, tensor(case['out'][name]))
    assert_close(out.R, tensor(case['out']['R']).expand_as(out.R))
    ((out.x * tensor(case['g_x'])).sum() + (out.phi * tensor(case['g_phi'])).sum()).backward()
    assert case['grad'].keys() == {'x', *parameters}
    for name, p in {'x': x, **parameters}.items():
        assert_close(p.grad, tensor(case['grad'][name]), msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize('case', author['efficient'], ids=lambda c: str(c['settings']))
def test_values_and_gradients_are_the_authors(case):
    x = tensor(case['x']).requires_grad_()
    routing = VectorRouting.from_published(state(case), **case['settings'])
    out = routing(x, hidden(case), return_credit=True)
    assert torch.equal(routing(x, hidden(case)), out.x)
    named = {n.replace('to_', 'compute_beta_'): p for n, p in routing.named_parameters()}
    check(case, out, x, named)


def test_the_definition_is_the_authors():
    case = author['definable']
    x = tensor(case['x']).requires_grad_()
    p = {name: v.requires_grad_() for name, v in state(case).items() if 'CONST' not in name}
    out = definable_routing(
        x,
        A=lambda x: F.linear(x, p['A.weight'], p['A.bias'])[..., 0],
        F=lambda x: torch.einsum('...id,ijdh->...ijh', x, p['F.W']),
        G=lambda x: F.linear(x, p['G.weight'], p['G.bias']),
        S=lambda x, pred: x @ pred.mT / x.shape[-1] ** 0.5,
        beta_use=p['beta_use'],
        beta_ign=p['beta_ign'],
        n_iters=case['settings']['n_iters'],
        mask=hidden(case),
    )
    check(case, out, x, p)


def test_composed_credit_is_the_authors():
    "and the scale of one does not depend on the others"
    case = author['composed']
    phis = [tensor(phi) for phi in case['phis']]
    assert_close(end_to_end(phis), tensor(case['out']))
    batch = end_to_end([torch.stack([phi, 3 * phi]) for phi in phis], eps=0)
    assert_close(batch[0], batch[1])
    with pytest.raises(ValueError, match='without a routing'):
        end_to_end([])


def kept(fn, own=()):
    "Numbers in the storages that are kept for the backward pass, without parameters."
    sizes = {}

    def note(t):
        storage = t.untyped_storage()
        sizes[storage.data_ptr()] = storage, storage.nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        fn()
    mine = {p.untyped_storage().data_ptr() for p in own}
    return sum(n for at, (_, n) in sizes.items() if at not in mine)


def test_memory_is_linear():
    d, h, n_iters = 8, 64, 3

    def grows(i, j):
        r = VectorRouting(None, j, d, h, n_iters=n_iters, normalize=False)
        x = torch.randn(i, d, requires_grad=True)
        return kept(lambda: r(x), [*r.parameters()])

    for i, j in ((400, 10), (800, 10), (400, 20)):
        most = 2 * i * d + n_iters * (6 * i * j + 4 * j * (d + h))
        assert grows(i, j) <= most + 100 < i * j * h  # fewer than all votes
    assert grows(2000, 10) <= 2 * grows(1000, 10)


def test_a_hidden_input_has_no_credit():
    r = VectorRouting(None, 3, 4, 4, n_iters=3)
    x = torch.randn(5, 4, requires_grad=True)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[1], mask[2, 0] = True, True
    out = r(x, mask, return_credit=True)
    assert torch.equal(out.phi == 0, mask)
    assert_close(out.R.sum(-1), torch.ones(5))
    (g,) = torch.autograd.grad(out.x.square().sum() + out.x[0].sum() ** 3, x)
    assert g.isfinite().all() and not g[1].any() and g[0].any()


def test_what_does_not_fit_is_refused():
    r = VectorRouting(5, 3, 4, 2)
    x = torch.randn(5, 4)
    for wrong, words in (
        (dict(x=x[:4]), 'x must have shape'),
        (dict(x=x, scores=torch.zeros(4)), 'scores must be'),
        (dict(x=x, mask=torch.zeros(3, 5).bool()), 'mask must be bool'),
    ):
        with pytest.raises(ValueError, match=words):
            r(**wrong)
    with pytest.raises(ValueError, match='no weights'):
        VectorRouting.from_published({'W': x})
