"""Builds the site from stored outputs: `pip install '.[docs]' && python .ci/site.py`.

Nothing is run. Notebooks are copied to _site/source without what nbdev hides (`#| hide`,
`#| default_exp`), other directives become tags, and links to files that are no page lead to the
repository. Beside them stand a page for every module, written from docments, and a gallery of all
stored figures. Sphinx makes _site/html of it, where a wide figure's panels wrap on a phone: open
_site/html/index.html, without a network, too.
"""

from __future__ import annotations
import argparse
import base64
import configparser
import dataclasses
import html
import importlib
import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
from readme import directives, is_off

floors = {
    'book': 'The book',
    'studies': 'Studies',
    '': 'Foundation',
    'engine': 'Engine',
    'zoo': 'Other routings',
    'data': 'Data',
    'lab': 'Lab',
}
_link = re.compile(r'(\]\()([^)\s]+)(\))')
_pictures = 'image/png', 'image/jpeg'
_stored = re.compile(r'<img alt="([^"]*)" src="([^":]+\.png)" />')


def notebooks(nbs: Path) -> dict:  # floor -> paths, in their order
    "All notebooks but the index."
    found = {f: sorted((nbs / f).glob('[0-9]*.ipynb')) for f in floors}
    return {f: paths for f, paths in found.items() if paths}


def move_links(text: str, at: Path, nbs: Path, repository: str) -> str:
    "Links to pages stay; links to other files lead to the repository."

    def move(m):
        path, hash_, anchor = m[2].partition('#')
        if not path or re.match(r'\w+:', path):
            return m[0]
        target = (at.parent / path).resolve()
        if target.suffix == '.ipynb' and target.is_relative_to(nbs.resolve()):
            return m[0]
        inside = os.path.relpath(target, nbs.resolve().parent).replace(os.sep, '/')
        return f'{m[1]}{repository}/blob/main/{inside}{hash_}{anchor}{m[3]}'

    parts = re.split(r'(^```.*?^```[ \t]*$)', text, flags=re.M | re.S)
    return ''.join(p if k % 2 else _link.sub(move, p) for k, p in enumerate(parts))


def page_of(path: Path, nbs: Path, repository: str) -> dict:
    "A notebook as a page: what is hidden is gone, directives are tags."
    nb, cells = json.loads(path.read_text(encoding='utf-8')), []
    for cell in nb['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] != 'code':
            source = move_links(source, path, nbs, repository)
            cells.append(cell | dict(source=source))
            continue
        found, source = directives(source)
        if {'hide', 'default_exp'} & found.keys() or is_off(found, 'include'):
            continue
        tags = ['remove-input'] if is_off(found, 'echo') else []
        tags += ['remove-output'] if is_off(found, 'output') else []
        folded = cell['metadata'].get('jupyter', {}).get('source_hidden')
        tags += ['hide-input'] if folded and not tags else []
        meta = dict(tags=tags)
        if alt := found.get('fig-alt', found.get('fig-cap')):
            meta['mystnb'] = dict(image=dict(alt=alt))
        for out in cell['outputs']:  # tables in Markdown have links, too
            data = out.get('data', {})
            if 'text/markdown' in data:
                told = move_links(''.join(data['text/markdown']), path, nbs, repository)
                data['text/markdown'] = re.sub(r'(\]\((?!\w+:)[^)\s]+)\.ipynb\b', r'\1.html', told)
        cells.append(cell | dict(source=source.strip('\n'), metadata=meta))
    return nb | dict(cells=cells)


def title_of(path: Path) -> str:
    "The heading of a notebook."
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        if cell['cell_type'] == 'markdown':
            return ''.join(cell['source']).split('\n')[0].lstrip('# ')
    raise ValueError(f"'{path}' has no heading")


def entry(path: Path, nbs: Path) -> str:  # a line of a table of contents
    "Number and heading of a notebook, and where it is."
    name = title_of(path).replace('`', '')
    return f"{int(path.name[:2])} {name} <{path.relative_to(nbs).with_suffix('').as_posix()}>"


# Objects


def _default(p) -> str:
    return '' if p.default is p.empty else f'`{p.default!r}`'.replace('|', '\\|')


def _type(note) -> str:  # an annotation, or what has none
    name = note if isinstance(note, str) else getattr(note, '__name__', str(note))
    return '' if note is inspect.Parameter.empty else f'`{name}`'.replace('|', '\\|')


def _parameters(thing) -> str:  # a table, or nothing
    "What the comments beside the parameters say."
    docments = importlib.import_module('fastcore.docments').docments
    try:
        told = docments(thing, full=True, returns=True)
        signature = inspect.signature(thing)
    except (TypeError, ValueError, OSError):
        return ''
    rows = []
    for name, about in told.items():
        if name in ('self', 'cls'):
            continue
        text = ' '.join((about.docment or '').split()).replace('|', '\\|')
        if name == 'return':
            kind = _type(signature.return_annotation)
            rows += [f'| *result* | {kind} | | {text} |'] if text else []
        elif p := signature.parameters.get(name):
            rows.append(f'| `{name}` | {_type(p.annotation)} | {_default(p)} | {text} |')
    head = '| parameter | type | default | what it is |\n|---|---|---|---|\n'
    return head + '\n'.join(rows) + '\n' if rows else ''


def _fields(cls) -> str:  # a table, or nothing
    "Fields of a named tuple, with the comments beside them."
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return ''
    rows = []
    for name in cls._fields:
        if m := re.search(rf'^    {name}\b[^#\n]*(?:#\s*(.*))?$', source, re.M):
            kind = _type(cls.__annotations__.get(name, inspect.Parameter.empty))
            rows.append(f"| `{name}` | {kind} | {(m[1] or '').replace('|', chr(92) + '|')} |")
    head = '| field | type | what it is |\n|---|---|---|\n'
    return head + '\n'.join(rows) + '\n' if rows else ''


def _entry(name: str, thing, level: int) -> str:
    "An object: signature, sentence, table."
    doc = inspect.getdoc(thing) or ''
    doc = re.sub(r'^>>> .*?(?=\n\n|\Z)', r'```python\n\g<0>\n```', doc, flags=re.M | re.S)
    try:
        names = [n for n in inspect.signature(thing).parameters if n not in ('self', 'cls')]
        call = f"{name}({', '.join(names)})"
    except (TypeError, ValueError):
        call = name
    told = _fields(thing) if hasattr(thing, '_fields') else _parameters(thing)
    parts = [f"{'#' * level} {name}", f'```python\n{call}\n```', doc, told]
    return '\n\n'.join(p.rstrip() for p in parts if p) + '\n\n'


def _shown(thing) -> str:  # of a constant
    kind, text = type(thing).__name__, ' '.join(repr(thing).split())
    if ' at 0x' in text and isinstance(thing, dict):
        return f"A dict: {', '.join(f'`{k}`' for k in thing)}."
    if ' at 0x' in text or len(text) > 300:
        return f'An object of the type `{kind}`.'
    return f'`{text}`'


def _methods(cls) -> list:  # of (name, function)
    "Public methods that the class itself writes down."
    own = ((k, v) for k, v in vars(cls).items() if not k.startswith('_'))
    return [(k, v) for k, v in own if inspect.isfunction(v) and inspect.getdoc(v)]


def module_page(module, at: str) -> str:
    "All public objects of a module, and where they are derived."
    parts = [f'# {module.__name__}\n', f'{inspect.getdoc(module)}\n']
    parts.append(f'Written and tried in [{at}](../{at}).\n')
    for name in sorted(module.__all__, key=lambda n: not inspect.isclass(getattr(module, n))):
        thing = getattr(module, name)
        if inspect.isclass(thing):
            parts.append(_entry(name, thing, 2))
            inside = not dataclasses.is_dataclass(thing) or not hasattr(thing, '_fields')
            parts += [_entry(f'{name}.{k}', f, 3) for k, f in _methods(thing) if inside]
        elif callable(thing):
            parts.append(_entry(name, thing, 2))
        else:
            parts.append(f'## {name}\n\n{_shown(thing)}\n\n')
    return '\n'.join(parts)


def write_api(source: Path, root: Path) -> list:  # names of the pages
    "A page for each module that a notebook exports."
    folder, pages = source / 'api', []
    folder.mkdir(parents=True)
    for path in sorted((root / 'capsnb').rglob('*.py')):
        found = re.search(r'File to edit: (?:\.\./)+nbs/(\S+\.ipynb)', path.read_text('utf-8'))
        if not found:
            continue
        name = '.'.join(path.relative_to(root).with_suffix('').parts)
        text = module_page(importlib.import_module(name), found[1])
        (folder / f'{name}.md').write_text(text, encoding='utf-8')
        pages.append(name)
    order = "Every public object, module by module; the notebook of each is named at its top."
    listed = '\n'.join(pages)
    text = f'# Objects\n\n{order}\n\n```{{toctree}}\n:maxdepth: 1\n{listed}\n```\n'
    (folder / 'index.md').write_text(text, encoding='utf-8')
    return pages


# Figures


def write_gallery(source: Path, nbs: Path, pages: dict) -> int:  # figures
    "All stored figures on one page, each with a link to where it is drawn."
    folder, parts, n = source / '_static' / 'gallery', ['# Gallery\n'], 0
    folder.mkdir(parents=True)
    for path, page in pages.items():
        at, shown = path.relative_to(nbs).with_suffix('.html').as_posix(), []
        for cell in page['cells']:
            alt = cell['metadata'].get('mystnb', {}).get('image', {}).get('alt', '')
            for out in cell.get('outputs', ()):
                kind = next((k for k in _pictures if k in out.get('data', {})), None)
                if kind is None or not alt:
                    continue
                n += 1
                name = f'{n:03d}.{kind[6:]}'
                (folder / name).write_bytes(base64.b64decode(''.join(out['data'][kind])))
                shown.append(
                    f'<a href="{at}"><img loading="lazy" src="_static/gallery/{name}" '
                    f'alt="{html.escape(alt)}" title="{html.escape(alt)}"></a>'
                )
        if shown:
            link = path.relative_to(nbs).as_posix()
            pictures = '\n'.join(shown)
            parts.append(
                f'## [{title_of(path)}]({link})\n\n<div class="gallery">{pictures}</div>\n'
            )
    (source / 'gallery.md').write_text('\n'.join(parts), encoding='utf-8')
    return n


def _blank(free, least: int) -> list:  # free [n]: of (first, last + 1)
    "Runs of blank columns, at least so wide."
    runs = np.flatnonzero(np.diff(np.r_[0, free, 0])).reshape(-1, 2)
    return runs[runs[:, 1] - runs[:, 0] >= least].tolist()


def panels(image) -> list:  # x of all edges, or nothing
    "Where a wide figure comes apart: each panel has its title above and its own y axis."
    pixels = np.asarray(image.convert('RGB'))
    ink = (pixels != pixels[0, 0]).any(-1)
    if ink.shape[1] <= 580 or not ink.any():
        return []
    top = np.argmax(ink.any(1))
    bottom = top + np.argmin(ink[top:].any(1))  # of the titles' first line
    if bottom - top > 40:
        return []
    gaps, edges, labelled = _blank(~ink.any(0), 5), [0], set()
    for left, right in _blank(~ink[top:bottom].any(0), 20)[1:-1]:
        between = [(x, y) for x, y in gaps if left <= x and y <= right]
        if not between:
            return []
        widest = max(y - x for x, y in between)  # one may follow an axis label: take the first
        edges.append(next((x + y) // 2 for x, y in between if y - x >= widest - 4))
    edges.append(ink.shape[1])
    for left, right in zip(edges, edges[1:]):
        axis = (pixels[:, left:right].max(-1) < 99).mean(0) > 0.5
        if axis.any():
            labelled.add(np.argmax(axis) - np.argmax(ink[:, left:right].any(0)) > 9)
    return edges if len(edges) > 2 and len(labelled) < 2 else []


def stack_panels(page: Path) -> None:
    "In a built page, the panels of a wide figure are images of their own, which wrap on a phone."

    def apart(m):
        if not (path := page.parent / unquote(m[2])).is_file():
            return m[0]
        with Image.open(path) as image:
            edges, height = panels(image), image.height
        if not edges:
            return m[0]
        alt, shown = f'alt="{m[1]}"', ''
        for left, right in zip(edges, edges[1:]):
            n, at = right - left, 100 * left / (edges[-1] - right + left)
            shown += f'<img {alt} src="{m[2]}" style="flex: {n}; width: {n}px; '
            shown += f'aspect-ratio: {n} / {height}; object-position: {at:.3f}% 0">'
            alt = 'alt="" aria-hidden="true"'
        return f'<div class="panels" style="max-width: {edges[-1]}px">{shown}</div>'

    text = page.read_text(encoding='utf-8')
    page.write_text(_stored.sub(apart, text), encoding='utf-8')


# The site

style = """
.gallery { display: flex; flex-wrap: wrap; gap: .8rem; }
.gallery img { height: 150px; max-width: 100%; object-fit: contain; background: #fff; }
.bd-content table { display: block; max-width: 100%; overflow-x: auto; width: fit-content; }
.bd-content table { overflow-wrap: normal; }
@media (max-width: 36rem) { .bd-content table { font-size: .8em; } }
@media (max-width: 36rem) { .bd-content td { min-width: 5.5em; } }
@media (max-width: 36rem) { .bd-content td:last-child { min-width: 8em; } }
.bd-article details:not(.hide) { margin-bottom: 1.15rem; }
.bd-content img { max-width: 100%; height: auto; }
.gallery img { height: 150px; width: auto; }
div.math { overflow-x: auto; overflow-y: hidden; max-width: 100%; }
.bd-main .bd-content .bd-article-container { max-width: 56rem; }
.bd-article pre { font-size: .78em; }
.bd-sidebar-secondary { flex: 0 0 15rem; }
@media (min-width: 1200px) { .bd-header { display: none !important; } }
.bd-article-container { overflow-wrap: anywhere; min-width: 0; }
p code.literal, li code.literal, p code .pre, li code .pre { white-space: normal; }
@media (max-width: 36rem) { .cell_output { overflow-x: auto; } }
@media (max-width: 36rem) { .cell_output img { max-width: none !important; zoom: .58; } }
@media (max-width: 36rem) {
  .cell_output [id^=film-] img { max-width: 100% !important; zoom: 1; }
}
.panels { display: flex; align-items: flex-start; }
.panels img { object-fit: cover; min-width: 0; }
.panels:has(img[style*='display: none']) { display: none; }
@media (max-width: 36rem) { .panels { flex-wrap: wrap; } }
@media (max-width: 36rem) {
  .cell_output .panels img { flex: none !important; max-width: 100% !important; zoom: .68; }
}
@media (max-width: 36rem) { .prev-next-area { display: block; } }
@media (max-width: 36rem) { .prev-next-area a { max-width: 100%; } }
html[data-theme=dark] .cell_output .text_html { color-scheme: light; }
"""

icon = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><circle cx="16" cy="16" r="13"
fill="none" stroke="#4477AA" stroke-width="3"/><g fill="#EE6677"><circle cx="16" cy="10" r="3"/>
<circle cx="10.5" cy="19" r="3"/><circle cx="21.5" cy="19" r="3"/></g></svg>"""


def stage(root: Path, source: Path) -> None:
    "Everything that Sphinx reads."
    config = configparser.ConfigParser(delimiters=['='], interpolation=None)
    config.read(root / 'settings.ini', encoding='utf-8')
    repository, nbs, pages = config['DEFAULT']['git_url'], root / 'nbs', {}
    shutil.rmtree(source, ignore_errors=True)
    trees = []
    for floor, paths in notebooks(nbs).items():
        for path in paths:
            pages[path] = page_of(path, nbs, repository)
        listed = '\n'.join(entry(p, nbs) for p in paths)
        trees.append(f'```{{toctree}}\n:hidden:\n:caption: {floors[floor]}\n\n{listed}\n```')
    trees.append('```{toctree}\n:hidden:\n:caption: Look up\n\ngallery\napi/index\n```')
    index = page_of(nbs / 'index.ipynb', nbs, repository)
    index['cells'].append(
        dict(id='trees', cell_type='markdown', metadata={}, source='\n\n'.join(trees))
    )
    for path, page in (pages | {nbs / 'index.ipynb': index}).items():
        to = source / path.relative_to(nbs)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps(page), encoding='utf-8')
    write_gallery(source, nbs, pages)
    write_api(source, root)
    mathjax = Path(importlib.import_module('sphinx-mathjax-offline').__file__).parent / 'static'
    few = shutil.ignore_patterns('sre', 'a11y', '*svg*', '*mml*')
    shutil.copytree(mathjax, source / '_static', dirs_exist_ok=True, ignore=few)
    (source / '_static' / 'site.css').write_text(style, encoding='utf-8')
    (source / '_static' / 'icon.svg').write_text(icon, encoding='utf-8')


def settings(root: Path) -> dict:
    "Sphinx's."
    config = configparser.ConfigParser(delimiters=['='], interpolation=None)
    config.read(root / 'settings.ini', encoding='utf-8')
    about = config['DEFAULT']
    return dict(
        project=about['title'],
        author=about['author'],
        copyright=about['copyright'],
        version=about['version'],
        extensions=['myst_nb'],
        mathjax_path='mathjax/tex-chtml.js',
        myst_enable_extensions=['dollarmath', 'amsmath'],
        myst_heading_anchors=4,
        nb_execution_mode='off',
        nb_merge_streams=True,
        nb_render_markdown_format='gfm',  # commonmark has no tables
        html_theme='sphinx_book_theme',
        html_title=about['title'],
        html_favicon='_static/icon.svg',
        html_context=dict(default_mode='auto'),
        html_static_path=['_static'],
        html_css_files=['site.css'],
        html_theme_options=dict(
            repository_url=about['git_url'],
            use_repository_button=True,
            show_navbar_depth=1,
            navbar_persistent=[],
            show_toc_level=2,
        ),
        html_copy_source=False,
        html_show_sourcelink=False,
        suppress_warnings=['mystnb.unknown_mime_type', 'misc.highlighting_failure'],
    )


def build(root: Path, out: Path, jobs: int = 2) -> int:  # warnings
    "Stage and build; the warnings of Sphinx are printed."
    Sphinx = importlib.import_module('sphinx.application').Sphinx
    source = out / 'source'
    stage(root, source)
    for old in ('html', 'doctrees'):
        shutil.rmtree(out / old, ignore_errors=True)
    how = dict(confoverrides=settings(root), status=None, parallel=jobs)
    app = Sphinx(source, None, out / 'html', out / 'doctrees', 'html', **how)
    app.build()
    for page in (out / 'html').rglob('*.html'):
        stack_panels(page)
    return app._warncount


def main(argv: list[str] | None = None) -> int:
    "Build the site; 1 if there were warnings."
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--out', type=Path, default=root / '_site', help='folder of the site')
    parser.add_argument('--jobs', type=int, default=2, help='processes')
    args = parser.parse_args(argv)
    n = build(root, args.out, args.jobs)
    print(f"{args.out / 'html' / 'index.html'}: {n} warnings")
    return int(n > 0)


if __name__ == '__main__':
    sys.exit(main())
