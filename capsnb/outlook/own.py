"""The old path of `capsnb.lab.own`, which run folders and scripts of before 0.1.0 name."""

import sys
from capsnb.lab import own

sys.modules[__name__] = own
