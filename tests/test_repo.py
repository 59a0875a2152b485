"""What every notebook and module of this repository keeps to."""

import ast
import contextlib
import importlib
import importlib.metadata as md
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path
import pytest
import capsnb

root = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('count', root / '.ci' / 'count.py')
count = importlib.util.module_from_spec(spec)
spec.loader.exec_module(count)

config = ConfigParser(delimiters=['='], interpolation=None)
config.read(root / 'settings.ini', encoding='utf-8')
settings = config['DEFAULT']
notebooks = count.notebooks(root)
modules = sorted(p for p in (root / 'capsnb').rglob('*.py'))


def test_count():
    def code(s):
        return dict(cell_type='code', source=s.splitlines(True))

    nb = dict(
        cells=[
            code('#| slow\nf()'),
            code('#|cuda\n#| slow\nf()'),
            code('%%time\n\n#| data\nf()'),
            code('# a comment\n#| data\nf()'),
            code('x = 1\n#| slow'),
            code(''),
            code('#| hide\nimport nbdev; nbdev.nbdev_export()'),
            dict(cell_type='markdown', source='#| slow'),
        ]
    )
    assert count.count(nb, ['slow', 'cuda', 'data']) == dict(ran=2, slow=2, data=1)


@pytest.mark.parametrize('name', getattr(capsnb, '__all__', []))
def test_public_names_are_there(name):
    assert getattr(capsnb, name) is not None


def test_editors_are_told_the_same_names():
    "the stub that type checkers read in place of the lazy imports"
    lines = (root / 'capsnb' / '__init__.pyi').read_text(encoding='utf-8').splitlines()
    told = {n for line in lines for n in re.findall(r'^from \.(\S+) import (\w+) as \2$', line)}
    assert told == {(room, n) for room, names in capsnb._names.items() for n in names}
    assert len(told) == len(lines) - 3


def test_import_needs_only_torch_and_einops():
    "in an interpreter that refuses every optional package"
    code = """
import sys
refused = '''transformers datasets sklearn matplotlib typer accelerate huggingface_hub safetensors
nbdev fastcore IPython pandas scipy numba numpy'''.split()
sys.modules.update(dict.fromkeys(refused))
import torch, einops
before = set(sys.modules)
import capsnb
new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(' '.join(sorted(o for o in new if not o.startswith(('torch', 'capsnb', 'einops')))))
for name in set(capsnb.__all__) - {'RoutingClassifier'}: getattr(capsnb, name)   # networks too
assert set(capsnb.__all__) <= set(dir(capsnb)) and not hasattr(capsnb, 'Nothing')
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # what torch itself loads late, and the import hooks of an editable install
    others = {o for o in done.stdout.split() if not o.startswith('__editable__')} - {
        'numpy',
        'sympy',
        'mpmath',
        'triton',
        'networkx',
        'jinja2',
        'typing_extensions',
    }
    assert not others, f"import capsnb also loads {others}"


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
    assert {'torch', 'sklearn', 'matplotlib', 'IPython', 'nbdev'} <= found
    lacking = {m for m in found if not {o.lower() for o in makers[m]} & brought}
    assert not lacking, f'the extra book does not bring {sorted(lacking)}'


@pytest.mark.long
def test_a_source_archive_builds_again(tmp_path):
    "what setup.py reads lies in the archive, so that a release can be installed from it"
    tree = tmp_path / 'tree'
    shutil.copytree(root / 'capsnb', tree / 'capsnb', ignore=shutil.ignore_patterns('__pycache__'))
    for p in root.iterdir():
        if p.is_file() and p.name != '.git':
            shutil.copy(p, tree)

    def setup(where, *args):
        command = [sys.executable, 'setup.py', '-q', *args]
        done = subprocess.run(command, cwd=where, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    setup(tree, 'sdist', '--dist-dir', str(tmp_path))
    name = f"{settings['lib_name']}-{settings['version']}"
    safe = dict(filter='data') if hasattr(tarfile, 'data_filter') else {}  # not in 3.10.0 to 3.11.3
    shutil.unpack_archive(tmp_path / f'{name}.tar.gz', tmp_path, **safe)
    assert setup(tmp_path / name, '--version') == [settings['version']]
    packed = {p.relative_to(tmp_path / name).as_posix() for p in (tmp_path / name).rglob('*.py')}
    assert packed == {'setup.py', *(p.relative_to(root).as_posix() for p in modules)}


@pytest.mark.long
def test_docs_can_be_prepared(tmp_path):
    "nbdev_docs up to the point where Quarto itself renders, with a stand-in for Quarto; some rooms"
    tree, bin_ = tmp_path / 'tree', tmp_path / 'bin'
    tree.mkdir()
    bin_.mkdir()
    left_out = ('__pycache__', '.ipynb_checkpoints', '[1345689][0-9]_*', '2[0-57-9]_*', '7[1-9]_*')
    for name in ('nbs', 'capsnb'):
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns(*left_out))
    some = [p for p in notebooks if (tree / p.relative_to(root)).exists()]
    assert {p.parent.name for p in some} >= {'nbs', 'book', 'zoo', 'studies'}
    for name in ('settings.ini', 'README.md'):
        shutil.copy(root / name, tree / name)
    (bin_ / 'quarto').write_text('#!/bin/sh\nexit 0\n')
    (bin_ / 'quarto').chmod(0o755)
    env = dict(
        os.environ,
        PATH=f"{bin_}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(tree),
    )
    done = subprocess.run(
        ['nbdev_proc_nbs', '--n_workers', '0'], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sidebar = (tree / 'nbs' / 'sidebar.yml').read_text()
    globs = re.findall(r'[\w/*]+\.ipynb', sidebar)
    listed = [p for g in globs for p in sorted((tree / 'nbs').glob(g))]
    assert listed[0].name == 'index.ipynb' and {p.name for p in listed} == {p.name for p in some}
    assert f"title: \"{settings['title']}\"" in (tree / 'nbs' / 'nbdev.yml').read_text()
    for p in some:
        page = (tree / '_proc' / p.relative_to(root / 'nbs')).read_text(encoding='utf-8')
        assert 'description:' in page, f"{p.name} lost its frontmatter"
    for name in ('_quarto.yml', 'nbdev.yml', 'sidebar.yml', 'styles.css'):
        assert (tree / '_proc' / name).exists(), name


@pytest.mark.slow
@pytest.mark.parametrize('chosen, want', [(None, '1 1'), ('2', '2 2')])
def test_a_notebook_tested_beside_others_computes_on_one_thread(tmp_path, chosen, want):
    "and so do the processes it starts; but a number of threads that somebody chose holds"
    code = f"""import subprocess, sys, torch
if {chosen is None}: torch.set_num_threads(2)        # as PyTorch does by itself on two cores
import capsnb.core
ask = 'import torch; print(torch.get_num_threads())'
child = subprocess.run([sys.executable, '-c', ask], stdout=-1, text=True, check=True).stdout.strip()
threads = f'{{torch.get_num_threads()}} {{child}}'
assert threads == {want!r}, threads"""
    cell = dict(
        cell_type='code', execution_count=None, id='a', metadata={}, outputs=[], source=code
    )
    shutil.copy(root / 'settings.ini', tmp_path)
    (tmp_path / 'nbs').mkdir()
    nb = dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)
    (tmp_path / 'nbs' / 'a.ipynb').write_text(json.dumps(nb))
    env = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
    env |= dict(PYTHONPATH=str(root), **({'OMP_NUM_THREADS': chosen} if chosen else {}))
    command = [str(Path(sys.executable).with_name('nbdev_test')), '--n_workers', '2']
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_who_cites_cites_this_version():
    "CITATION.cff says what settings.ini says"
    yaml = pytest.importorskip('yaml')
    said = yaml.safe_load((root / 'CITATION.cff').read_text(encoding='utf-8'))
    assert said['version'] == settings['version'] and said['repository-code'] == settings['git_url']
    assert said['keywords'] == settings['keywords'].split() and said['authors'][0]['name']
    papers = {r['title'] for r in said['references']}
    readme = (root / 'README.md').read_text(encoding='utf-8').lower()
    assert len(papers) == 3 and all(title.lower() in readme for title in papers)
