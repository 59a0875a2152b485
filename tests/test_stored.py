"""The numbers that notebooks show are those of the files: cells that read them run again."""

import ast
import contextlib
import functools
import io
import json
import re
import sys
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root / '.ci'))
import count  # noqa: E402

notebooks = count.notebooks(root)


def cells(path, kind='code'):
    for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if c['cell_type'] == kind:
            yield ''.join(c['source']), c


def statements(source):
    "What a code cell does, without magics and shell commands."
    lines = source.split('\n')
    return ast.parse('\n'.join(o for o in lines if not o.lstrip().startswith(('%', '!')))).body


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
    "The statements before that the body needs, directly or through others, in their order."
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


@functools.cache
def always_run(path):
    "The code of cells that every test of a notebook runs, by their number."
    code = {}
    for k, (source, _) in enumerate(cells(path)):
        skipped = count.flags_of(source) & {'slow', 'data', 'cuda', 'study'}
        if not skipped and 'nbdev_export()' not in source:
            code[k] = statements(source)
    return code


def readers():
    "Cells that show what a file in nbs/results/ holds."
    for path in notebooks:
        for k, (source, c) in enumerate(cells(path)):
            flags = {'slow', 'data', 'cuda', 'study', 'export', 'exporti'}
            reads = "results/" in source or "'results'" in source
            writes = 'write_' in source or 'mkdir' in source
            if reads and not (writes or count.flags_of(source) & flags):
                yield pytest.param(path, k, c['outputs'], id=f"{path.stem}-{c['id']}")


def shown(output):
    "The text of a stored output; pictures have none."
    data = output.get('data', {})
    kind = next((k for k in ('text/markdown', 'text/html') if k in data), None)
    return ''.join(output['text'] if output['output_type'] == 'stream' else data.get(kind, ''))


@pytest.mark.parametrize('path, k, outputs', list(readers()))
def test_a_notebook_shows_the_results_of_today(path, k, outputs, monkeypatch):
    code = always_run(path)[k]
    before = [s for at, body in always_run(path).items() if at < k for s in body]
    monkeypatch.chdir(path.parent)
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
    stored = ''.join(shown(o) for o in outputs)
    assert now == stored, f"run nbs/{path.name} again; its figures are older than the file"


def test_measured_numbers_are_printed_not_typed():
    "a mean with its deviation, or a speed-up, in prose would be a copy that nothing keeps true"
    mean, ratio = r'\d\.\d\s*%?\s*±\s*\d|±\s*[\d.]+ ?%', r'\d ?(times|×) (faster|lighter|smaller)'
    pages = [(p.name, page) for p in notebooks for page, _ in cells(p, 'markdown')]
    found = [(n, m[0]) for n, page in pages for m in re.finditer(f'{mean}|{ratio}', page)]
    assert not found, f"{found}: print what the file in nbs/results/ says"


results = sorted((Path(__file__).parents[1] / 'nbs' / 'results').glob('*.json'))
records = {p.stem: json.loads(p.read_text(encoding='utf-8')) for p in results}


saw_all = 'validation of a shoot-out, all views'  # 77_viewpoints: it says so in its protocol


def chosen_on(record):
    "(what, split) of every choice that a record tells of."
    study = record.get('study', {})
    told = [*record.get('selects', {}).values(), study.get('selects', {})]
    told += [{'all': study[k]} for k in ('select',) if k in study]
    return {choice for choices in told for choice in choices.items()}


def kept_the_best(run):
    "Whether the epoch that a run kept is the first of those that validate best."
    valid = [epoch['valid_accuracy'] for epoch in run['history']]
    return run['best_epoch'] == 1 + valid.index(max(valid))


def opened_the_test(run):
    "Whether a run looked at the test, or at what is watched beside it."
    looked = {'test_accuracy', 'test_log_loss'} & run.keys()
    return bool(looked) or any('watched' in epoch for epoch in run.get('history', []))


@pytest.mark.parametrize('name', records)
def test_nothing_was_chosen_on_test_data(name):
    "searches saw no test, and studies of the claims and of routings say what they selected on"
    record = records[name]
    if not isinstance(record, dict) or not isinstance(record.get('runs'), dict):
        return
    if name.endswith('_search'):
        assert record['runs'] and not any(map(opened_the_test, record['runs'].values()))
    choices = chosen_on(record) - {('matched', 'familiar')}  # 77_viewpoints says why
    splits = {split for _, split in choices}
    assert splits <= {'validation', saw_all, None}
    taken = record.get('study', {}).get('rates') == 'shoot-out'
    assert taken == (('rate', saw_all) in choices)  # of networks that saw the novel views
    claims = 'viewpoint|attacks|overlap|poses|distortion|affnist|shootout|rates|misfit'
    of_a_claim = re.match(rf'({claims})(?!.*(_costs|_search)$)', name)
    if of_a_claim and 'epoch' not in {what for what, _ in choices}:  # older: its runs must tell
        assert record['runs'] and all(map(kept_the_best, record['runs'].values()))
