"""Counts the notebooks and cells that nbdev_test runs, and those that a flag skips."""

from __future__ import annotations
import json
import re
import sys
from collections import Counter
from configparser import ConfigParser
from pathlib import Path

_directive = re.compile(r'^\s*#\s*\|\s*([\w-]+)')


def flags_of(source: str) -> set[str]:
    "Names of the directives at the head of a cell; empty lines and cell magics may precede."
    found = set()
    for line in source.split('\n'):
        if m := _directive.match(line):
            found.add(m[1])
        elif line.strip() and not re.match(r'\s*%%\w', line):
            break
    return found


def count(nb: dict, flags: list[str]) -> Counter:
    "Code cells: 'ran', and an entry for each flag (a cell with two counts once)."
    tally = Counter(ran=0)
    for c in nb['cells']:
        source = ''.join(c['source'])
        if c['cell_type'] != 'code' or not source.strip() or 'nbdev_export(' in source:
            continue
        tally[next((f for f in flags if f in flags_of(source)), 'ran')] += 1
    return tally


def notebooks(root: Path) -> list[Path]:
    "The notebooks that nbdev_test runs: no name of a file or folder starts with _ or a dot."
    nbs = root / 'nbs'
    return [
        p
        for p in sorted(nbs.rglob('*.ipynb'))
        if not any(o[0] in '_.' for o in p.relative_to(nbs).parts)
    ]


def main(root: Path) -> int:
    config = ConfigParser(delimiters=['='], interpolation=None)
    config.read(root / 'settings.ini', encoding='utf-8')
    flags = config['DEFAULT']['tst_flags'].split()
    total, files = Counter(), notebooks(root)
    for p in files:
        tally = count(json.loads(p.read_text(encoding='utf-8')), flags)
        skipped = ', '.join(f'{tally[f]} {f}' for f in flags if tally[f])
        print(
            f"  {p.relative_to(root / 'nbs')}: {tally['ran']} cells ran"
            + (f", skipped: {skipped}" if skipped else '')
        )
        total += tally
    skipped = sum(total[f] for f in flags)
    print(
        f"{len(files)} notebooks, {total['ran']} code cells ran, {skipped} skipped by a flag ("
        + ', '.join(f'{f}: {total[f]}' for f in flags)
        + ')'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent))
