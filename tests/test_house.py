"What the house promises: the book is short, rooms import downwards, parameters say what they are."

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
floors = ('book', 'engine', 'zoo', 'data', 'lab', 'reports', 'outlook')
notebooks = sorted((root / 'nbs').rglob('[0-9]*.ipynb'), key=lambda p: p.name)
notebooks = [p for p in notebooks if not any(o[0] in '_.' for o in p.relative_to(root).parts)]
book = [p for p in notebooks if p.parent.name == 'book']
modules = sorted((root / 'capsnb').rglob('*.py'))
modules = [p for p in modules if p.stem not in ('__init__', '_modidx')]
ids = lambda p: p.stem


def cells(path, kind):
    for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if c['cell_type'] == kind:
            yield ''.join(c['source'])


def words(path):
    return sum(len(page.split()) for page in cells(path, 'markdown'))


def test_numbers_go_on_through_the_floors():
    "The names of all notebooks, sorted, are the reading order."
    at = {'nbs': -1, **{floor: k for k, floor in enumerate(floors)}}
    order = [at[p.parent.name] for p in notebooks if p.parent.name != 'studies']
    assert order == sorted(order)


@pytest.mark.parametrize('path', book, ids=ids)
def test_a_chapter_is_short(path):
    assert words(path) <= 1200


def test_a_network_is_trained_within_the_hour():
    early = [p for p in book if int(p.name[:2]) <= 6]
    assert len(early) == 6 and 'it_learns' in early[-1].stem
    assert sum(map(words, early)) <= 6500


@pytest.mark.parametrize('n', (77, 78, 80, 81))
def test_a_verdict_is_short(n):
    "the four claims of the papers, a report for each"
    (path,) = (p for p in notebooks if p.name.startswith(str(n)))
    assert words(path) <= 900


def test_the_whole_house_is_short():
    assert sum(map(words, notebooks)) + words(root / 'nbs' / 'index.ipynb') <= 47_000


@pytest.mark.parametrize('path', [p for p in notebooks if p.parent.name == 'zoo'], ids=ids)
def test_a_room_of_the_zoo_is_short(path):
    assert words(path) <= 900


def prose(page):
    "Sentences of a markdown cell, without code, formulas, tables, quotes of code, links' targets."
    page = re.sub(r'^(```|~~~).*?^\1', '', page, flags=re.M | re.S)
    page = re.sub(r'\$\$.+?\$\$', '. ', page, flags=re.S)
    page = re.sub(r'^\s*(\||#|<).*$', '. ', page, flags=re.M)
    page = re.sub(r'`[^`]*`|\$[^$]*\$', 'x', page)
    page = re.sub(r'\]\([^)]*\)', ']', page)
    page = re.sub(r'^\s*([-*>]|\d+\.)\s', '. ', page, flags=re.M)
    page = re.sub(r'\n\s*\n', '. ', page)
    page = re.sub(r'\b(et al|e\.g|i\.e|eq|eqs|cf|vs)\.', r'\1', page)
    return [s.split() for s in re.split(r'[.!?:;](?:[*_)"]*)(?:\s|$)', page) if s.split()]


@pytest.mark.parametrize('path', book, ids=ids)
def test_sentences_of_the_book_are_short(path):
    long = [' '.join(s) for page in cells(path, 'markdown') for s in prose(page) if len(s) > 35]
    assert not long, f"{len(long)} sentences of more than 35 words: {long}"


def test_long_sentences_are_found():
    assert [len(s) for s in prose('One two. Three `a b c` four\n\n| a table |\n- five')] == [
        2,
        3,
        1,
    ]


@pytest.mark.parametrize('path', book, ids=ids)
def test_all_cells_of_a_chapter_run_on_a_laptop(path):
    "Run All reaches the end: what wants data or days asks for a GPU first (slow: a minute)."
    flagged = [o for o in cells(path, 'code') if o.startswith(('#| data', '#| cuda'))]
    assert all('torch.cuda.is_available()' in o for o in flagged)


@pytest.mark.parametrize('path', book, ids=ids)
def test_a_chapter_has_exercises_with_folded_solutions(path):
    pages = '\n'.join(cells(path, 'markdown'))
    assert '## Exercises' in pages and '<details>' in pages and '</details>' in pages


@pytest.mark.parametrize('path', notebooks, ids=ids)
def test_figures_have_a_text(path):
    "for those who cannot see them"
    for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
        shown = any('image/png' in o.get('data', {}) for o in c.get('outputs', []))
        if shown:
            assert '#| fig-alt: ' in ''.join(c['source']), f"cell {c['id']} has no fig-alt"


@pytest.mark.parametrize('path', notebooks, ids=ids)
def test_films_are_light(path):
    for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
        for o in c.get('outputs', []):
            assert len(''.join(o.get('data', {}).get('text/html', ''))) <= 300_000


@pytest.mark.parametrize('path', modules, ids=ids)
def test_a_module_says_what_it_is_in_one_line(path):
    "its docstring is the notebook's description, which ruff does not see"
    first = path.read_text(encoding='utf-8').splitlines()[0]
    assert first.startswith('"""') and len(first) <= 100


def made_by(path):
    "Number of the notebook that makes a module; None for what is written by hand."
    found = re.search(r'File to edit: \S*?(\d+)_\w+\.ipynb', path.read_text(encoding='utf-8'))
    return found and int(found[1])


def imported(tree, package):
    "Modules of this library that are imported when the module is, as dotted names."
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            yield '.'.join([*base, *(node.module or '').split('.')]).strip('.')


@pytest.mark.parametrize('path', modules, ids=ids)
def test_a_module_imports_only_from_smaller_numbers(path):
    mine = made_by(path)
    if mine is None:  # the command line alone is written by hand
        assert path.parent == root / 'capsnb' and path.stem in (
            'cli',
            'commands',
            'study',
            '__main__',
        )
        return
    package = path.relative_to(root).parts[:-1]
    for name in imported(ast.parse(path.read_text(encoding='utf-8')), package):
        other = root.joinpath(*name.split('.')).with_suffix('.py')
        assert made_by(other) < mine, f"{path.stem} ({mine}) imports {name} ({made_by(other)})"


def told(path):
    "Public functions of a module, with the lines of their parameters."
    source = path.read_text(encoding='utf-8')
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (node.name[0] != '_' or node.name == '__init__'):
            for arg in node.args.args + node.args.kwonlyargs:
                if arg.arg not in ('self', 'cls'):
                    yield node, arg, '\n'.join(lines[arg.lineno - 1 : node.body[0].lineno - 1])


def top_level(path):
    tree = ast.parse(path.read_text(encoding='utf-8'))
    return {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize('path', [p for p in modules if made_by(p)], ids=ids)
def test_every_parameter_says_what_it_is(path):
    "one parameter a line, with a comment of its own"
    silent = []
    public = {n for n in top_level(path) if n[0] != '_'}
    for node, arg, below in told(path):
        own = re.split(r'\n\s*\w+\s*:|\n\s*\*|\n\s*\)', below, maxsplit=1)[0]
        if node.name in public and '#' not in own:
            silent.append(f'{node.name}({arg.arg})')
    assert not silent, f"{len(silent)} parameters say nothing: {', '.join(silent)}"


def test_what_readers_need_not_see_is_shut():
    command = [sys.executable, str(root / '.ci' / 'fold.py'), '--check']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_in_records_name_notebooks_that_exist():
    for path in sorted((root / 'nbs' / 'results').glob('*.json')):
        for named in re.findall(r'nbs/[\w/]+\.ipynb', path.read_text(encoding='utf-8')):
            assert (root / named).exists(), f'{path.name} names {named}'
