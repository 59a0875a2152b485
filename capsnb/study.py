"""`capsnb study`: runs a notebook of nbs/studies from a checkout. Written by hand, no notebook."""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import re
import sys
from pathlib import Path

import typer

from .cli import entrance
from .options import option, remarks, with_options


def studies() -> dict:  # name -> path
    "The studies of the checkout that is the current folder or holds it, or this library."
    here = Path.cwd()
    for root in (here, *here.parents, Path(__file__).resolve().parent.parent):
        places = 'studies/[0-9]*.ipynb', 'lab/*_speed.ipynb'  # that one has `capsnb bench` too
        if found := sorted(p for o in places for p in (root / 'nbs').glob(o)):
            return {p.stem.split('_', 1)[1].replace('_', '-'): p for p in found}
    raise ValueError("no nbs/studies here: `capsnb study` runs notebooks in a checkout of capsnb")


def cells_of(path: Path, kind: str) -> list:  # their sources
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == kind]


def parameters(source: str) -> dict:  # name -> inspect.Parameter
    "What a cell of plain literals assigns; each name becomes an option of its default's type."
    told, made = remarks(source), {}
    for line in ast.parse(source).body:
        name, value = line.targets[0].id, ast.literal_eval(line.value)
        many = list[type(value[0]) if value else str] if isinstance(value, (list, tuple)) else None
        kind = str if value is None else many or type(value)
        made[name] = option(name, kind, value, told.get(name, ''))
    return made


def as_given(value, default, here: Path):  # as the notebook takes it
    "Words are read as literals where the default is None; files stand where the person stands."
    if isinstance(value, list):
        return tuple(as_given(v, default, here) for v in value)
    if isinstance(value, str) and '/' in value and (here / value).exists():
        return str(here / value)
    if default is None and isinstance(value, str):
        with contextlib.suppress(SyntaxError, ValueError):
            return ast.literal_eval(value)
    return value


def run_cells(path: Path, values: dict):
    "All code cells in one namespace, in the notebook's folder; `values` for its parameters."
    os.environ.setdefault('MPLBACKEND', 'agg')
    os.chdir(path.parent)
    sources = [s for s in cells_of(path, 'code') if s.strip() and 'nbdev_export(' not in s]
    names = dict(__name__='__main__')
    for k, source in enumerate(sources, 1):
        where, code = f'{path.name}, cell {k}', re.sub(r'^[%!].*$', '', source, flags=re.M)
        linecache.cache[where] = len(code), None, code.splitlines(True), where
        first = next((s for s in code.splitlines() if s and not s.startswith('#|')), '')
        print(f'[{k}/{len(sources)}] {first[:80]}', file=sys.stderr)
        body = ast.parse(code).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        exec(compile(ast.Module(body, []), where, 'exec', dont_inherit=True), names)
        for line in last:
            code = compile(ast.Expression(line.value), where, 'eval', dont_inherit=True)
            if (shown := eval(code, names)) is not None:
                print(shown._repr_markdown_() if hasattr(shown, '_repr_markdown_') else shown)
        if source.startswith('# parameters'):
            names |= values
    print(f'{path.name} draws its tables and pictures from the record: open it', file=sys.stderr)


class Studies(typer.core.TyperGroup):
    "The sub-commands of `capsnb study`."

    def list_commands(self, ctx):
        return [*studies()]

    def get_command(self, ctx, name):
        found = studies()
        if (name := name.replace('_', '-')) not in found:
            ctx.fail(f"no study '{name}'; there are {', '.join(found)}")
        path = found[name]
        title, told = cells_of(path, 'markdown')[0].split('\n>', 1)
        named = next((s for s in cells_of(path, 'code') if s.startswith('# parameters')), '')
        made = parameters(named)

        def command(**values):
            here = Path.cwd()
            run_cells(path, {k: as_given(v, made[k].default, here) for k, v in values.items()})

        short = told.split('\n\n')[0].strip()
        command.__doc__ = f"{title.strip().removeprefix('# ')}\n\n{short}\n\n{_where}"
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, short_help=short)(entrance(with_options(command, made)))
        return typer.main.get_command(app)


_where = "Files that are there are found from the current folder; what is made, from nbs/studies."
