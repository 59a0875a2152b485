"""The network for text: its definition, the author's module, padding, credit."""

import math
from pathlib import Path
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from capsnb.engine.numerics import error_to
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.lab.text import SSTNet, blend, measure_scale

WORDS = 'a warm , funny and deeply humane film that never finds its feet but laughs twice .'.split()
golden = torch.load(Path(__file__).parent / 'data' / 'heinsen2019_sst.pt', weights_only=True)
near = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope='module', params=['gpt2', 'bert'])
def encoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiny') / request.param
    tiny_transformer(folder, WORDS + [' '.join(WORDS)], request.param)
    return FrozenEncoder(folder, device='cpu')


def ragged(lengths, l=3, m=8, dtype=torch.float32):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(dtype)
    return mask, torch.randn(*mask.shape, l, m, dtype=dtype) * mask[..., None, None]


def fresh(**kw):
    torch.manual_seed(0)
    return SSTNet(3, 8, **kw)


def ref(net, mask, embs):  # figure 5 from left to right
    x = net.detect_parts((embs - net.emb_mean) / net.emb_size + net.depth_emb)
    a = torch.logit(mask)[..., None].expand(x.shape[:-1]).flatten(1)
    out = net.routings[0](a, x.flatten(1, 2)[:, :, None])
    return net.routings[1](out.scores, out.mu)


# ---- the published network


def test_published_weights_give_the_published_outputs(tmp_path):
    torch.save(golden['state'], tmp_path / 'w.pt')
    out = SSTNet.from_published(tmp_path / 'w.pt')(golden['mask'], golden['embs'])
    for name, got in zip(('a', 'mu', 'sig2'), out):
        assert_close(got, golden[name], atol=1e-4, rtol=1e-4)
    torch.save({k: v for k, v in golden['state'].items() if k != 'routings.1.W'}, tmp_path / 'w.pt')
    with pytest.raises(ValueError, match='expected the weights of another network.*routings.1.W'):
        SSTNet.from_published(tmp_path / 'w.pt')


# ---- the definition


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=13),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_values_and_gradients_are_the_definitions(lengths, seed, mixed, packed):
    torch.manual_seed(seed)
    net = SSTNet(3, 8, n_classes=4, d_feat=6, n_parts=5).double()
    torch.nn.init.normal_(net.depth_emb)
    mask, embs = ragged(lengths, dtype=torch.float64)
    measure_scale(net, [torch.randn(9, 3, 8).exp()])
    lam = torch.rand(len(lengths), dtype=torch.float64) if mixed else None
    partner = torch.randperm(len(lengths)) if mixed else None
    out = net(mask, embs[mask > 0] if packed else embs, lam=lam, partner=partner)
    if mixed:
        mask, embs = blend(mask, lam, partner), embs[partner].lerp(embs, lam.view(-1, 1, 1, 1))
    expected = ref(net, mask, embs)
    gradients = []
    for o in (out, expected):
        assert_close(tuple(o), tuple(expected))
        loss = o.scores.square().sum() + o.mu.sum()
        gradients.append(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))
    for p, q in zip(*gradients):
        assert (p is None) == (q is None) and (p is None or error_to(p, q) < 1e-8)


@pytest.mark.parametrize('n', [1, 512])
def test_one_token_and_512(n):
    net, mask, embs = fresh(), torch.ones(1, n), torch.randn(1, n, 3, 8)
    out = net(mask, embs, torch.tensor([3]))
    out['loss'].backward()
    assert out['logits'].isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())
    assert_close(net.credit(mask, embs).shares.sum((1, 2)), net.eval()(mask, embs).scores, **near)


def test_half_precision_hidden_states_are_welcome():
    net, (mask, embs) = fresh(), ragged([4, 2])
    assert_close(net(mask, embs.half()).scores, net(mask, embs.half().float()).scores)


def test_nan_at_padding_reaches_neither_scores_nor_gradients():
    net, (mask, embs) = fresh(), ragged([4, 2])
    want = net(mask, embs).scores
    out = net(mask, embs.masked_fill(mask[..., None, None] == 0, math.nan)).scores
    assert_close(out, want)
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_holes_in_a_mask_are_absent_tokens():
    net, (mask, embs) = fresh(), ragged([5])
    mask[0, 2] = 0
    there = mask[0] > 0
    assert_close(net(mask, embs).scores, net(mask[:, there], embs[:, there]).scores, **near)


def test_scale_is_saved_and_that_of_nothing_or_nan_refused(tmp_path):
    net = measure_scale(fresh(n_parts=5), [torch.randn(20, 3, 8) * 3 + 1]).eval()
    net.save_pretrained(tmp_path)
    given = ragged([4, 2])
    assert_close(SSTNet.from_pretrained(tmp_path).eval()(*given).scores, net(*given).scores)
    for states, said in (([], 'got none'), ([torch.full((2, 3, 8), math.nan)], 'inf or NaN')):
        with pytest.raises(ValueError, match=said):
            measure_scale(net, states)


# ---- credit


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6), st.booleans())
def test_credit_adds_up_to_the_scores(lengths, seed, scaled):
    torch.manual_seed(seed)
    net = SSTNet(3, 8, n_classes=3, d_feat=6, n_parts=5).double()
    for r in net.routings:
        torch.nn.init.normal_(r.beta_use)
        torch.nn.init.normal_(r.beta_ign)
    mask, embs = ragged(lengths, dtype=torch.float64)
    c = net.credit(mask, embs * (1e3 if scaled else 1))
    assert_close(c.shares.sum((1, 2)), c.scores, atol=1e-9, rtol=1e-9)
    assert not c.shares[mask == 0].any()


def test_credit_of_a_training_network_is_that_of_the_finished_one():
    net, given = fresh(dropout=0.5).train(), ragged([4, 2])
    a = net.credit(*given)
    assert net.training
    assert_close(a.shares, net.eval().credit(*given).shares)


def test_words_come_back_with_all_of_their_credit(encoder):
    net = SSTNet(encoder.n_layers, encoder.d_emb)
    for r in net.routings:
        torch.nn.init.normal_(r.beta_use)
    text = 'a deeply <humane> unforeseeable film , twice .'
    c, words = net.credit(*encoder([text])), encoder.words(text)
    assert_close(sum(c.shares[0, at].sum((0, 1)) for _, at in words), c.scores[0], **near)
    assert {'deeply', '<humane>', 'film'} <= {w for w, _ in words}
