"""Builds README.md from nbs/index.ipynb, its figures in README_files/, from stored outputs.

Directives mean what they mean to nbdev and Quarto: `#| hide` leaves a cell out, `#| echo: false`
its code; `#| label:` names a figure's file, `#| fig-cap:` is its caption, `#| fig-alt:` its text.
"""

from __future__ import annotations
import base64
import json
import os
import re
import sys
from pathlib import Path

warning = '<!-- Built from nbs/index.ipynb by .ci/readme.py. Edit the notebook, not this file. -->'
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


def move_links(text: str, root: Path) -> str:
    "Make links relative to `root` that are relative to nbs; `ValueError` for one to nothing."

    def move(m):
        path, hash_, anchor = m[2].partition('#')
        if not path or re.match(r'\w+:', path):
            return m[0]
        moved = os.path.normpath(f'nbs/{path}').replace(os.sep, '/')
        if not (root / moved).exists():
            raise ValueError(f"index.ipynb links to '{path}', which does not exist")
        return m[1] + moved + hash_ + anchor + m[3]

    return ''.join(s if i % 2 else _link.sub(move, s) for i, s in enumerate(_fence.split(text)))


def build(root: Path) -> dict[str, bytes]:
    "README.md and its figures as a dict from path to content."
    nb = json.loads((root / 'nbs' / 'index.ipynb').read_text(encoding='utf-8'))
    parts, files = [], {}
    for cell in nb['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            parts.append(move_links(source, root))
            continue
        found, source = directives(source)
        if {'hide', 'export'} & found.keys():
            continue
        if not is_off(found, 'echo'):
            parts.append(f'```python\n{source.strip()}\n```')
        for out in cell['outputs']:
            data = {k: ''.join(v) for k, v in out.get('data', {}).items()}
            if 'text/markdown' in data:
                parts.append(move_links(data['text/markdown'], root))
            elif 'image/png' in data:
                file = f"README_files/{found['label']}.png"
                files[file] = base64.b64decode(data['image/png'])
                parts.append(f"![{found['fig-alt']}]({file})\n\n*{found['fig-cap']}*")
            else:
                raise ValueError(f"index.ipynb: expected Markdown or a PNG in an output, got {out}")
    if not parts or not parts[0].startswith('# '):
        raise ValueError("index.ipynb must begin with a markdown cell '# Title'")
    text = '\n\n'.join(p.strip('\n') for p in [parts[0], warning, *parts[1:]])
    return {'README.md': (text + '\n').encode(), **files}


def main(root: Path) -> None:
    "Write what differs, remove figures that are no more."
    new = build(root)
    for path in (root / 'README_files').glob('*'):
        if f'README_files/{path.name}' not in new:
            path.unlink()
    for file, content in new.items():
        path = root / file
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f'wrote {file}')


if __name__ == '__main__':
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent)
