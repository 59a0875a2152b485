"""What every notebook and module keeps to, beyond ruff, pyright and nbdev: `python .ci/lint.py`.

Prints a line for each fault and exits with 1 if there is one."""

from __future__ import annotations
import ast
import json
import re
import sys
from configparser import ConfigParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from count import flags_of, notebooks
from fold import fold

by_hand = '__init__', '__main__', '_modidx', 'cli', 'commands', 'options', 'study'
above = {'nbs': -1, 'book': 0, 'engine': 1, 'zoo': 2, 'data': 3, 'lab': 4}
above |= {'studies': 4}  # whose numbers go on through the lab's
most_words = {'book': 1200, 'zoo': 900}
looked_up = r'## (Letters and words|References)\n'
starts = 'subplots figure plot loglog semilogx semilogy imshow bar hist'.split()


def cells_of(path: Path, kind: str) -> list:  # of (source, cell)
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [(''.join(c['source']), c) for c in cells if c['cell_type'] == kind]


def words_of(path: Path) -> int:  # of prose: tables, glossary and references are looked up
    pages = (page for page, _ in cells_of(path, 'markdown') if not re.match(looked_up, page))
    lines = (line for page in pages for line in page.split('\n') if not line.startswith('|'))
    return sum(len(re.findall(r'\S*\w\S*', line)) for line in lines)


def draws(source: str) -> bool:
    "Does a cell start a figure of matplotlib's, outside of the functions that it defines?"
    lines = [s for s in source.split('\n') if not s.lstrip().startswith(('%', '!'))]
    body = ast.parse('\n'.join(lines)).body
    body = [s for s in body if not isinstance(s, (ast.FunctionDef, ast.ClassDef))]
    calls = [n.func for s in body for n in ast.walk(s) if isinstance(n, ast.Call)]
    methods = [f for f in calls if isinstance(f, ast.Attribute)]
    drawn = {f.attr for f in methods if ast.unparse(f.value) in ('plt', 'plot_style()')}
    return bool(drawn & set(starts)) and 'close' not in drawn


def broken_formulas(page: str):
    r"Formulas in which \\sum stands for \sum, or \t of \theta has become a tab."
    prose = re.sub(r'^```.*?^```|`[^`\n]*`', '', page, flags=re.M | re.S)
    for m in re.finditer(r'\$\$.+?\$\$|(?<!\\)\$[^$\n]+\$', prose, re.S):
        doubled = re.search(r'\\\\[A-Za-z]', m[0]) and r'\begin{' not in m[0]  # there \\ ends a row
        if doubled or re.search(r'[\t\b\f\v\a\r]', m[0]):
            yield m[0]


def sentences(page: str) -> list:  # of lists of words
    "Of a markdown cell, without code, formulas, tables, targets of links."
    page = re.sub(r'^(```|~~~).*?^\1', '', page, flags=re.M | re.S)
    page = re.sub(r'\$\$.+?\$\$', '. ', page, flags=re.S)
    page = re.sub(r'^\s*(\||#|<).*$', '. ', page, flags=re.M)
    page = re.sub(r'`[^`]*`|\$[^$]*\$', 'x', page)
    page = re.sub(r'\]\([^)]*\)', ']', page)
    page = re.sub(r'^\s*([-*>]|\d+\.)\s', '. ', page, flags=re.M)
    page = re.sub(r'\n\s*\n', '. ', page)
    page = re.sub(r'\b(et al|e\.g|i\.e|eq|eqs|cf|vs)\.', r'\1', page)
    return [s.split() for s in re.split(r'[.!?:;](?:[*_)"]*)(?:\s|$)', page) if s.split()]


def in_code(source: str, cell: dict, flags: list):  # yields faults of a code cell
    if re.search(r'^\s*#\s*\|\s*eval:?\s*false', source, re.M | re.I):
        yield 'use a flag of tst_flags, not eval: false'
    for flag in set(re.findall(r'^\s*#\s*\|\s*([\w-]+)', source, re.M)) & set(flags):
        if flag not in flags_of(source):
            yield f"nbdev does not see '#| {flag}' below other lines"
    shown = [o.get('data', {}) for o in cell['outputs']]
    if any('image/png' in o for o in shown):
        if '#| fig-alt: ' not in source:
            yield 'a figure without fig-alt'
    elif not flags_of(source) & set(flags) and draws(source):
        yield 'the figure is lost (another backend): run the notebook again'
    if any(len(''.join(o.get('text/html', ''))) > 300_000 for o in shown):
        yield 'a film of more than 300 kB'
    for o in cell['outputs']:
        if o['output_type'] == 'error':
            yield f"it stores {o['ename']}: {o['evalue']}"


def in_notebook(path: Path, flags: list):  # yields faults
    pages, code = cells_of(path, 'markdown'), cells_of(path, 'code')
    if not pages or not re.match(r'# \S.*\n+> \S', pages[0][0]):
        yield "the first markdown cell must be '# Title', an empty line, '> description'"
    for source, cell in code:
        yield from (f"cell {cell['id']}: {fault}" for fault in in_code(source, cell, flags))
    exports = any('nbdev_export()' in source for source, _ in code)
    if path.parent.name == 'book' and exports:
        yield 'a chapter that is run must not write the library: no nbdev_export()'
    if path.stem != 'index' and path.parent.name not in ('book', 'studies') and not exports:
        yield 'it must end with nbdev_export()'
    if path.stat().st_size > 1.5e6:
        yield f'{path.stat().st_size / 1e6:.2f} MB; at most 1.5: fewer or smaller figures'
    machine = r'(?<![\w.~])/(home|root|Users|tmp|work)/\w'
    if found := re.search(machine, path.read_text(encoding='utf-8')):
        yield f"'{found[0]}' is a path of one machine"
    yield from (f'a broken formula: {f}' for page, _ in pages for f in broken_formulas(page))
    if (n := words_of(path)) > (most := most_words.get(path.parent.name, n)):
        yield f'{n} words; at most {most}'
    if fold(path, write=False):
        yield 'python .ci/fold.py would shut some of its cells'
    if path.parent.name == 'book':
        yield from in_chapter(pages, code)


def in_chapter(pages: list, code: list):  # yields faults
    prose = '\n'.join(page for page, _ in pages)
    for s in (s for page, _ in pages for s in sentences(page) if len(s) > 35):
        yield f"a sentence of {len(s)} words: {' '.join(s)}"
    if not all(o in prose for o in ('## Exercises', '<details>', '</details>')):
        yield 'no exercises with folded solutions'
    for source, cell in code:
        wants = source.startswith(('#| data', '#| cuda'))
        if wants and 'torch.cuda.is_available()' not in source:
            yield f"cell {cell['id']}: a chapter runs on a laptop; ask for a GPU first"


def in_order(paths: list):  # yields faults of the numbers of all notebooks
    numbered = sorted((p for p in paths if p.stem[0].isdigit()), key=lambda p: p.name)
    for p, q in zip(numbered, numbered[1:]):
        if p.name[:2] == q.name[:2]:
            yield f'{p.name} and {q.name} have one number'
        if above[p.parent.name] > above[q.parent.name]:
            yield f'{q.name} stands on a lower floor than {p.name}'


def made_by(path: Path):  # number of the notebook that makes a module; None: written by hand
    found = re.search(r'File to edit: \S*?(\d+)_\w+\.ipynb', path.read_text(encoding='utf-8'))
    return found and int(found[1])


def in_module(path: Path, root: Path):  # yields faults
    source = path.read_text(encoding='utf-8')
    first, tree, mine = source.split('\n', 1)[0], ast.parse(source), made_by(path)
    if not (first.startswith('"""') and len(first) <= 100):
        yield 'its docstring must begin with one line of at most 100 letters'
    if mine is None:
        if path.stem not in by_hand and 'The old path of' not in first:
            yield 'no notebook makes it'
        return
    package = path.relative_to(root).parts[:-1]
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            other = root.joinpath(*base, *(node.module or '').split('.')).with_suffix('.py')
            if other.exists() and not (made_by(other) or 0) < mine:
                yield f'{path.stem} ({mine}) imports {other.stem} ({made_by(other)})'
    lines = source.splitlines()
    for node in (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != '_'):
        for arg in node.args.args + node.args.kwonlyargs:
            below = '\n'.join(lines[arg.lineno - 1 : node.body[0].lineno - 1])
            own = re.split(r'\n\s*\w+\s*:|\n\s*\*|\n\s*\)', below, maxsplit=1)[0]
            if '#' not in own:
                yield f'{node.name}({arg.arg}) says nothing of its parameter'


def faults(root: Path):  # yields lines
    "Everything, with its place."
    config = ConfigParser(delimiters=['='], interpolation=None)
    config.read(root / 'settings.ini', encoding='utf-8')
    paths = notebooks(root)
    yield from in_order(paths)
    for p in paths:
        flags = config['DEFAULT']['tst_flags'].split()
        yield from (f'{p.relative_to(root)}: {fault}' for fault in in_notebook(p, flags))
    for p in sorted((root / 'capsnb').rglob('*.py')):
        if p.stem not in ('__init__', '_modidx'):
            yield from (f'{p.relative_to(root)}: {fault}' for fault in in_module(p, root))
    for p in sorted((root / 'nbs' / 'results').glob('*.json')):
        for named in set(re.findall(r'nbs/[\w/]+\.ipynb', p.read_text(encoding='utf-8'))):
            if not (root / named).exists():
                yield f'{p.relative_to(root)}: it names {named}, which is not there'


if __name__ == '__main__':
    found = list(faults(Path(__file__).resolve().parent.parent))
    print(*found, sep='\n', end='\n' if found else '')
    sys.exit(bool(found))
