"Pictures that move."

import pytest
from capsnb.core import film, plot_style

pytest.importorskip('matplotlib').use('Agg')


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
