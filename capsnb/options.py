"""Options of commands, from signatures and fields with their comments. Written by hand."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Annotated

import typer

# where the command line says it in another way
called = dict(as_json='--json', subset='--pairs', folder='--data', n_test='--test-limit')
called |= dict(published='--as-published', official='--official/--any-files', gguf_file='--gguf')
least = dict(seed=0, seeds=1, epochs=1, batch_size=1, limit=1, n_test=1, crops=1)
kinds = {'list[str]': list[str], 'Callable': str, 'Path': Path, 'int': int, 'float': float}


def kind_of(text: str):  # of an annotation: a type that Typer can read
    kind = next((kind for name, kind in kinds.items() if name in text), str)
    return bool if text.startswith('bool') else kind


def remarks(source: str) -> dict:  # name -> the comment behind it
    return dict(re.findall(r'^ *(\w+) *[:=].*?# +(.+)$', source, re.M))


def literal(text: str):  # a value where Python reads one, else the text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def option(name: str, kind, default, told: str, argument: bool = False) -> inspect.Parameter:
    "A parameter as Typer wants it: an argument where it has to be given, or is a list of words."
    how = dict(help=told, show_default=default not in (None, (), []))
    if argument:
        info = typer.Argument(**how)
    else:
        word = called.get(name, '--' + name.replace('_', '-'))
        if kind is bool and default is not False and '/' not in word:
            word += f'/--no-{word[2:]}'
        low = least.get(name) if kind is int else None
        info = typer.Option(word, min=low, **how)
    default = inspect.Parameter.empty if argument and default is ... else default
    annotation = Annotated[kind if default is not None else kind | None, info]
    how = dict(default=default, annotation=annotation)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **how)


def options_of(function) -> list:  # of inspect.Parameter: what stands before a star is an argument
    told, made = remarks(inspect.getsource(function)), []
    for p in inspect.signature(function).parameters.values():
        if p.name == 'ctx':
            made.append(p.replace(kind=p.KEYWORD_ONLY, annotation=typer.Context))
        elif p.kind is not p.VAR_KEYWORD:
            argument = p.kind is p.POSITIONAL_OR_KEYWORD
            default = ... if p.default is p.empty else p.default
            kind = kind_of(p.annotation)
            made.append(option(p.name, kind, default, told.get(p.name, ''), argument))
    return made


def fields_of(place: str) -> dict:  # name -> inspect.Parameter
    "Options of a dataclass, 'lab.digits:Digits', whose module is read, not run: it needs PyTorch."
    module, _, name = place.partition(':')
    path = Path(__file__).parent.joinpath(*module.split('.')).with_suffix('.py')
    source = path.read_text(encoding='utf-8')
    body = next(n.body for n in ast.parse(source).body if getattr(n, 'name', '') == name)
    made = {}
    for field in (n for n in body if isinstance(n, ast.AnnAssign) and n.value):
        told = remarks(source.splitlines()[field.lineno - 1].replace('None: ', 'else '))
        name, kind = field.target.id, kind_of(ast.unparse(field.annotation))
        made[name] = option(name, kind, ast.literal_eval(field.value), told.get(name, ''))
    return made


def with_options(function, parameters: list | None = None):  # the same, for Typer
    made = options_of(function) if parameters is None else parameters

    def run(**options):
        return function(**options)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(made)
    return run
