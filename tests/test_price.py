"""What training on the treebank will cost is said before anything is loaded.

No disk is filled unasked: GPT-2-large's shape, without its weights.
"""

import json
import re
from collections import namedtuple
import pytest

tf = pytest.importorskip('transformers')
from capsnb.data import embed
from capsnb.lab import sentiment
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.lab import tasks
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import train
from capsnb.data.sst import load_sst, tiny_treebank

tf.utils.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('world')
    trees = tiny_treebank(root / 'trees')
    texts = list(load_sst(trees, 'sst5', phrases=False, official=False)['train']['text'])
    return dict(trees=trees, model=tiny_transformer(root / 'model', texts))


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')


of_train = ('out', 'epochs', 'device', 'progress', 'resume')


def go(task='sst2', encoder=None, **kw):
    "Train: what is the run's goes to `train`, all else to the task."
    usual = {k: kw.pop(k) for k in of_train if k in kw}
    return train(Sentiment(task, encoder, **kw), **usual)


def few(world, tmp_path):
    "a run of one epoch on the sentences of the tiny treebank"
    out = dict(out=tmp_path / 'run', epochs=1, device='cpu', progress=False)
    return out | dict(
        encoder=str(world['model']), roots=True, folder=world['trees'], official=False
    )


Loaded = type('Loaded', (Exception,), {})


@pytest.fixture
def large(world, tmp_path, monkeypatch):
    "a folder with GPT-2-large's config and nothing else; a treebank as large as the real one"
    folder, text = tmp_path / 'large', 'nine words that cost what the real ones do'
    tf.GPT2Config(n_embd=1280, n_layer=36, n_head=20).save_pretrained(folder)

    def never(*_, **__):
        raise Loaded

    def many(*_):
        sizes = {'train': 159_274, 'validation': 1102, 'test': 2210}
        row = lambda name, n: sentiment.Samples(name, [text] * n, list(range(n)), [0, 1] * (n // 2))
        return {k: row('train-phrases' if k == 'train' else k, n) for k, n in sizes.items()}

    monkeypatch.setattr(embed, '_load_frozen', never)
    monkeypatch.setattr(Sentiment, 'read', many)
    return folder


def disk(monkeypatch, free):
    usage = namedtuple('usage', 'total used free')
    for module in (embed, sentiment):
        monkeypatch.setattr(module.shutil, 'disk_usage', lambda _: usage(free, 0, free))


def test_the_price_of_gpt2_large_comes_first_and_its_default_takes_no_disk(
    large, tmp_path, monkeypatch, capsys
):
    disk(monkeypatch, 500e9)
    with pytest.raises(Loaded):
        go('sst2', str(large), out=tmp_path / 'run', device='cpu')
    said = capsys.readouterr().err
    assert '37 hidden states of width 1,280, 774.0 million weights (3.1 GB of memory); 162,' in said
    gb = float(re.search(r'in float16 take about ([\d.]+) GB of disk', said)[1])
    assert 120 < gb < 180
    for way in ('--cache', '--roots', '--layers', '--on-the-fly', 'computed on the fly'):
        assert way in said
    assert not (tmp_path / 'run').exists() and not (tmp_path / 'xdg').exists()
    with pytest.raises(Loaded):
        go('sst2', str(large), out=tmp_path / 'run', device='cpu', in_memory=True)
    said = capsys.readouterr().err
    assert said.count('GB of memory') == 2 and 'disk' not in said and 'on the fly' not in said


def test_an_automatic_choice_is_kept_on_resume(world, tmp_path, monkeypatch, capsys):
    kw = few(world, tmp_path) | dict(task='sst5', epochs=2)
    monkeypatch.setattr(sentiment, 'most_unasked', 100)

    def stopped(*a, **k):
        (tmp_path / 'run').mkdir(exist_ok=True)
        note = json.dumps(dict(settings=dict(on_the_fly=True)))
        (tmp_path / 'run' / 'settings.json').write_text(note)
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, 'fit_decks', stopped)
    with pytest.raises(KeyboardInterrupt):
        go(**kw)
    assert 'on the fly' in capsys.readouterr().err and not (tmp_path / 'xdg').exists()
    monkeypatch.setattr(sentiment, 'most_unasked', 1e9)  # now a cache would do

    def look(net, deck, *a, **k):
        assert not deck.cached and k['note']['on_the_fly'] is True
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, 'fit_decks', look)
    with pytest.raises(KeyboardInterrupt):
        go(resume=True, **kw)


def test_a_cache_that_is_there_is_used_whatever_its_size(world, tmp_path, monkeypatch):
    encoder = FrozenEncoder(world['model'], device='cpu')
    kw = dict(task='sst5', encoder=encoder, folder=world['trees'], official=False, roots=True)
    assert Sentiment(**kw).decks()['train'].cached
    monkeypatch.setattr(sentiment, 'most_unasked', 100)
    assert Sentiment(**kw).decks()['train'].cached
    assert not Sentiment(**kw, cache_dtype='bfloat16').decks()['train'].cached
