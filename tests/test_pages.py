"""Pages of results: whole, of one file, safe from strangers' names; what `--json` prints."""

import inspect
import json
import os
import shutil
import pytest

bs4 = pytest.importorskip('bs4')
from typer.testing import CliRunner
from browser import fits, look, needs_chromium
from capsnb.cli import make_app
from capsnb.data.files import read_json, write_text
from capsnb.lab import hub
from capsnb.lab.hub import _eval_page, _run_page, leave_credit
from capsnb.lab.tasks import evaluate
from capsnb.lab.predict import Explained

tiny = 'train digits --net cnn --limit 60 --test-limit 50 --epochs 1 --device cpu --out'.split()
evil = '<script>alert(1)</script>"\'><img src=http://x onerror=a>'


def capsnb(*args, code=0):
    apart = 'mix_stderr' in inspect.signature(CliRunner.__init__).parameters  # click before 8.2
    runner = CliRunner(**dict(mix_stderr=False) if apart else {})
    r = runner.invoke(make_app(), [str(a) for a in args])
    assert r.exit_code == code, r.output
    return r


class Whole:
    "A page that asks for no other file and runs nothing."

    def __init__(self, page):
        assert page.startswith('<!doctype html>')
        soup = bs4.BeautifulSoup(page, 'html.parser')
        for tag in soup(True):
            assert tag.name != 'script' and not [k for k in tag.attrs if k[:2] == 'on'], tag
            asked = [tag.get(k, 'data:') for k in ('src', 'href', 'srcset', 'data', 'action')]
            assert all(o.startswith('data:') for o in asked) and 'url(' not in str(tag.attrs), tag
        style = soup.style.extract().text
        assert 'url(' not in style and '@import' not in style
        self.images, self.text = soup('img'), soup.get_text()
        assert all(o['alt'].strip() for o in self.images)
        self.rows = [[o.get_text() for o in row(['td', 'th'])] for row in soup('tr')]

    def row(self, name):
        return next(r[1:] for r in self.rows if r[0] == name)


def read(path):
    return Whole(path.read_text(encoding='utf-8'))


def read_metrics(out):
    return {k: v for k, v in read_json(out / 'metrics.json').items() if k != 'digest'}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A run, and a test of it, as the command line leaves them."
    out = tmp_path_factory.mktemp('pages') / 'run'
    r = capsnb(*tiny, out, '--json')
    assert f"look at {out / 'report.html'}" in r.stderr
    assert json.loads(r.stdout) == read_metrics(out) and len(r.stdout.splitlines()) == 1
    r = capsnb('eval', out, '--device', 'cpu')
    assert r.output.endswith(f"look at {out / 'report_test.html'}\n")
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / 'run')


def test_the_pages_of_a_run_and_of_its_test(finished):
    page, m = read(finished / 'report.html'), read_metrics(finished)
    assert page.row('test accuracy') == [f"{m['test_accuracy']:.2%}"]
    assert page.row('best epoch') == ['1'] and page.row('lr')[0].startswith('1e-05, 0.01')
    assert m['command'] in page.text and page.row('torch') == [m['torch']]
    assert len(page.images) == 1 and page.row('1')[0] == f"{m['history'][0]['loss']:.4g}"
    page, found = read(finished / 'report_test.html'), evaluate(finished, device='cpu')
    cells = [row[1:11] for row in page.rows if len(row) == 12][1:]
    assert [list(map(int, row)) for row in cells] == found['confusion']
    assert page.row('samples') == ['50'] and page.row('arch') == ['cnn']


def test_strange_names_are_text(run, tmp_path):
    found = dict(split=evil, n=2, accuracy=0.5, names=[evil, 'b'], confusion=[[1, 0], [1, 0]])
    found |= {evil: evil, 'by': {evil: {'1': 0.5}}}
    about = {'task': evil, evil: [evil], 'image': 'photo'}  # a column may have any name
    page = Whole(_eval_page(found, about, dict(command=evil, device=evil)))
    assert page.text.count(evil) >= 8 and page.row(evil) and page.row('image') == ['photo']
    odd = read_metrics(run) | dict(data=evil, network=evil, changes=[evil])
    (tmp_path / 'demo').mkdir()
    write_text(
        tmp_path / 'demo' / 'metrics.json', json.dumps({evil: odd, 'b': odd, 'command': evil})
    )
    assert Whole(_run_page(tmp_path / 'demo')).text.count(evil) >= 5
    e = Explained(evil, evil, 0.5, [(evil, -0.5), ('b', 0.25)], None, None, (0.2, 0.1))
    assert read(leave_credit(tmp_path / 'page.html', [e], [None])).text.count(evil) >= 3
    e = e._replace(label='caf\udce9')  # as the system gives the name of a file
    assert 'caf?' in read(leave_credit(tmp_path / 'page.html', [e], [None])).text


@pytest.mark.slow
def test_a_run_shown_again_has_the_same_page_and_a_new_one_takes_it_away(run):
    page, before = run / 'report.html', (run / 'report.html').read_bytes()
    page.unlink()
    for _ in range(2):
        capsnb(*tiny, run, '--resume')
        assert page.read_bytes() == before
    (run / 'report_mine.html').write_text('mine')
    capsnb(*tiny, run, '--overwrite', '--seed', 1)
    assert read(page).row('seed') == ['1'] and not (run / 'report_test.html').exists()
    assert (run / 'report_mine.html').read_text() == 'mine'


def test_somebodys_page_stays(run):
    page, kept = run / 'report.html', '<!doctype html><p>mine'
    page.write_text(kept)
    r = capsnb(*tiny, run, '--resume')
    assert "no page: " in r.stderr and 'stays' in r.stderr
    r = capsnb(*tiny, run, '--overwrite', code=1)
    assert 'holds report.html, which no run left' in r.output
    assert page.read_text() == kept and (run / 'metrics.json').exists()
    (run / 'report_test.html').write_text(kept)
    r = capsnb('eval', run, '--device', 'cpu')
    assert 'no page: ' in r.stderr and 'of 50' in r.stdout
    assert (run / 'report_test.html').read_text() == kept


def test_a_page_that_fails_loses_nothing_and_a_second_process_leaves_none(run, monkeypatch):
    def full(*args):
        raise OSError(28, 'No space left on device')

    (page := run / 'report.html').unlink()
    monkeypatch.setattr(hub, '_curves', lambda *a: {}['a hole'])
    r = capsnb(*tiny, run, '--resume', '--json')
    assert "no page: KeyError('a hole')" in r.stderr and json.loads(r.stdout) == read_metrics(run)
    assert not page.exists()
    before = (run / 'report_test.html').read_bytes()
    with monkeypatch.context() as m:
        m.setattr(os, 'replace', full)
        r = capsnb('eval', run, '--device', 'cpu')
    assert 'of 50' in r.stdout and 'no page: ' in r.stderr
    assert (run / 'report_test.html').read_bytes() == before
    assert [p.name for p in run.glob('report*')] == ['report_test.html']
    (run / 'report_test.html').unlink()
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('RANK', '1')
    capsnb('eval', run, '--device', 'cpu')
    assert not (run / 'report_test.html').exists()


@pytest.mark.slow
@needs_chromium
def test_in_a_browser(finished, tmp_path):
    folder = tmp_path / 'pages'
    folder.mkdir()
    for path in (finished / 'report.html', finished / 'report_test.html'):
        shutil.copy(path, folder)
    long = dict(split='test', n=2, accuracy=0.5, names=['x' * 60] * 12, confusion=[[1] * 12] * 12)
    about = dict(task='a' * 200, path='/' + 'folder/' * 60)
    write_text(folder / 'long.html', _eval_page(long, about, dict(command='b' * 500)))
    shown = '[...document.images].every((i) => i.complete && i.naturalWidth > 0)'
    script = f'Object.assign({fits}, {{shown: {shown}}})'
    names = sorted(p.name for p in folder.iterdir())
    asked = [[name, width, script] for name in names for width in (1280, 390)]
    for at, found in look(folder, tmp_path / 'chromium', asked).items():
        assert found['wide'] <= int(at.split()[1]) and found['shown'] and not found['asked'], at
