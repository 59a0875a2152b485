"""Training on a treebank: decks, what is cached or held, chapter 11."""

import json
from pathlib import Path
from types import SimpleNamespace
import pytest
import torch
import torch._dynamo
from torch.testing import assert_close

from typer.testing import CliRunner
import capsnb.data.embed as embed
from capsnb.cli import make_app
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.data.files import checksum
from capsnb.data.sst import files, load_sst, tiny_treebank
from capsnb.lab.sentiment import Sentiment, TextMixup
from capsnb.lab.tasks import evaluate, load_run, study, train

ROOT = Path(__file__).resolve().parents[1]
quiet = dict(device='cpu', progress=False)
graphs = dict(torch_compile=True, torch_compile_mode='reduce-overhead')


@pytest.fixture(scope='module')
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp('world')
    trees = tiny_treebank(root / 'trees')
    texts = list(load_sst(trees, 'sst5', phrases=False, official=False)['train']['text'])
    model = tiny_transformer(root / 'model', texts)
    return dict(root=root, trees=trees, texts=texts, model=model)


@pytest.fixture(scope='module')
def encoder(world):
    return FrozenEncoder(world['model'], device='cpu')


def on(world, encoder, task='sst5', **kw):
    usual = dict(roots=True, cache=False, folder=world['trees'], official=False)
    task = Sentiment(task, encoder, **{**usual, **kw})
    task.progress = False
    return task


def data(world, encoder, task='sst5', **kw):
    return on(world, encoder, task, **{**dict(cache=world['root'] / 'cache'), **kw}).decks(seed=0)


def agrees_again(world, run, m):
    found = evaluate(run, folder=world['trees'], cache=False, device='cpu')
    assert abs(found['accuracy'] - m['test_accuracy']) < 1e-6


# ---- decks


@pytest.mark.parametrize('task', ['sst5', 'sst2'])
@pytest.mark.parametrize('roots', [True, False])
@pytest.mark.parametrize('limit', [None, 3])
def test_every_sample_has_its_own_text_and_label(world, encoder, task, roots, limit):
    wanted = load_sst(world['trees'], task, not roots, False)
    for split, deck in data(world, encoder, task, roots=roots, limit=limit).items():
        n = len(wanted[split])
        few = min(n, limit or n)
        part = wanted[split].select([k * n // few for k in range(few)])
        texts, labels = list(part['text']), list(part['label'])
        assert len(deck) == len(texts) and deck.labels.tolist() == labels
        for k in range(0, len(deck), 3):
            assert deck.read([k])[1].shape[0] == len(encoder.tokens([texts[k]])[0])
        k = len(deck) - 1
        assert_close(deck.read([k])[1], encoder([texts[k]]).embs[0], atol=2e-3, rtol=2e-3)


def test_mixup_is_the_blend_it_says(world, encoder):
    deck = data(world, encoder)['train']
    deck.deal(2)
    raw = deck.__getitems__([0, 1, 2, 3, 4])
    y = torch.nn.functional.one_hot(raw['labels'], 5).float()
    for per, shape in dict(pair=(5, 1), batch=()).items():
        out = TextMixup(5, per=per)(raw)
        lam = out['lam'].view(shape)
        assert 0 <= lam.min() and lam.max() <= 1 and len(lam.unique()) == len(lam.flatten())
        assert sorted(out['partner'].tolist()) == list(range(5))
        assert_close(out['labels'], lam * y + (1 - lam) * y[out['partner']])
    assert set(TextMixup(5, 0.0)(raw)) == {'mask', 'embs', 'labels'}
    with pytest.raises(ValueError, match="per 'pair' or 'batch'"):
        TextMixup(5, per='token')


@pytest.mark.parametrize('raw', [True, False])
def test_texts_as_the_treebank_spells_them(world, encoder, tmp_path, raw):
    "published texts are raw, older runs had them restored, and each has a cache of its own"
    task = on(world, encoder, cache=tmp_path, published=True, **({} if raw else dict(raw=False)))
    assert any('-LRB-' in t for t in task.read()['train'].texts) == raw
    task.decks(splits=('train',))
    note = json.loads(json.dumps(task.note('sstnet')))
    assert note.get('raw', False) == raw == task.from_note(note, encoder=encoder).as_spelt
    (place,) = tmp_path.iterdir()  # and only what is asked for is encoded
    assert [p.name for p in place.iterdir() if p.is_dir()] == ['train-raw' if raw else 'train']


@pytest.mark.parametrize(
    'own, more, what',
    [
        (dict(task='sst3'), {}, "task must be 'sst5' or 'sst2'"),
        (dict(encoder='./nowhere'), {}, 'no folder'),
        ({}, dict(lr=(1, 0.1)), 'expected lr'),
        ({}, dict(net='lstm'), "net must be one of .* got 'lstm'"),
        (dict(in_memory=True, cache='x'), {}, "in memory: no cache then, got 'x'"),
        (dict(in_memory=True, cache=None), dict(dataloader_num_workers=1), '_num_workers=0'),
        (dict(in_memory=True, cache=None), graphs, 'need a GPU'),
        (dict(in_memory=False), graphs, 'few shapes: in_memory=True'),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    world, encoder, tmp_path, own, more, what
):
    with pytest.raises(ValueError, match=what):
        train(on(world, **dict(encoder=encoder) | own), out=tmp_path / 'run', **quiet | more)
    assert not (tmp_path / 'run').exists()


# ---- runs


@pytest.mark.slow
def test_from_a_cache_on_the_fly_or_in_memory(world, encoder, tmp_path):
    "the same run, and what is held is read once"
    losses, seen = {}, []
    ways = dict(fly={}, cache=dict(cache=world['root'] / 'cache'))
    ways |= dict.fromkeys(('held', 'again'), dict(in_memory=True, cache=None))
    hook = encoder.model.register_forward_pre_hook(lambda *_: seen.append(1))
    for name, how in ways.items():
        before = len(seen)
        task = on(world, encoder, 'sst2', cache_dtype='float32', **how)
        found = train(task, out=tmp_path / name, epochs=2, batch_size=4, **quiet)
        losses[name] = [h['loss'] for h in found['history']]
        assert found.get('in_memory', False) == (name in ('held', 'again'))
        assert (len(seen) == before) == (name == 'again')
    hook.remove()
    assert losses['held'] == losses['again']
    for name in ways:
        assert losses[name] == pytest.approx(losses['fly'], abs=1e-6)
    batch = on(world, encoder).decks()['train'].__getitems__([0, 1])
    assert batch['texts'] == world['texts'][:2]  # nothing on a device before it is time


def test_what_is_held(world, encoder, monkeypatch):
    "Other rows are read anew, and room is asked for first."
    texts = world['texts']
    first, again = (encoder.hold({'a': (texts, [0, k]), 'b': (texts, None)}) for k in (1, 2))
    assert again['a'] is not first['a'] and again['b'] is first['b']
    monkeypatch.setattr('psutil.virtual_memory', lambda: SimpleNamespace(available=1000))
    with pytest.raises(MemoryError, match='GB of memory, of which cpu has 0.0 GB free.*--layers'):
        encoder.hold({'a': (texts, None)})
    assert encoder.hold({}) == {}


@pytest.mark.slow
def test_an_encoder_is_loaded_once_for_all_seeds(world, tmp_path, monkeypatch):
    made, load = [], embed._load_frozen
    monkeypatch.setattr(embed, '_load_frozen', lambda *a: made.append(a) or load(*a))
    task = on(world, str(world['model']), in_memory=True, cache=None)
    how = dict(runs=tmp_path, epochs=1, **quiet)
    found = study(task, {'a': {}}, tmp_path / 'a.json', (0, 1), **how)
    assert len(made) == 1 and len(found['a']) == 2


@pytest.mark.slow
def test_layers_dtype_and_place_are_remembered(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world['root'])
    encoder = FrozenEncoder('model', layers=[2, 0], dtype='bfloat16', device='cpu')
    m = train(on(world, encoder, 'sst2'), out=tmp_path, epochs=1, **quiet)
    monkeypatch.chdir('/')
    net, task, _ = load_run(tmp_path, 'cpu')
    found = task.reader()
    assert found.layers == [2, 0] and found.dtype == torch.bfloat16
    assert net.depth_emb.shape[0] == 2
    assert torch.equal(found(['A play.']).embs, encoder(['A play.']).embs)
    agrees_again(world, tmp_path, m)
    other = tiny_transformer(tmp_path / 'other', world['texts'], seed=1)
    with pytest.raises(ValueError, match='is another transformer'):
        load_run(tmp_path, 'cpu', encoder=other)


def test_without_validation_the_last_epoch_is_tested(world, encoder, tmp_path):
    "and every epoch is validated all the same: figure 8"
    m = train(on(world, encoder, 'sst2', validate=False), out=tmp_path, epochs=2, **quiet)
    assert m['best_epoch'] == m['epochs'] == 2
    assert all('valid_accuracy' in h and 'valid_loss' in h for h in m['history'])
    assert m['valid_accuracy'] == m['history'][-1]['valid_accuracy']
    assert json.loads((tmp_path / 'task.json').read_text())['validate'] is False
    agrees_again(world, tmp_path, m)


# ---- as published


def capsnb(*args):
    return CliRunner().invoke(make_app(), [str(a) for a in args])


@pytest.mark.parametrize(
    'more, validates',
    [('', True), ('--as-published', False), ('--as-published --validate', True)],
)
@pytest.mark.parametrize('seeds', (1, 2))
def test_as_published_no_epoch_is_chosen(tmp_path, monkeypatch, more, validates, seeds):
    "unless it is asked for; the record of several seeds says which"
    found = {}
    note = lambda task, *a, **k: found.update(k, validate=task.validate) or dict(runs={}, sst5=[])
    for name in ('train', 'study'):
        monkeypatch.setattr(f'capsnb.lab.tasks.{name}', note)
    monkeypatch.setattr('capsnb.commands.told', lambda *a: '')
    monkeypatch.setattr('capsnb.commands.draw', lambda *a: None)
    line = f'train sst --encoder x {more} --no-progress --seeds {seeds}'
    monkeypatch.setattr('sys.argv', ['capsnb', *line.split(), '--out', f'{tmp_path}/run'])
    capsnb(*line.split(), '--out', tmp_path / 'run')
    assert found['validate'] == validates
    if seeds > 1:
        assert found['settings']['published'] == ('--as-published' in more)
        typed = f'capsnb {line} --out {tmp_path}/run --resume'
        assert sorted(found['command'].split()) == sorted(typed.split())


@pytest.mark.slow
def test_the_cells_of_chapter_11_for_the_real_model(world, tmp_path, monkeypatch):
    "with a small transformer and a small treebank in the real one's format; twice: it goes on"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('CAPSNB_DATA', str(world['trees']))
    sums = {k: checksum(world['trees'] / name) for k, name in files.items()}
    monkeypatch.setattr('capsnb.data.sst._sums', sums)
    book = json.loads((ROOT / 'nbs/book/11_text.ipynb').read_text(encoding='utf-8'))
    sources = [''.join(c['source']) for c in book['cells'] if c['cell_type'] == 'code']
    imports, real = sources[1], [s for s in sources if s.startswith('#| data')]
    assert len(real) == 2
    here = {"'gpt2-large'": repr(str(world['model'])), '(37, 1280)': '(3, 32)'}
    for known, small in (here | {'torch.cuda.is_available()': 'True'}).items():
        real = [s.replace(known, small) for s in real]
    names = {}
    for source in (imports, *real, real[-1]):
        exec(source, names)
    kept = json.loads((tmp_path / 'runs/gpt2-large-sst2/metrics.json').read_text())
    assert kept['raw'] and kept['published'] and kept['best_epoch'] == 3
    assert kept['mixup_per'] == 'pair'
