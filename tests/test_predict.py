"""What is trained is used: predict and explain, for every kind of run, without its data."""

import csv
import io
import json
import shutil
import warnings
import numpy as np
import pytest
import torch

Image = pytest.importorskip('PIL.Image')
import capsnb
from typer.testing import CliRunner
from hub import stand_in
from capsnb.cli import make_app
from capsnb.commands import asked, still_rising
from capsnb.data.embed import tiny_transformer
from capsnb.data.files import read_json
from capsnb.data.sst import tiny_treebank
from capsnb.lab.hub import push_run
from capsnb.lab.own import OwnPictures, OwnTable, OwnTexts
from capsnb.lab.predict import Loaded, _opened, explain, read
from capsnb.lab.tasks import task_named, train
from capsnb.lab.vision import PlainCNN

quick = dict(epochs=1, device='cpu', progress=False)
slow = pytest.mark.slow


def run(*args, code=0, given=''):
    done = CliRunner().invoke(make_app(), [str(a) for a in args], input=given)
    assert done.exit_code == code, done.output
    return done.stdout if not code else done.output


def shades(folder, n=12):
    for kind, shade in (('dark', 30), ('light', 220)):
        (folder / kind).mkdir(parents=True)
        for k in range(n):
            Image.new('RGB', (20 + k, 15), (shade, shade, k)).save(folder / kind / f'{k}.png')
    return folder


def sheet(path, n=120):
    rows = [dict(a=k % 7 + (k % 2) * 9, b=k, c=0, kind='xy'[k % 2]) for k in range(n)]
    with open(path, 'w', newline='') as f:
        out = csv.DictWriter(f, [*rows[0]])
        out.writeheader()
        out.writerows(rows)
    return path


@pytest.fixture(scope='module')
def table(tmp_path_factory):
    "A run on two columns of a table of three, whose file has gone; a step takes two batches."
    folder = tmp_path_factory.mktemp('table')
    task = OwnTable(sheet(folder / 'all.csv'), 'kind', columns=('a', 'b'))
    more = dict(epochs=None, gradient_accumulation_steps=2)
    assert 400 <= train(task, None, folder / 'run', **quick | more)['steps'] < 403
    (folder / 'all.csv').unlink()
    return folder / 'run'


def test_rows_of_a_table(table, tmp_path, monkeypatch, capsys):
    few, page = sheet(tmp_path / 'few.csv', 9), tmp_path / 'p.html'
    leave = '--csv', tmp_path / 'new/p.csv', '--html', page
    said, *lines = run('predict', table, few, '--device', 'cpu', *leave).splitlines()
    assert str(page) in said and page.read_text().count('<tr><th scope="row">row ') == 9
    p = list(csv.reader(open(tmp_path / 'new/p.csv')))
    assert p[0] == ['what', 'predicted', 'x', 'y'] and len(p) == 10 and len(lines) == 9
    assert [line.split()[2] for line in lines] == [row[1] for row in p[1:]]
    loaded = capsnb.load(table, 'cpu')
    rows = torch.tensor([[k % 7 + (k % 2) * 9, k] for k in range(9)])
    want = loaded.predict(rows)
    for row, name, q in zip(p[1:], want.names, want.p.tolist()):
        assert row[1] == name and [float(v) for v in row[2:]] == pytest.approx(q, abs=1e-6)
    more = dict(b=rows[:, 1].tolist(), extra=['?'] * 9, a=rows[:, 0].tolist())
    with pytest.warns(UserWarning, match="1 left out: column 'extra'"):
        torch.testing.assert_close(loaded.predict(more).p, want.p)
    with warnings.catch_warnings():  # training left it out, too
        warnings.simplefilter('error')
        torch.testing.assert_close(loaded.predict(few).p, want.p)
    assert asked(table, [few], None, None, 'cpu')[1][8] == 'row 9'
    assert capsys.readouterr().err == 'not read, as in training: c\n'
    torch.testing.assert_close(loaded.predict(rows.tolist()).p, want.p)
    for wrong, said in ((dict(a=[1]), "no column 'b': there is a"), (rows[:, :1], 'a, b: ')):
        with pytest.raises(ValueError, match=said):
            loaded.predict(wrong)
    (e, *_) = explain(loaded, rows)
    assert {*dict(e.parts)} == {'a', 'b'} and e.label == want.names[0]
    said = run('predict', table, '-', '--device', 'cpu', '--json', given=few.read_text())
    assert [row['predicted'] for row in json.loads(said)] == want.names
    assert 'lost without the most credited' in run('explain', table, few, '--device', 'cpu')
    assert 'Where the answer comes from' in (table / 'report_credit.html').read_text()
    terminal = io.StringIO(few.read_text())
    terminal.isatty = lambda: True
    monkeypatch.setattr('sys.stdin', terminal)
    assert len(asked(table, [], None, None, 'cpu')[1]) == 9
    assert 'reading standard input' in capsys.readouterr().err
    assert "there is no file 'none.csv'" in run('predict', table, 'none.csv', code=1)
    assert 'is a run: it comes first' in run('predict', few, table, code=1)
    assert 'is there already' in run('predict', table, few, '--csv', few, code=1)


def test_a_text_is_no_path_and_a_file_is_closed_again(tmp_path):
    words = ['a good film ' * 30, '~ nice', '~nobody said']
    loaded = Loaded(None, OwnTexts(), dict(names='xy'))
    assert read(loaded, words)[1] == [w.strip() for w in words]
    with pytest.raises(ValueError, match='expected a list of texts'):
        loaded.shown(dict(words=words))
    (tmp_path / 'few.csv').write_text('a;text\n1;fine\n')
    for given, texts in ((f'{tmp_path}/few.csv', ['fine']), (words[0], [words[0].strip()])):
        assert loaded.shown(given).samples['test'].texts == texts
    Image.new('L', (8, 8)).save(tmp_path / 'a.png')
    assert _opened(tmp_path / 'a.png').fp is None


@slow
def test_pictures_of_every_kind_and_size(tmp_path):
    out = tmp_path / 'run'
    task = OwnPictures(shades(tmp_path / 'all'), size=16)
    train(task, 'routing', out, **quick | dict(epochs=6))
    shutil.move(tmp_path / 'all', tmp_path / 'new')
    loaded = capsnb.load(out, 'cpu')
    one = np.asarray(Image.open(tmp_path / 'new' / 'light' / '3.png'))
    want = loaded.predict([one])
    kinds = one[None], one[None] / 255.0, torch.tensor(one).movedim(-1, 0)[None].float()
    kinds += ([Image.fromarray(one)], tmp_path / 'new' / 'light' / '3.png', one[None].astype('i4'))
    kinds += (np.repeat(np.repeat(one, 2, 0), 2, 1)[None],)
    for kind in kinds:
        torch.testing.assert_close(loaded.predict(kind).p, want.p, atol=0.03, rtol=0)
    for wrong in (one[None] / 16.0, -1.0 * one[None], [one[0, 0]], ['none.png']):
        with pytest.raises((ValueError, OSError)):
            loaded.predict(wrong)
    assert len(loaded.predict(tmp_path / 'new').names) == 24
    page = tmp_path / 'page.html'
    said = run('predict', out, tmp_path / 'new', '--device', 'cpu', '--html', page).splitlines()
    assert len(said) == 25 and all('.png' in line for line in said[1:])
    assert page.read_text().count('<img src="data:image/png') == 24
    assert 'at random' in run('explain', out, tmp_path / 'new' / 'dark', '--device', 'cpu')
    assert (out / 'report_credit.html').read_text().count('<img ') == 12


@slow
def test_stereo_pairs_and_photographs(tmp_path):
    for data, more in (('toys', '--pairs 20 --size 32'), ('digits', '--limit 60 --net capsnet')):
        how = f'{data} {more} --epochs 1 --device cpu --no-progress --out'.split()
        run('train', *how, tmp_path / data)
    pair = np.random.default_rng(0).integers(0, 256, (32, 64), 'uint8')
    Image.fromarray(pair).save(tmp_path / 'pair.png')
    np.save(tmp_path / 'pair.npy', np.stack([pair[:, :32], pair[:, 32:]]))
    toys = capsnb.load(tmp_path / 'toys', 'cpu')
    found = toys.predict([tmp_path / 'pair.png', tmp_path / 'pair.npy'])
    torch.testing.assert_close(found.p[0], found.p[1])
    digits = capsnb.load(tmp_path / 'digits', 'cpu')
    with pytest.warns(UserWarning, match='1 of 3 images have light edges'):
        found = digits.predict(torch.tensor([0.2, 0.5, 0.9])[:, None, None].expand(3, 8, 8))
    assert found.p.sum(1).allclose(torch.ones(3)) and found.classes == tuple('0123456789')
    (e,) = explain(digits, torch.rand(1, 8, 8))
    assert e.places.shape == torch.Size(digits.network.places) and e.label in digits.classes
    plain = Loaded(PlainCNN(), task_named('digits'), dict(names='0123456789'))
    with pytest.raises(ValueError, match='says not what it owes'):
        explain(plain, torch.rand(1, 8, 8))
    image = io.BytesIO()
    Image.fromarray(pair[:, :32]).save(image, 'PNG')
    how = '--html', tmp_path / 'one.html'
    assert len(run('predict', tmp_path / 'digits', *how, given=image.getvalue()).splitlines()) == 2
    run('predict', tmp_path / 'toys', tmp_path / 'pair.npy', *how)  # its own page is replaced


@slow
def test_sentences_and_the_hub(tmp_path, table, monkeypatch):
    trees = tiny_treebank(tmp_path / 'trees')
    folder = tiny_transformer(tmp_path / 'model', ['it lasts .', 'it broke .'])
    how = f'sst --encoder {folder} --roots --any-files --on-the-fly --data {trees} --epochs 1'
    run('train', *how.split(), '--device', 'cpu', '--no-progress', '--out', tmp_path / 'sst')
    said = tmp_path / 'said.txt'
    said.write_text('it lasts .\n\nit broke .\n')
    lines = run('predict', tmp_path / 'sst', said, 'it lasts .', '--device', 'cpu').splitlines()
    assert len(lines) == 3 and lines[0] == lines[2]
    assert "no file 'gone.txt'" in run('predict', tmp_path / 'sst', 'gone.txt', code=1)
    with stand_in(monkeypatch, tmp_path / 'hub') as hub:
        push_run(table, 'me/rows')
        assert str(tmp_path) not in hub.repos['models/me/rows']['task.json'].decode()
        rows = torch.tensor([[3.0, 4.0]])
        want = capsnb.load(table, 'cpu').predict(rows)
        torch.testing.assert_close(capsnb.load('me/rows', 'cpu').predict(rows).p, want.p)
        assert read_json(table / 'task.json')['columns'] == ['a', 'b']
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
        torch.testing.assert_close(capsnb.load('me/rows', 'cpu').predict(rows).p, want.p)
        with pytest.raises(OSError, match='cannot be had from the Hub'):
            capsnb.load('me/none')


def test_validation_that_still_rises_is_told():
    history = lambda v: dict(history=[dict(valid_accuracy=a) for a in v])
    assert still_rising(history([0.3, 0.4, 0.5, 0.6]))
    for v in ([0.6, 0.9, 0.9, 0.9], [0.5, 1.0, 0.9, 1.0], [0.3, 0.6], []):
        assert not still_rising(history(v))
    rows = [dict(valid_accuracy=a, valid_loss=1 - a) for a in (0.3, 0.4, 0.5, 0.6)]
    by_loss = lambda rows: dict(history=rows, metric_for_best_model='loss')
    assert still_rising(by_loss(rows))
    assert not still_rising(by_loss([row | dict(valid_loss=0.5) for row in rows]))
