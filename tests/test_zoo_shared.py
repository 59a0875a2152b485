"Routings that need no votes, held against themselves with all votes."

import pytest
import torch
from torch.testing import assert_close
from capsnb.zoo.routers import SharedVotes, all_routings

linear = sorted(k for k, kind in all_routings().items() if getattr(kind, 'linear', False))


def layer_of(name, **kw):
    torch.manual_seed(0)
    layer = all_routings()[name](4, 3, 2, n_out=5, **kw).double()
    with torch.no_grad():  # what starts at 0 would hide a mistake
        for p in layer.parameters():
            p.add_(torch.randn_like(p) / 3)
    a = torch.randn(2, 3, 7).double()
    a[1, :, 4:] = -torch.inf
    return layer, a, torch.randn(2, 3, 7, 4, 3).double().requires_grad_()


def test_who_needs_no_votes():
    want = 'agreement attention dynamic inverted mean random self uniform'
    assert linear == want.split()


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('name', linear)
def test_the_same_without_votes(name, bias, monkeypatch):
    layer, a, mu = layer_of(name, bias=bias)
    assert isinstance(layer.votes_of(mu), SharedVotes)
    found = []
    for made in (False, True):
        if made:
            monkeypatch.setattr(type(layer), 'linear', False)
            assert torch.is_tensor(layer.votes_of(mu))
        out = layer(a, mu, return_R=True)
        loss = out.a.sin().sum() + (2 * out.mu).sin().sum()
        known = [mu, *layer.parameters()]
        found.append([*out[:2], out.R, *torch.autograd.grad(loss, known, allow_unused=True)])
    for without, with_votes in zip(*found):
        assert (without is None) == (with_votes is None)
        if without is not None:
            assert_close(without, with_votes, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('name', linear)
def test_maps_of_their_own_need_votes(name):
    layer = all_routings()[name](4, 3, 2, n_inp=7, n_out=5)
    assert torch.is_tensor(layer.votes_of(torch.randn(2, 7, 4, 3)))


@pytest.mark.parametrize('name', linear)
def test_memory_does_not_hold_votes(name):
    layer = all_routings()[name](4, 4, 4, n_out=16)
    a, mu = torch.randn(2, 500), torch.randn(2, 500, 4, 4)
    votes, kept = 2 * 500 * 16 * 16 * 4, {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = layer(a, mu)
    assert out.a.requires_grad and max(kept.values()) <= votes / 8
