"Runs that begin with the weights of others."

import shutil
import pytest
import torch
from torch.testing import assert_close

from typer.testing import CliRunner
from capsnb.commands import make_app
from capsnb.data.embed import FrozenEncoder, tiny_transformer
from capsnb.data.files import checksum
from capsnb.data.sst import load_sst, tiny_treebank
from capsnb.lab.sentiment import Sentiment
from capsnb.lab.tasks import begin_with, load_run, train
from capsnb.lab.text import SSTNet

pytestmark = pytest.mark.slow
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


def test_a_run_goes_on_only_from_its_own_start_but_without_it(place, tmp_path):
    "a run that has begun needs its start no more"
    shutil.copytree(place / 'vectors', tmp_path / 'start')
    kw = dict(epochs=1, start=tmp_path / 'start', **quiet)
    one = train(task(place, 'sst2'), 'vectors', tmp_path / 'run', **kw)
    shutil.rmtree(tmp_path / 'start')
    again = dict(kw, resume=True)
    assert train(task(place, 'sst2'), 'vectors', tmp_path / 'run', **again) == one
    for start, out in ((None, 'run'), (tmp_path / 'start', 'other')):
        with pytest.raises((ValueError, OSError), match='start'):
            train(task(place, 'sst2'), 'vectors', tmp_path / out, **again | dict(start=start))


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
    with pytest.raises(ValueError, match='no layer of .* has the shape'):
        begin_with(SSTNet(1, 3, 7, 5, 3, 2), place / 'sstnet', note)
    with pytest.raises(ValueError, match='a run cannot begin with itself'):
        own = dict(start=place / 'sstnet', overwrite=True)
        train(task(place, 'sst5'), 'sstnet', place / 'sstnet', **own, **quiet)


def test_seeds_of_one_setting_are_not_those_of_another(place, tmp_path):
    line = f'train sst --encoder {place}/model0 --data {place}/trees --any-files --roots'
    line += f' --cache {place}/cache --epochs 1 --seeds 2 --device cpu --out {tmp_path}'
    for more, code in (('', 0), ('', 0), (' --net vectors', 1), (f' --start {place}/sstnet', 1)):
        r = CliRunner().invoke(make_app(), (line + more + ' --no-progress').split())
        assert r.exit_code == code and (not code or 'holds another study' in r.stderr), r.output
