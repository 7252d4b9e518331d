"""Python reads this first in every process of a server that the tests start (harness.py).

A process of SGLang imports 8,000 modules. While it does, the garbage collector looks at all their
objects again and again and finds nothing, which takes a fifth of the time.
"""

import gc

gc.set_threshold(100_000, 20, 100)
