"""Builds README.md from nbs/index.ipynb; with `--check` it exits with 1 if it would write.

The notebook is not run: its stored outputs go into the page, its figures into README_files/. The
same notebook gives the same bytes on every machine. Directives mean what they mean to nbdev and
Quarto: `#| hide`, `#| export`, `#| include: false` leave a cell out, `#| echo: false` its code,
`#| output: false` its outputs; `#| label:` names a figure's file, `#| fig-cap:` is its caption and
 `#| fig-alt:` the text for those who do not see it.
"""

from __future__ import annotations
import argparse
import base64
import copy
import difflib
import os
import re
import sys
from pathlib import Path
import nbformat
from nbconvert import MarkdownExporter

warning = '<!-- Built from nbs/index.ipynb by .ci/readme.py. Edit the notebook, not this file. -->'
left_out = {'hide', 'export', 'exporti', 'default_exp'}
suffix = {'image/svg+xml': '.svg', 'image/png': '.png', 'image/jpeg': '.jpg'}
_directive = re.compile(r'^\s*#\s*\|\s*([\w-]+):?[ \t]*(.*?)\s*$')
_link = re.compile(r'(\]\()([^)\s]+)(\))')
_fence = re.compile(r'(^```.*?^```[ \t]*$)', re.M | re.S)


def directives(source: str) -> tuple[dict, str]:
    "The directives at the head of a cell, and the rest of its source."
    found, lines = {}, source.split('\n')
    while lines and (not lines[0].strip() or _directive.match(lines[0])):
        if m := _directive.match(lines.pop(0)):
            found[m[1]] = m[2].strip('"\'')
    return found, '\n'.join(lines)


def is_off(found: dict, key: str) -> bool:
    return found.get(key, '').lower() == 'false'


def move_links(text: str, root: Path, folder: str = 'nbs') -> str:
    "Make links relative to `root` that are relative to `folder`; `ValueError` for one to nothing."

    def move(m):
        path, hash_, anchor = m[2].partition('#')
        if not path or re.match(r'\w+:', path):
            return m[0]
        moved = os.path.normpath(f'{folder}/{path}').replace(os.sep, '/')
        if not (root / moved).exists():
            raise ValueError(f"index.ipynb links to '{path}', which does not exist")
        return m[1] + moved + hash_ + anchor + m[3]

    return ''.join(s if i % 2 else _link.sub(move, s) for i, s in enumerate(_fence.split(text)))


def convert_output(out, found: dict, name: str, root: Path, images: dict):
    "One stored output as the exporter shall see it; figures are added to `images`."
    if out.output_type == 'error':
        raise ValueError(f"index.ipynb holds an error: {out.ename}: {out.evalue}")
    if out.output_type == 'stream':
        drop = found.get('filter_stream', '').split()
        kept = [o for o in out.text.splitlines(True) if not any(re.search(d, o) for d in drop)]
        if found.get('output') != 'asis':
            return nbformat.v4.new_output('stream', name=out.name, text=''.join(kept))
        return nbformat.v4.new_output(
            'display_data', {'text/markdown': move_links(''.join(kept), root)}
        )
    data = out.data
    if 'text/markdown' in data:
        new = {'text/markdown': move_links(data['text/markdown'], root)}
    elif kind := next((k for k in suffix if k in data), None):
        file = f'README_files/{name}{suffix[kind]}'
        images[file] = (
            data[kind].encode() if kind == 'image/svg+xml' else base64.b64decode(data[kind])
        )
        caption = found.get('fig-cap', '')
        new = {
            'text/markdown': f"![{found.get('fig-alt', caption)}]({file})"
            + (f'\n\n*{caption}*' if caption else '')
        }
    else:
        new = {'text/plain': data.get('text/plain', '')}
    return nbformat.v4.new_output('display_data', new)


def convert_cell(cell, root: Path, images: dict):
    "A cell as the exporter shall see it, or None if it is left out."
    if cell.cell_type == 'markdown':
        if re.match(r'#+ .* -\s*$', cell.source.strip()):
            return None
        cell.source = move_links(cell.source, root)
    if cell.cell_type != 'code':
        return cell
    found, source = directives(cell.source)
    if left_out & found.keys() or is_off(found, 'include'):
        return None
    source = '\n'.join(
        o for o in source.split('\n') if not re.search(r'#\|\s*hide_line\s*$', o)
    ).strip('\n')
    outputs = [] if is_off(found, 'output') else cell.outputs
    label = found.get('label', f"cell-{cell.get('id', 'x')}")
    cell.outputs = [
        convert_output(o, found, label + (f'-{i}' if i else ''), root, images)
        for i, o in enumerate(outputs)
    ]
    cell.source, cell.metadata = source, {'hide_code': is_off(found, 'echo')}
    return cell


def build(root: Path) -> dict[str, bytes]:
    "README.md and its figures as a dict from path to content."
    nb, images = nbformat.read(root / 'nbs' / 'index.ipynb', 4), {}
    cells = [convert_cell(copy.deepcopy(c), root, images) for c in nb.cells]
    parts = []
    for c in cells:
        if c is None:
            continue
        hidden = c.cell_type == 'code' and c.metadata.pop('hide_code')
        exporter = MarkdownExporter(
            exclude_input=hidden, exclude_input_prompt=True, exclude_output_prompt=True
        )
        one = nbformat.v4.new_notebook(cells=[c], metadata={'language_info': {'name': 'python'}})
        parts.append(exporter.from_notebook_node(one)[0].strip('\n'))
    parts = [p for p in parts if p.strip()]
    if not parts or not parts[0].startswith('# '):
        raise ValueError("index.ipynb must begin with a markdown cell '# Title'")
    text = '\n\n'.join([parts[0], warning, *parts[1:]])
    pieces = _fence.split(text)
    text = ''.join(
        s if i % 2 else re.sub(r'\n{3,}', '\n\n', re.sub(r'[ \t]+$', '', s, flags=re.M))
        for i, s in enumerate(pieces)
    )
    return {'README.md': (text.strip() + '\n').encode(), **images}


def main(argv: list[str] | None = None) -> int:
    "Write what differs; with --check say what differs and return 1."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--check', action='store_true', help='write nothing; exit 1 if a file would change'
    )
    parser.add_argument(
        '--root',
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help='root of the repository',
    )
    args = parser.parse_args(argv)
    new = build(args.root)
    old = {f: (args.root / f).read_bytes() for f in new if (args.root / f).exists()}
    for p in (args.root / 'README_files').glob('*'):
        old[f'README_files/{p.name}'] = p.read_bytes()
    changed = sorted(f for f in new.keys() | old.keys() if new.get(f) != old.get(f))
    for f in changed:
        if args.check and f.endswith('.md'):
            was, will = (o.get(f, b'').decode().splitlines(True) for o in (old, new))
            sys.stdout.writelines(difflib.unified_diff(was, will, f, f + ' (from index.ipynb)'))
        elif args.check:
            print(f"{f} differs from the figure in index.ipynb")
        elif f not in new:
            (args.root / f).unlink()
        else:
            (args.root / f).parent.mkdir(exist_ok=True)
            (args.root / f).write_bytes(new[f])
    if changed and args.check:
        print("README.md is stale: python .ci/readme.py")
    elif not args.check:
        print(
            '\n'.join(f'wrote {f}' if f in new else f'removed {f}' for f in changed)
            or 'README.md is up to date'
        )
    return int(bool(changed) and args.check)


if __name__ == '__main__':
    sys.exit(main())
