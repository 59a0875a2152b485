"""The numbers that notebooks show are those of the result files: cells that read them are run again."""

import ast
import contextlib
import io
import json
import pytest
from test_repo import cells, count, notebooks, root, statements


def names(node, kind):
    found = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in found if isinstance(n.ctx, kind)}


def made(statement):
    "Names that a top-level statement defines or changes."
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {a.asname or a.name.split('.')[0] for a in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    targets = getattr(
        statement, 'targets', [getattr(statement, 'target', None)]
    )  # x[i] = y, x.a = y
    found = names(statement, ast.Store).union(*(names(t, ast.Load) for t in targets if t))
    call = getattr(statement, 'value', None)
    method = call.func if isinstance(call, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr in ('append', 'update'):
        found |= names(method.value, ast.Load)
    return found


def used(body, own=False):
    "Names that statements load, but no arguments nor what comprehensions or (`own`) they all make."
    loads, local = set(), set()
    for s in body:
        loads |= names(s, ast.Load)
        local |= {n.arg for n in ast.walk(s) if isinstance(n, ast.arg)}
        for n in ast.walk(s):
            if isinstance(n, ast.comprehension):
                local |= names(n.target, ast.Store)
        if own or isinstance(s, (ast.FunctionDef, ast.ClassDef)):
            local |= names(s, ast.Store)
    return loads - local


def needed(body, before):
    "Those of the statements before that the body needs, directly or through others, in their order."
    chosen, wanted, size = set(), used(body, own=True), -1
    while len(chosen) > size:  # a function may need what is defined after it
        size = len(chosen)
        for i, s in enumerate(before):
            star = any(a.name == '*' for a in getattr(s, 'names', []))
            if i in chosen or not (star or made(s) & wanted):
                continue
            chosen.add(i)
            wanted |= used([s])
    return [before[i] for i in sorted(chosen)]


def readers():
    "Cells that show what a file in nbs/results/ holds, each with the statements above it."
    for path in notebooks:
        before = []
        for source, c in cells(path):
            flags = count.flags_of(source)
            if flags & {'slow', 'data', 'cuda'} or 'nbdev_export()' in source:
                continue
            code = statements(source)
            reads = "results/" in source or "'results'" in source
            writes = 'write_' in source or 'mkdir' in source
            if reads and not writes and not flags & {'export', 'exporti'}:
                yield pytest.param(path, c, code, list(before), id=f"{path.stem}-{c['id']}")
            before += code


def shown(output):
    "The text of a stored output; pictures have none."
    data = output.get('data', {})
    kind = next((k for k in ('text/markdown', 'text/html') if k in data), None)
    return ''.join(output['text'] if output['output_type'] == 'stream' else data.get(kind, ''))


@pytest.mark.parametrize('path, cell, code, before', list(readers()))
def test_a_notebook_shows_the_results_of_today(path, cell, code, before, monkeypatch):
    monkeypatch.chdir(root / 'nbs')
    monkeypatch.setenv('MPLBACKEND', 'agg')
    scope, last, out = {'__name__': path.stem}, None, io.StringIO()
    *body, end = code
    if isinstance(end, ast.Expr):
        last = ast.Expression(end.value)
    else:
        body = code
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(ast.Module(needed(code, before), []), path.name, 'exec'), scope)
    with contextlib.redirect_stdout(out):
        exec(compile(ast.Module(body, []), path.name, 'exec'), scope)
        value = eval(compile(last, path.name, 'eval'), scope) if last else None
    text = getattr(value, 'data', None)
    now = out.getvalue() + (text if isinstance(text, str) else '')
    stored = ''.join(shown(o) for o in cell['outputs'])
    assert now == stored, f"run nbs/{path.name} again; its figures are older than the file"


def test_there_are_readers():
    assert len(list(readers())) >= 30


def results(name):
    return json.loads((root / 'nbs' / 'results' / f'{name}.json').read_bytes())


def runs_of(name, of):
    from capsnb.lab.train import summary

    return summary([r for k, r in results(name)['runs'].items() if k.startswith(f'{of} seed')])


def rows_of_the_tiles():
    case = results('caps_speed')['cases']['32·32·32·32, layer 1']
    for plan, what in (('votes', ', all votes at hand'), ('tiles', '')):
        r = case[plan]
        both = f"{r['both']:.2g}"
        seconds = f"{r['forward']:.2f} s | {both} s"
        yield f"| `plan='{plan}'`{what} | {seconds} | {r['bytes'] / 1e9:.2f} GB |"


def rows_of_the_floors():
    for n in (3, 5):
        both = [runs_of('em_floor', f'eps={eps}, {n} iterations') for eps in ('300%', '1e-05')]
        said = [f"{r[k]:.1f} ± {r[k + '_sd']:.1f} %" for k in ('valid', 'test') for r in both]
        ours, small = both
        yield f"| {n} | {' | '.join(said)} | {ours['test'] - small['test']:.1f} points |"


def errors_on_toys():
    error = {
        net: f"{100 - runs_of('toys_runs', net)['test']:.1f} %"
        for net in ('dstep', 'cnn', 'baseline')
    }
    yield (
        f"the D-step network errs in {error['dstep']} of all cases, "
        f"the CNN in {error['cnn']} and the baseline in {error['baseline']}."
    )


def speed_of_the_tiles():
    r = results('caps_speed')['cases']['32·32·32·32, layer 1']['tiles']
    yield f"{r['both']:.2f} s for the large network's first layer, and {r['bytes'] / 1e9:.2f} GB"


@pytest.mark.parametrize(
    'name, sentences',
    [
        ('06_layers', rows_of_the_tiles),
        ('37_em_floor', rows_of_the_floors),
        ('35_objects_study', errors_on_toys),
        ('40_bench', speed_of_the_tiles),
    ],
    ids=lambda o: getattr(o, '__name__', o),
)
def test_numbers_written_by_hand_are_those_of_the_file(name, sentences):
    prose = '\n'.join(source for source, _ in cells(root / 'nbs' / f'{name}.ipynb', 'markdown'))
    for said in sentences():
        assert said in prose, f"nbs/{name}.ipynb should say: {said}"
