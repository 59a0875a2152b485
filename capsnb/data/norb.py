"""The old path of smallNORB's half of `capsnb.data.views`, which scripts of before 0.1.0 name."""

import sys
from capsnb.data import views

sys.modules[__name__] = views
