"Heads side by side, and runs that begin with the weights of others."

import json
import shlex
import shutil
import warnings
import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip('transformers')
pytest.importorskip('sklearn')
pytest.importorskip('typer')
from typer.testing import CliRunner
from capsnb.commands import make_app
from capsnb.data.embed import FrozenEncoder, read_config, tiny_transformer
from capsnb.data.files import checksum
from capsnb.data.sst import load_sst, tiny_treebank
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import begin_with, load_run, train
from capsnb.lab.text import SSTNet
from capsnb.lab.vision import n_params
from capsnb.outlook.faithful import by_gradient, credit_study, margin, mean_curves
from capsnb.outlook.faithful import plot_curves, shares, units_of
from capsnb.outlook.heads import head_rows, head_study, plot_by_weights, weights_below

quiet = dict(device='cpu', progress=False)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A tiny treebank, two random transformers, and a run of each kind of head on five labels."
    place = tmp_path_factory.mktemp('heads')
    folder = tiny_treebank(place / 'trees')
    texts = list(load_sst(folder, 'sst5', phrases=False, official=False)['train']['text'])
    for seed in (0, 1):
        tiny_transformer(place / f'model{seed}', texts, seed=seed)
    for net in ('vectors', 'sstnet'):
        train(task(place, 'sst5'), net, place / net, epochs=1, **quiet)
    return place


def task(place, name, model='model0'):
    encoder = FrozenEncoder(place / model, device='cpu')
    own = dict(folder=place / 'trees', official=False, cache=place / 'cache')
    return Sentiment(name, encoder, roots=True, **own)


def test_two_classes_begin_with_five(place, tmp_path):
    "what fits is taken over: at a rate of nearly zero all of it is still there"
    kw = dict(epochs=1, lr=(1e-30, 1e-30), **quiet)
    train(task(place, 'sst2'), 'vectors', tmp_path / 'begun', start=place / 'vectors', **kw)
    train(task(place, 'sst2'), 'vectors', tmp_path / 'new', **kw)
    five = load_run(place / 'vectors', 'cpu').network.state_dict()
    begun, note = load_run(tmp_path / 'begun', 'cpu')[::2]
    begun, new = (n.state_dict() for n in (begun, load_run(tmp_path / 'new', 'cpu').network))
    assert note['start'] == checksum(place / 'vectors' / 'model.safetensors')
    fit = {k for k in five if not k.startswith('routings.2.')}  # as the author, no layer by halves
    assert len(fit) > 20
    for k, v in begun.items():
        assert_close(v, five[k] if k in fit else new[k], rtol=0, atol=1e-20)
    assert not torch.equal(begun['routings.0.W_F2'], new['routings.0.W_F2'])


def test_a_run_goes_on_only_from_its_own_start(place, tmp_path):
    kw = dict(epochs=1, **quiet)
    one = train(task(place, 'sst2'), 'vectors', tmp_path, start=place / 'vectors', **kw)
    again = dict(kw, resume=True)
    assert train(task(place, 'sst2'), 'vectors', tmp_path, start=place / 'vectors', **again) == one
    with pytest.raises(ValueError, match='start'):
        train(task(place, 'sst2'), 'vectors', tmp_path, **again)


@pytest.mark.parametrize(
    'start, net, model, said',
    [
        ('nowhere', 'vectors', 'model0', 'nowhere'),
        ('sstnet', 'vectors', 'model0', 'trained a SSTNet, which cannot be the start of a Vector'),
        ('vectors', 'vectors', 'model1', 'read a transformer in another way .* fingerprint'),
    ],
)
def test_what_cannot_be_a_start(place, tmp_path, start, net, model, said):
    with pytest.raises((ValueError, OSError), match=said):
        train(task(place, 'sst2', model), net, tmp_path, start=place / start, epochs=1, **quiet)


def test_other_layers_are_no_start(place):
    note = load_run(place / 'sstnet', 'cpu').note
    with pytest.raises(ValueError, match=r'another way .* layers \[0, 1, 2\] there, \[0, 2\] here'):
        begin_with(SSTNet(2, 8), place / 'sstnet', note | dict(layers=[0, 2]))
    with pytest.raises(ValueError, match='a run cannot begin with itself'):
        own = dict(start=place / 'sstnet', overwrite=True)
        train(task(place, 'sst5'), 'sstnet', place / 'sstnet', **own, **quiet)


def test_a_start_that_is_gone(place, tmp_path):
    "a run that has begun needs it no more"
    for name in ('start', 'start2'):
        shutil.copytree(place / 'vectors', tmp_path / name)
    kw = dict(epochs=1, start=tmp_path / 'start', **quiet)
    one = train(task(place, 'sst2'), 'vectors', tmp_path / 'run', **kw)
    shutil.rmtree(tmp_path / 'start')
    assert train(task(place, 'sst2'), 'vectors', tmp_path / 'run', resume=True, **kw) == one
    with pytest.raises((ValueError, OSError), match='start'):
        train(task(place, 'sst2'), 'vectors', tmp_path / 'other', resume=True, **kw)


def test_seeds_of_one_setting_are_not_those_of_another(place, tmp_path):
    line = f'train sst --encoder {place}/model0 --data {place}/trees --any-treebank --roots'
    line += f' --cache {place}/cache --epochs 1 --seeds 2 --device cpu --out {tmp_path}'
    for more, code in (('', 0), ('', 0), (' --net vectors', 1), (f' --start {place}/sstnet', 1)):
        r = CliRunner().invoke(make_app(), (line + more + ' --no-progress').split())
        assert r.exit_code == code and (not code or 'holds another study' in r.stderr), r.output


def test_starts_are_looked_for_first(place, tmp_path):
    five = task(place, 'sst5')
    for only, said in (
        (('vectors',), 'nowhere'),
        (('attention',), "start is a start of 'vectors'"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            head_study(five, tmp_path, only, (0,), start=tmp_path / 'nowhere', **quiet)
    assert not list(tmp_path.iterdir())


def test_nothing_that_fits(place):
    note, net = load_run(place / 'sstnet', 'cpu').note, SSTNet(1, 3, 7, 5, 3, 2)
    with pytest.raises(ValueError, match='no layer of .* has the shape'):
        begin_with(net, place / 'sstnet', note)


def test_heads_are_as_large_as_they_say(place):
    five = task(place, 'sst5')
    made = {
        k: five.make(row['net'], 0, **row.get('options', {})) for k, row in head_rows(five).items()
    }
    assert list(made) == ['dstep', 'em', 'attention', 'vectors', 'large attention']
    n = {k: n_params(net) for k, net in made.items()}
    assert abs(n['attention'] / n['dstep'] - 1) < 0.05 > abs(n['em'] / n['dstep'] - 1)
    assert abs(n['large attention'] / n['vectors'] - 1) < 0.05
    with pytest.raises(ValueError, match=r"heads are 'dstep', .* got \['lstm'\]"):
        head_rows(five, ('dstep', 'lstm'))


def test_on_the_command_line(place, tmp_path):
    line = f'study heads --encoder {place}/model0 --folder {place}/trees --any-treebank --out'
    line += f' {tmp_path} --cache {place}/cache --seeds 2 --epochs 1 --device cpu --no-progress'
    own = ['--only', 'vectors', '--only', 'attention']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # tiny runs are alike
        for more in ('', ' --task sst2 --start ' + str(tmp_path / 'runs' / 'sst5')):
            r = CliRunner().invoke(make_app(), [*(line + more).split(), *own])
            assert r.exit_code == 0, r.output
    five, two = (json.loads((tmp_path / f'heads_sst{k}.json').read_text()) for k in (5, 2))
    assert list(five['headline']) == ['vectors', 'attention']
    assert five['command'].endswith(' --only vectors --only attention --any-treebank')
    assert list(two['headline']) == ['vectors', 'attention', 'vectors, begun']
    assert {r['lr'][1] for k, r in two['runs'].items() if k.startswith('vectors')} == {
        two['runs']['vectors seed 0']['lr'][1]
    }
    for k in (5, 2):
        probes = json.loads((tmp_path / f'heads_sst{k}_probes.json').read_text())['probes']
        assert probes == sorted(probes, key=lambda row: -row['valid_accuracy'])
        assert (tmp_path / f'heads_sst{k}.html').exists()
    for record in tmp_path.glob('heads_*.json'):
        told = json.loads(record.read_text())['command']
        assert told.endswith(' --only vectors --only attention --any-treebank'), record
        assert ('--start FOLDER' in told) == record.name.startswith('heads_sst2')
        assert known(told)


def known(command):
    "Whether the command line knows all options; it runs nothing."
    r = CliRunner().invoke(make_app(), [*shlex.split(command)[1:], '--help'])
    return r.exit_code == 0


def test_records_repeat_what_they_were_asked(place, tmp_path):
    "the transformer's file, its layers and a head of two words are in all three commands"
    encoder = FrozenEncoder(place / 'model0', layers=(0, 2), device='cpu')
    encoder.gguf_file = 'small.gguf'
    own = dict(folder=place / 'trees', official=False, cache=False)
    five, only = Sentiment('sst5', encoder, roots=True, **own), ('large attention',)
    head_study(five, tmp_path, only, (0,), epochs=1, runs=tmp_path / 'runs', **quiet)
    commands = {json.loads(p.read_text())['command'] for p in tmp_path.glob('heads_*.json')}
    (told,) = commands
    for part in ('--gguf small.gguf', '--layers 0,2', "--only 'large attention'"):
        assert part in told
    assert known(told) and not known(told + ' --nothing 1')


def test_probes_alone(place, tmp_path):
    "no head is trained; the record's command asks for no more, and there is a page"
    line = f'study heads --encoder {place}/model0 --folder {place}/trees --any-treebank'
    line += f' --cache {place}/cache --device cpu --out {tmp_path}'
    r = CliRunner().invoke(make_app(), [*line.split(), '--only', 'probes'])
    assert r.exit_code == 0 and 'linear probe of hidden state' in r.output, r.output
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ['heads_sst5_probes.html', 'heads_sst5_probes.json']
    record = json.loads((tmp_path / 'heads_sst5_probes.json').read_text())
    assert '--only probes' in record['command'] and len(record['probes']) == 6
    r = CliRunner().invoke(make_app(), [*line.split(), '--only', 'probes', '--only', 'dstep'])
    assert r.exit_code == 1 and "got ['probes']" in r.stderr


@pytest.mark.parametrize('net', ['vectors', 'sstnet'])
def test_credit_of_both_is_judged(place, tmp_path, net):
    here = dict(cache=place / 'cache', folder=place / 'trees')
    record = credit_study([place / net], tmp_path / 'credit.json', 3, **here)
    found = record['runs'][net]
    for kind in ('token', 'layer'):
        assert all(len(v) == 3 for v in found[kind].values())
        assert set(found['curves'][kind]) == set(found[kind])
    drawn = {line.get_label(): line for line in plot_curves(record).axes[1].lines}
    for name, (down, up) in found['curves']['token'].items():
        assert len(down) == len(up) == 21 and down[0] == up[-1]  # the whole text
        assert_close(drawn[name].get_ydata(), 100 * np.array(up))
    del found['curves']['layer']  # no text had two
    for kind in ('layer', 'token'):
        with pytest.raises(ValueError, match=f'no run of the record has curves by {kind}'):
            plot_curves(record, kind)
        found.pop('curves', None)  # an older record


def test_curves_of_texts_of_different_lengths():
    "two units stand at 0 and 1/2 when they go, at 1/2 and 1 when they come"
    short, long = torch.tensor([0.9, 0.1]), torch.tensor([0.8, 0.4, 0.2, 0.0])
    down, up = mean_curves([(short, short), (long, long)])
    at = shares.index
    assert (down[at(0)], down[at(0.5)], down[-1]) == (0.85, 0.15, 0.05)
    assert (up[0], up[at(0.5)], up[-1]) == (0.85, 0.65, 0.05)


def test_gradients_of_normed_states(place):
    "integrated gradients add up to the difference, also where the size of states is not seen"
    net, embs = (
        load_run(place / 'vectors', 'cpu').network.double(),
        torch.randn(1, 4, 3, 32).double(),
    )
    torch.nn.init.normal_(net.depth_emb)
    mask, parts = torch.ones(1, 4).double(), units_of(4, 3, 'token')
    told = by_gradient(net, mask, embs, 1, parts, steps=200)
    nothing = margin(net.route(mask, net.placed(torch.zeros_like(embs))).a, 1)
    assert_close(told.sum(), (margin(net(mask, embs).a, 1) - nothing)[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('net', ['vectors', 'sstnet'])
def test_credit_differs_from_gradients(place, tmp_path, net):
    here = dict(cache=place / 'cache', folder=place / 'trees')
    found = credit_study([place / net], tmp_path / 'credit.json', 3, **here)['runs'][net]
    for kind in ('token', 'layer'):
        assert found[kind]['credit'] != found[kind]['gradient']


def test_three_ways_on_the_command_line(place, tmp_path):
    pytest.importorskip('peft')
    line = f'study tuned --encoder {place}/model0 --folder {place}/trees --any-treebank --limit 4'
    line += f' --seeds 1 --epochs 1 --device cpu --out {tmp_path}'
    r = CliRunner().invoke(make_app(), line.split())
    assert r.exit_code == 0, r.output
    record = json.loads((tmp_path / 'tuned_sst2.json').read_text())
    runs, told = record['runs'], 'capsnb study tuned --task sst2 --encoder FOLDER --seeds 1'
    assert record['command'] == f'{told} --epochs 1 --limit 4 --any-treebank'
    assert [r['texts'] for r in runs.values()] == [4, 4, 4]
    n = [r['n_params'] for r in runs.values()]  # frozen, lora, whole
    assert sorted(n) == n and (tmp_path / 'tuned_sst2.html').exists()
    for other in (['--epochs', '2'], ['--limit', '3'], ['--encoder', f'{place}/model1']):
        r = CliRunner().invoke(make_app(), [*line.split(), *other])
        assert r.exit_code == 1 and 'holds another study' in r.stderr
    r = CliRunner().invoke(make_app(), [*line.split(), '--task', 'sst5', '--only', 'frozen'])
    assert r.exit_code == 0 and (tmp_path / 'runs' / 'sst5').is_dir()
    r = CliRunner().invoke(make_app(), [*line.split(), '--only', 'half'])
    assert r.exit_code == 1 and '--only must be frozen, lora, whole, got half' in r.stderr


def test_texts_of_a_length_are_read_together():
    sets = pytest.importorskip('datasets')
    tuned = pytest.importorskip('capsnb.outlook.tuned')
    split = sets.Dataset.from_dict(dict(text=['four', 'one', 'seventeen', ''], label=[0, 1, 2, 3]))
    found = tuned._by_length(split)
    assert found['text'][:] == ['', 'one', 'four', 'seventeen']
    assert found['label'][:] == [3, 1, 0, 2]


@pytest.mark.parametrize('more', ['', ' --gguf a.gguf', ' --limit 7 --gguf a.gguf --only lora'])
def test_what_was_trained_stands_in_the_command(tmp_path, monkeypatch, more):
    "nothing is loaded: what is written down is what was typed"
    tuned, found = 'capsnb.outlook.tuned', {}
    monkeypatch.setattr(f'{tuned}.on_treebank', lambda *a, **k: (None, None, {}))
    monkeypatch.setattr(f'{tuned}.tuned_study', lambda *a, **k: found.update(k))
    monkeypatch.setattr(f'{tuned}.tuned_table', lambda path: '')
    monkeypatch.setattr('capsnb.commands.leave_study', lambda *a: None)
    for trees in ('', ' --any-treebank'):
        line = f'study tuned --encoder x{more}{trees} --out {tmp_path}'
        r = CliRunner().invoke(make_app(), line.split())
        assert r.exit_code == 0, r.output
        told = 'capsnb study tuned --task sst2 --encoder FOLDER --seeds 3 --epochs 2'
        assert found['command'] == told + more + trees


def test_weights_below_a_hidden_state():
    "of GPT-2-large's shape, counted by hand; words and places are looked up"
    transformers = pytest.importorskip('transformers')
    with torch.device('meta'):
        model = transformers.AutoModel.from_config(read_config('gpt2-large'))
    m, told = 1280, weights_below(model)
    block = (4 * m * m + 4 * m) + (8 * m * m + 5 * m) + 4 * m
    assert len(told) == 37 and told[0] == 0 and told[36] == 36 * block + 2 * m
    assert told[18] == 18 * block + m


def test_probes_name_the_hidden_states_that_were_read(place, tmp_path):
    folder = dict(folder=place / 'trees', official=False, cache=False)
    encoder = FrozenEncoder(place / 'model0', layers=(0, 1), device='cpu')
    five = Sentiment('sst5', encoder, roots=True, **folder)
    own = dict(epochs=1, rates=(1e-3,), runs=tmp_path / 'runs', **quiet)
    head_study(five, tmp_path, ('attention',), (0, 1), **own)
    record = tmp_path / 'heads_sst5.json'
    found = json.loads(record.with_name('heads_sst5_probes.json').read_text())
    assert {row['layer'] for row in found['probes']} == {0, 1} and len(found['weights_below']) == 3
    plt = pytest.importorskip('matplotlib.pyplot')
    ax = plot_by_weights({'tiny': record}, {'other': (1e6, 58.5)}, head='attention')
    line, x = ax.lines[0].get_xydata(), found['weights_below']
    for (at, value), layer in zip(line, (0, 1)):
        best = max(
            (r for r in found['probes'] if r['layer'] == layer), key=lambda r: r['valid_accuracy']
        )
        assert at == x[layer] and value == 100 * best['test_accuracy']
    assert [line.get_xdata()[0] for line in ax.lines if len(line.get_xdata()) == 1][0] == x[1]
    plt.close(ax.figure)
    shutil.copy(record.with_name('heads_sst5_probes.json'), tmp_path / 'bare_probes.json')
    bare = plot_by_weights({'no head yet': tmp_path / 'bare.json'})
    assert len(bare.lines) == 1
    with pytest.raises(ValueError, match="has no runs of 'dstep', but of attention"):
        plot_by_weights({'tiny': record})
    plt.close('all')
