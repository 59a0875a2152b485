"""The site: built from stored outputs, every link and figure, and looked at in a browser."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
import matplotlib.pyplot as plt
import pytest
from browser import chromium, fits, look

ROOT = Path(__file__).resolve().parents[1]
for name in ('sphinx', 'myst_nb', 'sphinx_book_theme', 'sphinx-mathjax-offline', 'nbformat'):
    pytest.importorskip(name)
spec = importlib.util.spec_from_file_location('capsnb_site', ROOT / '.ci' / 'site.py')
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


class Page(HTMLParser):
    "What a page links to, which places it has, which pictures lack a text."

    def __init__(self, path):
        super().__init__()
        self.links, self.places, self.mute, self.foreign = [], set(), [], []
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if 'id' in found:
            self.places.add(found['id'])
        if tag == 'a' and found.get('href'):
            self.links.append(found['href'])
        if tag in ('img', 'script', 'link') and (found.get('src') or found.get('href')):
            at = found.get('src') or found['href']
            kind = found.get('rel', '')
            if re.match(r'(\w+:)?//', at) and kind not in ('canonical',):
                self.foreign.append(at)
            elif not at.startswith('data:') and tag != 'link':
                self.links.append(at)
        if tag == 'img' and not (found.get('alt') or '').strip() and 'aria-hidden' not in found:
            self.mute.append(found.get('src', '')[:80])


def missing(html: Path) -> list:  # of what is wrong, in words
    "Links to nothing, places that are not there, mute pictures, foreign files."
    pages = {p.resolve(): Page(p) for p in html.rglob('*.html') if '_static' not in p.parts}
    said = []
    for path, page in pages.items():
        at = path.relative_to(html.resolve())
        said += [f'{at}: no text for {src}' for src in page.mute]
        said += [f'{at}: asks for {src}' for src in page.foreign]
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            if not target.exists():
                said.append(f'{at}: links to {link}, which is not there')
            elif to.fragment and target in pages:
                if unquote(to.fragment) not in pages[target].places:
                    said.append(f'{at}: links to {link}, a place that is not there')
    return said


def test_a_page_keeps_what_a_reader_sees(tmp_path):
    nbs = tmp_path / 'nbs'
    (nbs / 'lab').mkdir(parents=True)
    head = dict(cell_type='markdown', metadata={}, source=['# A | B\n', '[x](../00.ipynb) [y](r)'])
    shut = dict(jupyter=dict(source_hidden=True))
    sources = [
        '#| hide\nsecret = 1',
        '#| default_exp lab.x',
        '#| export\ndef f(): ...',
        '#| echo: false\n#| fig-alt: "two bars"\nplot()',
        'long()',
        '#| output: false\nloud()',
    ]
    cells = [
        dict(cell_type='code', id=str(k), source=s, outputs=[], metadata=shut if k == 4 else {})
        for k, s in enumerate(sources)
    ]
    path = nbs / 'lab' / '01.ipynb'
    note = dict(cells=[head, *cells], metadata={}, nbformat=4, nbformat_minor=5)
    path.write_text(json.dumps(note))
    (nbs / '00.ipynb').write_text('{}')
    found = site.page_of(path, nbs, 'https://home')['cells']
    heads = [c['source'].split('\n')[0] for c in found]
    assert heads == ['# A | B', 'def f(): ...', 'plot()', 'long()', 'loud()']
    assert '(../00.ipynb)' in found[0]['source']
    assert '(https://home/blob/main/nbs/lab/r)' in found[0]['source']
    tags = [c['metadata'].get('tags') for c in found[1:]]
    assert tags == [[], ['remove-input'], ['hide-input'], ['remove-output']]
    assert found[2]['metadata']['mystnb'] == dict(image=dict(alt='two bars'))
    assert site.entry(path, nbs) == '1 A | B <lab/01>'


def test_both_sidebars_name_the_chapters():
    told = (ROOT / 'nbs/sidebar.yml').read_text(encoding='utf-8')
    for path in site.notebooks(ROOT / 'nbs')['book']:
        name, at = site.entry(path, ROOT / 'nbs').rstrip('>').split(' <')
        assert f'text: "{name}"\n            href: {at}.ipynb' in told


def test_objects_have_types_and_examples():
    page = site.module_page(importlib.import_module('capsnb.engine.layers'), 'engine/19')
    assert '| `n_types` | `int` |' in page and '```python\n>>> ' in page


def test_panels_come_apart_where_each_stands_alone(tmp_path):
    for name, shared, over in ('alone', False, ''), ('shared', True, ''), ('over', False, 'both'):
        fig, axs = plt.subplots(1, 3, figsize=(9, 2.5), sharey=shared, layout='constrained')
        for k, ax in enumerate(axs):
            ax.plot([1, 2])
            ax.set(title=f'panel {k}', ylabel=None if k and shared else 'loss')
        fig.suptitle(over or None)
        fig.savefig(tmp_path / f'{name}.png', dpi=100)
        plt.close(fig)
    tags = [f'<img alt="three" src="{n}.png" />' for n in ('alone', 'shared', 'over')]
    page = tmp_path / 'page.html'
    page.write_text(''.join(tags))
    site.stack_panels(page)
    text = page.read_text()
    assert text.count('src="alone.png"') == 3 and text.count('alt="three"') == 3
    assert text.endswith(''.join(tags[1:])) and not Page(page).mute
    with site.Image.open(tmp_path / 'alone.png') as image:
        edges = site.panels(image)
    assert all(abs(x - k * 300) < 20 for k, x in enumerate(edges)), edges


def tables_links_and_pictures(built):
    shown = ((p, p.read_text(encoding='utf-8')) for p in built.rglob('*.html'))
    raw = [p.name for p, text in shown if re.search(r'<p>\|[ -]', text)]
    assert not raw, f'tables shown as text: {raw}'
    assert not (found := missing(built)), '\n'.join(found[:20])
    pages = {p.relative_to(ROOT / 'nbs') for p in (ROOT / 'nbs').rglob('[0-9]*.ipynb')}
    pages = {p for p in pages if '.ipynb_checkpoints' not in p.parts}
    assert all((built / p).with_suffix('.html').exists() for p in pages) and len(pages) > 50
    assert (built / 'gallery.html').read_text(encoding='utf-8').count('<img loading') > 100
    home = (built / 'index.html').read_text(encoding='utf-8')
    floors = map(site.floors.get, site.notebooks(ROOT / 'nbs'))
    assert all(f'>{floor}</span>' in home for floor in floors)


both = f"""async function() {{
  const later = (ms) => new Promise((then) => setTimeout(then, ms));
  const formulas = document.querySelectorAll('.math.notranslate').length;
  for (let k = 0; formulas && k < 100 && !window.MathJax?.startup?.promise; k++) await later(100);
  if (formulas) await MathJax.startup.promise;
  const heads = [...document.querySelectorAll('article th p')];
  const size = (e) => parseFloat(getComputedStyle(e).fontSize);
  return Object.assign({fits}, {{
    on: document.querySelectorAll('a.left-prev, a.right-next').length,
    wrong: document.querySelectorAll('mjx-merror').length,
    unset: formulas - document.querySelectorAll('.math mjx-container').length,
    broken: heads.filter((e) => /^[a-z]+$/.test(e.innerText) && e.offsetHeight > 2.5 * size(e))
      .map((e) => e.innerText),
  }});
}}.call()"""
moves = """async function() {
  const image = () => document.querySelector('[id^=film-] img').src, before = image();
  document.querySelector('[id^=film-] button').click();
  await new Promise((then) => setTimeout(then, 2000));
  const found = [image() !== before];
  for (const mode of ['dark', 'light']) {
    document.querySelector(`button.theme-change-button[data-mode=${mode}]`).click();
    found.push(document.documentElement.dataset.theme === mode);
  }
  return found;
}.call()"""
searched = """async function() {
  const found = () => document.querySelectorAll('#search-results li').length;
  for (let k = 0; k < 300 && found() < 6; k++) await new Promise((then) => setTimeout(then, 100));
  return [found() > 5];
}.call()"""


def looks_right(built, profile):
    pages = [p.relative_to(built).as_posix() for p in sorted(built.rglob('*.html'))]
    pages = [p for p in pages if not p.startswith('_')]
    wide = 'index', 'book/04_em_routing', 'studies/75_which_routing', 'gallery'
    wide += 'api/capsnb.engine.dstep', 'lab/58_command_line', 'lab/55_own_data'
    asked = [[f'{p}.html', w, both] for p in wide for w in (1200, 390)]
    asked += [[p, 390, both] for p in pages[::6]]
    asked += [['book/04_em_routing.html', 1201, moves], ['search.html?q=routing', 1200, searched]]
    for at, found in look(built, profile, asked).items():
        if isinstance(found, list):
            assert all(found), at
            continue
        assert found['wide'] <= int(at.split()[1]) and not found['asked'], (at, found)
        assert found['on'] or at.split('.')[0] in ('search', 'genindex'), f'{at} leads nowhere'
        assert not found['wrong'] and found['unset'] <= 0 and not found['broken'], (at, found)


@pytest.mark.slow
def test_the_site(tmp_path):
    "built once, and looked at in a browser where there is one"
    assert site.build(ROOT, tmp_path / 'site') == 0, 'Sphinx warned'
    built = tmp_path / 'site' / 'html'
    tables_links_and_pictures(built)
    if chromium is None:
        pytest.skip('there is no Chromium')
    looks_right(built, tmp_path / 'chromium')
