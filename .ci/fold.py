"""Shuts cells marked `#| hide` or `#| echo: false` in JupyterLab: readers need not see them.

`python .ci/fold.py` writes the notebooks; with `--check` it exits with 1 if it would.
"""

from __future__ import annotations
import json
import re
import sys
from pathlib import Path


def folded(cell: dict) -> bool:
    "Whether a cell's source is to be shut."
    source = ''.join(cell['source'])
    marks = re.findall(r'^#\|\s*(hide|echo:\s*false|code-fold:\s*true)\s*$', source, re.M)
    return cell['cell_type'] == 'code' and bool(marks)


def fold(path: Path, write: bool) -> bool:
    "Whether a notebook changes; every cell has the metadata that its marks ask for."
    text = path.read_text(encoding='utf-8')
    try:
        cells = (nb := json.loads(text))['cells']
    except (ValueError, KeyError, TypeError) as e:
        raise SystemExit(f'{path} is no notebook: {e}') from e
    changed = False
    for cell in cells:
        want = {'jupyter': {'source_hidden': True}} if folded(cell) else {}
        changed |= cell.get('metadata') != want
        cell['metadata'] = want
    if changed and write:
        text = json.dumps(nb, ensure_ascii=False, indent=1) + '\n'
        path.write_text(text, encoding='utf-8')
    return changed


def main(args: list[str]) -> int:
    root, check = Path(__file__).resolve().parent.parent, '--check' in args
    paths = [p for p in sorted((root / 'nbs').rglob('*.ipynb')) if 'checkpoints' not in str(p)]
    changed = [p for p in paths if fold(p, not check)]
    for p in changed:
        print(f"{'would fold' if check else 'folded'} {p.relative_to(root)}")
    return int(bool(changed) and check)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
