"""The old path of `capsnb.lab.hub`, which cards on the Hub name."""

import sys
from capsnb.lab import hub

sys.modules[__name__] = hub
