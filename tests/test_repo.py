"""What every notebook and module of this repository keeps to."""

import ast
import contextlib
import importlib.metadata as md
import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
import pytest
import capsnb

root = Path(__file__).resolve().parent.parent
config = ConfigParser(delimiters=['='], interpolation=None)
config.read(root / 'settings.ini', encoding='utf-8')
settings = config['DEFAULT']


def test_editors_are_told_the_same_names():
    "the stub that type checkers read in place of the lazy imports"
    lines = (root / 'capsnb' / '__init__.pyi').read_text(encoding='utf-8').splitlines()
    told = {n for line in lines for n in re.findall(r'^from \.(\S+) import (\w+) as \2$', line)}
    assert told == {(room, n) for room, names in capsnb._names.items() for n in names}
    assert len(told) == len(lines) - 3


def test_the_lowest_versions_that_were_run_are_those_that_are_promised():
    lines = (root / '.ci' / 'lowest.txt').read_text(encoding='utf-8').splitlines()
    ran = dict(o.split('==') for o in lines if o and not o.startswith('#'))
    asked = dict(o.split('>=') for o in settings['requirements'].split())
    asked |= dict(o.split('>=') for o in settings['train_requirements'].split())  # may ask for more
    assert ran.keys() == asked.keys()
    for name, bound in asked.items():
        promised = f'{ran[name]}.'.startswith(f'{bound}.')
        assert promised, f"{name}>={bound} is promised, {ran[name]} was run"


def test_extras_are_those_of_settings():
    "and dev holds all of them"
    code = (
        "import setuptools, sys; sys.argv = ['setup.py', '--version']; kept = {}; "
        "setuptools.setup = lambda **kw: kept.update(kw); exec(open('setup.py').read()); "
        "import json; print(json.dumps(kept['extras_require']))"
    )
    code = code.replace("open('setup.py')", "open(__file__ := 'setup.py')")
    done = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extras = json.loads(done.stdout)
    named = {'train', 'fast', 'gpu', 'attack', 'lora', 'onnx', 'book', 'docs', 'dev'}
    assert set(extras) == named and set(extras['train']) < set(extras['book'])
    assert {r for name in extras for r in extras[name]} == set(extras['dev'])
    assert extras['gpu'] == ['triton>=3.6;platform_system=="Linux"']
    assert [r.split('>=')[0] for r in extras['fast']] == ['numba']


def closure(asked):
    "Distributions that requirements lead to, as they are installed."
    found, left = set(), [o for o in asked if 'extra ==' not in o]
    while left:
        name = re.match(r'[\w.-]+', left.pop())[0].lower().replace('_', '-')
        if name not in found:
            found.add(name)
            with contextlib.suppress(md.PackageNotFoundError):  # of another system
                left += [o for o in md.requires(name) or () if 'extra ==' not in o]
    return found


def test_the_book_needs_its_extra_alone():
    "every package that a chapter imports comes with `pip install '.[book]'`"
    kinds = 'requirements', 'train_requirements', 'book_requirements'
    brought, found = closure(o for k in kinds for o in settings[k].split()), set()
    for path in sorted((root / 'nbs' / 'book').glob('*.ipynb')):
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        code = '\n\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'code')
        for node in ast.walk(ast.parse(code)):
            names = [o.name for o in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition('.')[0] for name in names}
    found -= {'capsnb', *sys.stdlib_module_names}
    makers = md.packages_distributions()
    assert {'torch', 'sklearn', 'matplotlib', 'IPython'} <= found
    lacking = {m for m in found if not {o.lower() for o in makers[m]} & brought}
    assert not lacking, f'the extra book does not bring {sorted(lacking)}'


def test_who_cites_cites_this_version():
    "CITATION.cff says what settings.ini says"
    yaml = pytest.importorskip('yaml')
    said = yaml.safe_load((root / 'CITATION.cff').read_text(encoding='utf-8'))
    assert said['version'] == settings['version'] and said['repository-code'] == settings['git_url']
    assert said['keywords'] == settings['keywords'].split() and said['authors'][0]['name']
    papers = {r['title'] for r in said['references']}
    readme = (root / 'README.md').read_text(encoding='utf-8').lower()
    assert len(papers) == 3 and all(title.lower() in readme for title in papers)
