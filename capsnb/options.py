"""Options of commands, from signatures and fields with their comments. Written by hand."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Annotated

import typer

# where the command line says it in another way
called = dict(as_json='--json', subset='--pairs', folder='--data', n_test='--test-limit')
called |= dict(published='--as-published', official='--official/--any-files', gguf_file='--gguf')
rare = 'start graphs mixup_per cache_dtype raw revision'.split()  # not in --help
least = dict(seed=0, seeds=1, epochs=1, batch_size=1, limit=1, n_test=1, crops=1)
kinds = {'list[str]': list[str], 'Callable': str, 'Path': Path, 'int': int, 'float': float}


def remarks(source: str) -> dict:  # name -> the comment behind it
    return dict(re.findall(r'^ *(\w+) *[:=].*?# +(.+)$', source, re.M))


def option(name: str, kind, default, told: str, low: int | None = None) -> inspect.Parameter:
    "A parameter as Typer wants it; an argument where it must be given, or is words."
    how = dict(help=told, show_default=default not in (None, (), []), hidden=name in rare)
    word = called.get(name, '--' + name.replace('_', '-'))
    if default is ... or name == 'words':
        info = typer.Argument(**how)
    else:
        if kind is bool and default is not False and '/' not in word:
            word += f'/--no-{word[2:]}'
        info = typer.Option(word, min=low, max=1000 if low and name == 'seeds' else None, **how)
    kind = Annotated[kind if default is not None else kind | None, info]
    default = inspect.Parameter.empty if default is ... else default
    how = dict(default=default, annotation=kind)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **how)


def _option(name: str, text: str, default, told: str) -> inspect.Parameter:
    "The same, by its annotation as it is written."
    kind = next((kind for word, kind in kinds.items() if word in text), str)
    kind = bool if text.startswith('bool') else kind
    return option(name, kind, default, told, least.get(name) if kind is int else None)


def options_of(function) -> dict:  # name -> inspect.Parameter
    told, made = remarks(inspect.getsource(function)), {}
    for p in inspect.signature(function).parameters.values():
        if p.name == 'ctx':
            made['ctx'] = p.replace(kind=p.KEYWORD_ONLY, annotation=typer.Context)
        elif p.kind is not p.VAR_KEYWORD:
            default = ... if p.default is p.empty else p.default
            made[p.name] = _option(p.name, p.annotation, default, told.get(p.name, ''))
    return made


@functools.cache
def fields_of(place: str) -> dict:  # name -> inspect.Parameter
    "Options of a dataclass, 'lab.tasks:Digits', whose module is read, not run: it needs PyTorch."
    module, _, name = place.partition(':')
    path = Path(__file__).parent.joinpath(*module.split('.')).with_suffix('.py')
    source = path.read_text(encoding='utf-8')
    body = next(n.body for n in ast.parse(source).body if getattr(n, 'name', '') == name)
    made = {}
    for field in (n for n in body if isinstance(n, ast.AnnAssign) and n.value):
        told = remarks(source.splitlines()[field.lineno - 1].replace('None: ', 'else '))
        name, default = field.target.id, ast.literal_eval(field.value)
        made[name] = _option(name, ast.unparse(field.annotation), default, told.get(name, ''))
    return made


def with_options(function, options: dict | None = None):  # the same, for Typer
    made = options_of(function) if options is None else options

    def run(**given):
        return function(**given)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature([*made.values()])
    return run
