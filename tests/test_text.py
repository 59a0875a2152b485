"""The network for text: its definition, the author's module, padding, credit, the head."""

import math
import random
from pathlib import Path
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

pytest.importorskip('transformers')
pytest.importorskip('tokenizers')
from capsnb.engine.numerics import error_to
from capsnb.core import seed_everything
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.lab.text import (
    SSTNet,
    blend,
    coloured,
    credit,
    explain,
    into_rows,
    measure_scale,
    without_each,
)

WORDS = 'a warm , funny and deeply humane film that never finds its feet but laughs twice .'.split()
golden = torch.load(Path(__file__).parent / 'data' / 'heinsen2019_sst.pt', weights_only=True)


def some_texts(n, longest, seed=0):
    rng = random.Random(seed)
    return [' '.join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(n)]


@pytest.fixture(scope='module')
def encoders(tmp_path_factory):
    root = tmp_path_factory.mktemp('tiny')
    return {
        kind: FrozenEncoder(
            tiny_transformer(root / kind, WORDS + [' '.join(WORDS)], kind), device='cpu'
        )
        for kind in ('gpt2', 'bert')
    }


def ragged(lengths, l=3, m=8, dtype=torch.float64):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(dtype)
    return mask, torch.randn(*mask.shape, l, m, dtype=dtype) * mask[..., None, None]


def ref(net, mask, embs):  # figure 5 from left to right
    x = net.detect_parts((embs - net.emb_mean) / net.emb_size + net.depth_emb)
    out = net.routings[0](
        torch.logit(mask)[..., None].expand(x.shape[:-1]).flatten(1), x.flatten(1, 2)[:, :, None]
    )
    return net.routings[1](out.a, out.mu)


# ---- the published network


def test_published_weights_give_the_published_outputs(tmp_path):
    torch.save(golden['state'], tmp_path / 'w.pt')
    out = SSTNet.from_published(tmp_path / 'w.pt')(golden['mask'], golden['embs'])
    for name in ('a', 'mu', 'sig2'):
        assert_close(getattr(out, name), golden[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    'change, what',
    [
        (lambda s: s.pop('routings.1.W'), "expected the weights of a network for text"),
        (lambda s: s.pop('routings.1.B'), "missing: routings.1.B"),
        (lambda s: s.update(more=torch.ones(1)), "extra: more"),
        (
            lambda s: s.update({'routings.0.B': torch.ones(1, 2, 1, 2)}),
            'misshapen: routings.0.B (1, 2, 1, 2) instead of',
        ),
        (
            lambda s: s.update({'routings.0.W': torch.ones(2)}),
            "expected the weights of a network for text",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(tmp_path, change, what):
    state = dict(golden['state'])
    change(state)
    torch.save(state, tmp_path / 'w.pt')
    with pytest.raises(ValueError) as e:
        SSTNet.from_published(tmp_path / 'w.pt')
    assert what in str(e.value)


def test_files_that_are_no_state_dict_are_refused(tmp_path):
    (tmp_path / 'junk.pt').write_bytes(b'junk')
    torch.save([1, 2], tmp_path / 'list.pt')
    torch.save(SSTNet(2, 4), tmp_path / 'module.pt')
    for name, what in (
        ('junk', 'cannot be read'),
        ('list', 'expected a dict of named tensors'),
        ('module', 'cannot be read'),
    ):
        with pytest.raises(ValueError, match=what):
            SSTNet.from_published(tmp_path / f'{name}.pt')
    with pytest.raises(FileNotFoundError):
        SSTNet.from_published(tmp_path / 'none.pt')


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
    mask, embs = ragged(lengths)
    measure_scale(net, [torch.randn(9, 3, 8).exp()])
    lam = torch.rand(len(lengths), dtype=torch.float64) if mixed else None
    partner = torch.randperm(len(lengths)) if mixed else None
    out = net(mask, embs[mask > 0] if packed else embs, lam=lam, partner=partner)
    mix = (lambda x: x[partner].lerp(x, lam.view(-1, 1, 1, 1))) if mixed else (lambda x: x)
    expected = ref(net, blend(mask, lam, partner) if mixed else mask, mix(embs))
    for o, r in zip(out, expected):
        assert_close(o, r)
    g, h = (
        torch.autograd.grad(
            o.a.square().sum() + o.mu.sum(), list(net.parameters()), allow_unused=True
        )
        for o in (out, expected)
    )
    for p, q in zip(g, h):
        assert (p is None) == (q is None) and (p is None or error_to(p, q) < 1e-8)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(0, 60), st.integers(0, 10**6)
)
def test_company_padding_and_what_stands_there_change_nothing(lengths, more, seed):
    torch.manual_seed(seed)
    net = SSTNet(3, 8, d_feat=6, n_parts=5)
    mask, embs = ragged(lengths, dtype=torch.float32)
    alone = torch.cat(
        [net(mask[k : k + 1, :n], embs[k : k + 1, :n]).a for k, n in enumerate(lengths)]
    )
    order = torch.randperm(len(lengths))
    wide = F.pad(mask, (0, more))
    junk = F.pad(embs, (0, 0, 0, 0, 0, more)) + (1 - wide)[..., None, None] * 1e4
    assert_close(net(wide[order], junk[order]).a, alone[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('kind', ['gpt2', 'bert'])
def test_from_text_to_scores_company_changes_nothing(encoders, kind):
    enc, texts = encoders[kind], some_texts(13, 25, seed=2)
    seed_everything(0)
    net = SSTNet(enc.n_layers, enc.d_emb).eval()
    alone = torch.cat([net(*enc([t])).a for t in texts])
    for k in (13, 4):
        assert_close(
            torch.cat([net(*enc(texts[s : s + k])).a for s in range(0, 13, k)]),
            alone,
            atol=1e-5,
            rtol=1e-5,
        )


@pytest.mark.parametrize('n', [1, 512])
def test_one_token_and_512(encoders, n):
    enc = encoders['gpt2']
    net = SSTNet(enc.n_layers, enc.d_emb)
    embs = enc([' '.join(WORDS * 30)]).embs[:, :n].contiguous()
    assert embs.shape[1] == n
    out = net(torch.ones(1, n), embs, torch.tensor([3]))
    out['loss'].backward()
    assert out['logits'].isfinite().all() and all(
        p.grad is None or p.grad.isfinite().all() for p in net.parameters()
    )
    assert_close(
        credit(net, torch.ones(1, n), embs).shares.sum((1, 2)),
        net.eval()(torch.ones(1, n), embs).a,
        atol=1e-5,
        rtol=1e-4,
    )


def test_half_precision_hidden_states_are_welcome():
    torch.manual_seed(0)
    net = SSTNet(3, 8)
    mask, embs = ragged([4, 2], dtype=torch.float32)
    assert_close(net(mask, embs.half()).a, net(mask, embs.half().float()).a)


@pytest.mark.parametrize(
    'mask, embs, what',
    [
        (torch.ones(2, 3), torch.ones(2, 3, 3, 7), 'expected hidden states of shape'),
        (torch.ones(2, 3), torch.ones(5, 3, 8), 'expected hidden states of shape (6, 3, 8)'),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, 3, 8), 'floating-point mask'),
        (torch.tensor([[1.0, 1], [0, 0]]), torch.ones(2, 2, 3, 8), 'sentence 1 is empty'),
        (torch.tensor([[1.0, math.nan]]), torch.ones(1, 2, 3, 8), 'between 0 and 1'),
        (torch.ones(0, 3), torch.ones(0, 3, 3, 8), 'at least one text'),
        (torch.ones(1, 2), torch.full((1, 2, 3, 8), math.nan), 'must be finite'),
        (torch.ones(1, 2), torch.ones(1, 2, 3, 8).long(), 'floating-point hidden states'),
    ],
)
def test_bad_input_is_named(mask, embs, what):
    with pytest.raises(ValueError) as e:
        SSTNet(3, 8)(mask, embs)
    assert what in str(e.value)


def test_packed_tokens_must_fit_the_mask():
    for mask in ([[1.0, 0, 1], [1, 1, 1]], [[0.0, 1, 1], [1, 1, 1]], [[1.0, 0.5, 0.5], [1, 1, 1]]):
        n = int((torch.tensor(mask) != 0).sum())
        with pytest.raises(ValueError, match='ones with zeros on the right'):
            into_rows(torch.arange(float(n)), torch.tensor(mask))
    with pytest.raises(ValueError, match='longest text'):
        into_rows(torch.ones(3, 2), torch.tensor([[1.0, 1, 0], [1, 0, 0]]))


def test_saved_and_read_again_with_its_scale(tmp_path):
    torch.manual_seed(0)
    mask, embs = ragged([4, 2], dtype=torch.float32)
    net = measure_scale(SSTNet(3, 8, n_parts=5), [torch.randn(20, 3, 8) * 3 + 1]).eval()
    net.save_pretrained(tmp_path)
    assert_close(SSTNet.from_pretrained(tmp_path).eval()(mask, embs).a, net(mask, embs).a)


def test_scale_of_nothing_and_of_nan_are_refused():
    with pytest.raises(ValueError, match='got none'):
        measure_scale(SSTNet(3, 8), [])
    with pytest.raises(ValueError, match='inf or NaN'):
        measure_scale(SSTNet(3, 8), [torch.full((2, 3, 8), math.nan)])
    with pytest.raises(ValueError, match=r'\[n, 3, 8\]'):
        measure_scale(SSTNet(3, 8), [torch.ones(2, 3, 9)])


# ---- credit


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 10**6), st.booleans())
def test_credit_adds_up_to_the_scores(lengths, seed, scaled):
    torch.manual_seed(seed)
    net = SSTNet(3, 8, n_classes=3, d_feat=6, n_parts=5).double()
    for r in net.routings:
        torch.nn.init.normal_(r.beta_use)
        torch.nn.init.normal_(r.beta_ign)
    mask, embs = ragged(lengths)
    c = credit(net, mask, embs * (1e3 if scaled else 1))
    assert_close(c.shares.sum((1, 2)), c.a, atol=1e-9, rtol=1e-9)
    assert not c.shares[mask == 0].any()


def test_credit_of_a_training_network_is_that_of_the_finished_one():
    torch.manual_seed(0)
    net = SSTNet(3, 8, dropout=0.5).train()
    mask, embs = ragged([4, 2], dtype=torch.float32)
    a = credit(net, mask, embs)
    assert net.training
    assert_close(a.shares, credit(net.eval(), mask, embs).shares)


@pytest.mark.parametrize('kind', ['gpt2', 'bert'])
def test_words_come_back_with_all_of_their_credit(encoders, kind):
    enc, text = encoders[kind], 'a deeply <humane> unforeseeable film , twice .'
    torch.manual_seed(0)
    net = SSTNet(enc.n_layers, enc.d_emb)
    for r in net.routings:
        torch.nn.init.normal_(r.beta_use)
    e = explain(text, net, enc)
    assert abs(e.leaning() - float(torch.tensor(e.a) @ torch.linspace(-1, 1, 5))) < 1e-5
    got = [w for w, _ in e.words]
    assert got == [w for w, _ in e.without] and abs(sum(v for _, v in e.beyond())) < 1e-6
    assert (
        'deeply' in got
        and 'film' in got
        and '<'
        not in coloured(e.words)
        .replace('<span', '')
        .replace('</span', '')
        .replace('<div', '')
        .replace('</div', '')
    )
    with pytest.raises(ValueError, match='is empty'):
        explain('  ', net, enc)
    with pytest.raises(ValueError, match='the encoder'):
        explain(text, SSTNet(7, 8), enc)


def test_without_a_token_is_the_text_that_lacks_it():
    torch.manual_seed(0)
    net = SSTNet(3, 8).eval()
    mask, embs = ragged([6], dtype=torch.float32)
    lost = without_each(net, mask, embs, [[k] for k in range(6)])
    for k in range(6):
        keep = [i for i in range(6) if i != k]
        assert_close(
            lost[k],
            (net(mask, embs).a - net(mask[:, keep], embs[:, keep]).a)[0],
            atol=1e-5,
            rtol=1e-4,
        )
    assert_close(
        without_each(net, mask[:, :1], embs[:, :1], [[0]]), net(mask[:, :1], embs[:, :1]).a
    )  # nothing is left


def test_nan_at_padding_reaches_neither_scores_nor_gradients():
    torch.manual_seed(0)
    net = SSTNet(3, 8)
    mask, embs = ragged([4, 2], dtype=torch.float32)
    want = net(mask, embs).a
    embs[mask == 0] = math.nan
    out = net(mask, embs).a
    assert_close(out, want)
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_holes_in_a_mask_are_absent_tokens():
    torch.manual_seed(0)
    net = SSTNet(3, 8)
    mask, embs = ragged([5], dtype=torch.float32)
    mask[0, 2] = 0
    assert_close(
        net(mask, embs).a, net(mask[:, mask[0] > 0], embs[:, mask[0] > 0]).a, atol=1e-5, rtol=1e-5
    )


def test_mixup_needs_both_share_and_partners():
    mask, embs = ragged([4, 2], dtype=torch.float32)
    for kw in (
        dict(lam=torch.tensor(0.5)),
        dict(lam=torch.tensor(0.5), partner=torch.tensor([0])),
        dict(lam=torch.rand(3), partner=torch.tensor([1, 0])),
        dict(lam=torch.rand(2, 1), partner=torch.tensor([1, 0])),
    ):
        with pytest.raises(ValueError, match='or neither'):
            SSTNet(3, 8)(mask, embs, **kw)
