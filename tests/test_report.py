"""Tables and pictures of records."""

import math
import statistics
import pytest
from capsnb.core import film, plot_style
from capsnb.lab.report import curves, dots, interval, percent, runs_of, spread, table

stats = pytest.importorskip('scipy.stats')
matplotlib = pytest.importorskip('matplotlib')
matplotlib.use('Agg')


def test_an_interval_is_students():
    values = [91.0, 94.5, 92.5, 90.0]
    low, high = stats.t.interval(
        0.95, 3, loc=statistics.mean(values), scale=statistics.stdev(values) / 2
    )
    assert interval(values) == pytest.approx((low, high)) and interval([7.0]) == (7.0, 7.0)


def test_runs_are_grouped_by_setting_and_ordered_by_seed():
    runs = {f'a seed b seed {s}': dict(seed=s, test_accuracy=s / 10) for s in (10, 2, 1)}
    found = runs_of(dict(runs=runs))
    assert list(found) == ['a seed b']
    assert percent(found['a seed b']) == pytest.approx([10, 20, 100])
    assert percent(found['a seed b'], error=True) == pytest.approx([90, 80, 0])


def test_a_table_says_what_it_is_given():
    rows = [dict(a='x', b=[1.0, 3.0], c=1234, d=0.125), dict(a='y', b=[2.0], c=None, d=None)]
    lines = table(rows, digits=2).data.split('\n')
    assert lines[0] == '| a | b | c | d |' and lines[2] == '| x | 2.00 ± 1.41 | 1,234 | 0.12 |'
    assert lines[3] == '| y | 2.00 (one seed) |  |  |' and len(lines) == 4
    assert spread([1.0, 2.0], 0) == '2 ± 1'


def test_dots_and_curves_are_drawn_where_they_belong():
    ax = dots({'one': [1.0, 3.0], 'two': [5.0]}, 'x', marks={'two': 4.0})
    drawn = [list(line.get_xdata()) for line in ax.lines]
    assert drawn[1] == [1.0, 3.0] and drawn[2] == [2.0] and drawn[-1] == [4.0]
    assert drawn[0] == pytest.approx(interval([1.0, 3.0])) and not math.isnan(drawn[0][0])
    assert [t.get_text() for t in ax.get_yticklabels()] == ['one', 'two']
    ax = curves({'one': [[1, 2, 3], [4, 5, 6]]}, 'x', 'y')
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2, 3], [4, 5, 6]]
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3] and len(ax.get_legend().texts) == 1
    matplotlib.pyplot.close('all')


def test_a_film_shows_values_as_they_are_and_needs_some():
    pytest.importorskip('IPython')
    drawn = []

    def draw(**case):
        drawn.append(case)
        fig, _ = plot_style().subplots(figsize=(1, 1))
        return fig

    page = film(draw, 'a "film"', of=['</script>', '"', "'"]).data
    assert len(drawn) == 3 and page.count('</script>') == 1 and 'alt="a &quot;film&quot;"' in page
    assert film(draw, 'one', t=[1]).data.count('<img') == 1
    for axes in ({}, dict(t=[]), dict(s=[1], t=[])):
        with pytest.raises(ValueError, match='axes with values'):
            film(draw, 'none', **axes)
