"""The README is what index.ipynb says, and its builder does what it promises."""

import base64
import importlib.util
import json
import re
import runpy
from pathlib import Path
import nbformat
import pytest
from capsnb.lab.report import percent, runs_of
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

root = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('readme', root / '.ci' / 'readme.py')
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)

png = base64.b64encode(b'\x89PNG fig').decode()


@pytest.fixture
def project(tmp_path):
    "Writes nbs/index.ipynb from cells (after a title) and returns the root."
    (tmp_path / 'nbs').mkdir()
    (tmp_path / 'nbs' / '00_core.ipynb').write_text('{}')
    (tmp_path / 'LICENSE').write_text('free')

    def write(*cells, title='# T\n\n> about T'):
        nb = new_notebook(cells=[new_markdown_cell(title), *cells])
        nbformat.write(nb, tmp_path / 'nbs' / 'index.ipynb')
        return tmp_path

    return write


def shown(data):
    return new_output('display_data', data)


def test_readme_is_up_to_date():
    built = readme.build(root)
    assert all((root / file).read_bytes() == content for file, content in built.items())


def test_what_a_page_shows(project):
    links = '[a](00_core.ipynb#x) [b](../LICENSE) [c](https://x.org/a) [d](#why)'
    figure = shown({'image/png': png})
    root = project(
        new_code_cell('#| hide\nsecret', outputs=[shown({'text/markdown': 'secret'})]),
        new_markdown_cell(links + '\n\n```\n[e](nothing.md)\n```'),
        new_code_cell('#| slow\nx = 1', outputs=[shown({'text/markdown': '[f](00_core.ipynb)'})]),
        new_code_cell(
            '#| label: fig-x\n#| echo: false\n#| fig-cap: "Why."\n#| fig-alt: A dot.\nplot()',
            outputs=[figure],
        ),
    )
    built = readme.build(root)
    moved = '[a](nbs/00_core.ipynb#x) [b](LICENSE) [c](https://x.org/a) [d](#why)'
    assert built['README.md'].decode() == (
        f'# T\n\n> about T\n\n{readme.warning}\n\n{moved}\n\n```\n[e](nothing.md)\n```\n\n'
        '```python\nx = 1\n```\n\n[f](nbs/00_core.ipynb)\n\n'
        '![A dot.](README_files/fig-x.png)\n\n*Why.*\n'
    )
    assert built['README_files/fig-x.png'] == b'\x89PNG fig'


error = new_output('error', ename='ZeroDivisionError', evalue='by zero')


@pytest.mark.parametrize(
    'cell, message',
    [
        (new_markdown_cell('[a](nothing.ipynb)'), "links to 'nothing.ipynb', which does not exist"),
        (new_code_cell('1/0', outputs=[error]), 'ZeroDivisionError'),
    ],
)
def test_what_cannot_be_shown_is_an_error(project, cell, message):
    with pytest.raises(ValueError, match=message):
        readme.build(project(cell))
    with pytest.raises(ValueError, match='must begin with a markdown cell'):
        readme.build(project(title='no title'))


@pytest.fixture
def package(monkeypatch):
    "What setup.py hands to setuptools, and its functions."
    said = {}
    monkeypatch.setattr('setuptools.setup', said.update)
    scope = runpy.run_path(str(root / 'setup.py'))
    return said, scope


def commands():
    return re.findall(
        r"^pip install .*&&.*$", (root / 'README.md').read_text(encoding='utf-8'), re.M
    )


def test_the_two_commands():
    assert commands() == [
        "pip install '.[train]' && capsnb demo",
        "pip install --no-compile -e '.[dev]' && nbdev_test && pytest",
    ]


def test_the_versions_that_are_promised(package):
    page = (root / 'README.md').read_text(encoding='utf-8')
    least = re.search(r"PyTorch \(≥ ([\d.]+)\) and ", page)[1]
    said, _ = package
    assert f'torch>={least}' in said['install_requires']
    assert f'torch>={least}' in said['extras_require']['train']
    assert f"Python ≥ {said['python_requires'].removeprefix('>=')}." in page


def test_the_table_shows_the_files_of_today(monkeypatch):
    "its stored output equals what its cell says now, and every number was measured"
    monkeypatch.chdir(root / 'nbs')
    cells = nbformat.read('index.ipynb', 4).cells
    cell = next(c for c in cells if '#| label: tbl-results' in c.source)
    scope = {'json': json, 'Path': Path}
    exec(cell.source.replace('Markdown(', 'table = (', 1), scope)
    assert scope['table'] == cell.outputs[0].data['text/markdown'], (
        "run it again: jupyter nbconvert --to notebook --execute --inplace nbs/index.ipynb "
        "&& nbdev_clean && python .ci/readme.py"
    )
    assert 'not measured here' not in scope['table']


def test_usage_runs(capsys):
    page = (root / 'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})
    shapes = capsys.readouterr().out.splitlines()
    assert shapes == [
        'torch.Size([2, 10]) torch.Size([2, 10, 4, 4]) torch.Size([2, 10, 4, 4])',
        'torch.Size([2, 4, 32])',
    ]


def targets(page):
    "Where the links and pictures of a page lead; code is left out."
    prose = re.sub(r'^```.*?^```|`[^`\n]*`', '', page, flags=re.M | re.S)
    found = re.findall(r'\]\(\s*([^)\s]+)', prose)
    found += re.findall(r'^\s*\[[^\]]+\]:\s*(\S+)', prose, re.M)
    return found + re.findall(r'(?:src|href)\s*=\s*["\']?([^"\'\s>]+)', prose)


def test_a_package_index_shows_absolute_links_to_files_that_exist(package):
    said, _ = package
    page = said['long_description']
    pages = 'https://github.com/capsnb/capsnb/blob/main/'
    files = 'https://raw.githubusercontent.com/capsnb/capsnb/main/'
    links = targets(page)
    assert len(links) == len(targets((root / 'README.md').read_text(encoding='utf-8'))) > 20
    assert not [o for o in links if not o.startswith('https://')]
    ours = [o for o in links if o.startswith((pages, files))]
    assert len(ours) > 20
    for o in ours:
        assert (root / o.removeprefix(pages).removeprefix(files)).exists(), o
    assert f']({files}README_files/fig-votes.png)' in page and f']({pages}LICENSE)' in page
    assert said['long_description_content_type'] == 'text/markdown'


def test_what_the_table_says_in_words_holds():
    "The sentences are typed; the records that they stand on are not."
    text = (root / 'README.md').read_text(encoding='utf-8')
    assert 'is first or second on all four sets of images' in text
    assert 'on sentences the network without capsules is first' in text
    results = root / 'nbs' / 'results'
    pictures = 'toys', 'mnist', 'fashion-mnist', 'eth80'
    paths = {k: results / f'shootout_{k}.json' for k in (*pictures, 'treebank')}
    found = {k: {n: percent(v) for n, v in runs_of(p).items()} for k, p in paths.items()}
    mean = lambda values: sum(values) / len(values)
    order = {k: sorted(of, key=lambda n: -mean(of[n])) for k, of in found.items()}
    assert all('self' in order[k][:2] for k in pictures) and order['treebank'][0] == 'cnn'
