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


def test_old_figures_go_and_what_is_the_same_is_not_written(project):
    root = project()
    (root / 'README_files').mkdir()
    (root / 'README_files' / 'old.png').write_bytes(b'old')
    readme.main(root)
    before = (root / 'README.md').stat().st_mtime_ns
    readme.main(root)
    assert (root / 'README.md').stat().st_mtime_ns == before
    assert not list((root / 'README_files').iterdir())


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
        "pip install -e '.[dev]' && nbdev_test && pytest",
    ]


def test_the_versions_that_are_promised(package):
    page = (root / 'README.md').read_text(encoding='utf-8')
    least = re.search(r"PyTorch \(≥ ([\d.]+)\) and ", page)[1]
    said, _ = package
    assert f'torch>={least}' in said['install_requires']
    assert f'torch>={least}' in said['extras_require']['train']
    assert f"Python ≥ {said['python_requires'].removeprefix('>=')}." in page


def table_cell(name, begin):
    return next(
        c
        for c in nbformat.read(root / 'nbs' / name, 4).cells
        if c.cell_type == 'code' and begin in c.source
    )


@pytest.mark.parametrize(
    'name, begin',
    [
        ('index.ipynb', '#| label: tbl-results'),
    ],
)
def test_tables_show_the_files_of_today(name, begin, monkeypatch):
    "The stored output of a table equals what its cell says now."
    cell = table_cell(name, begin)
    from IPython.display import Markdown

    monkeypatch.chdir((root / 'nbs' / name).parent)
    scope = {'json': json, 'Path': Path, 'Markdown': Markdown}
    *body, last = re.split(r'^(?=Markdown\()', cell.source, flags=re.M)
    exec('\n'.join(body), scope)
    assert eval(last, scope).data == cell.outputs[0].data['text/markdown'], (
        f"run nbs/{name} again: jupyter nbconvert --to notebook --execute --inplace nbs/{name} "
        "&& nbdev_clean && python .ci/readme.py"
    )


def rows_in(folder, name, begin, monkeypatch):
    (folder / 'results').mkdir(exist_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    monkeypatch.chdir((folder / name).parent)
    scope = {'json': json, 'Path': Path}
    exec(table_cell(name, begin).source.replace('Markdown(', 'table = (', 1), scope)
    return scope['table'].split('\n')[2:]


def test_the_short_table_is_read_too(tmp_path, monkeypatch):
    what = 'R² of the true elevation, novel toys'

    def table():
        return rows_in(tmp_path, 'index.ipynb', '#| label: tbl-results', monkeypatch)

    count = lambda: sum('| not measured here |' in r for r in table())
    n = count()
    assert n == 7 and len(table()) == 10
    (tmp_path / 'results' / 'toys_poses.json').write_text(
        json.dumps(
            dict(headline={f'{what}, linear probe on class capsules, mean of 3 seeds': '0.5'})
        )
    )
    assert count() == n - 1 and any('class capsule 0.5 |' in r for r in table())


def test_every_number_of_the_short_table_was_measured(monkeypatch):
    rows = rows_in(root / 'nbs', 'index.ipynb', '#| label: tbl-results', monkeypatch)
    assert not any('not measured here' in r for r in rows)


def test_usage_runs(capsys):
    page = (root / 'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', page, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(block, {})
    shapes = capsys.readouterr().out.splitlines()
    assert shapes == [
        'torch.Size([2, 10]) torch.Size([2, 10, 4, 4]) torch.Size([2, 10, 4, 4])',
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


def test_the_readme_keeps_its_relative_links():
    links = targets((root / 'README.md').read_text(encoding='utf-8'))
    assert {'README_files/fig-votes.png', 'LICENSE', 'nbs/lab/51_tasks.ipynb'} <= set(links)


def test_links_in_code_and_elsewhere_stay(package):
    absolute = package[1]['absolute']
    page = '[a](https://x.org/a) [b](mailto:a@x.org)\n\n```\n[c](d.md)\n```\n'
    assert absolute(page) == page
    assert absolute('[why](#why)') == '[why](https://github.com/capsnb/capsnb#why)'


def test_what_the_package_says_of_itself(package):
    said, _ = package
    kinds = said['classifiers']
    versions = [c.split(' :: ')[-1] for c in kinds if re.search(r':: 3\.\d+$', c)]
    assert said['license_expression'] == 'Apache-2.0'
    assert said['python_requires'] == f'>={versions[0]}'
    assert versions == [f'3.{i}' for i in range(10, 10 + len(versions))]
    for kind in ('Operating System', 'Topic', 'Intended Audience', 'Development Status'):
        assert any(c.startswith(f'{kind} :: ') for c in kinds), kind


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
